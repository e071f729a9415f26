"""Searching in the real Postgres: its time is kept, whatever Postgres does, and the connections are of use again."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import median

import psycopg
import pytest

from fairlane_server.postgres import pool
from fairlane_server.postgres.connection import connect
from fairlane_server.retrieval import pgvector_search
from fairlane_server.retrieval.pgvector_search import PgVectorSearch
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from fairlane_server.retrieval.store import Collection
from fairlane_server.store_error import StoreError
from tests.kit.pgvector_kit import (
    DIMENSIONS,
    PATIENT_S,
    TEXTS,
    VECTORS,
    document,
    paused,
    searching,
    stored_handbook,
    unit_vectors,
)
from tests.kit.stack import PostgresServer

pytestmark = pytest.mark.full

SLOW_FULL_TEXT = """
CREATE OR REPLACE FUNCTION match_passages(wanted_collection bigint, query text, wanted integer)
RETURNS TABLE (number bigint, score double precision) LANGUAGE sql AS 'SELECT 1, 1 FROM pg_sleep(30)'
"""


@pytest.fixture
def store(migrated: PostgresServer) -> Iterator[PgVectorCollections]:
    """A store in which acme has a handbook."""
    with stored_handbook(migrated) as made:
        yield made


def test_late_full_text_is_left_out_and_the_connection_used_again(
    store: PgVectorCollections, migrated: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handbook = store.get("acme", "handbook")
    # The server's own end comes later than the caller's, so that the two cannot be mistaken for one another, and before
    # the connection is cut.
    monkeypatch.setattr(pgvector_search, "search_settings", lambda tenant, _limit, _timeout_s: (tenant, "3s", "100"))
    monkeypatch.setattr(pool, "CUT_AFTER_S", 30.0)
    with psycopg.connect(migrated.owner_dsn, autocommit=True, connect_timeout=5) as owner:
        owner.execute(SLOW_FULL_TEXT)

    async def use(search: PgVectorSearch) -> None:
        await search.search(handbook, VECTORS[0], None, 3, PATIENT_S)
        before = backends(migrated)
        started = time.monotonic()
        found = await search.search(handbook, VECTORS[0], "warehouse", 3, 0.3)
        assert (len(found.nearest), found.matching) == (3, None)
        assert time.monotonic() - started < 2.5
        after = await search.search(handbook, VECTORS[0], None, 3, PATIENT_S)
        assert len(after.nearest) == 3
        assert backends(migrated) == before

    searching(migrated, use, connections=1)


def test_a_late_nearest_is_a_timeout(store: PgVectorCollections, migrated: PostgresServer) -> None:
    handbook = store.get("acme", "handbook")

    async def use(search: PgVectorSearch) -> None:
        await search.search(handbook, VECTORS[0], None, 3, PATIENT_S)
        with connect(migrated.dispatcher_dsn, "test") as other:
            # As the index is being made, but for reads too.
            other.execute("SELECT set_config('fairlane.tenant', 'acme', true)")
            with psycopg.connect(migrated.owner_dsn, connect_timeout=5) as owner:
                owner.execute(f"LOCK TABLE passages_{handbook.number}".encode())
                with pytest.raises(TimeoutError):
                    await search.search(handbook, VECTORS[0], "warehouse", 3, 0.2)
        assert len((await search.search(handbook, VECTORS[0], None, 3, PATIENT_S)).nearest) == 3

    searching(migrated, use, connections=1)


def test_a_server_that_hangs_keeps_nobody_waiting_and_the_pool_recovers(
    store: PgVectorCollections, migrated: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CUT_AFTER_S", 0.3)
    handbook = store.get("acme", "handbook")

    async def use(search: PgVectorSearch) -> None:
        async def ask(timeout_s: float) -> float:
            started = time.monotonic()
            with pytest.raises((TimeoutError, StoreError)):
                await search.search(handbook, VECTORS[0], "warehouse", 3, timeout_s)
            return time.monotonic() - started

        await search.search(handbook, VECTORS[0], None, 3, PATIENT_S)
        waits: list[float] = []
        with paused(migrated):
            for _ in range(5):
                waits += await asyncio.gather(*(ask(0.1) for _ in range(8)))
        # Before the connection is cut, which is after 0.1 + 0.3 s; a slow machine may be late now and then.
        assert median(waits) < 0.1 + 0.2
        await answered_again(search, handbook)
        # All of the pool is of use again, not the one connection.
        both = await asyncio.gather(*(search.search(handbook, VECTORS[0], None, 3, PATIENT_S) for _ in range(8)))
        assert [len(found.nearest) for found in both] == [3] * 8

    searching(migrated, use)


def test_a_connection_that_broke_while_idle_is_replaced_within_the_search(
    store: PgVectorCollections, migrated: PostgresServer
) -> None:
    handbook = store.get("acme", "handbook")

    async def use(search: PgVectorSearch) -> None:
        await asyncio.gather(*(search.search(handbook, VECTORS[0], None, 3, PATIENT_S) for _ in range(8)))
        with connect(migrated.dispatcher_dsn, "test") as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s AND datname = %s",
                (pgvector_search.APPLICATION_NAME, other.info.dbname),
            )
        found = await search.search(handbook, VECTORS[0], "warehouse", 3, PATIENT_S)
        assert (len(found.nearest), len(found.matching or ())) == (3, 2)

    searching(migrated, use)


def test_a_cancelled_caller_leaves_no_half_read_connection(
    store: PgVectorCollections, migrated: PostgresServer
) -> None:
    handbook = store.get("acme", "handbook")

    async def use(search: PgVectorSearch) -> None:
        cancelled = 0
        for number in range(60):
            task = asyncio.create_task(search.search(handbook, VECTORS[1], "warehouse", 3, PATIENT_S))
            for _ in range(number % 12):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            cancelled += task.cancelled()
            found = await search.search(handbook, VECTORS[0], "invoices", 1, PATIENT_S)
            assert [hit.text for hit in (*found.nearest, *(found.matching or ()))] == [TEXTS[0], TEXTS[1]]
        # One may be done before it is cancelled.
        assert cancelled > 30

    searching(migrated, use, connections=1)


def test_searches_go_on_while_an_index_is_built_and_a_deletion_waits(
    store: PgVectorCollections, migrated: PostgresServer
) -> None:
    store.create("acme", "large", "e", 64)
    for part in range(4):
        texts = [f"passage {part} {number}" for number in range(2_000)]
        store.put("acme", "large", [document(f"{part}.md", texts, unit_vectors(2_000, 64, part))])
    large, vector = store.get("acme", "large"), unit_vectors(1, 64, 9)[0]
    store.create("acme", "other", "e", DIMENSIONS)

    async def use(search: PgVectorSearch) -> None:
        await search.search(large, vector, "passage", 3, PATIENT_S)
        loop = asyncio.get_running_loop()
        with (
            ThreadPoolExecutor(2) as threads,
            PgVectorCollections(migrated.operator_dsn) as builder,
            PgVectorCollections(migrated.operator_dsn) as deleter,
            psycopg.connect(migrated.owner_dsn, connect_timeout=5) as owner,
        ):
            # Whoever reads the parent keeps a deletion waiting, and that one would keep everybody else.
            owner.execute("LOCK TABLE passages IN ACCESS SHARE MODE")
            deletion = loop.run_in_executor(threads, deleter.delete, "acme", "other")
            build = loop.run_in_executor(threads, builder.build_index, "acme", "large")
            during = 0
            while not build.done():
                assert len((await search.search(large, vector, "passage", 3, PATIENT_S)).nearest) == 3
                during += not build.done()
            assert await build
            assert during > 2
            assert not deletion.done()
            fresh = PgVectorSearch(migrated.dispatcher_dsn, 1)
            await fresh.open()
            assert len((await fresh.search(large, vector, "passage", 3, PATIENT_S)).nearest) == 3
            await fresh.close()
            owner.rollback()
            assert (await deletion).name == "other"

    searching(migrated, use)


def test_closing_ends_what_hangs(
    store: PgVectorCollections, migrated: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CUT_AFTER_S", 30.0)
    handbook = store.get("acme", "handbook")

    async def use() -> float:
        search = PgVectorSearch(migrated.dispatcher_dsn, 1)
        await search.open()
        await search.search(handbook, VECTORS[0], None, 3, PATIENT_S)
        with paused(migrated):
            with pytest.raises(TimeoutError):
                await search.search(handbook, VECTORS[0], None, 3, 0.05)
            started = time.monotonic()
            await search.close()
            took = time.monotonic() - started
        with pytest.raises(StoreError, match="closed"):
            await search.search(handbook, VECTORS[0], None, 3, PATIENT_S)
        return took

    assert asyncio.run(use()) < pool.CUT_AFTER_S / 2


def test_without_a_server_it_is_a_timeout() -> None:
    handbook = Collection("acme", "handbook", "e", DIMENSIONS, 1, number=1)

    async def use() -> None:
        async with PgVectorSearch("postgresql://fairlane@127.0.0.1:1/fairlane", 1) as search:
            with pytest.raises(TimeoutError):
                await search.search(handbook, VECTORS[0], None, 3, 0.1)

    asyncio.run(use())


async def answered_again(search: PgVectorSearch, collection: Collection) -> None:
    """Ask until there is an answer."""
    deadline = time.monotonic() + 60
    while True:
        try:
            await search.search(collection, VECTORS[0], None, 3, 1.0)
        except (TimeoutError, StoreError):
            assert time.monotonic() < deadline, "no answer after the server went on"
            continue
        return


def backends(database: PostgresServer) -> list[int]:
    """The server processes of the pool."""
    query = "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND datname = current_database() ORDER BY 1"
    with connect(database.dispatcher_dsn, "test") as connection:
        return [pid for (pid,) in connection.execute(query, (pgvector_search.APPLICATION_NAME,))]
