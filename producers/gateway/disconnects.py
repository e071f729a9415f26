"""Detect clients that disconnect while their answer is being made."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

ResultT = TypeVar("ResultT")


class ClientGoneError(Exception):
    """The client disconnected before its answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of ``work``. If the client disconnects first, cancels the work and raises ClientGoneError.

    Args:
        receive: ASGI receive of a request whose body has been read.
        work: makes the answer.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return await working
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
