"""One connection to Postgres that is opened when it is needed, bounded in time, and replaced after trouble."""

from collections.abc import Iterator
from contextlib import closing, suppress

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from fairlane_server.postgres.connection import DsnError, ReconnectingConnection, connect
from tests.kit.pgvector_kit import PATIENT_S, paused
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

NAME = "kept-connection-test"
OURS = "SELECT pid, state FROM pg_stat_activity WHERE application_name = %s AND datname = current_database()"


@pytest.fixture
def other(database: PostgresServer) -> Iterator[psycopg.Connection]:
    """Another connection of the same role, which sees what the kept one does and may end it."""
    with connect(database.owner_dsn, "test", autocommit=True) as owner:
        owner.execute("CREATE TABLE notes (note integer PRIMARY KEY)")
        owner.execute("GRANT ALL ON notes TO PUBLIC")
    with connect(database.dispatcher_dsn, "test", autocommit=True) as connection:
        yield connection


@pytest.fixture
def kept(database: PostgresServer) -> Iterator[ReconnectingConnection]:
    with closing(ReconnectingConnection(database.dispatcher_dsn, NAME, PATIENT_S)) as made:
        yield made


def backend(kept: ReconnectingConnection) -> int:
    with kept.transaction() as connection:
        return connection.info.backend_pid


def open_backends(other: psycopg.Connection) -> list[tuple[int, str]]:
    return [(pid, state) for pid, state in other.execute(OURS, (NAME,))]


def notes(other: psycopg.Connection) -> list[int]:
    return [note for (note,) in other.execute("SELECT note FROM notes ORDER BY note")]


def test_it_is_opened_when_it_is_needed_and_used_again(kept: ReconnectingConnection, other: psycopg.Connection) -> None:
    assert open_backends(other) == []
    first = backend(kept)
    assert backend(kept) == first
    assert [pid for pid, _ in open_backends(other)] == [first]
    kept.close()
    eventually(lambda: not open_backends(other), what="the end of the connection")
    assert backend(kept) != first


def test_a_transaction_is_committed_and_acts_for_its_tenant_alone(
    kept: ReconnectingConnection, other: psycopg.Connection
) -> None:
    acting = "SELECT current_setting('fairlane.tenant', true)"
    with kept.transaction("acme") as connection:
        connection.execute("INSERT INTO notes VALUES (1)")
        assert connection.execute(acting).fetchone() == ("acme",)
    with kept.transaction() as connection:
        assert connection.execute(acting).fetchone() == ("",)
    assert notes(other) == [1]


def test_a_connection_that_died_is_replaced(kept: ReconnectingConnection, other: psycopg.Connection) -> None:
    first = backend(kept)
    other.execute("SELECT pg_terminate_backend(%s)", (first,))
    eventually(lambda: not open_backends(other), what="the end of the connection")
    with pytest.raises(psycopg.OperationalError):
        backend(kept)
    assert backend(kept) != first


def test_one_that_dies_in_a_transaction_is_replaced(kept: ReconnectingConnection, other: psycopg.Connection) -> None:
    def write_and_die() -> None:
        with kept.transaction() as connection:
            connection.execute("INSERT INTO notes VALUES (1)")
            other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))

    with pytest.raises(psycopg.OperationalError):
        write_and_die()
    with kept.transaction() as connection:
        connection.execute("INSERT INTO notes VALUES (2)")
    assert notes(other) == [2]


def test_one_that_dies_in_a_block_that_fails_is_replaced(
    kept: ReconnectingConnection, other: psycopg.Connection
) -> None:
    with suppress(ZeroDivisionError), kept.transaction() as connection:
        other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
        raise ZeroDivisionError
    assert backend(kept) > 0


def test_a_server_that_hangs_is_waited_for_no_longer_than_the_time(database: PostgresServer) -> None:
    hasty = ReconnectingConnection(make_conninfo(database.dispatcher_dsn, connect_timeout=2), NAME, 0.5)

    def is_back() -> bool:
        with suppress(psycopg.Error):
            return backend(hasty) > 0
        return False

    with closing(hasty):
        eventually(is_back, what="a connection")
        # It goes on only when this is over: that these end at all is what is tested.
        with paused(database):
            with pytest.raises(psycopg.errors.QueryCanceled, match=r"no answer within 0\.5 s"):
                backend(hasty)
            with pytest.raises(psycopg.OperationalError) as to_connect:
                backend(hasty)
        assert not isinstance(to_connect.value, psycopg.errors.QueryCanceled)
        eventually(is_back, what="a connection")


def test_the_time_of_a_transaction_holds_for_the_server_too(kept: ReconnectingConnection) -> None:
    shown = "SELECT current_setting('statement_timeout')"
    with kept.transaction() as connection:
        usual = connection.execute(shown).fetchone()
    with kept.transaction(timeout_s=30) as connection:
        assert connection.execute(shown).fetchone() == ("30s",) != usual
    with kept.transaction() as connection:
        assert connection.execute(shown).fetchone() == usual


def test_a_block_that_fails_leaves_nothing_open(kept: ReconnectingConnection, other: psycopg.Connection) -> None:
    first = backend(kept)
    with suppress(ZeroDivisionError), kept.transaction() as connection:
        connection.execute("INSERT INTO notes VALUES (1)")
        raise ZeroDivisionError
    assert open_backends(other) == [(first, "idle")]
    assert notes(other) == []
    assert backend(kept) == first


def test_a_value_that_is_refused_leaves_nothing_open_and_costs_no_connection(
    kept: ReconnectingConnection, other: psycopg.Connection
) -> None:
    def write_two(value: str) -> None:
        with kept.transaction() as connection:
            connection.execute("INSERT INTO notes VALUES (2)")
            connection.execute("INSERT INTO notes SELECT %s::text::integer", (value,))

    first = backend(kept)
    other.execute("INSERT INTO notes VALUES (1)")
    for value in ("1", "no number"):
        with pytest.raises((psycopg.IntegrityError, psycopg.DataError)):
            write_two(value)
    assert open_backends(other) == [(first, "idle")]
    assert notes(other) == [1]


def test_after_any_other_refusal_there_is_a_new_one(kept: ReconnectingConnection, other: psycopg.Connection) -> None:
    first = backend(kept)
    with pytest.raises(psycopg.errors.UndefinedTable), kept.transaction() as connection:
        connection.execute("SELECT * FROM nothing")
    eventually(lambda: not open_backends(other), what="the end of the connection")
    assert backend(kept) != first


def test_every_connection_is_prepared(database: PostgresServer, other: psycopg.Connection) -> None:
    prepared: list[int] = []

    def prepare(connection: psycopg.Connection) -> None:
        prepared.append(connection.info.backend_pid)
        if len(prepared) == 1:
            connection.execute("SELECT * FROM nothing")

    limits = {"statement_timeout": 12, "lock_timeout": 0.5}
    with closing(
        ReconnectingConnection(database.dispatcher_dsn, NAME, PATIENT_S, server_timeouts_s=limits, prepare=prepare)
    ) as kept:
        with pytest.raises(psycopg.errors.UndefinedTable):
            backend(kept)
        eventually(lambda: not open_backends(other), what="the end of the connection")
        with kept.transaction() as connection:
            shown = connection.execute("SELECT current_setting('statement_timeout'), current_setting('lock_timeout')")
            assert shown.fetchone() == ("12s", "500ms")
        assert backend(kept) == prepared[-1]
        assert len(prepared) == 2


def test_what_is_no_connection_string_is_not_quoted() -> None:
    with pytest.raises(DsnError) as caught:
        backend(ReconnectingConnection("nonsense hush", NAME, PATIENT_S))
    assert "hush" not in str(caught.value)
