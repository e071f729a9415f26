"""The images of docker-compose.yml, the Dockerfile of ours, and how the servers in containers are set up."""

import ast
import fnmatch
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import yaml

from deploy.local.kafka import BROKER_SETTINGS, HEAP, SECURED_SETTINGS
from deploy.local.layout import PROJECT_ROOT
from deploy.local.redis import CACHE_NAME, NAME, SETTINGS
from fairlane.settings import IDEMPOTENCY_TTL_S, Settings
from fairlane_server.redis.rights import DEFAULT_USER_OFF, RIGHTS, RedisRole, RedisServer, acl_line, redis_user
from tests.contract.compose_file import PASSWORDS, ComposeService, dockerfile, our_services, services
from tests.kit import stack
from tests.kit.compose_kafka import formatted
from tests.kit.topic_prefix import topic_prefix

# Of the node, where it runs; everything else is in BROKER_SETTINGS.
WHERE_THE_NODE_RUNS = {
    *("listeners", "advertised.listeners", "controller.quorum.voters", "log.dirs"),
    *("ssl.keystore.location", "ssl.truststore.location"),
}
# Other than in the embedded one, whose first user is created when its storage is formatted.
OF_ITS_LISTENERS = {
    *("listener.security.protocol.map", "inter.broker.listener.name", "sasl.mechanism.inter.broker.protocol"),
    "listener.name.admin.sasl.enabled.mechanisms",
}
OUR_PACKAGES = ("fairlane", "fairlane_server", "stream_processors", "inference_consumers", "producers", "deploy")
OWN_CONTAINERS = [service for service in services().values() if service.is_ours]

each_service = pytest.mark.parametrize("service", services().values(), ids=lambda service: service.name)

# ------------------------------------------------------------------ images


@each_service
def test_every_image_is_pinned(service: ComposeService) -> None:
    name, _, tag = service.image.rpartition(":")
    assert name
    assert re.search(r"\d+\.\d+", tag), service.image


def test_tests_on_containers_use_the_same_images() -> None:
    assert services()["kafka"].image == stack.KAFKA_IMAGE
    assert services()["postgres"].image == stack.POSTGRES_IMAGE
    assert services()["redis"].image == services()["redis-cache"].image == stack.REDIS_IMAGE
    pom = (PROJECT_ROOT / "deploy" / "local" / "pom.xml").read_text(encoding="utf-8")
    assert f"<kafka.version>{stack.KAFKA_IMAGE.partition(':')[2]}<" in pom


def test_our_images_carry_the_version_of_the_project_and_are_built_once() -> None:
    version = re.search(
        r'^version = "(.+)"', (PROJECT_ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert version is not None
    names = ("fairlane", "fairlane-models", "fairlane-vllm")
    assert {service.image for service in OWN_CONTAINERS} == {f"{name}:{version[1]}" for name in names}
    builders = {service.image: service.raw["build"] for service in OWN_CONTAINERS if "build" in service.raw}
    assert builders.keys() == {service.image for service in OWN_CONTAINERS}
    assert sum("build" in service.raw for service in OWN_CONTAINERS) == len(builders)
    # Whoever does not build an image waits for whoever does, or for somebody who does.
    assert all(service.raw["pull_policy"] == "never" for service in OWN_CONTAINERS)


# ------------------------------------------------------------------ Kafka and Redis


def test_the_broker_has_the_properties_of_the_embedded_one(tmp_path: Path) -> None:
    """Translated by the program that the image starts with; it also formats a folder with them."""
    translated = formatted(tmp_path / "config", {"KAFKA_LOG_DIRS": str(tmp_path / "data")})
    lines = translated.read_text(encoding="utf-8").split("\n")
    properties = dict(line.split("=", 1) for line in lines if line)
    protocols = properties["listener.security.protocol.map"].split(",")
    assert {protocol.partition(":")[2] for protocol in protocols} == {"SASL_SSL"}
    expected = {**BROKER_SETTINGS, **SECURED_SETTINGS}
    expected = {name: value for name, value in expected.items() if name not in OF_ITS_LISTENERS}
    found = {name: value for name, value in properties.items() if name not in WHERE_THE_NODE_RUNS | OF_ITS_LISTENERS}
    assert {name: value for name, value in found.items() if not name.endswith(".jaas.config")} == expected
    assert properties.keys() >= WHERE_THE_NODE_RUNS


def test_the_listeners_of_the_broker_fit_together() -> None:
    kafka = services()["kafka"]
    listeners, advertised = (
        {urlsplit(address).scheme.upper(): urlsplit(address) for address in kafka.environment[name].split(",")}
        for name in ("KAFKA_LISTENERS", "KAFKA_ADVERTISED_LISTENERS")
    )
    assert listeners.keys() == {"SERVICES", "HOST", "ADMIN", "CONTROLLER"}
    assert advertised.keys() == listeners.keys() - {"CONTROLLER"}
    assert advertised["ADMIN"].netloc == services()["setup"].environment["KAFKA_BOOTSTRAP_SERVERS"]
    users = [service for service in our_services() if "KAFKA_BOOTSTRAP_SERVERS" in service.environment]
    assert {service.environment["KAFKA_BOOTSTRAP_SERVERS"] for service in users} == {advertised["SERVICES"].netloc}
    for name in ("SERVICES", "ADMIN"):
        assert listeners[name].port == advertised[name].port
    assert kafka.environment["KAFKA_CONTROLLER_QUORUM_VOTERS"] == f"1@{listeners['CONTROLLER'].netloc}"
    assert listeners["CONTROLLER"].hostname == "127.0.0.1"
    ((host, outside, inside),) = kafka.published
    assert (advertised["HOST"].hostname, advertised["HOST"].port, listeners["HOST"].port) == (host, outside, inside)
    check = " ".join(kafka.raw["healthcheck"]["test"])
    assert f"--bootstrap-server {advertised['ADMIN'].netloc}" in check
    assert kafka.environment["KAFKA_HEAP_OPTS"].endswith(f"-Xmx{HEAP}")
    data, admin, *_ = kafka.raw["volumes"]
    assert data == f"kafka-data:{kafka.environment['KAFKA_LOG_DIRS']}"
    assert f"--command-config {admin.split(':')[1]}" in check


SERVERS = {NAME: RedisServer.STATE, CACHE_NAME: RedisServer.CACHE}
# The admin API's is named as those on Kafka and in Postgres, where `ADMIN` is the superuser.
PASSWORDS_OF_REDIS = {role: f"REDIS_{role.upper()}_PASSWORD" for role in RedisRole} | {
    RedisRole.ADMIN: "REDIS_ADMIN_API_PASSWORD"
}


@pytest.mark.parametrize("name", SETTINGS)
def test_redis_is_configured_as_the_embedded_one_and_no_password_is_in_an_argument(name: str) -> None:
    redis = services()[name]
    script = redis.raw["command"][-1]
    assert all(f"--{setting} {value}" in script for setting, value in SETTINGS[name].items())
    assert "--save ''" in script
    assert not [variable for variable in PASSWORDS_OF_REDIS.values() if PASSWORDS[variable] in script]
    assert redis.raw["user"] == "redis"


@pytest.mark.parametrize("prefix", ["", "staging."])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_users_of_redis_have_the_rights_of_the_table_and_no_others_exist(name: str, prefix: str) -> None:
    text = (PROJECT_ROOT / "docker-compose.yml").read_text(encoding="utf-8").replace("${TOPIC_PREFIX:-}", prefix)
    script = yaml.safe_load(text)["services"][name]["command"][-1].replace("$$", "$")
    configuration = script.partition("<<CONFIGURATION\n")[2].partition("CONFIGURATION\n")[0]
    # The health check's program reads its password from a variable of its own.
    variables = PASSWORDS_OF_REDIS | {RedisRole.OPERATOR: "REDISCLI_AUTH"}
    with topic_prefix(prefix):
        users = [acl_line(SERVERS[name], role, [f">${variables[role]}"]) for role in RIGHTS[SERVERS[name]]]
        operator = redis_user(RedisRole.OPERATOR)
    assert configuration.splitlines() == [DEFAULT_USER_OFF, *users]
    assert f" --user {operator} ping" in yaml.safe_load(text)["services"][name]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", SETTINGS)
def test_redis_gets_the_passwords_of_its_users(name: str) -> None:
    given = dict(services()[name].environment)
    assert given.pop("REDISCLI_AUTH") == PASSWORDS[PASSWORDS_OF_REDIS[RedisRole.OPERATOR]]
    roles = RIGHTS[SERVERS[name]].keys() - {RedisRole.OPERATOR}
    assert given == {PASSWORDS_OF_REDIS[role]: PASSWORDS[PASSWORDS_OF_REDIS[role]] for role in roles}


@pytest.mark.parametrize("service", our_services(), ids=lambda service: service.name)
def test_each_service_has_the_urls_of_its_own_user_of_redis(service: ComposeService) -> None:
    name = service.python_commands[0][1]
    role = {
        "stream_processors.dispatcher": RedisRole.DISPATCHER,
        "producers.gateway": RedisRole.GATEWAY,
        "producers.admin": RedisRole.ADMIN,
        "inference_consumers": RedisRole.CONSUMER,
    }.get(name)
    for server in RedisServer:
        url = service.environment.get(server.setting)
        if role is None or role not in RIGHTS[server]:
            assert url is None
            continue
        found = urlsplit(str(url))
        assert (found.username, found.password) == (redis_user(role), PASSWORDS[PASSWORDS_OF_REDIS[role]])
    mine = [] if role is None else [PASSWORDS[PASSWORDS_OF_REDIS[role]]]
    others = {PASSWORDS[variable] for variable in PASSWORDS_OF_REDIS.values()} - {*mine}
    assert not [password for password in others if password in str(service.raw)]


def test_one_tenant_fills_a_tenth_of_the_state_at_most_and_the_container_holds_a_rewrite() -> None:
    text = (PROJECT_ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (of_id, of_key) = re.findall(r"about (\d+) bytes an id and (\d+) an idempotency key", text)[0]
    fields = Settings.model_fields
    of_tenant = int(of_id) * fields["dedupe_max_ids"].default + int(of_key) * fields["gateway_max_claims"].default
    redis = services()["redis"]
    (gibibytes,) = re.findall(r"--maxmemory (\d+)gb ", redis.raw["command"][-1])
    most = int(gibibytes) * 1024**3
    assert of_tenant <= most / 10
    assert f"maxmemory = tenants * ({of_id} * DEDUPE_MAX_IDS + {of_key} * GATEWAY_MAX_CLAIMS) bytes" in text
    # What is copied while it is written to, and the rest of the process.
    limit = redis.raw["deploy"]["resources"]["limits"]["memory"]
    assert int(limit.removesuffix("m")) * 1024**2 >= 2.5 * most


def test_the_rates_that_reach_a_tenants_bounds_are_those_of_the_settings() -> None:
    text = (PROJECT_ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    fields = Settings.model_fields
    for name, lifetime_s in (
        ("dedupe_max_ids", fields["dedupe_ttl_s"].default),
        ("gateway_max_claims", IDEMPOTENCY_TTL_S),
    ):
        most = fields[name].default
        (documented,) = re.findall(rf"\| `{name.upper()}` \| {most:,} \w+ in 24 h \| ([\d.]+) requests/s", text)
        assert lifetime_s == 24 * 3_600
        assert documented == f"{most / lifetime_s:.2g}"


# ------------------------------------------------------------------ the Dockerfile


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, those of the stages it builds on first."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for instruction, arguments in dockerfile():
        if instruction == "FROM":
            parent, _, name = arguments.partition(" AS ")
            found[name] = list(found.get(parent, [("FROM", parent)]))
        else:
            found[name].append((instruction, arguments))
    return found


def copied(stage: str) -> list[tuple[str, str]]:
    """What a stage copies from the project: source and target."""
    pairs = []
    for instruction, arguments in stages()[stage]:
        if instruction == "COPY" and not arguments.startswith("--from="):
            *sources, target = arguments.split()
            pairs += [(source, target) for source in sources]
    return pairs


def targets() -> set[str]:
    return {service.raw["build"]["target"] for service in OWN_CONTAINERS if "build" in service.raw}


def test_the_stages_that_are_built_exist_and_the_services_are_the_default() -> None:
    assert targets() == {"service", "model-preparation", "vllm"}
    assert targets() <= stages().keys()
    assert list(stages())[-1] == services()["setup"].raw["build"]["target"]


def test_no_container_of_ours_runs_as_root() -> None:
    for target in targets():
        (*_, user) = [arguments for instruction, arguments in stages()[target] if instruction == "USER"]
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), target
        last_user = max(i for i, (instruction, _) in enumerate(stages()[target]) if instruction == "USER")
        # Nothing is built as that user either: what it runs it cannot change.
        assert {instruction for instruction, _ in stages()[target][last_user:]} <= {"USER", "CMD", "EXPOSE"}


def test_the_base_image_is_pinned_and_there_is_one() -> None:
    bases = {instructions[0][1] for instructions in stages().values()}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", bases.pop())


def test_what_is_installed_is_pinned() -> None:
    for instruction, arguments in dockerfile():
        if instruction == "RUN":
            for command in re.findall(r"pip install ([^&]+)", arguments):
                named = re.sub(r'--index-url "\$\{TORCH_INDEX_URL\}"|\$\{FAIRLANE_PIP_ARGS\}', "", command).split()
                files = [named[i + 1] for i, word in enumerate(named) if word in {"-r", "-c"}]
                packages = [word for i, word in enumerate(named) if not word.startswith("-") and word not in files]
                pinned = "".join(requirements(Path(file).name) for file in files)
                assert all(re.search(rf"^{package}==", pinned, re.MULTILINE) for package in packages)
    for file in ("base.txt", "models.txt", "dev.txt", "vllm.txt"):
        for line in requirements(file).splitlines():
            assert re.fullmatch(r"(#.*|[\w.\[\],-]+==[\w.+]+( --hash=sha256:[0-9a-f]{64})?)?", line.strip()), line
    # Weights can hold code, so that the version alone does not say what runs.
    assert all("--hash=" in line for line in requirements("models.txt").splitlines() if not line.startswith("#"))


def test_torch_comes_from_the_index_of_its_cpu_builds_and_from_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No image is built without that index, or with a build for CUDA that it had."""
    (build,) = (arguments for _, arguments in stages()["packages"] if "-m venv" in arguments)
    *_, torch, rest, check = (step.strip() for step in build.split("&&"))
    assert torch == 'pip install --index-url "${TORCH_INDEX_URL}" --no-deps -c /requirements/base.txt torch'
    assert rest == "pip install ${FAIRLANE_PIP_ARGS} -r /requirements/base.txt"
    program = re.fullmatch(r"python -c '([^']+)'", check)
    assert program is not None
    for cuda, ends_with in ((None, None), ("13.0", "torch for CUDA 13.0: no CPU build")):
        torch_module = SimpleNamespace(version=SimpleNamespace(cuda=cuda))
        monkeypatch.setitem(sys.modules, "torch", torch_module)
        with pytest.raises(SystemExit) as ended:
            exec(program[1], {})  # noqa: S102 - our own Dockerfile
        assert ended.value.code == ends_with
    (refusal,) = (arguments for name, arguments in stages()["packages"] if name == "RUN" and "test -n" in arguments)
    for url, status in (("", 1), ("https://index.test/cpu", 0)):
        done = subprocess.run(
            ("/bin/sh", "-c", refusal), env={"TORCH_INDEX_URL": url}, capture_output=True, text=True, check=False
        )
        assert done.returncode == status
        assert ("TORCH_INDEX_URL" in done.stderr) is bool(status)


@pytest.mark.parametrize("service", [service for service in OWN_CONTAINERS if "build" in service.raw], ids=str)
def test_every_image_is_built_with_the_arguments_that_its_stages_read(service: ComposeService) -> None:
    read = {
        arguments.partition("=")[0]
        for instructions in stages().values()
        for name, arguments in instructions
        if name == "ARG"
    }
    assert service.raw["build"]["args"].keys() == read


def test_the_environment_of_vllm_is_where_its_consumers_look_for_it() -> None:
    (made,) = (arguments for _, arguments in stages()["vllm-packages"] if "-m venv" in arguments)
    assert "--no-deps -r /requirements/vllm.txt" in made
    (copied_from,) = (
        arguments for name, arguments in stages()["vllm"] if name == "COPY" and "vllm-packages" in arguments
    )
    source, target = copied_from.removeprefix("--from=vllm-packages ").split()
    assert source == target
    assert f"-m venv {target}" in made
    (service,) = (service for service in our_services() if service.is_optional)
    assert service.environment["VLLM_PYTHON"] == f"{target}/bin/python"


def requirements(name: str) -> str:
    return (PROJECT_ROOT / "requirements" / name).read_text(encoding="utf-8")


def test_the_models_are_prepared_from_what_is_installed() -> None:
    from deploy.models.prepare import recipes

    pinned = "".join(map(requirements, ("base.txt", "models.txt", "dev.txt")))
    for recipe in recipes():
        for package in (recipe.package, *recipe.tools):
            assert re.search(rf"^{package}==", pinned, re.MULTILINE), package


@pytest.mark.parametrize("target", sorted(targets()))
def test_everything_that_is_copied_exists_and_reaches_the_builder(target: str) -> None:
    ignored = (PROJECT_ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    let_in = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    for source, _ in copied(target):
        assert (PROJECT_ROOT / source).exists(), source
        files = [source, *(f"{source}/{file.name}" for file in (PROJECT_ROOT / source).glob("*.txt"))]
        assert any(fnmatch.fnmatch(file, pattern) for file in files for pattern in let_in), source
    assert not any("env" in line for line in let_in)


@pytest.mark.parametrize("target", sorted(targets()))
def test_what_is_copied_is_enough_for_every_command(target: str, tmp_path: Path) -> None:
    """In the tree of the image, made by hand, every module can be imported and every file that is read is there."""
    for source, name in copied(target):
        if not name.startswith("/"):
            copy(PROJECT_ROOT / source, tmp_path / name / Path(source).name if name.endswith("/") else tmp_path / name)
    script = f"""
import importlib, sys
from pathlib import Path
from fairlane.schema_files import data_path
from fairlane.settings import Settings

settings = Settings()
assert settings.models_file.is_file() and settings.tenants_file.is_file() and settings.prices_file.is_file()
assert all(data_path(name) for name in ("schemas", "topics.yaml", "deploy/migrations"))
for name in {sorted(modules(target))}:
    importlib.import_module(name)
for name, module in sys.modules.items():
    if name.split(".")[0] in {sorted(OUR_PACKAGES)} and getattr(module, "__file__", None):
        assert Path(module.__file__).is_relative_to(Path.cwd()), name
"""
    answer = subprocess.run(
        (sys.executable, "-c", script),
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr


def copy(source: Path, goal: Path) -> None:
    goal.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, goal, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, goal)


def modules(target: str) -> set[str]:
    """What the commands of an image import: the composition root where there is one, for `__main__` would run it."""
    (image,) = {service.image for service in OWN_CONTAINERS if service.raw.get("build", {}).get("target") == target}
    run = {command[1] for service in OWN_CONTAINERS if service.image == image for command in service.python_commands}
    return {f"{name}.app" if find_spec(f"{name}.app") else name for name in run if find_spec(name)}


def find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


@pytest.mark.parametrize(
    ("target", "files"),
    [
        ("service", ["base.txt"]),
        ("vllm", ["base.txt"]),
        ("model-preparation", ["base.txt", "models.txt", "dev.txt"]),
    ],
)
def test_every_package_that_is_imported_is_installed(target: str, files: list[str]) -> None:
    """Late imports too: what tests and tools bring along is not in the image."""
    installed = {re.split(r"[=\[]", line)[0] for file in files for line in requirements(file).splitlines()}
    of_module = importlib.metadata.packages_distributions()
    for source, _ in copied(target):
        for file in (PROJECT_ROOT / source).rglob("*.py"):
            # What needs vLLM runs in an environment of its own, which the image does not have.
            elsewhere = {"vllm"} if file.name.startswith("vllm_") else set()
            for module in imported(file) - sys.stdlib_module_names - set(OUR_PACKAGES) - elsewhere:
                names = {re.sub(r"[-_.]+", "-", name).lower() for name in of_module.get(module, [module])}
                assert names & installed, f"{file.relative_to(PROJECT_ROOT)}: {module}"


def imported(file: Path) -> set[str]:
    """The top-level packages that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).split(".")[0])
    return found


def test_the_service_port_is_the_one_that_the_image_names() -> None:
    exposed = {arguments for instruction, arguments in stages()["service"] if instruction == "EXPOSE"}
    assert exposed == {service.environment["METRICS_PORT"] for service in our_services()}
