"""The real servers, started once per test run and only if a test asks for them, and what keeps tests apart on them."""

import json
import os
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from tests.stack import (
    FAILURES_VARIABLE,
    PostgresServer,
    ServerStack,
    StackChoiceError,
    choose_stack,
    empty_database,
)

_MAX_REASON_CHARS = 2_000

# How long an example takes says more about the machine than about what is tested.
settings.register_profile("fairlane", deadline=None)
settings.load_profile("fairlane")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test` runs the two kinds of tests one after the other."""
    parser.addoption("--alone", choices=("only", "never"), help="only, or none of, the tests marked `alone`")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file for `--alone=only` that has no such test: many import torch."""
    if config.getoption("alone") != "only" or collection_path.suffix != ".py":
        return None
    return None if _says_alone(collection_path) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the kind that `--alone` does not want."""
    if (wanted := config.getoption("alone")) is None:
        return
    kinds: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        kinds[item.get_closest_marker("alone") is not None].append(item)
    if hidden := [item.nodeid for item in kinds[True] if not _says_alone(item.path)]:
        raise pytest.UsageError(f"neither part would run what is marked from another file: {hidden}")
    config.hook.pytest_deselected(items=kinds[wanted != "only"])
    items[:] = kinds[wanted == "only"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write down why each test failed, for the end of a run of several parts (`python -m tests`)."""
    file = os.environ.get(FAILURES_VARIABLE)
    if file is not None and os.environ.get("PYTEST_XDIST_WORKER") is None:
        failed = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, ())]
        with Path(file).open("a", encoding="utf-8") as out:
            out.writelines(json.dumps({"test": one.nodeid, "reason": _reason(one)}) + "\n" for one in failed)


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"
    return text[:_MAX_REASON_CHARS]


@cache
def _says_alone(file: Path) -> bool:
    return "pytest.mark.alone" in file.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def test_stack() -> Iterator[ServerStack]:
    """The servers that FAIRLANE_TEST_STACK names."""
    try:
        stack = choose_stack()
    except StackChoiceError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    try:
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="session")
def broker(test_stack: ServerStack) -> str:
    """Bootstrap servers of a Kafka broker; use unique topic and group names on it (`unique`)."""
    return test_stack.kafka()


@pytest.fixture(scope="session")
def postgres(test_stack: ServerStack) -> PostgresServer:
    """A Postgres with pgvector, shared by the whole test run; `database` gives one that is empty."""
    return test_stack.postgres()


@pytest.fixture(scope="session")
def redis_url(test_stack: ServerStack) -> str:
    """A Redis, shared by the whole test run; use unique keys on it (`unique`)."""
    return test_stack.redis()


@pytest.fixture
def database(postgres: PostgresServer, unique: str) -> Iterator[PostgresServer]:
    """An empty database with the vector extension, for one test."""
    with empty_database(postgres, unique) as made:
        yield made


@pytest.fixture
def unique() -> str:
    """A name that no other test has: fit for topics, tenants, groups, transactional ids and keys."""
    return f"t{uuid.uuid4().hex[:12]}"
