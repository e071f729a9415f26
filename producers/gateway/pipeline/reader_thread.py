"""A thread that reads records of one type and passes them to the event loop, with backpressure: a few batches at a
time, while the rest waits in Kafka."""

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from fairlane.cluster import reason_of
from fairlane.codec import Codec
from fairlane.logs import get_logger
from producers.gateway.limited_log import LimitedLog
from producers.gateway.pipeline.record_decoder import RecordDecoder

log = get_logger(__name__)

RecordT = TypeVar("RecordT")
ItemT = TypeVar("ItemT")

MOST_BATCHES = 4

_LOOK_S = 0.1
_END_TIMEOUT_S = 10.0


class ReaderThread(Generic[RecordT, ItemT]):
    """Base of the readers.

    Args:
        name: name of the thread.
        codec: decodes the records.
        record_type: type of the records.
        deliver: called with each batch, in order, in the event loop that ``start`` was called in.
        on_failure: called on the thread when it has died: the process must end.
    """

    def __init__(
        self,
        name: str,
        codec: Codec,
        record_type: type[RecordT],
        deliver: Callable[[list[ItemT]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._name = name
        self._decoder = RecordDecoder(codec, record_type, self._late, on_failure)
        self._deliver = deliver
        self._on_failure = on_failure
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._room = threading.BoundedSemaphore(MOST_BATCHES)
        self._log = LimitedLog(log)

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        self._decoder.close()
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, _END_TIMEOUT_S)

    @abstractmethod
    def _read_until_stopped(self) -> None:
        """Read on the thread until ``_stopping`` is set."""

    @abstractmethod
    def _late(self, found: list[tuple[str, RecordT]]) -> None:
        """Pass records on that waited for their schema, each with its topic."""

    def _give(self, batch: list[ItemT]) -> None:
        """Pass a batch to the loop; blocks while ``MOST_BATCHES`` are pending."""
        while not self._room.acquire(timeout=_LOOK_S):
            if self._stopping.is_set():
                return
        self._call(self._taken, batch)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Call in the event loop, in order."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _taken(self, batch: list[ItemT]) -> None:
        try:
            self._deliver(batch)
        finally:
            self._room.release()

    def _run(self) -> None:
        try:
            self._read_until_stopped()
        except Exception as error:  # noqa: BLE001 - the process ends with it
            log.error("reader_died", reader=self._name, reason=reason_of(error))
            self._on_failure(error)
