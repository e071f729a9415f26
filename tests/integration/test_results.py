"""What became of requests, in the recorder's own tables and in a real Redis."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from redis.asyncio import Redis

from fairlane.names import LEDGER_AUDIT, LEDGER_USAGE, replies_topic
from fairlane.outcomes import Outcome
from fairlane.records import AuditEvent, InferenceReply, UsageEvent
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from fairlane_server.postgres.request_timeline import RecordedReply
from fairlane_server.redis.cache import RedisCache
from fairlane_server.store_error import StoreError
from producers.gateway.results import cache_entries, request_store
from producers.gateway.results.cache_entries import MOST_ENTRY_BYTES
from producers.gateway.results.request_status import RequestState
from producers.gateway.results.request_store import (
    EndedCursor,
    EndedFilter,
    RequestStore,
    ended_question,
)
from producers.gateway.results.results import Results
from producers.openai_api.errors import GatewayError
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.store import RecorderStore
from tests.kit.native_kit import ID, place, recorded
from tests.kit.pgvector_kit import paused
from tests.kit.pipeline import unique_name
from tests.kit.request_store_suite import Requests, RequestStoreSuite, reply_of
from tests.kit.stack import PostgresServer, migrated_database
from tests.kit.waiting import PATIENCE_S, eventually_awaited

TABLES = ("results", "usage", "audit_logs")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product's bounds are of seconds and less, which is another test's matter."""
    monkeypatch.setattr(cache_entries, "_FLUSH_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(request_store, "PAGE_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(request_store, "LOOK_UP_TIMEOUT_S", PATIENCE_S)


class Recorded:
    """Tables that the recorder's own code fills."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self._store = RecorderStore(server.recorder_dsn)
        self._offset = 0

    def record(self, *replies: RecordedReply) -> None:
        self._write([(replies_topic(one.reply.tenant), one.reply, one.replied_at_ms) for one in replies])

    def decide(self, *decisions: AuditEvent) -> None:
        self._write([(LEDGER_AUDIT, event, event.occurred_at_ms) for event in decisions])

    def use(self, *events: UsageEvent) -> None:
        self._write([(LEDGER_USAGE, event, event.occurred_at_ms) for event in events])

    def ask(self, use: Callable[[RequestStore], Awaitable[Any]]) -> Any:
        async def within() -> Any:
            store = RequestStore(self.server.gateway_dsn)
            await store.open()
            try:
                return await use(store)
            finally:
                await store.close()

        return asyncio.run(within())

    def clear(self) -> None:
        with connect(self.server.owner_dsn, "test") as connection:
            connection.execute(f"TRUNCATE {', '.join(TABLES)}".encode())

    def close(self) -> None:
        self._store.close()

    def _write(self, records: list[tuple[str, AuditEvent | InferenceReply | UsageEvent, int]]) -> None:
        encoded = []
        for topic, value, at_ms in records:
            encoded.append(LogRecord(topic, 0, self._offset, at_ms, None, default_codec().encode(value)))
            self._offset += 1
        projection = project(encoded, default_codec())
        assert not projection.skipped
        self._store.write(projection, {})


@pytest.fixture(scope="module")
def tables(postgres: PostgresServer) -> Iterator[Recorded]:
    with migrated_database(postgres, unique_name()) as database:
        made = Recorded(database)
        yield made
        made.close()


@pytest.fixture
def requests(tables: Recorded) -> Recorded:
    """With nothing in them."""
    tables.clear()
    return tables


class TestPgRequests(RequestStoreSuite):
    @pytest.fixture(name="requests")
    def of_postgres(self, requests: Recorded) -> Requests:
        return requests


def test_what_is_no_tenant_is_asked_nothing(requests: Recorded) -> None:
    for tenant in (ALL_TENANTS, "", "acme'"):
        with pytest.raises(StoreError):
            reply_of(requests, tenant, ID)


def test_pages_are_read_from_an_index(requests: Recorded) -> None:
    with connect(requests.server.owner_dsn, "test") as connection:
        act_for(connection, ALL_TENANTS)
        connection.execute(
            """
            INSERT INTO results SELECT to_hex(n), 'acme', 'requests.acme', 0, n, 'replies.acme', 0, n, n / 3,
                CASE WHEN n % 500 = 0 THEN 'failed' ELSE 'ok' END, NULL, NULL, NULL, NULL,
                CASE WHEN n % 700 = 0 THEN 'rare' ELSE 'usual' END, '1', 'generate', 'e', NULL, 'stop', 0, 0, 0,
                n, n, n, n, n, n, 1, '[]', '[]', 1, 0
            FROM generate_series(1, 20000) AS n
            """
        )
        connection.execute("ANALYZE results")
        behind = EndedCursor(5_000, "ffff", "requests.acme", 0, 15_000)
        for wanted, index in (
            (EndedFilter(), "results_by_time"),
            (EndedFilter(model="rare"), "results_by_model"),
            (EndedFilter(outcome="failed"), "results_not_ok"),
        ):
            for start in (None, behind):
                statement, parameters = ended_question("acme", wanted, start, 20)
                plan = connection.execute(b"EXPLAIN (FORMAT TEXT) " + statement, parameters).fetchall()
                text = "\n".join(row[0] for row in plan)
                assert index in text, text
                assert "Seq Scan" not in text


def running(server: PostgresServer, redis_url: str, test: Callable[[Results, Results], Awaitable[None]]) -> None:
    """A test of two instances, over these servers."""

    async def within() -> None:
        redis = Redis.from_url(redis_url)
        settings = Settings(postgres_dsn=server.gateway_dsn)
        results, other = (
            Results(
                RedisCache(redis, settings.result_cache_ttl_s, PATIENCE_S, most_entry_bytes=MOST_ENTRY_BYTES),
                RequestStore(server.gateway_dsn),
                kept_s=settings.results_ttl_s,
            )
            for _ in range(2)
        )
        await results.open()
        await other.open()
        try:
            await test(results, other)
        finally:
            await results.close()
            await other.close()
            await redis.aclose()

    asyncio.run(within())


async def is_answered(results: Results, tenant: str) -> bool:
    """Whether it is known that there is nothing."""
    with suppress(GatewayError):
        return await results.find_reply(tenant, "f" * 32) is None
    return False


def test_redis_first_and_postgres_when_it_has_nothing(requests: Recorded, redis_url: str, unique: str) -> None:
    seen = recorded(1, unique, request_id=ID)
    stored = recorded(2, unique)

    async def test(results: Results, other: Results) -> None:
        assert await results.find_reply(unique, ID) is None
        results.remember([seen.reply])
        requests.record(stored)
        await eventually_awaited(lambda: other.find_reply(unique, ID), what="the reply in Redis")
        assert await other.find_reply(unique, ID) == seen.reply
        assert await results.find(unique, stored.reply.request_id) == stored
        assert await results.find_reply(f"{unique}x", ID) is None
        status = await results.status(unique, ID)
        assert status is not None
        assert status.status is RequestState.DONE

    running(requests.server, redis_url, test)


def test_a_page_survives_the_whole_way(requests: Recorded, redis_url: str) -> None:
    requests.record(*(recorded(number) for number in range(5)), recorded(9, outcome=Outcome.FAILED, code="poison"))

    async def test(results: Results, other: Results) -> None:
        first = await results.ended("acme", EndedFilter(), None, 4)
        rest = await results.ended("acme", EndedFilter(), EndedCursor(*place(first[-1])), 4)
        assert [int(one.reply.request_id, 16) for one in (*first, *rest)] == [9, 4, 3, 2, 1, 0]

    running(requests.server, redis_url, test)


def test_a_postgres_that_hangs_holds_nobody_up_for_long(
    requests: Recorded, redis_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_store, "LOOK_UP_TIMEOUT_S", 2.0)

    async def test(results: Results, other: Results) -> None:
        await eventually_awaited(lambda: is_answered(results, unique), what="an answer of Postgres")
        results.remember([recorded(1, unique, request_id=ID).reply])
        await eventually_awaited(lambda: other.find_reply(unique, ID), what="the reply in Redis")
        with paused(requests.server):
            answers = await asyncio.gather(
                *(results.find_reply(unique, f"{number:032x}") for number in range(20)), return_exceptions=True
            )
            assert all(isinstance(answer, GatewayError) and answer.status == 503 for answer in answers)
            assert not results.is_store_available
            assert await other.find_reply(unique, ID) is not None
        await eventually_awaited(lambda: is_answered(results, unique), what="an answer of Postgres")
        assert results.is_store_available

    running(requests.server, redis_url, test)


def test_many_look_ups_at_once_share_the_connections(requests: Recorded) -> None:
    requests.record(recorded(1, request_id=ID))

    async def look_up(store: RequestStore) -> None:
        histories = await asyncio.gather(*(store.history("acme", ID) for _ in range(60)))
        assert all(len(history.replies) == 1 for history in histories)

    requests.ask(look_up)
