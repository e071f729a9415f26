"""The wheel in an environment of its own, with what it declares and nothing else: what an upstream service gets."""

import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution, distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.local.layout import PROJECT_ROOT
from deploy.local.shared_packages import required_by, share

TIMEOUT_S = 120
SMALL = 24
"""Packages, most of them of one file or two; 19 when this was written."""
NOT_DECLARED = ("torch", "transformers", "faust", "aiokafka", "fastapi", "uvicorn", "psycopg", "redis", "opentelemetry")
OURS_ELSEWHERE = ("producers", "stream_processors", "inference_consumers", "deploy", "tests", "benchmarks", "schemas")

WELL_TYPED = """
import asyncio

from fairlane import (
    AsyncClient,
    Client,
    DeadLetter,
    HandlerRetries,
    InferenceReply,
    Rejected,
    RetryPolicy,
    Unsuccessful,
    async_replies,
    replies,
)


def book(reply: InferenceReply) -> None:
    print(reply.request_id, reply.usage.completion_tokens)


async def book_soon(reply: InferenceReply) -> None:
    book(reply)


def keep(letter: DeadLetter) -> None:
    if letter.reply is None:
        print(letter.record.topic, letter.record.offset, len(letter.record.value or b""), letter.error)


def ask(client: Client) -> str | None:
    handle = client.submit(model="m", messages=[{"role": "user", "content": "hi"}], retries=RetryPolicy(tries=3))
    try:
        output = handle.result(timeout=30).output
    except Rejected as refusal:
        return str(refusal.retry_after_ms)
    except Unsuccessful as error:
        return error.code
    return None if output is None else output.text


def all_of(client: Client, texts: list[str]) -> list[str]:
    rows = client.map(({"model": "m", "task": "embed", "texts": [text]} for text in texts), ordered=False)
    return [reply.outcome for _, reply in rows]


async def stream(client: AsyncClient) -> str:
    return "".join([delta.text async for delta in client.stream(model="m", prompt="hi")])


with Client(tenant="acme", retries=RetryPolicy()) as client:
    print(ask(client), all_of(client, ["a", "b"]))
    client.serve_replies("billing", book, service="billing", retries=HandlerRetries(tries=2)).run()
replies("billing", book, tenant="acme", service="billing", on_dead_letter=keep).run()
asyncio.run(async_replies("billing", book_soon, tenant="acme").run())
"""
WRONGLY_TYPED = """
from fairlane import Client

Client(tenant="acme").submit(model="m", promt="a mistake that types find")
"""
MYPY = """
[mypy]
strict = true

# It takes three times as long to look into what the program does not use.
[mypy-pydantic.*,pydantic_core.*,pydantic_settings.*,prometheus_client.*,structlog.*,rich.*,typer.*,yaml.*]
follow_imports = skip
"""
USED = """
import fairlane
from fairlane import *
from fairlane import client
from fairlane.schema_files import default_codec
from fairlane_server.topics.families import load_families

assert all(getattr(fairlane, name) is not None for name in fairlane.__all__)
request = client.requests.build_request(model="m", prompt="hello")
assert default_codec().decode(default_codec().encode(request)) == request
assert load_families()
with Client(tenant="acme", bootstrap_servers="127.0.0.1:1") as made:
    made.serve_replies("group", print, service="billing")
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this checkout, offline."""
    folder = tmp_path_factory.mktemp("dist")
    built = run(
        sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, PROJECT_ROOT, cwd=folder
    )
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, and links to what the wheel says that it needs."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    done = run(
        *(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check"),
        *("install", "--no-index", "--no-deps", wheel),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    site = site_of(folder)
    here = by_name(Path(sys.prefix))
    here["fairlane"] = installed(site)
    needed = set(required_by("fairlane", here, {}))
    declared = {Requirement(line).name.lower() for line in here["fairlane"].requires or () if "extra ==" not in line}
    assert declared <= needed
    assert len(needed) <= SMALL
    assert set(share(site_of(sys.prefix), site, {name: here[name].version for name in needed})) == needed
    return folder


def by_name(prefix: Path) -> dict[str, Distribution]:
    return {canonicalize_name(found.name): found for found in distributions(path=[str(site_of(prefix))])}


def unmet(environment: Path) -> list[str]:
    """What a package there says that it needs, and what of it there is instead; none if all is as declared."""
    there = by_name(environment)
    wrong = []
    for found in there.values():
        for line in found.requires or ():
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            other = there.get(canonicalize_name(requirement.name))
            if other is None or not requirement.specifier.contains(other.version, prereleases=True):
                wrong.append(f"{found.name} needs {requirement}, there is {other and other.version}")
    return wrong


def site_of(prefix: Path | str) -> Path:
    return Path(prefix) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def installed(site: Path) -> Distribution:
    (found,) = (one for one in distributions(path=[str(site)]) if one.name == "fairlane")
    return found


def test_the_client_and_the_operators_commands_are_all_that_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fairlane", "fairlane_server"}
    assert len(tops) == 3
    assert {"fairlane/py.typed", "fairlane/_data/topics.yaml", "fairlane/_data/schemas/ids.yaml"} <= set(names)


def test_every_version_there_is_one_that_was_declared(environment: Path, tmp_path: Path) -> None:
    assert unmet(environment) == []
    # And what is not would be seen.
    info = site_of(tmp_path) / "fairlane-0.dist-info" / "METADATA"
    info.parent.mkdir(parents=True)
    info.write_text("Metadata-Version: 2.1\nName: fairlane\nVersion: 0\nRequires-Dist: rich<15\nRequires-Dist: torch\n")
    share(site_of(sys.prefix), site_of(tmp_path), {"rich": version("rich")})
    found = [line for line in unmet(tmp_path) if line.startswith("fairlane ")]
    assert found == [f"fairlane needs rich<15, there is {version('rich')}", "fairlane needs torch, there is None"]


def test_what_it_offers_works_with_what_it_declares(environment: Path) -> None:
    python = environment / "bin" / "python"
    used = run(python, "-I", "-W", "error", "-c", USED, cwd=environment)
    # Nobody listens at the client's broker: that it says so is its affair, anything else is not.
    said = [line for line in used.stderr.splitlines() if not line.startswith("kafka_error ")]
    assert (used.returncode, used.stdout, said) == (0, "", [])
    helped = run(environment / "bin" / "fairlane", "--help", cwd=environment)
    assert helped.returncode == 0, helped.stderr
    assert "topics" in helped.stdout


def test_nothing_heavy_and_nothing_else_of_ours_is_there(environment: Path) -> None:
    names = (*NOT_DECLARED, *OURS_ELSEWHERE)
    script = f"import importlib.util as u; print([n for n in {names!r} if u.find_spec(n) is not None])"
    found = run(environment / "bin" / "python", "-I", "-c", script, cwd=environment)
    assert (found.stdout.strip(), found.stderr) == ("[]", "")


def test_a_program_that_uses_it_is_checked_strictly(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "well_typed.py").write_text(WELL_TYPED)
    (tmp_path / "wrongly_typed.py").write_text(WRONGLY_TYPED)
    (tmp_path / "mypy.ini").write_text(MYPY)
    checked = run(
        *(sys.executable, "-m", "mypy", "--python-executable", environment / "bin" / "python"),
        *("--config-file", "mypy.ini", "--cache-dir", tmp_path / "cache", "well_typed.py", "wrongly_typed.py"),
        cwd=tmp_path,
    )
    errors = [line for line in checked.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, checked.stdout + checked.stderr
    assert errors[0].startswith("wrongly_typed.py:4:")
    assert "promt" in errors[0]
