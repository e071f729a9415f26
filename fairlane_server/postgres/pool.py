"""Postgres connections for an event loop, with a time limit that holds whatever Postgres does.

The caller gets its answer, or none, within its time. The exchange with Postgres goes on in the background: the server's
own timeout ends it and the connection is reused, or, if the server is silent, the connection is cut a little later and
replaced. Cancelling a caller disturbs neither.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from fairlane.file_text import present
from fairlane_server.postgres.connection import defaults, postgres_ms, reason
from fairlane_server.store_error import StoreError

CUT_AFTER_S = 1.0
"""How long after its deadline a silent server keeps its connection."""

_SETTINGS = "SELECT set_config('fairlane.tenant', %s, true), set_config('statement_timeout', %s, true)"
_CLOSE_TIMEOUT_S = 5.0
# Give up early and reconnect on demand: the pool's own backoff grows to minutes.
_RECONNECT_TIMEOUT_S = 1.0
_WAITING_PER_CONNECTION = 16

Connection = psycopg.AsyncConnection[Any]
Cursor = psycopg.AsyncCursor[Any]
Rows = list[tuple[Any, ...]]
Question = tuple[bytes, tuple[Any, ...]]
"""A statement and its parameters."""
Ask = Callable[[Connection], Awaitable[None]]


class DeadlinePool:
    """Connections shared by any number of callers, at most ``max_connections``; other callers wait within their time.
    ``configure`` is called with every new connection. A ``dsn`` that is in a file is what the file holds when a
    connection is opened. Raises ValueError for an invalid ``dsn``."""

    def __init__(
        self, dsn: str, name: str, max_connections: int, configure: Callable[[Connection], None] | None = None
    ) -> None:
        async def made(connection: Connection) -> None:
            if configure is not None:
                configure(connection)

        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            lambda: present(dsn),
            kwargs={**defaults(dsn, name), "autocommit": True},
            min_size=1,
            max_size=max_connections,
            open=False,
            configure=made,
            max_waiting=max_connections * _WAITING_PER_CONNECTION,
            reconnect_timeout=_RECONNECT_TIMEOUT_S,
            name=name,
        )
        self._talks: set[asyncio.Task[None]] = set()
        self._in_use: set[Connection] = set()

    async def open(self) -> None:
        """Start connecting; Postgres need not be available yet."""
        await self._pool.open()

    async def close(self) -> None:
        for connection in self._in_use:
            _cut(connection)
        # Before waiting for the calls, so that the pool replaces none of their connections.
        await self._pool.close(_CLOSE_TIMEOUT_S)
        if self._talks:
            await asyncio.wait(self._talks, timeout=_CLOSE_TIMEOUT_S)

    async def talk(self, ask: Ask, timeout_s: float) -> psycopg.Error | None:
        """Run ``ask`` in one transaction and wait for its end, at most ``timeout_s``.

        ``ask`` runs in pipeline mode, a second time if its connection proves to have broken while idle, and goes on
        after the timeout. Returns the error that ended it; None on success and on timeout.
        """
        loop = asyncio.get_running_loop()
        talk = loop.create_task(self._converse(ask, loop.time() + timeout_s))
        self._talks.add(talk)
        talk.add_done_callback(self._ended)
        # Not cancelled at the timeout: psycopg would then wait for the server for seconds.
        await asyncio.wait((talk,), timeout=timeout_s)
        if not talk.done():
            return None
        try:
            talk.result()
        except psycopg.Error as error:
            return error
        return None

    def _ended(self, talk: asyncio.Task[None]) -> None:
        self._talks.discard(talk)
        if not talk.cancelled():
            talk.exception()  # retrieved, so that asyncio does not log it as never retrieved

    async def _converse(self, ask: Ask, deadline: float) -> None:
        """Run ``ask`` on a pooled connection, once more if that proves to have broken while idle."""
        loop = asyncio.get_running_loop()
        for may_repeat in (True, False):
            connection = await self._pool.getconn(deadline - loop.time())
            self._in_use.add(connection)
            cut = loop.call_later(max(deadline - loop.time(), 0) + CUT_AFTER_S, _cut, connection)
            try:
                async with connection.pipeline():
                    await ask(connection)
            except psycopg.OperationalError:
                if not (may_repeat and connection.closed):
                    raise
            else:
                return
            finally:
                cut.cancel()
                self._in_use.discard(connection)
                await self._pool.putconn(connection)
            await self._pool.drain()


async def rows_for(pool: DeadlinePool, tenant: str, questions: Sequence[Question], timeout_s: float) -> list[Rows]:
    """Run these statements in one transaction that sees this tenant's rows only. Returns the rows of each.

    Raises StoreError or TimeoutError when not all of them were answered.
    """
    cursors: list[Cursor] = []

    async def ask(connection: Connection) -> None:
        cursors.clear()
        await connection.execute(_SETTINGS, (tenant, postgres_ms(timeout_s)))
        for statement, parameters in questions:
            cursors.append(await connection.execute(statement, parameters))

    error = await pool.talk(ask, timeout_s)
    answers = [await rows_of(cursor) for cursor in tuple(cursors)]
    complete = [rows for rows in answers if rows is not None]
    if len(complete) < len(questions):
        raise failure_of(error, timeout_s)
    return complete


async def rows_of(cursor: Cursor | None) -> Rows | None:
    """The rows if they have arrived; never waits for the server."""
    return None if cursor is None or cursor.pgresult is None else await cursor.fetchall()


def failure_of(error: psycopg.Error | None, timeout_s: float) -> Exception:
    """The exception for a call without rows: TimeoutError or StoreError."""
    match error:
        case None | PoolTimeout() | psycopg.errors.QueryCanceled():
            return TimeoutError(f"no answer within {timeout_s:g} s")
        case TooManyRequests():
            return StoreError("too many searches wait for a connection")
        case PoolClosed():
            return StoreError("the store is closed")
    return StoreError(reason(error))


def _cut(connection: Connection) -> None:
    if not connection.closed:
        # Duplicate the descriptor: the connection closes its own itself.
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)
