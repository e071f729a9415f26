"""A thread that reads records of one type and passes them to the event loop.

Backpressure: a few batches are passed at a time, while the rest waits in Kafka. Decoding survives unreadable records
and an unavailable schema registry.
"""

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable
from random import random
from typing import Generic, TypeVar

from confluent_kafka import Message

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.cluster import reason_of
from fairlane.codec import Codec, DecodeError, DecodeProblem, SchemaNotLoadedError
from fairlane.logs import get_logger
from fairlane.schema_registry import RegistryError
from producers.gateway.limited_log import LimitedLog

log = get_logger(__name__)

RecordT = TypeVar("RecordT")
ItemT = TypeVar("ItemT")

MOST_HELD = 500
MOST_HELD_BYTES = 16_777_216
REGISTRY_UNAVAILABLE = "registry_away"
"""Problem of a record that is skipped because too many wait for the schema registry."""

_AGAIN = Backoff(first_s=0.25, longest_s=10.0)


class RecordDecoder(Generic[RecordT]):
    """Decoder for the thread of one reader.

    A record that is not of this type is counted, logged without its content, and skipped. A record whose schema is not
    loaded is held, within bounds, until the schema registry has answered; meanwhile others are decoded. A separate
    thread asks the registry, with backoff. It calls ``late`` with records that were held, each with its topic, and
    ``on_failure`` when it has died: the process must end.
    """

    def __init__(
        self,
        codec: Codec,
        record_type: type[RecordT],
        late: Callable[[list[tuple[str, RecordT]]], None],
        on_failure: Callable[[BaseException], None],
        again: Backoff = _AGAIN,
    ) -> None:
        self._codec = codec
        self._record_type = record_type
        self._late = late
        self._on_failure = on_failure
        self._again = again
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._held: list[Message] = []
        self._held_bytes = 0
        self._asks = False
        """Whether the separate thread runs."""
        self._log = LimitedLog(log)

    def close(self) -> None:
        self._stopping.set()

    def decode(self, message: Message) -> RecordT | None:
        """The record; None if it is skipped or held."""
        try:
            return self._decoded(message)
        except SchemaNotLoadedError:
            self._hold(message)
            return None

    def _decoded(self, message: Message) -> RecordT | None:
        """Raises SchemaNotLoadedError."""
        try:
            return self._codec.decode_any((self._record_type,), message.value(), may_ask=False)
        except DecodeError as error:
            self._pass_over(message, error.problem)
            return None

    def _hold(self, message: Message) -> None:
        size = len(message.value() or b"")
        with self._lock:
            fits = len(self._held) < MOST_HELD and self._held_bytes + size <= MOST_HELD_BYTES
            if fits:
                self._held.append(message)
                self._held_bytes += size
            begins, self._asks = not self._asks, True
        if begins:
            threading.Thread(target=self._ask, name="schemas", daemon=True).start()
        if not fits:
            self._pass_over(message, REGISTRY_UNAVAILABLE)

    def _pass_over(self, message: Message, problem: str) -> None:
        kind = self._record_type.__name__
        metrics.GATEWAY_UNREADABLE.labels(record=kind, problem=problem).inc()
        with self._lock:
            self._log.warning(
                "record_passed_over",
                record=kind,
                topic=message.topic(),
                partition=message.partition(),
                offset=message.offset(),
                problem=problem,
            )

    def _ask(self) -> None:
        """Ask the registry until no record is held."""
        failures = 0
        try:
            while not self._stopping.is_set():
                with self._lock:
                    # One look-up reads all schemas, so it answers for all records that are held when it begins.
                    count = len(self._held)
                    self._asks = count > 0
                if not count:
                    return
                try:
                    self._codec.refresh()
                except RegistryError as error:
                    failures += 1
                    with self._lock:
                        self._log.warning("schema_not_known", reason=str(error))
                else:
                    failures = 0
                    self._release(count)
                self._stopping.wait(self._again.delay_s(max(failures, 1), random()))  # noqa: S311 - jitter, no secret
        except Exception as error:  # noqa: BLE001 - the process ends with it
            log.error("record_decoder_died", error=type(error).__name__)
            self._on_failure(error)

    def _release(self, count: int) -> None:
        """Decode the first of the held records, and pass them on."""
        with self._lock:
            messages, self._held = self._held[:count], self._held[count:]
            self._held_bytes -= sum(len(message.value() or b"") for message in messages)
        found: list[tuple[str, RecordT]] = []
        for message in messages:
            try:
                record = self._decoded(message)
            except SchemaNotLoadedError:
                self._pass_over(message, DecodeProblem.UNKNOWN_SCHEMA_ID)
                continue
            if record is not None:
                found.append((message.topic() or "", record))
        if found:
            log.info("schema_known", records=len(found))
            self._late(found)


MOST_BATCHES = 4

_LOOK_S = 0.1
_END_TIMEOUT_S = 10.0


class ReaderThread(Generic[RecordT, ItemT]):
    """Base of the readers. ``deliver`` is called with each batch, in order, in the event loop that ``start`` was called
    in; ``on_failure`` on the thread when it has died: the process must end."""

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
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    async def close(self) -> None:
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
