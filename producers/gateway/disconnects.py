"""Callers who go away while they are waited for."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

ResultT = TypeVar("ResultT")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What the work comes to. Raises ClientGoneError, with the work cancelled, when the caller goes away before.

    Args:
        receive: of the request, whose body was read.
        work: what its caller waits for.
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
