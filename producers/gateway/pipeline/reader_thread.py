"""A thread that reads records of one type and passes them to the event loop.

Backpressure: a few batches are passed at a time, while the rest waits in Kafka. Decoding survives unreadable records
and an unavailable schema registry.
"""

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import random
from typing import Generic, TypeVar

from confluent_kafka import Message

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.cluster import reason_of
from fairlane.codec import Codec, DecodeError
from fairlane.logs import get_logger
from fairlane.schema_registry import RegistryError
from producers.gateway.limited_log import LimitedLog

log = get_logger(__name__)

RecordT = TypeVar("RecordT")
ItemT = TypeVar("ItemT")

MOST_HELD = 500
MOST_HELD_BYTES = 16_777_216
REGISTRY_UNAVAILABLE = "registry_away"
"""Problem of a record that is skipped because the schema registry is unavailable."""

_AGAIN = Backoff(first_s=0.25, longest_s=10.0)
# Confluent's framing: a zero byte and the schema id.
_FRAME_BYTES = 5


@dataclass(frozen=True, slots=True)
class _Record:
    topic: str
    partition: int | None
    offset: int | None
    value: bytes | None


class RecordDecoder(Generic[RecordT]):
    """Decoder for the thread of one reader.

    A record that is not of this type is counted, logged without its content, and skipped. A record whose schema must
    come from the registry is held, within bounds, while the registry does not answer. The registry is retried with
    backoff on a separate thread, while records of other schemas are decoded. That thread calls ``late`` with records
    that were held, each with its topic, and ``on_failure`` when it has died: the process must end.
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
        self._held: dict[bytes, list[_Record]] = {}
        """Held records by their frame."""
        self._held_records = 0
        self._held_bytes = 0
        self._asks = False
        """Whether the separate thread runs."""
        self._log = LimitedLog(log)

    def close(self) -> None:
        self._stopping.set()

    def decode(self, topic: str, message: Message) -> RecordT | None:
        """The record; None if it is skipped or held."""
        record = _Record(topic, message.partition(), message.offset(), message.value())
        with self._lock:
            # Retried already: a call to an unavailable registry may block for many seconds.
            if self._is_held(record):
                self._hold(record)
                return None
        try:
            return self._decoded(record)
        except RegistryError as error:
            with self._lock:
                self._log.warning("schema_not_known", topic=topic, reason=str(error))
                self._hold(record)
            return None

    def _decoded(self, record: _Record) -> RecordT | None:
        try:
            return self._codec.decode_as(self._record_type, record.value)
        except DecodeError as error:
            with self._lock:
                self._pass_over(record, error.problem)
            return None

    def _is_held(self, record: _Record) -> bool:
        return bool(self._held) and _frame(record) in self._held

    def _hold(self, record: _Record) -> None:
        """Call with the lock held."""
        held = self._held.setdefault(_frame(record), [])
        size = len(record.value or b"")
        if self._held_records >= MOST_HELD or self._held_bytes + size > MOST_HELD_BYTES:
            self._pass_over(record, REGISTRY_UNAVAILABLE)
        else:
            held.append(record)
            self._held_records += 1
            self._held_bytes += size
        if not self._asks:
            self._asks = True
            threading.Thread(target=self._ask_again, name="schemas", daemon=True).start()

    def _pass_over(self, record: _Record, problem: str) -> None:
        """Call with the lock held."""
        kind = self._record_type.__name__
        metrics.GATEWAY_UNREADABLE.labels(record=kind, problem=problem).inc()
        self._log.warning(
            "record_passed_over",
            record=kind,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            problem=problem,
        )

    def _ask_again(self) -> None:
        failures = 1
        try:
            while not self._stopping.wait(self._again.delay_s(failures, random())):  # noqa: S311 - jitter, no secret
                with self._lock:
                    frame, held = next(iter(self._held.items()))
                    first = held[0] if held else None
                if first is not None and not self._is_known(first):
                    failures += 1
                    with self._lock:
                        # Move it to the end, so that the next schema is tried.
                        self._held[frame] = self._held.pop(frame)
                    continue
                failures = 1
                # From here on the reader's thread decodes records of this schema itself.
                records, is_last = self._let_go(frame)
                if found := [(topic, record) for topic, record in map(self._again_decoded, records) if record]:
                    log.info("schema_known", records=len(found))
                    self._late(found)
                if is_last:
                    return
        except Exception as error:  # noqa: BLE001 - the process ends with it
            log.error("record_decoder_died", error=type(error).__name__)
            self._on_failure(error)

    def _is_known(self, record: _Record) -> bool:
        """Whether the registry answers, with a schema or without."""
        try:
            self._codec.decode_as(self._record_type, record.value)
        except DecodeError:
            return True
        except RegistryError:
            return False
        return True

    def _again_decoded(self, record: _Record) -> tuple[str, RecordT | None]:
        try:
            return record.topic, self._decoded(record)
        except RegistryError:
            with self._lock:
                self._pass_over(record, REGISTRY_UNAVAILABLE)
            return record.topic, None

    def _let_go(self, frame: bytes) -> tuple[list[_Record], bool]:
        """Remove and return the held records of a frame, and whether no others are held."""
        with self._lock:
            records = self._held.pop(frame)
            self._held_records -= len(records)
            self._held_bytes -= sum(len(record.value or b"") for record in records)
            self._asks = bool(self._held)
            return records, not self._asks


def _frame(record: _Record) -> bytes:
    return (record.value or b"")[:_FRAME_BYTES]


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
