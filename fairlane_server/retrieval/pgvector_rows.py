"""Rows of collections in Postgres: conversions of vectors and text, shared by the store and the search."""

import struct
from functools import lru_cache
from typing import Any, Self

import numpy as np
import psycopg
from psycopg import sql
from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format

from fairlane.names import is_name
from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.store import Collection, CollectionNotFoundError
from fairlane_server.store_error import StoreError
from fairlane_server.text import clean_text

LARGEST_NUMBER = 65_504.0
"""Of a half precision number."""

SELECT_COLLECTIONS = """
SELECT tenant, name, embedder, dimensions, version, documents, passages,
    (extract(epoch FROM created_at) * 1000)::bigint, (extract(epoch FROM updated_at) * 1000)::bigint, collection_id
FROM collections
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
