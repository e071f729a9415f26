"""TLS in front of a server without it: the Redis of the wheel has none."""

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CHUNK_BYTES = 65_536
_END_TIMEOUT_S = 10.0


@contextmanager
def tls_front(port: int, server_file: Path, host: str = "127.0.0.1") -> Iterator[int]:
    """A port at ``host`` that takes TLS alone and passes on to ``port`` of this machine.

    ``server_file``: key, certificate and chain.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_file)
    front = _Front(port, context, host)
    thread = threading.Thread(target=lambda: asyncio.run(front.run()), name="tls front")
    thread.start()
    try:
        assert front.ready.wait(_END_TIMEOUT_S)
        yield front.port
    finally:
        front.stop()
        thread.join(_END_TIMEOUT_S)
        assert not thread.is_alive()


class _Front:
    def __init__(self, target: int, context: ssl.SSLContext, host: str) -> None:
        self._target = target
        self._context = context
        self._host = host
        self._connections: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self.port = 0
        self.ready = threading.Event()

    async def run(self) -> None:
        """Until ``stop``."""
        self._loop = asyncio.get_running_loop()
        # Whoever comes without TLS is not worth a line in the log of the test.
        self._loop.set_exception_handler(lambda _loop, _context: None)
        server = await asyncio.start_server(self._accept, self._host, 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        self.ready.set()
        await self._ended.wait()
        server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def stop(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._ended.set)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(OSError, asyncio.CancelledError):
                inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._target)
                try:
                    ways = (_pass_on(reader, inner_writer), _pass_on(inner_reader, writer))
                    ends = [asyncio.ensure_future(way) for way in ways]
                    try:
                        # When one side closes, so does the other.
                        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for end in ends:
                            end.cancel()
                        await asyncio.gather(*ends, return_exceptions=True)
                finally:
                    await _close(inner_writer)
        finally:
            await _close(writer)
            self._connections.discard(task)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError, ssl.SSLError, asyncio.CancelledError):
        await writer.wait_closed()
