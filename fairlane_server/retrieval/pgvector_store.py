"""Store of collections with pgvector. Its tables, policies and functions: migration 0004."""

import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Self

import numpy as np
import psycopg
from psycopg import sql
from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format

from fairlane.closing import Closing
from fairlane.names import is_name
from fairlane_server.postgres.connection import DsnError, ReconnectingConnection, reason
from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.store import (
    Collection,
    CollectionExistsError,
    CollectionNotFoundError,
    NewDocument,
    TooManyCollectionsError,
)
from fairlane_server.store_error import StoreError
from fairlane_server.text import clean_text

LARGEST_NUMBER = 65_504.0
"""Of a half precision number."""

SELECT_COLLECTIONS = """
SELECT tenant, name, embedder, dimensions, version, documents, passages,
    (extract(epoch FROM created_at) * 1000)::bigint, (extract(epoch FROM updated_at) * 1000)::bigint, collection_id
FROM collections
"""


APPLICATION_NAME = "fairlane-collections"
CALL_TIMEOUT_S = 120.0
BUILD_TIMEOUT_S = 3_600.0
LOCK_TIMEOUT_S = 30.0
"""How long one ingest waits for another of the same collection, or for its index to be built."""

INDEX_FROM_PASSAGES = 2_500
"""Below, reading all vectors is about as fast as the index, and finds all."""

MAX_SOURCE_BYTES = 1_024
MAX_NAME_BYTES = 256

MOST_COLLECTIONS = 1_000
"""Of a tenant."""

_ROWS_PER_STATEMENT = 1_000
_IDLE_TIMEOUT_S = 60.0
_BY_NAME = f"{SELECT_COLLECTIONS} WHERE tenant = %s AND name = %s".encode()
# Every change of a collection takes this lock: two ingests, or an ingest and a deletion, run one after the other.
_LOCKED = _BY_NAME + b" FOR NO KEY UPDATE"
_ALL = f"{SELECT_COLLECTIONS} WHERE tenant = %s ORDER BY name".encode()
_REMOVE_DOCUMENTS = """
DELETE FROM documents USING unnest(%s::text[], %s::text[]) AS wanted (source, content_hash)
WHERE collection_id = %s AND documents.source = wanted.source
AND documents.content_hash = coalesce(wanted.content_hash, documents.content_hash)
RETURNING documents.source, passages
"""
_ADD_DOCUMENTS = """
INSERT INTO documents (collection_id, tenant, source, content_hash, title, passages, size_bytes)
SELECT %s, %s, * FROM unnest(%s::text[], %s::text[], %s::text[], %s::bigint[], %s::bigint[])
"""
_ADD_PASSAGES = sql.SQL("""
INSERT INTO {} (collection_id, tenant, source, ordinal, heading, text, tokens, embedding)
SELECT %s, %s, * FROM unnest(%s::text[], %s::int[], %s::text[], %s::text[], %s::int[], %s::halfvec[])
""")
_COUNT = """
UPDATE collections SET version = nextval('collection_versions'), documents = documents + %s, passages = passages + %s,
    updated_at = now() WHERE collection_id = %s
"""


class Wire(bytes):
    """A parameter that is in Postgres' own binary format already; the statement casts it to its type."""

    __slots__ = ()

    @classmethod
    def vector(cls, vector: FloatArray) -> Self:
        """One halfvec. Raises StoreError for numbers that it cannot hold."""
        return cls(struct.pack(">hh", len(vector), 0) + half_precision(vector).tobytes())

    @classmethod
    def vectors(cls, vectors: FloatArray, oid: int) -> Self:
        """An array of halfvec, whose oid is given, of at least one. Raises StoreError for numbers it cannot hold."""
        count, dimensions = vectors.shape
        layout = [("length", ">i4"), ("dimensions", ">i2"), ("unused", ">i2"), ("values", ">f2", (dimensions,))]
        rows = np.zeros(count, np.dtype(layout))
        rows["length"], rows["dimensions"] = 4 + 2 * dimensions, dimensions
        rows["values"] = half_precision(vectors)
        return cls(struct.pack(">iiiii", 1, 0, oid, count, 1) + rows.tobytes())


class WireDumper(Dumper):
    """Sends the value without a type and leaves the type to the server."""

    format = Format.BINARY

    def dump(self, obj: Buffer) -> Buffer:
        return obj


def half_precision(vectors: FloatArray) -> "np.ndarray[Any, Any]":
    """Big-endian half precision. Raises StoreError for what is not finite, or too large for it."""
    if not np.isfinite(vectors).all() or np.abs(vectors).max(initial=0) > LARGEST_NUMBER:
        raise StoreError("a vector has a number that is not finite or too large")
    return vectors.astype(">f2")


def register(connection: psycopg.BaseConnection[Any]) -> None:
    connection.adapters.register_dumper(Wire, WireDumper)


def plain(text: str) -> str:
    """The text without what Postgres cannot store: NUL, and half surrogate pairs."""
    return clean_text(text).replace("\0", "")


def check_tenant(tenant: str) -> None:
    """Raise StoreError unless the text names a single tenant; the wildcard for all tenants is refused."""
    if not is_name(tenant):
        raise StoreError("this is no tenant's name")


def collection_of(row: tuple[Any, ...] | None, name: str) -> Collection:
    if row is None:
        raise CollectionNotFoundError(f"there is no collection {name!r}")
    return Collection(*row)


def partition(number: int) -> sql.Identifier:
    return sql.Identifier(f"passages_{number}")


class PgVectorCollections(Closing):
    """A CollectionStore. One connection, opened when it is first needed and again after every failure; calls of several
    threads wait for one another. Every call is bounded in time."""

    def __init__(self, dsn: str, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._lock = threading.Lock()
        server_timeouts_s = {
            "statement_timeout": call_timeout_s,
            "lock_timeout": min(LOCK_TIMEOUT_S, call_timeout_s),
            "idle_in_transaction_session_timeout": _IDLE_TIMEOUT_S,
        }
        self._kept = ReconnectingConnection(
            dsn, APPLICATION_NAME, call_timeout_s, server_timeouts_s=server_timeouts_s, prepare=self._prepare
        )
        self._vector_oid = 0

    def close(self) -> None:
        with self._lock:
            self._kept.close()

    def create(self, tenant: str, name: str, embedder: str, dimensions: int) -> Collection:
        """A new collection, with a partition of its own. Raises CollectionExistsError, StoreError: also for one more
        than MOST_COLLECTIONS."""
        if not _fits(name, MAX_NAME_BYTES):
            raise StoreError(f"a collection's name is text of 1 to {MAX_NAME_BYTES} bytes")
        with self._transaction(tenant) as connection:
            try:
                connection.execute("SELECT create_collection(%s, %s, %s)", (name, plain(embedder), dimensions))
            except psycopg.errors.UniqueViolation:
                raise CollectionExistsError(f"there is a collection {name!r} already") from None
            # Each is a table and its indexes, which every planner and every backup of the database has to do with.
            if len(connection.execute(_ALL, (tenant,)).fetchall()) > MOST_COLLECTIONS:
                raise TooManyCollectionsError(f"a tenant has at most {MOST_COLLECTIONS} collections")
            return _one(connection, _BY_NAME, tenant, name)

    def get(self, tenant: str, name: str) -> Collection:
        with self._transaction(tenant) as connection:
            return _one(connection, _BY_NAME, tenant, name)

    def list(self, tenant: str) -> Sequence[Collection]:
        with self._transaction(tenant) as connection:
            return [Collection(*row) for row in connection.execute(_ALL, (tenant,))]

    def delete(self, tenant: str, name: str) -> Collection:
        with self._transaction(tenant) as connection:
            # Not locked: the function does that, and the gateway's role may not.
            collection = _one(connection, _BY_NAME, tenant, name)
            deleted = connection.execute("SELECT delete_collection(%s)", (collection.name,)).fetchone()
            if deleted is None or not deleted[0]:
                return collection_of(None, name)
            return collection

    def content_hashes(self, tenant: str, name: str) -> Mapping[str, str]:
        with self._transaction(tenant) as connection:
            number = _one(connection, _BY_NAME, tenant, name).number
            query = "SELECT source, content_hash FROM documents WHERE collection_id = %s"
            return dict(connection.execute(query, (number,)).fetchall())

    def put(
        self,
        tenant: str,
        name: str,
        documents: Sequence[NewDocument],
        *,
        number: int | None = None,
        confirm: Callable[[psycopg.Connection], None] | None = None,
    ) -> None:
        """See CollectionStore. ``confirm`` is called at the end of the transaction; what it raises undoes all."""
        with self._transaction(tenant) as connection:
            collection = _one(connection, _LOCKED, tenant, name, number)
            self._put(connection, collection, documents)
            if confirm is not None:
                confirm(connection)

    def _put(self, connection: psycopg.Connection, collection: Collection, documents: Sequence[NewDocument]) -> None:
        tenant = collection.tenant
        _check(documents, collection)
        if not documents:
            return
        removed = _remove(connection, collection, {document.source: None for document in documents})
        columns = [
            [document.source for document in documents],
            [plain(document.content_hash) for document in documents],
            [plain(document.title) for document in documents],
            [len(document.passages) for document in documents],
            [document.size_bytes for document in documents],
        ]
        connection.execute(_ADD_DOCUMENTS, (collection.number, tenant, *columns))
        added = 0
        statement = _ADD_PASSAGES.format(partition(collection.number))
        passages = _rows(documents)
        while rows := tuple(islice(passages, _ROWS_PER_STATEMENT)):
            *values, vectors = zip(*rows, strict=True)
            wire = Wire.vectors(np.stack(vectors), self._vector_oid)
            connection.execute(statement, (collection.number, tenant, *map(list, values), wire))
            added += len(rows)
        counts = (len(documents) - len(removed), added - sum(removed))
        connection.execute(_COUNT, (*counts, collection.number))

    def remove(
        self, tenant: str, name: str, sources: Sequence[str] | Mapping[str, str], *, number: int | None = None
    ) -> int:
        hashes = sources if isinstance(sources, Mapping) else dict.fromkeys(sources)
        with self._transaction(tenant) as connection:
            collection = _one(connection, _LOCKED, tenant, name, number)
            wanted = {source: hashes[source] for source in hashes if _fits(source, MAX_SOURCE_BYTES)}
            removed = _remove(connection, collection, wanted)
            if removed:
                connection.execute(_COUNT, (-len(removed), -sum(removed), collection.number))
            return len(removed)

    def build_index(self, tenant: str, name: str, *, number: int | None = None) -> bool:
        """See CollectionStore; ingests of this collection wait meanwhile."""
        with self._transaction(tenant, BUILD_TIMEOUT_S) as connection:
            # Locked, so that it is the one that is indexed.
            _one(connection, _LOCKED, tenant, name, number)
            built = connection.execute("SELECT index_collection(%s, %s)", (name, INDEX_FROM_PASSAGES)).fetchone()
            return built is not None and bool(built[0])

    @contextmanager
    def _transaction(self, tenant: str, timeout_s: float | None = None) -> Iterator[psycopg.Connection]:
        with self._lock:
            check_tenant(tenant)
            try:
                with self._kept.transaction(tenant, timeout_s) as connection:
                    yield connection
            except psycopg.Error as error:
                raise StoreError(reason(error)) from None
            except DsnError as error:
                raise StoreError(f"POSTGRES_DSN: {error}") from None
            except UnicodeError as error:
                raise StoreError(type(error).__name__) from None

    def _prepare(self, connection: psycopg.Connection) -> None:
        register(connection)
        row = connection.execute("SELECT 'halfvec'::regtype::oid::bigint").fetchone()
        self._vector_oid = int(row[0]) if row else 0


def _one(connection: psycopg.Connection, query: bytes, tenant: str, name: str, number: int | None = None) -> Collection:
    known = _fits(name, MAX_NAME_BYTES)
    found = collection_of(connection.execute(query, (tenant, name)).fetchone() if known else None, name)
    if number is not None and found.number != number:
        raise CollectionNotFoundError(f"collection {name!r} was deleted meanwhile, and another has its name now")
    return found


def _remove(connection: psycopg.Connection, collection: Collection, hashes: Mapping[str, str | None]) -> Sequence[int]:
    """Remove documents by source, with this content hash where one is given; returns how many passages each had of
    those that were there."""
    wanted = (list(hashes), list(hashes.values()), collection.number)
    rows = connection.execute(_REMOVE_DOCUMENTS, wanted).fetchall()
    if rows:
        statement = sql.SQL("DELETE FROM {} WHERE collection_id = %s AND source = ANY(%s)")
        gone = [source for source, _ in rows]
        connection.execute(statement.format(partition(collection.number)), (collection.number, gone))
    return [passages for _, passages in rows]


def _rows(documents: Sequence[NewDocument]) -> Iterator[tuple[Any, ...]]:
    """Source, ordinal, heading, text, tokens and vector of each passage."""
    for document in documents:
        for ordinal, passage in enumerate(document.passages):
            texts = (plain(passage.heading), plain(passage.text))
            yield document.source, ordinal, *texts, passage.tokens, document.vectors[ordinal]


def _check(documents: Sequence[NewDocument], collection: Collection) -> None:
    if len({document.source for document in documents}) != len(documents):
        raise StoreError("a source is given twice")
    for document in documents:
        if not _fits(document.source, MAX_SOURCE_BYTES):
            raise StoreError(f"a source is text of 1 to {MAX_SOURCE_BYTES} bytes")
        wanted = (len(document.passages), collection.dimensions)
        # Without passages the shape says nothing: some embedders return (0,) for no texts.
        if document.passages and document.vectors.shape != wanted:
            raise StoreError(f"vectors of shape {document.vectors.shape} where {wanted} is needed")


def _fits(text: str, max_bytes: int) -> bool:
    """Whether the text can be stored unchanged and be part of a key."""
    return text == plain(text) and 0 < len(text.encode()) <= max_bytes
