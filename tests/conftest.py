"""Tiers, the count of processes, and the real servers: started once per worker, and only if a test asks for them."""

import json
import logging
import os
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests.kit.stack import (
    PostgresServer,
    ServerStack,
    StackChoiceError,
    choose_stack,
    empty_database,
    migrated_database,
    with_template,
)
from tests.run_report import PROCESSES_VARIABLE, program_name
from tests.tiers import Tier, may_hold, tiers_of

# Property tests: few examples in the core, many in the full tier. How long one takes depends on the machine.
settings.register_profile(Tier.CORE, deadline=None, max_examples=25)
settings.register_profile(Tier.FULL, deadline=None, max_examples=200)

_PROCESSES: Counter[str] = Counter()
"""The processes that this one has started, by what they run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--tier` selects the tests of one command."""
    parser.addoption("--tier", choices=list(Tier), help="the tests of this tier only (see tests/tiers.py)")


def pytest_configure(config: pytest.Config) -> None:
    """Load the tier's number of examples, and count processes if the run reports them."""
    settings.load_profile(Tier.FULL if config.getoption("tier") == Tier.FULL else Tier.CORE)
    if PROCESSES_VARIABLE in os.environ:
        sys.addaudithook(_count_process)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file that has no test of the tier: many import torch."""
    tier = config.getoption("tier")
    if tier is None or collection_path.suffix != ".py":
        return None
    return None if may_hold(collection_path, Tier(tier)) else True


# Last: hypothesis adds its own mark in this hook.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other tiers."""
    if (tier := config.getoption("tier")) is None:
        return
    tiers = {item: tiers_of(mark.name for mark in item.iter_markers()) for item in items}
    hidden = [item.nodeid for item in items for its_tier in tiers[item] if not may_hold(item.path, its_tier)]
    if hidden:
        raise pytest.UsageError(f"marked from another file, so their tier would not find them: {hidden}")
    config.hook.pytest_deselected(items=[item for item in items if tier not in tiers[item]])
    items[:] = [item for item in items if tier in tiers[item]]


def pytest_sessionfinish() -> None:
    """Add this process's count to the report of the run."""
    if file := os.environ.get(PROCESSES_VARIABLE):
        with Path(file).open("a", encoding="utf-8") as out:
            out.write(json.dumps(_PROCESSES) + "\n")


def _count_process(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen" and isinstance(command := arguments[1], list | tuple):
        _PROCESSES[program_name([os.fsdecode(word) for word in command])] += 1


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
def postgres(test_stack: ServerStack) -> Iterator[PostgresServer]:
    """A Postgres with pgvector, shared by the whole test run; `database` and `migrated` are databases on it."""
    with with_template(test_stack.postgres()) as server:
        yield server


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Take back what a test's own command set up: its log goes to the standard error of that test, which is closed."""
    root, is_configured = logging.getLogger(), structlog.is_configured()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    if not is_configured:
        structlog.reset_defaults()


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
def migrated(postgres: PostgresServer, unique: str) -> Iterator[PostgresServer]:
    """A database with the tables, for one test."""
    with migrated_database(postgres, unique) as made:
        yield made


@pytest.fixture
def unique() -> str:
    """A name that no other test has: fit for topics, tenants, groups, transactional ids and keys."""
    return f"t{uuid.uuid4().hex[:12]}"
