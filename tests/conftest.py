"""The real servers, started once per test run and only if a test asks for them, and what keeps tests apart on them."""

import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

from tests.stack import PostgresServer, ServerStack, StackChoiceError, choose_stack


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
    name = f"test_{unique.replace('-', '_')}"
    with psycopg.connect(postgres.owner_dsn, autocommit=True, connect_timeout=5) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield PostgresServer(dsn=_with_database(postgres.dsn, name), owner_dsn=_with_database(postgres.owner_dsn, name))
        # Not WITH (FORCE): the owner may not end sessions of the services' role. Postgres waits 5 s for their end.
        connection.execute(sql.SQL("DROP DATABASE {}").format(sql.Identifier(name)))


@pytest.fixture
def unique() -> str:
    """A name that no other test has: fit for topics, tenants, groups, transactional ids and keys."""
    return f"t{uuid.uuid4().hex[:12]}"


def _with_database(dsn: str, name: str) -> str:
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))
