"""Search in collections with pgvector, for an event loop, within a deadline."""

from functools import lru_cache
from typing import Any, Self

import psycopg
from psycopg import sql

from fairlane.logs import get_logger
from fairlane_server.postgres.connection import postgres_ms, reason
from fairlane_server.postgres.pool import Connection, Cursor, DeadlinePool, Rows, failure_of, rows_for, rows_of
from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.pgvector_store import (
    SELECT_COLLECTIONS,
    Wire,
    check_tenant,
    collection_of,
    partition,
    plain,
    register,
)
from fairlane_server.retrieval.store import Collection, CollectionNotFoundError, Found, Hit
from fairlane_server.store_error import StoreError

log = get_logger(__name__)

APPLICATION_NAME = "fairlane-retrieval"
MAX_LIMIT = 10_000
MAX_QUERY_CHARACTERS = 2_000
"""Of a text that is searched for; what comes after is left out."""

LOOK_UP_TIMEOUT_S = 1.0

_CANDIDATES = 100
_MAX_CANDIDATES = 1_000
SETTINGS = (
    "SELECT set_config('fairlane.tenant', %s, true), set_config('statement_timeout', %s, true), "
    # Passages that were deleted and not vacuumed yet are candidates too; then more are looked at.
    "set_config('hnsw.ef_search', %s, true), set_config('hnsw.iterative_scan', 'strict_order', true)"
)
_LOOK_UP = f"{SELECT_COLLECTIONS} WHERE tenant = %s AND name = %s".encode()


# The table is named, not found by way of the partitioned one: a deletion anywhere locks that one for a moment. Numbers
# are written out, because a plan for any limit would not use the index.
@lru_cache(maxsize=4_096)
def nearest_statement(number: int, dimensions: int, limit: int) -> bytes:
    """The passages of a collection that are nearest to a vector: the one parameter."""
    distance = sql.SQL("embedding::halfvec({}) <#> %s::halfvec").format(sql.Literal(dimensions))
    statement = sql.SQL(
        "SELECT source, ordinal, heading, text, tokens, {} AS distance FROM {} ORDER BY distance LIMIT {}"
    )
    return statement.format(distance, partition(number), sql.Literal(limit)).as_bytes()


@lru_cache(maxsize=4_096)
def matching_statement(number: int, limit: int) -> bytes:
    """The passages of a collection that hold words of a text, the one parameter; the rarer the words the better."""
    statement = sql.SQL(
        "SELECT p.source, p.ordinal, p.heading, p.text, p.tokens, m.score "
        "FROM match_passages({number}, %s, {limit}) AS m "
        "JOIN {partition} AS p ON p.collection_id = {number} AND p.number = m.number "
        "ORDER BY m.score DESC, m.number"
    )
    return statement.format(
        number=sql.Literal(number), limit=sql.Literal(limit), partition=partition(number)
    ).as_bytes()


class PgVectorSearch:
    """A VectorStore; others may share its ``pool``. At most ``max_connections`` searches run at once, others wait
    within their time. Raises ValueError for an invalid ``dsn``."""

    def __init__(self, dsn: str, max_connections: int = 8) -> None:
        self.pool = DeadlinePool(dsn, APPLICATION_NAME, max_connections, register)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def open(self) -> None:
        await self.pool.open()

    async def close(self) -> None:
        await self.pool.close()

    async def collection(self, tenant: str, name: str) -> Collection:
        """Raises CollectionNotFoundError, StoreError, TimeoutError (after ``LOOK_UP_TIMEOUT_S``)."""
        check_tenant(tenant)
        if name != plain(name):
            return collection_of(None, name)
        (rows,) = await rows_for(self.pool, tenant, [(_LOOK_UP, (tenant, name))], LOOK_UP_TIMEOUT_S)
        return collection_of(rows[0] if rows else None, name)

    async def search(
        self, collection: Collection, vector: FloatArray, text: str | None, limit: int, timeout_s: float
    ) -> Found:
        """The nearest passages by inner product, and those with words of the text, the rarer the better.

        A vector without any direction (all zeros) is near to nothing. Raises CollectionNotFoundError, StoreError, and
        TimeoutError as the protocol says.
        """
        check_tenant(collection.tenant)
        if not 1 <= limit <= MAX_LIMIT:
            raise StoreError(f"limit must be 1 to {MAX_LIMIT}, not {limit}")
        if vector.shape != (collection.dimensions,):
            raise StoreError(f"a vector of shape {vector.shape} for {collection.dimensions} dimensions")
        settings = search_settings(collection.tenant, limit, timeout_s)
        wire = Wire.vector(vector) if vector.any() else None
        words = None if text is None else plain(text[:MAX_QUERY_CHARACTERS])
        nearest: Cursor | None = None
        matching: Cursor | None = None

        async def ask(connection: Connection) -> None:
            nonlocal nearest, matching
            nearest = matching = None
            await connection.execute(SETTINGS, settings)
            if wire is not None:
                statement = nearest_statement(collection.number, collection.dimensions, limit)
                nearest = await connection.execute(statement, (wire,))
                # Otherwise the server would keep this answer until it has the next one.
                connection.pgconn.send_flush_request()
            if words is not None:
                matching = await connection.execute(matching_statement(collection.number, limit), (words,))

        error = await self.pool.talk(ask, timeout_s)
        near: Rows | None = [] if wire is None else await rows_of(nearest)
        matched = await rows_of(matching)
        if isinstance(error, psycopg.errors.UndefinedTable) and (near is None or matched is None):
            raise CollectionNotFoundError("there is no such collection any more")
        if near is None:
            raise failure_of(error, timeout_s)
        if words is not None and matched is None and not isinstance(error, psycopg.errors.QueryCanceled | None):
            log.warning("full_text_failed", tenant=collection.tenant, reason=reason(error))
        return Found(
            tuple(_hit(collection, row, -row[5]) for row in near),
            None if matched is None else tuple(_hit(collection, row, row[5]) for row in matched),
        )


def search_settings(tenant: str, limit: int, timeout_s: float) -> tuple[str, str, str]:
    candidates = min(max(_CANDIDATES, 2 * limit), _MAX_CANDIDATES)
    return tenant, postgres_ms(timeout_s), str(candidates)


def _hit(collection: Collection, row: tuple[Any, ...], score: float) -> Hit:
    source, ordinal, heading, text, tokens, _ = row
    return Hit(f"{collection.name}/{source}#{ordinal}", source, heading, text, tokens, score)
