"""Conversations in the real Postgres: the newest turns, for one tenant alone, within a time that is kept."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
import pytest

from fairlane.clock import monotonic_ms
from fairlane.outcomes import HistoryReason
from fairlane.records import ConversationTurn, InferenceReply, Message, Output, SourceCoordinate, Timings
from fairlane.schema_files import default_codec
from fairlane_server.conversations.conversations import (
    NEWEST_WITH,
    ConversationNotFoundError,
    Conversations,
    PgTurnStore,
)
from fairlane_server.conversations.turns import MOST_TURNS, StoredTurns
from fairlane_server.erasure.erasures import ErasureKind, Erasures
from fairlane_server.postgres import pool
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from fairlane_server.postgres.pool import DeadlinePool
from fairlane_server.store_error import StoreError
from stream_processors.dispatcher.enrichment.context import ReadHistory
from stream_processors.dispatcher.enrichment.history import HistoryReader
from stream_processors.recorder.positions import Move, Partition, Stored
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.retention import OldRows, Rule
from stream_processors.recorder.store import RecorderStore
from stream_processors.recorder.tables import TURNS
from tests.kit.pgvector_kit import PATIENT_S, paused
from tests.kit.stack import PostgresServer

T = TypeVar("T")
ENOUGH = 100_000


class Recorded:
    """Turns as the recorder writes them."""

    def __init__(self, dsn: str) -> None:
        self._store, self._old = RecorderStore(dsn), OldRows(dsn)
        self._at: dict[Partition, int] = {}

    def turns(
        self,
        tenant: str,
        conversation_id: str,
        numbers: Sequence[int],
        text: str = "answer",
        submitted_at_ms: int | None = None,
    ) -> None:
        """Turns with these numbers, the oldest first; they are answered a second apart."""
        partition = Partition(f"replies.{tenant}", 0)
        if partition not in self._at:
            self._store.start_at({partition: Stored(0)})
            self._at[partition] = 0
        records: list[LogRecord] = []
        for number in numbers:
            turn = ConversationTurn(conversation_id, (Message("user", f"question {number}"),))
            reply = InferenceReply(
                f"{conversation_id}-{number}",
                tenant,
                "ok",
                output=Output(text=f"{text} {number}"),
                source=SourceCoordinate(f"requests.{tenant}", 0, number),
                turn=turn,
                timings=Timings(submitted_at_ms=submitted_at_ms),
            )
            at = self._at[partition] + len(records)
            records.append(LogRecord(*partition, at, 1_000 * number, None, default_codec().encode(reply)))
        move = Move(self._at[partition], self._at[partition] + len(records))
        self._store.write(project(records, default_codec()), {partition: move})
        self._at[partition] = move.next_offset

    def remove(self, before_ms: int, most: int) -> int:
        removed, _ = self._old.remove(Rule(TURNS, "replied_at_ms", 0), before_ms, most)
        return removed

    def close(self) -> None:
        self._store.close()
        self._old.close()


@pytest.fixture
def recorded(migrated: PostgresServer) -> Iterator[Recorded]:
    made = Recorded(migrated.recorder_dsn)
    yield made
    made.close()


def reading(migrated: PostgresServer, use: Callable[[PgTurnStore], Awaitable[T]], connections: int = 2) -> T:
    """What comes of this use of a pool of so many connections."""

    async def run() -> T:
        pool = DeadlinePool(migrated.dispatcher_dsn, "test-turns", connections)
        await pool.open()
        try:
            return await use(PgTurnStore(pool))
        finally:
            await pool.close()

    return asyncio.run(run())


def read(
    migrated: PostgresServer, tenant: str, conversation_id: str, after: str | None = None, most: int = ENOUGH
) -> StoredTurns:
    return reading(migrated, lambda store: store.turns(tenant, conversation_id, after, most, PATIENT_S))


def answers(turns: StoredTurns) -> list[str]:
    return [turn.answer for turn in turns.turns]


def test_the_newest_turns_come_oldest_first(migrated: PostgresServer, recorded: Recorded) -> None:
    recorded.turns("acme", "talk", [2, 1])
    found = read(migrated, "acme", "talk")
    assert answers(found) == ["answer 1", "answer 2"]
    assert (found.is_whole, found.has_after) == (True, True)
    (first, _) = found.turns
    assert (first.request_id, first.messages, first.replied_at_ms) == (
        "talk-1",
        (Message("user", "question 1"),),
        1_000,
    )
    assert first.tokens == 2 * (2 + 1)
    assert read(migrated, "acme", "other") == StoredTurns()


def test_turns_stand_in_the_order_of_their_requests_whatever_the_clocks_of_consumers_say(
    migrated: PostgresServer, recorded: Recorded
) -> None:
    recorded.turns("acme", "talk", [9], submitted_at_ms=500)
    recorded.turns("acme", "talk", [5], submitted_at_ms=600)
    recorded.turns("acme", "talk", [4, 3], submitted_at_ms=700)
    in_order = ["answer 9", "answer 5", "answer 3", "answer 4"]
    assert answers(read(migrated, "acme", "talk")) == in_order
    size = read(migrated, "acme", "talk").turns[-1].tokens
    assert answers(read(migrated, "acme", "talk", most=3 * size)) == in_order[1:]
    with Conversations(migrated.operator_dsn, "acme") as conversations:
        assert [turn.answer for turn in conversations.turns("talk")] == in_order
        assert [turn.answer for turn in conversations.turns("talk", most=2)] == in_order[2:]
    # How long they are kept is counted from their answers.
    assert recorded.remove(before_ms=5_000, most=10) == 2
    assert answers(read(migrated, "acme", "talk")) == in_order[:2]


def test_what_is_read_again_is_no_second_turn(migrated: PostgresServer, recorded: Recorded) -> None:
    recorded.turns("acme", "talk", [1, 1])
    recorded.turns("acme", "talk", [1, 2], text="another answer")
    assert answers(read(migrated, "acme", "talk")) == ["answer 1", "another answer 2"]


def test_it_is_said_when_older_turns_are_left_out(migrated: PostgresServer, recorded: Recorded) -> None:
    recorded.turns("acme", "whole", range(MOST_TURNS))
    whole = read(migrated, "acme", "whole")
    assert (len(whole.turns), whole.is_whole) == (MOST_TURNS, True)
    recorded.turns("acme", "long", range(MOST_TURNS + 3))
    long = read(migrated, "acme", "long")
    assert (len(long.turns), long.is_whole) == (MOST_TURNS, False)
    assert answers(long)[-1] == f"answer {MOST_TURNS + 2}"
    size = long.turns[-1].tokens
    few = read(migrated, "acme", "long", most=2 * size)
    assert (len(few.turns), few.is_whole) == (2, False)
    # The newest is there however long it is: it may be cut.
    assert len(read(migrated, "acme", "long", most=0).turns) == 1


def test_whether_the_turn_before_is_there(migrated: PostgresServer, recorded: Recorded) -> None:
    recorded.turns("acme", "talk", range(MOST_TURNS + 3))
    assert read(migrated, "acme", "talk", after="talk-1").has_after
    assert not read(migrated, "acme", "talk", after="talk-99").has_after
    recorded.turns("acme", "other", [99])
    assert not read(migrated, "acme", "talk", after="other-99").has_after


def test_names_that_postgres_cannot_hold_are_found_as_they_were_stored(
    migrated: PostgresServer, recorded: Recorded
) -> None:
    recorded.turns("acme", "nul\0byte", [1], text="with\0nul")
    assert answers(read(migrated, "acme", "nul\0byte")) == ["with\u2400nul 1"]
    assert read(migrated, "acme", "half \ud800").turns == ()


def test_turns_are_read_with_the_one_before_or_not_at_all(migrated: PostgresServer, recorded: Recorded) -> None:
    recorded.turns("acme", "talk", range(MOST_TURNS + 3))
    recorded.turns("acme", "other", [99])
    recorded.turns("globex", "talk", [77])
    recorded.turns("acme", "nul\0byte", [1])

    async def use(store: PgTurnStore) -> list[StoredTurns | None]:
        async def asked(after: str, conversation_id: str = "talk", most: int = ENOUGH) -> StoredTurns | None:
            return await store.turns_with("acme", conversation_id, after, most, PATIENT_S)

        whole = await store.turns("acme", "talk", "talk-1", ENOUGH, PATIENT_S)
        assert await asked("talk-1") == whole
        size = whole.turns[-1].tokens
        few = await asked("talk-1", most=size + 1)
        assert few == await store.turns("acme", "talk", "talk-1", size + 1, PATIENT_S)
        assert await asked("nul\0byte-1", "nul\0byte") is not None
        return [await asked(after) for after in ("talk-99", "other-99", "talk-77")]

    assert reading(migrated, use) == [None, None, None]


def test_nothing_but_the_key_is_looked_at_for_a_turn_that_is_not_there(
    migrated: PostgresServer, recorded: Recorded
) -> None:
    for number in range(20):
        recorded.turns("acme", "talk" if number == 7 else f"talk-{number}", range(100))
    with psycopg.connect(migrated.owner_dsn, autocommit=True, connect_timeout=5) as owner:
        owner.execute("VACUUM ANALYZE conversation_turns")
    with acting_for(migrated.dispatcher_dsn, "acme") as connection, psycopg.ClientCursor(connection) as cursor:
        for number, is_read in ((199, False), (99, True)):
            wanted = ("acme", "talk", MOST_TURNS + 1, ENOUGH, "acme", "talk", f"talk-{number}")
            cursor.execute(b"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) " + NEWEST_WITH, wanted)
            plan = "\n".join(line for (line,) in cursor)
            of_turns = [line for line in plan.splitlines() if "WindowAgg" in line]
            assert of_turns, plan
            assert all(("never executed" not in line) == is_read for line in of_turns), plan
            assert "Index Only Scan using conversation_turns_pkey" in plan, plan
            assert "Seq Scan" not in plan, plan


def test_a_tenant_reads_its_own_turns_only(migrated: PostgresServer, recorded: Recorded) -> None:
    recorded.turns("acme", "talk", [1], text="of acme")
    recorded.turns("globex", "talk", [1], text="of globex")
    assert answers(read(migrated, "acme", "talk")) == ["of acme 1"]
    assert answers(read(migrated, "globex", "talk")) == ["of globex 1"]
    with pytest.raises(StoreError):
        read(migrated, ALL_TENANTS, "talk")
    # Also with no filter at all, and as the owner.
    everything = b"SELECT answer FROM conversation_turns ORDER BY 1"
    for dsn in (migrated.dispatcher_dsn, migrated.operator_dsn, migrated.owner_dsn):
        for acting, seen in (("acme", ["of acme 1"]), ("globex", ["of globex 1"]), (None, []), ("initech", [])):
            with acting_for(dsn, acting) as connection:
                assert [text for (text,) in connection.execute(everything)] == seen
    # What is erased leaves a row: by a function, not by a right to delete.
    denied = pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied")
    with acting_for(migrated.operator_dsn, "acme") as connection, denied:
        connection.execute(b"DELETE FROM conversation_turns")
    refused = pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security")
    with acting_for(migrated.recorder_dsn, "acme") as connection, refused:
        connection.execute(
            b"INSERT INTO conversation_turns VALUES ('globex', 'talk', 'x', 's', 0, 0, 1, 1, '[]', 'planted', 1)"
        )
    with acting_for(migrated.dispatcher_dsn, "acme") as connection:
        noisy = b"CREATE FUNCTION pg_temp.tell(text) RETURNS boolean COST 0.0001 LANGUAGE plpgsql"
        connection.execute(noisy + b" AS 'BEGIN RAISE NOTICE ''%'', $1; RETURN true; END'")
        told: list[str] = []
        connection.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))
        connection.execute(b"SELECT 1 FROM conversation_turns WHERE pg_temp.tell(answer)")
        assert told == ["of acme 1"]


@contextmanager
def acting_for(dsn: str, tenant: str | None) -> "Iterator[psycopg.Connection[Any]]":
    with connect(dsn, "test") as connection:
        if tenant is not None:
            act_for(connection, tenant)
        yield connection
        connection.rollback()


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        ("newest", "conversation_turns_newest"),
        ("old", "conversation_turns_by_age"),
    ],
)
def test_policies_do_not_keep_the_indexes_from_being_used(
    migrated: PostgresServer, recorded: Recorded, statement: str, index: str
) -> None:
    for number in range(20):
        recorded.turns("acme", f"talk-{number}", range(100))
    with psycopg.connect(migrated.owner_dsn, autocommit=True, connect_timeout=5) as owner:
        owner.execute("ANALYZE conversation_turns")
    query = {
        "newest": "SELECT answer FROM conversation_turns WHERE tenant = 'acme' AND conversation_id = 'talk-7' "
        "ORDER BY submitted_at_ms DESC, source_offset DESC LIMIT 33",
        "old": "DELETE FROM conversation_turns WHERE ctid = ANY (ARRAY(SELECT ctid FROM conversation_turns "
        "WHERE replied_at_ms < 3000 ORDER BY replied_at_ms LIMIT 10))",
    }[statement]
    reads, removes = (migrated.dispatcher_dsn, "acme"), (migrated.owner_dsn, ALL_TENANTS)
    with acting_for(*(reads if statement == "newest" else removes)) as connection:
        plan = "\n".join(line for (line,) in connection.execute(f"EXPLAIN {query}".encode()))
    assert index in plan, plan
    assert "Seq Scan" not in plan, plan


def test_old_turns_are_removed_the_oldest_first(migrated: PostgresServer, recorded: Recorded) -> None:
    recorded.turns("acme", "talk", range(6))
    recorded.turns("globex", "talk", range(6))
    assert recorded.remove(before_ms=4_000, most=5) == 5
    assert recorded.remove(before_ms=4_000, most=5) == 3
    assert recorded.remove(before_ms=4_000, most=5) == 0
    assert answers(read(migrated, "acme", "talk")) == ["answer 4", "answer 5"]
    assert answers(read(migrated, "globex", "talk")) == ["answer 4", "answer 5"]


def remember(store: PgTurnStore, after: str | None, budget_s: float) -> Awaitable[ReadHistory]:
    return HistoryReader(store, monotonic_ms).read("acme", "talk", after, ENOUGH, budget_s, lambda: True)


def test_a_turn_that_is_recorded_meanwhile_is_there(migrated: PostgresServer, recorded: Recorded) -> None:
    recorded.turns("acme", "talk", [1])

    async def use(store: PgTurnStore) -> ReadHistory:
        asking = asyncio.ensure_future(remember(store, "talk-2", PATIENT_S))
        await asyncio.to_thread(recorded.turns, "acme", "talk", [2])
        return await asking

    found = reading(migrated, use)
    assert (found.reason, answers(found.turns)) == (None, ["answer 1", "answer 2"])
    assert found.took_ms < 2_000


def test_one_that_is_not_recorded_in_time_is_gone_on_without(migrated: PostgresServer, recorded: Recorded) -> None:
    recorded.turns("acme", "talk", [1])

    async def use(store: PgTurnStore) -> ReadHistory:
        await store.turns("acme", "talk", None, ENOUGH, PATIENT_S)
        return await remember(store, "talk-2", 0.3)

    found = reading(migrated, use)
    assert (found.reason, answers(found.turns)) == (HistoryReason.BEHIND, ["answer 1"])
    # A fifth of it was kept for reading; the rest of this second is the machine's.
    assert 200 <= found.took_ms <= 300 + 1_000


def test_a_server_that_hangs_costs_no_more_than_the_budget(
    migrated: PostgresServer, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CUT_AFTER_S", 0.3)
    recorded.turns("acme", "talk", [1])

    async def use(store: PgTurnStore) -> None:
        await store.turns("acme", "talk", None, ENOUGH, PATIENT_S)
        with paused(migrated):
            for _ in range(3):
                started = time.monotonic()
                found = await remember(store, None, 0.1)
                assert found.reason == HistoryReason.LATE
                assert time.monotonic() - started < 0.1 + 1.0
        deadline = time.monotonic() + 15
        while (found := await remember(store, None, 1.0)).reason is not None:
            assert time.monotonic() < deadline
        assert answers(found.turns) == ["answer 1"]

    reading(migrated, use)


def test_without_the_table_it_is_unavailable(database: PostgresServer) -> None:
    found = reading(database, lambda store: remember(store, None, 1.0))
    assert found.reason == HistoryReason.UNAVAILABLE


def test_conversations_are_listed_shown_and_deleted_for_one_tenant(
    migrated: PostgresServer, recorded: Recorded
) -> None:
    recorded.turns("acme", "orders", [1, 2])
    recorded.turns("acme", "talk", [3])
    recorded.turns("globex", "orders", [1])
    with Conversations(migrated.operator_dsn, "acme") as conversations:
        assert [(one.conversation_id, one.turns, one.last_at_ms) for one in conversations.list()] == [
            ("talk", 1, 3_000),
            ("orders", 2, 2_000),
        ]
        assert [turn.answer for turn in conversations.turns("orders")] == ["answer 1", "answer 2"]
        with Erasures(migrated.operator_dsn, "acme", 60_000) as erasures:
            erasure_id = erasures.request(ErasureKind.CONVERSATION, ["orders"], "operator")
            assert len(erasures.step(erasure_id)) == 2
        with pytest.raises(ConversationNotFoundError):
            conversations.turns("orders")
    assert answers(read(migrated, "globex", "orders")) == ["answer 1"]
    with pytest.raises(ValueError, match="no tenant"):
        Conversations(migrated.operator_dsn, ALL_TENANTS)


def test_the_command_line(migrated: PostgresServer, recorded: Recorded) -> None:
    recorded.turns("acme", "orders", [1, 2])

    def run(*arguments: str, tenant: str = "acme") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            (sys.executable, "-m", "fairlane_server.cli", "conversations", *arguments, "--tenant", tenant),
            env={"POSTGRES_DSN": migrated.operator_dsn},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    listed = json.loads(run("list", "--json").stdout)
    assert [(one["conversation_id"], one["turns"]) for one in listed["conversations"]] == [("orders", 2)]
    shown = run("show", "orders").stdout
    assert shown.index("user: question 1") < shown.index("assistant: answer 1") < shown.index("user: question 2")
    assert run("list", tenant="globex").stdout == "tenant globex has no conversations\n"
    other = run("show", "orders", tenant="globex")
    assert (other.returncode, other.stderr) == (1, "error: there is no conversation 'orders'\n")
    assert run("delete", "orders").returncode == 1
    said = "deleted orders of tenant acme with 2 turns; cached replies expire within 300 s\n"
    assert run("delete", "orders", "--yes").stdout == said
    assert run("list").stdout == "tenant acme has no conversations\n"
