"""Requests mapped to replies in bounded memory."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from fairlane.client.handle import AsyncHandle, Handle, from_any_thread
from fairlane.errors import FairlaneError, Timeout
from fairlane.records import InferenceReply

ItemT = TypeVar("ItemT")


def replies_of(
    submit: Callable[[ItemT], Handle],
    unwanted: Callable[[Handle], None],
    items: Iterable[ItemT],
    *,
    ordered: bool,
    ahead: int,
    timeout_s: float | None,
) -> Iterator[tuple[ItemT, InferenceReply]]:
    """Each item with its reply; see :meth:`Client.map`. At most ``ahead`` are submitted and not yet yielded.

    ``unwanted`` takes what nobody will take any more. It must take no lock: a generator that was dropped may be closed
    by the garbage collector, where any lock is held.
    """
    source = enumerate(items)
    open_rows: dict[int, tuple[ItemT, Handle]] = {}
    answered: SimpleQueue[int] = SimpleQueue()
    try:
        while True:
            while len(open_rows) < ahead and (row := next(source, None)) is not None:
                index, item = row
                with _noted(index):
                    handle = submit(item)
                open_rows[index] = item, handle
                if not ordered:
                    handle.replied.when_done(partial(answered.put, index))
            if not open_rows:
                return
            try:
                index = next(iter(open_rows)) if ordered else answered.get(timeout=timeout_s)
            except Empty:
                raise _none_in_time(len(open_rows), timeout_s) from None
            item, handle = open_rows[index]
            with _noted(index):
                reply = handle.reply(timeout_s)
            del open_rows[index]
            yield item, reply
    finally:
        for _, handle in open_rows.values():
            unwanted(handle)


async def replies_of_async(
    submit: Callable[[ItemT], Awaitable[AsyncHandle]],
    items: AsyncIterator[ItemT],
    *,
    ordered: bool,
    ahead: int,
    timeout_s: float | None,
) -> AsyncGenerator[tuple[ItemT, InferenceReply], None]:
    """The same for asyncio."""
    open_rows: dict[int, tuple[ItemT, AsyncHandle]] = {}
    answered: asyncio.Queue[int] = asyncio.Queue()
    index = -1
    more = True
    try:
        while True:
            while more and len(open_rows) < ahead:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    more = False
                    break
                index += 1
                with _noted(index):
                    handle = await submit(item)
                open_rows[index] = item, handle
                if not ordered:
                    handle.when_done(from_any_thread(partial(answered.put_nowait, index)))
            if not open_rows:
                return
            try:
                async with asyncio.timeout(timeout_s):
                    first = next(iter(open_rows)) if ordered else await answered.get()
            except TimeoutError:
                raise _none_in_time(len(open_rows), timeout_s) from None
            item, handle = open_rows[first]
            with _noted(first):
                reply = await handle.reply(timeout_s)
            del open_rows[first]
            yield item, reply
    finally:
        for _, handle in open_rows.values():
            with suppress(FairlaneError):
                handle.cancel()


async def each(items: Iterable[ItemT] | AsyncIterable[ItemT]) -> AsyncIterator[ItemT]:
    """The items of either kind of iterable."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


class _noted:  # noqa: N801 - read like a function
    """Says of an error which item it is about."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            error.add_note(f"item {self._index}")


def _none_in_time(count: int, timeout_s: float | None) -> Timeout:
    return Timeout(f"none of {count} requests: no reply within {timeout_s:g} s")
