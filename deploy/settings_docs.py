"""Makes ``.env.example`` and ``docs/settings.md`` from the settings classes and docker-compose.yml.

python -m deploy.settings_docs [--check]
"""

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import get_args

import yaml
from annotated_types import Ge, Gt, Le
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from deploy.local.layout import PROJECT_ROOT
from fairlane.settings import KafkaSettings, Settings

COMPOSE_FILE = PROJECT_ROOT / "docker-compose.yml"
ENV_EXAMPLE = Path(".env.example")
SETTINGS_PAGE = Path("docs") / "settings.md"
COMMAND = "python -m deploy.settings_docs"

COMPOSE_VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?::([-?])([^}]*))?\}")
"""A variable in a compose file: its name, an optional operator `-` or `?`, and the operand."""

_WORD = "letters and digits only"
_PASSWORD = "letters and digits only, it becomes part of a URL"  # noqa: S105 - a description
COMPOSE_VARIABLES: Mapping[str, str] = {
    "KAFKA_ADMIN_PASSWORD": f"Password of the user of Kafka who may do everything; `setup` alone uses it: {_WORD}",
    "KAFKA_REGISTRY_PASSWORD": f"Password of the schema registry on Kafka: {_WORD}",
    "KAFKA_DISPATCHER_PASSWORD": f"Password of the dispatcher on Kafka: {_WORD}",
    "KAFKA_RECORDER_PASSWORD": f"Password of the recorder on Kafka: {_WORD}",
    "KAFKA_GATEWAY_PASSWORD": f"Password of the gateway on Kafka: {_WORD}",
    "KAFKA_BACKFILL_PASSWORD": f"Password of the runner of offline jobs on Kafka: {_WORD}",
    "KAFKA_ADMIN_API_PASSWORD": f"Password of the admin API on Kafka: {_WORD}",
    "KAFKA_OPERATOR_PASSWORD": f"Password of the operators' command line on Kafka: {_WORD}",
    "KAFKA_VIEWER_PASSWORD": f"Password of Kafka UI on Kafka: {_WORD}",
    "KAFKA_GENERATE_PASSWORD": f"Password of the consumers of the pool `generate` on Kafka: {_WORD}",
    "KAFKA_ENCODE_PASSWORD": f"Password of the consumers of the pool `encode` on Kafka: {_WORD}",
    "POSTGRES_ADMIN_PASSWORD": "Password of the superuser of Postgres; no service uses it",
    "POSTGRES_OWNER_PASSWORD": f"Password of the role that owns the tables: {_PASSWORD}",
    "POSTGRES_DISPATCHER_PASSWORD": f"Password of the dispatcher's role: {_PASSWORD}",
    "POSTGRES_RECORDER_PASSWORD": f"Password of the recorder's role: {_PASSWORD}",
    "POSTGRES_GATEWAY_PASSWORD": f"Password of the gateway's role: {_PASSWORD}",
    "POSTGRES_BACKFILL_PASSWORD": f"Password of the role of the runner of offline jobs: {_PASSWORD}",
    "POSTGRES_INGEST_PASSWORD": f"Password of the role that ingests documents: {_PASSWORD}",
    "POSTGRES_OPERATOR_PASSWORD": f"Password of the role of the operators' command line: {_PASSWORD}",
    "POSTGRES_ADMIN_API_PASSWORD": f"Password of the admin API's role: {_PASSWORD}",
    "REDIS_DISPATCHER_PASSWORD": f"Password of the dispatcher on Redis: {_PASSWORD}",
    "REDIS_GATEWAY_PASSWORD": f"Password of the gateway on Redis: {_PASSWORD}",
    "REDIS_CONSUMER_PASSWORD": f"Password of the consumers on Redis: {_PASSWORD}",
    "REDIS_SESSIONS_PASSWORD": "Password of `fairlane sessions` on Redis; no service uses it",
    "REDIS_ADMIN_API_PASSWORD": f"Password of the admin API on Redis: {_PASSWORD}",
    "REDIS_OPERATOR_PASSWORD": "Password of the health checks on Redis; no service uses it",
    "TORCH_INDEX_URL": "Package index with the CPU builds of torch, from PyTorch's installation page",
    "EMBEDDER_API_KEY": "API key of an OpenAI-compatible embedder; only for the dispatcher and the ingest process",
    "KAFKA_HOST_PORT": "Port of Kafka on this machine",
    "SCHEMA_REGISTRY_HOST_PORT": "Port of the schema registry on this machine",
    "KAFKA_UI_HOST_PORT": "Port of Kafka UI on this machine",
    "POSTGRES_HOST_PORT": "Port of Postgres on this machine",
    "PROMETHEUS_HOST_PORT": "Port of Prometheus on this machine",
    "GATEWAY_HOST_PORT": "Port of the gateway on this machine",
    "ADMIN_HOST_PORT": "Port of the admin API on this machine",
    "FAIRLANE_PIP_ARGS": "Added to every pip install in the images, except that of torch; for instance a mirror",
}
"""Descriptions of the variables that only docker-compose.yml reads. Their defaults are read from that file."""

STORAGE_VARIABLES: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "Access key of S3, for `FILES_URL=s3://...`",
    "AWS_SECRET_ACCESS_KEY": "The secret of that key",
    "AWS_SESSION_TOKEN": "The token of temporary credentials",
    "AWS_REGION": "Region of the bucket",
    "AWS_ENDPOINT_URL": "Address of S3-compatible storage, by https",
    "AWS_ALLOW_HTTP": "true allows such an address by http, which shows the files to the network",
}
"""Variables for S3 that the gateway and the runner of offline jobs read, in containers and outside."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable. ``default``: as written in the environment, empty for none; ``values``: in words;
    ``needed``: nothing starts without it."""

    name: str
    default: str
    values: str
    meaning: str
    needed: bool = False


@dataclass(frozen=True, slots=True)
class ComposeFile:
    """The variables of docker-compose.yml.

    Attributes:
        variables: read by the file itself.
        passed_on: settings that reach the services from .env or the shell.
        fixed: settings with a value in the file.
        defaults: likewise from .env or the shell, with a default in the file.
    """

    variables: tuple[Variable, ...]
    passed_on: frozenset[str]
    fixed: frozenset[str]
    defaults: Mapping[str, str]


def setting_variables(model: type[KafkaSettings] = Settings) -> tuple[Variable, ...]:
    """Every setting of a class, in its order. Raises ValueError: one is not described."""
    meanings = {name: meaning for kind in reversed(model.__mro__) for name, meaning in _meanings(kind)}
    if mute := model.model_fields.keys() - meanings.keys():
        raise ValueError(f"{', '.join(sorted(mute))}: no description below it")
    return tuple(_setting(name, field, meanings[name]) for name, field in model.model_fields.items())


def read_compose(text: str) -> ComposeFile:
    """Find the variables in the text of a compose file. Raises KeyError: COMPOSE_VARIABLES does not explain one."""
    found: dict[str, Variable] = {}
    settings = {variable.name for variable in setting_variables()}
    defaults: dict[str, str] = {}
    for name, operator, default in COMPOSE_VARIABLE.findall(text):
        if name in settings:
            # Without a default it is a part of another value, such as TOPIC_PREFIX in the name of a user.
            if default:
                defaults[name] = default
            continue
        needed = operator != "-"
        found[name] = Variable(name, "" if needed else default, "", COMPOSE_VARIABLES[name], needed)
    given = [
        (name, value)
        for service in yaml.safe_load(text)["services"].values()
        for name, value in service.get("environment", {}).items()
        if name in settings
    ]
    ordered = tuple(found[name] for name in COMPOSE_VARIABLES if name in found)
    passed_on = frozenset(name for name, value in given if value is None)
    return ComposeFile(ordered, passed_on, frozenset(name for name, _ in given) - passed_on - defaults.keys(), defaults)


def env_example(compose: ComposeFile) -> str:
    """The text of .env.example."""
    passed_on: list[Variable] = []
    rest: list[Variable] = []
    for variable in setting_variables():
        name, meaning = variable.name, variable.meaning
        if name in compose.defaults:
            passed_on.append(replace(variable, meaning=f"{meaning}; in containers {compose.defaults[name]}"))
        else:
            (passed_on if name in compose.passed_on else rest).append(variable)
    lines = [
        f"# Made by `{COMMAND}`: do not edit this file.",
        "# `sh deploy/new_env.sh` makes .env from it, with random passwords.",
        "# docker compose reads .env by itself. For processes outside containers: set -a; . ./.env; set +a",
        "",
        "# ---- docker compose: required, without defaults",
        *_entries([variable for variable in compose.variables if variable.needed], "{name}="),
        "# ---- docker compose: optional",
        *_entries([variable for variable in compose.variables if not variable.needed], "# {name}={default}"),
        "# ---- Settings, in containers and outside",
        *_entries(passed_on, "# {name}={default}"),
        "# ---- Storage of files, in containers and outside: read by the gateway and the runner of offline jobs",
        *_entries(
            [Variable(name, "", "", meaning) for name, meaning in STORAGE_VARIABLES.items()], "# {name}={default}"
        ),
        "# ---- Settings outside containers; in containers docker-compose.yml sets them or the default applies",
        *_entries(rest, "# {name}={default}"),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def settings_page(compose: ComposeFile) -> str:
    """The text of docs/settings.md."""
    client = setting_variables(KafkaSettings)
    known = {variable.name for variable in client}
    services = [variable for variable in setting_variables() if variable.name not in known]
    needed = [variable for variable in compose.variables if variable.needed]
    optional = [variable for variable in compose.variables if not variable.needed]
    asked_for = ", ".join(f"`{variable.name}`" for variable in needed)
    return "\n".join(
        [
            "# Settings",
            "",
            "*Reference.*",
            "",
            f"Made by `{COMMAND}` from `fairlane/settings.py` and `docker-compose.yml`; not edited by hand.",
            "",
            "Every setting is an environment variable. A process with an invalid value exits at its start.",
            "",
            "A setting `NAME` can also be in a file of one line that `NAME_FILE` names, which keeps secrets out of the",
            "environment: `POSTGRES_DSN_FILE=/run/secrets/postgres_dsn`. New connections to Postgres, Redis and Kafka",
            "use the address or password that its file holds then ([security](security.md#passwords-in-files)); all",
            "other files are read at the start of a process.",
            "",
            "The last column is about `docker-compose.yml`. *from .env*: the value in `.env` is passed to the",
            "services, or else the default named there. *fixed*: the file sets it. Empty: the default applies.",
            "",
            "## Connection to Kafka",
            "",
            "The client SDK reads only these.",
            "",
            *_table(client, compose),
            "",
            "## Services and command line",
            "",
            *_table(services, compose),
            "",
            "## Storage of files",
            "",
            "With `FILES_URL=s3://...` the gateway and the runner of offline jobs also read these variables of the AWS",
            "SDK; `docker-compose.yml` passes them to both.",
            "",
            "| variable | meaning |",
            "|---|---|",
            *(f"| `{name}` | {meaning} |" for name, meaning in STORAGE_VARIABLES.items()),
            "",
            "## docker compose",
            "",
            f"Only `docker-compose.yml` reads these. Required: {asked_for}.",
            "",
            "| variable | default | meaning |",
            "|---|---|---|",
            *(
                f"| `{variable.name}` | {_code(variable.default)} | {variable.meaning} |"
                for variable in (*needed, *optional)
            ),
            "",
        ]
    )


def documents() -> dict[Path, str]:
    """Expected content of each file, by its path in the project."""
    compose = read_compose(COMPOSE_FILE.read_text(encoding="utf-8"))
    return {ENV_EXAMPLE: env_example(compose), SETTINGS_PAGE: settings_page(compose)}


def stale(root: Path = PROJECT_ROOT) -> tuple[Path, ...]:
    """The files below `root` that are missing or stale."""

    def is_current(path: Path, text: str) -> bool:
        return path.exists() and path.read_text(encoding="utf-8") == text

    return tuple(path for path, text in documents().items() if not is_current(root / path, text))


def main(arguments: list[str] | None = None, root: Path = PROJECT_ROOT) -> int:
    """Write the files; with `--check` only report stale ones, with exit status 1 if there are any."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Make .env.example and docs/settings.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when a file is stale")
    options = parser.parse_args(arguments)
    found = stale(root)
    for path in found:
        if options.check:
            print(f"{path} is stale: run `{COMMAND}`", file=sys.stderr)
            continue
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(documents()[path], encoding="utf-8")
        print(f"{path}: written")
    return 1 if options.check and found else 0


def _meanings(kind: type) -> Iterator[tuple[str, str]]:
    """The names of a class's own settings, and the strings below them. pydantic could keep these, but then every
    process would read its own source."""
    if issubclass(kind, KafkaSettings):
        (definition,) = ast.parse(dedent(inspect.getsource(kind))).body
        for setting, below in pairwise(definition.body if isinstance(definition, ast.ClassDef) else ()):
            match setting, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    yield name, " ".join(text.split()).removesuffix(".")


def _setting(name: str, field: FieldInfo, meaning: str) -> Variable:
    value = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
    text = "" if value is None else str(value)
    default = text.removesuffix(".0") if isinstance(value, float) else text
    return Variable(name.upper(), default, _values(field), meaning)


def _values(field: FieldInfo) -> str:
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
    if all(isinstance(kind, str) for kind in kinds):
        return ", ".join(kinds)
    # An optional Literal keeps its values one level down.
    if choices := get_args(kinds[0]):
        return ", ".join(choices)
    names = {int: "whole number", float: "number", Path: "path", SecretStr: "text, secret"}
    return " ".join((names.get(kinds[0], "text"), *_bounds(field))).strip()


def _bounds(field: FieldInfo) -> Iterator[str]:
    for bound in field.metadata:
        match bound:
            case Ge(ge=least):
                yield f"from {least}"
            case Gt(gt=limit):
                yield f"above {limit}"
            case Le(le=most):
                yield f"to {most}"


def _entries(variables: list[Variable], form: str) -> Iterator[str]:
    for variable in variables:
        values = f" ({variable.values})" if variable.values not in {"", "text"} else ""
        yield f"# {variable.meaning}{values}"
        yield form.format(name=variable.name, default=variable.default)
        yield ""


def _table(variables: tuple[Variable, ...] | list[Variable], compose: ComposeFile) -> Iterator[str]:
    yield "| variable | default | values | meaning | compose |"
    yield "|---|---|---|---|---|"
    for variable in variables:
        name = variable.name
        way = "from .env" if name in compose.passed_on else "fixed" if name in compose.fixed else ""
        if name in compose.defaults:
            way = f"from .env, else `{compose.defaults[name]}`"
        cells = (f"`{variable.name}`", _code(variable.default), variable.values, variable.meaning, way)
        yield f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    sys.exit(main())
