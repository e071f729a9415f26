"""What the tests of the store on Postgres share: tables, documents, and a server that can be paused."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import psycopg
import pytest

from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.pgvector_search import PgVectorSearch
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from fairlane_server.retrieval.store import NewDocument, NewPassage
from tests.kit.stack import PostgresServer

DIMENSIONS = 8
PATIENT_S = 60.0
TEXTS = [
    "The Orion warehouse is managed by the night shift.",
    "Invoices are paid within thirty days of their date.",
    "A broken pallet is put aside and reported to the warehouse.",
    "Parking is free for visitors.",
]

T = TypeVar("T")


def unit_vectors(count: int, dimensions: int = DIMENSIONS, seed: int = 0) -> FloatArray:
    """Random directions."""
    drawn = np.random.default_rng(seed).normal(size=(count, dimensions)).astype(np.float32)
    found: FloatArray = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return found


VECTORS = unit_vectors(len(TEXTS))


def document(source: str, texts: Sequence[str], vectors: FloatArray, heading: str = "") -> NewDocument:
    """A document with these passages."""
    passages = tuple(NewPassage(text, heading, len(text.split())) for text in texts)
    return NewDocument(source, "hash", source, passages, vectors)


def numbered(count: int, dimensions: int = DIMENSIONS, seed: int = 0) -> NewDocument:
    """A document with so many passages, each with a word of its own."""
    texts = [f"passage about word{number}" for number in range(count)]
    return document("many.md", texts, unit_vectors(count, dimensions, seed))


@contextmanager
def stored_handbook(tables: PostgresServer) -> Iterator[PgVectorCollections]:
    """A store in which acme has a handbook."""
    with PgVectorCollections(tables.operator_dsn) as made:
        made.create("acme", "handbook", "e", DIMENSIONS)
        made.put("acme", "handbook", [document("rules/night.md", TEXTS, VECTORS, heading="Rules")])
        yield made


def number_of(database: PostgresServer, tenant: str) -> int:
    """The number of a tenant's only collection."""
    with connect(database.owner_dsn, "test") as connection:
        act_for(connection, ALL_TENANTS)
        row = connection.execute("SELECT collection_id FROM collections WHERE tenant = %s", (tenant,)).fetchone()
    assert row is not None
    return int(row[0])


def searching(database: PostgresServer, use: Callable[[PgVectorSearch], Awaitable[T]], connections: int = 2) -> T:
    """What comes of this use of a pool of so many connections."""

    async def run() -> T:
        async with PgVectorSearch(database.dispatcher_dsn, connections) as search:
            return await use(search)

    return asyncio.run(run())


@contextmanager
def paused(database: PostgresServer) -> Iterator[None]:
    """Stop every process of the server for the while of this block, as a machine without a processor does."""
    with connect(database.owner_dsn, "test") as connection:
        backend = connection.info.backend_pid
        if not _is_ours(connection, backend):
            pytest.skip("the server runs on another machine")
        postmaster = _parent(backend)
    stopped = [postmaster, *_children(postmaster)]
    _signal(stopped, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(stopped, signal.SIGCONT)


def _signal(processes: Sequence[int], which: signal.Signals) -> None:
    for pid in processes:
        # That of a connection that was closed may be gone.
        with suppress(ProcessLookupError):
            os.kill(pid, which)


def _is_ours(connection: psycopg.Connection, backend: int) -> bool:
    try:
        return b"postgres" in Path(f"/proc/{backend}/cmdline").read_bytes() and connection.info.hostaddr == "127.0.0.1"
    except OSError:
        return False


def _parent(pid: int) -> int:
    # The name of the process is in brackets and may hold anything.
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text(encoding="utf-8").split()]
