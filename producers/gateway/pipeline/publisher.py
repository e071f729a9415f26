"""Publish from an event loop: one producer, thousands of records in flight, each acknowledgement awaited."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from fairlane.client.connector import KafkaHeaders
from fairlane.clock import ClockMs, monotonic_ms
from fairlane.cluster import reason_of
from fairlane.kafka_config import UNCERTAIN_DELIVERY_ERRORS, ClientConfig, idempotent_producer
from fairlane.logs import get_logger
from fairlane.outcomes import Code
from fairlane.settings import Settings
from fairlane_server.circuit_breaker import CircuitBreaker
from producers.gateway.limited_log import LimitedLog
from producers.openai_api.errors import UNAVAILABLE, UNCERTAIN, GatewayError

TOO_MANY_CALLS = "too_many_calls"
"""The gateway's own code: the tenant is at its limit at this instance; others have room."""

_RETRY_AFTER_MS = 1_000
_BUSY_RETRY_AFTER_MS = 250


def away() -> GatewayError:
    """503: Kafka does not take records."""
    message = "the log does not take requests at present; nothing was accepted"
    return GatewayError(503, UNAVAILABLE, message, retry_after_ms=_RETRY_AFTER_MS)


def draining() -> GatewayError:
    """503: this instance is shutting down; others go on."""
    return GatewayError(503, Code.DRAINING, "this gateway is about to end", retry_after_ms=_RETRY_AFTER_MS)


def busy() -> GatewayError:
    """503: this instance is at its limit."""
    message = "too much is under way at this gateway; nothing was accepted"
    return GatewayError(503, Code.OVERLOADED, message, retry_after_ms=_BUSY_RETRY_AFTER_MS)


def busy_with_tenant() -> GatewayError:
    """429: this tenant is at its limit at this instance."""
    message = "too much of this tenant is under way at this gateway; nothing was accepted"
    return GatewayError(429, TOO_MANY_CALLS, message, retry_after_ms=_BUSY_RETRY_AFTER_MS)


def not_confirmed(request_id: str) -> GatewayError:
    """503: the publish was not acknowledged; the request may be in Kafka."""
    what = f"ask for /v1/results/{request_id}, or send it again with the same Idempotency-Key"
    message = f"it is not known whether the request was accepted: {what}"
    return GatewayError(503, UNCERTAIN, message, retry_after_ms=_RETRY_AFTER_MS, request_id=request_id)


log = get_logger(__name__)

DELIVERY_TIMEOUT_MS = 10_000
_STALLED_MS = 2_500
_LOOK_S = 0.002
"""Interval of polls for acknowledgements. A thread that waited for them would take the interpreter from the event loop
for every single one, and then wake the loop, which costs a good part of a call."""
_IDLE_LOOK_S = 0.1
"""Interval while nothing is in flight: for connection errors."""
_LINGER_MS = 2
_LAST_RECORDS_TIMEOUT_S = 5.0
# Capacity of librdkafka's queue beyond our limits, so that it is never the first to be full.
_SPARE_MESSAGES = 1_000
_SPARE_KBYTES = 16_384


# Of unacknowledged records; one topic, which is one tenant's, gets half.
MAX_RECORDS, MAX_BYTES = 10_000, 134_217_728

_ID_LOST_ERRORS = frozenset(
    {
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.UNKNOWN_PRODUCER_ID,
        # Of records that were not sent any more.
        KafkaError._FATAL,
        KafkaError._PURGE_QUEUE,
    }
)
"""Delivery errors of records that a producer without an id may still deliver."""


def producer_config(
    settings: Settings, on_error: Callable[[KafkaError], None], *, is_idempotent: bool = True
) -> ClientConfig:
    """Configuration of a producer whose delivery timeout ends while the caller still waits."""
    return idempotent_producer(settings) | {
        "enable.idempotence": is_idempotent,
        "client.id": f"{settings.instance_id}-publisher",
        "delivery.timeout.ms": DELIVERY_TIMEOUT_MS,
        "linger.ms": _LINGER_MS,
        "topic.metadata.propagation.max.ms": 2_000,
        "queue.buffering.max.messages": MAX_RECORDS + _SPARE_MESSAGES,
        "queue.buffering.max.kbytes": MAX_BYTES // 1_024 + _SPARE_KBYTES,
        "error_cb": on_error,
    }


@dataclass(slots=True, eq=False)
class _Record:
    acknowledged: "asyncio.Future[None]"
    topic: str
    request_id: str
    value: bytes
    headers: KafkaHeaders
    sent_at_ms: int
    is_second_try: bool = False

    @property
    def size_bytes(self) -> int:
        return len(self.value)


@dataclass(slots=True)
class AsyncPublisher:
    """Publishes for all calls of a process. Call ``publish`` in the event loop that ``start`` was called in.

    When acknowledgements stop, new records are rejected: first because the oldest record is overdue, then, once records
    time out, by a circuit breaker that lets one through now and then. If they stop for one topic only, only new records
    for that topic are rejected.

    A tenant with a connection to Kafka can write batches with the producer id of this process to its topic, which Kafka
    does not check: the idempotent producer then fails, for all tenants. In its place comes one without an id, which
    nobody can disturb, for the rest of this process's life. It may write a record twice when an acknowledgement is
    lost; the dispatcher runs an id once.

    Args:
        make_producer: makes a producer, given its ``error_cb`` and whether it is to be idempotent.
        on_failure: called when nothing can be published any more: the process must end.
    """

    make_producer: Callable[[Callable[[KafkaError], None], bool], Producer]
    on_failure: Callable[[BaseException], None]
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    clock: ClockMs = monotonic_ms
    max_records: int = MAX_RECORDS
    max_bytes: int = MAX_BYTES
    _producer: Producer | None = field(default=None, init=False)
    _former: Producer | None = field(default=None, init=False)
    """The idempotent one, when another has taken its place; it still has records in flight."""
    _lost_id: str | None = field(default=None, init=False)
    """Why the idempotent one can no longer be used."""
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _log: LimitedLog = field(default_factory=lambda: LimitedLog(log), init=False)
    _next_look: asyncio.TimerHandle | None = field(default=None, init=False)
    _looks_often: bool = field(default=False, init=False)
    _has_failed: bool = field(default=False, init=False)
    _on_the_way: dict[_Record, None] = field(default_factory=dict, init=False)
    """Oldest first."""
    _of_topic: dict[str, dict[_Record, None]] = field(default_factory=dict, init=False)
    """The same by topic; topics without records are removed."""
    _answered_at_ms: int | None = field(default=None, init=False)
    """When the brokers last answered for a record."""
    _bytes: int = field(default=0, init=False)
    _bytes_of_topic: Counter[str] = field(default_factory=Counter, init=False)
    _reports: list[tuple[_Record, KafkaError | None]] = field(default_factory=list, init=False)
    """Delivery reports of the poll in progress."""

    @property
    def on_the_way(self) -> int:
        return len(self._on_the_way)

    def start(self) -> None:
        """Create the producer and accept records from the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._producer = self.make_producer(self._on_error_of_idempotent, True)
        self._look_in(_IDLE_LOOK_S)

    async def close(self) -> None:
        """Wait a few seconds for records in flight, then stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_RECORDS_TIMEOUT_S):
                await asyncio.gather(*(record.acknowledged for record in self._on_the_way), return_exceptions=True)
        if self._next_look is not None:
            self._next_look.cancel()
        self._producer = self._former = self._next_look = None

    async def publish(self, topic: str, request_id: str, value: bytes, headers: KafkaHeaders) -> None:
        """Publish a record keyed by the request id; return when it is acknowledged.

        Raises:
            GatewayError: 503 ``unavailable`` or ``overloaded``, 429 ``too_many_calls``, 413 ``invalid``: the record is
                not in Kafka and never will be; 503 ``uncertain``: that is unknown, and the error names the request.
        """
        now_ms = self.clock()
        size = len(value)
        if self._refusal(topic, size, now_ms) is not None:
            # Acknowledgements may have arrived that this process has not polled yet.
            self._take_reports()
            if (refusal := self._refusal(topic, size, now_ms)) is not None:
                raise refusal
        if not self.breaker.lets_through(now_ms):
            raise away()
        assert self._loop is not None and self._producer is not None  # noqa: S101, PT018 - a mistake in this package
        record = _Record(self._loop.create_future(), topic, request_id, value, headers, now_ms)
        try:
            self._send(record)
        except BufferError:
            self.breaker.abandoned()
            raise busy() from None
        except KafkaException as error:
            self.breaker.failed(now_ms, random.random())  # noqa: S311 - jitter, no secret
            self._log.warning("publish_refused", topic=topic, request_id=request_id, reason=reason_of(error))
            raise away() from error
        self._on_the_way[record] = self._of_topic.setdefault(topic, {})[record] = None
        self._bytes += size
        self._bytes_of_topic[topic] += size
        if not self._looks_often:
            self._look_in(_LOOK_S)
        await record.acknowledged

    def end_waiting(self) -> None:
        """Stop waiting for acknowledgements: pending calls of ``publish`` fail as uncertain."""
        for record in self._on_the_way:
            if not record.acknowledged.done():
                record.acknowledged.set_exception(not_confirmed(record.request_id))

    @property
    def is_available(self) -> bool:
        """Whether the circuit breaker is closed and publishing is not stalled."""
        return not self.breaker.is_open and not self.is_stalled(self.clock())

    def is_stalled(self, now_ms: int) -> bool:
        """Whether Kafka as a whole does not acknowledge: the oldest record is overdue, and either no record was
        acknowledged for as long, or records of several topics are overdue."""
        if not self._is_late(self._on_the_way, now_ms):
            return False
        if not self._answered_of_late(now_ms):
            return True
        return sum(self._is_late(records, now_ms) for records in self._of_topic.values()) > 1

    def _refusal(self, topic: str, size_bytes: int, now_ms: int) -> GatewayError | None:
        """Why this topic gets no more records; None if it does."""
        # A record may be of any size if nothing else of its topic, or at all, is in flight.
        of_topic = self._of_topic.get(topic, {})
        if of_topic and (
            2 * len(of_topic) >= self.max_records or 2 * (self._bytes_of_topic[topic] + size_bytes) > self.max_bytes
        ):
            return busy_with_tenant()
        if self._on_the_way and (
            len(self._on_the_way) >= self.max_records or self._bytes + size_bytes > self.max_bytes
        ):
            return busy()
        if self._has_failed or self._is_late(of_topic, now_ms) or self.is_stalled(now_ms):
            return away()
        return None

    def _answered_of_late(self, now_ms: int) -> bool:
        return self._answered_at_ms is not None and now_ms - self._answered_at_ms <= _STALLED_MS

    @staticmethod
    def _is_late(records: "Iterable[_Record]", now_ms: int) -> bool:
        """Whether the first record, the oldest, is overdue."""
        oldest = next(iter(records), None)
        return oldest is not None and now_ms - oldest.sent_at_ms > _STALLED_MS

    def _send(self, record: _Record) -> None:
        """Raises BufferError and KafkaException."""
        try:
            self._produce(record)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._FATAL or self._former is not None:
                raise
            self._go_on_without_id(reason_of(error))
            self._produce(record)

    def _produce(self, record: _Record) -> None:
        assert self._producer is not None  # noqa: S101 - a mistake in this package
        self._producer.produce(
            record.topic,
            record.value,
            record.request_id.encode(),
            headers=record.headers,
            on_delivery=partial(self._reported, record),
        )

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self.on_failure(KafkaException(error))

    def _on_error_of_idempotent(self, error: KafkaError) -> None:
        # Runs inside ``poll``: the other producer is made afterwards.
        if error.fatal():
            self._lost_id = error.str()

    def _poll(self) -> None:
        for producer in (self._former, self._producer):
            if producer is None:
                continue
            try:
                producer.poll(0)
            except KafkaException as error:
                if not error.args[0].fatal() or (producer is self._producer and self._former is not None):
                    raise
                self._lost_id = reason_of(error)
        if self._lost_id is not None:
            self._go_on_without_id(self._lost_id)

    def _go_on_without_id(self, reason: str) -> None:
        """Put a producer without an id in the place of the idempotent one, if that has not happened."""
        if self._former is not None or self._producer is None:
            return
        log.error("producer_id_lost", reason=reason)
        self._former, self._producer = self._producer, self.make_producer(self._on_error, False)
        # What it has not sent, the other one sends; what is in flight it still reports.
        self._former.purge(in_flight=False, blocking=False)

    def _is_sent_again(self, record: _Record, error: KafkaError) -> bool:
        """Whether a record that the idempotent producer lost with its id is on its way once more."""
        if error.code() not in _ID_LOST_ERRORS or record.is_second_try or record.acknowledged.done():
            return False
        record.is_second_try = True
        self._go_on_without_id(f"{error.name()} from {record.topic}")
        try:
            self._send(record)
        except (BufferError, KafkaException):
            return False
        return True

    def _look_in(self, seconds: float) -> None:
        assert self._loop is not None  # noqa: S101 - a mistake in this package
        if self._next_look is not None:
            self._next_look.cancel()
        self._looks_often = seconds == _LOOK_S
        self._next_look = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._next_look = None
        if self._take_reports():
            self._look_in(_LOOK_S if self._on_the_way else _IDLE_LOOK_S)

    def _take_reports(self) -> bool:
        """Poll for delivery reports and settle their records; returns whether polling can go on."""
        if self._producer is None or self._has_failed:
            return False
        try:
            self._poll()
            reports, self._reports = self._reports, []
            self._settle(reports)
        except Exception as error:  # noqa: BLE001 - the process ends with it
            self._has_failed = True
            log.error("publisher_died", reason=reason_of(error))
            self.on_failure(error)
            return False
        return True

    def _reported(self, record: _Record, error: KafkaError | None, _message: Message) -> None:
        # Runs inside ``poll``: only collect, so that no exception ends ``poll`` before its last report.
        self._reports.append((record, error))

    def _settle(self, reports: list[tuple[_Record, KafkaError | None]]) -> None:
        now_ms = self.clock()
        for record, error in reports:
            if error is not None and self._is_sent_again(record, error):
                continue
            self._on_the_way.pop(record, None)
            of_topic = self._of_topic.get(record.topic, {})
            of_topic.pop(record, None)
            self._bytes_of_topic[record.topic] -= record.size_bytes
            if not of_topic:
                self._of_topic.pop(record.topic, None)
                del self._bytes_of_topic[record.topic]
            self._bytes -= record.size_bytes
            uncertain = error is not None and error.code() in UNCERTAIN_DELIVERY_ERRORS
            if uncertain and self._answered_of_late(now_ms):
                # Only this topic is stalled, others are not.
                self.breaker.abandoned()
            elif uncertain:
                self.breaker.failed(now_ms, random.random())  # noqa: S311 - jitter, no secret
            else:
                # A broker that rejects a record is available.
                self._answered_at_ms = now_ms
                self.breaker.succeeded()
            if record.acknowledged.done():
                continue
            if error is None:
                record.acknowledged.set_result(None)
                continue
            self._log.warning("not_published", request_id=record.request_id, error=error.name(), uncertain=uncertain)
            record.acknowledged.set_exception(_error_of(error, record.request_id))


def _error_of(error: KafkaError, request_id: str) -> GatewayError:
    if error.code() in UNCERTAIN_DELIVERY_ERRORS:
        return not_confirmed(request_id)
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return GatewayError(413, Code.INVALID, "the request is larger than its topic takes", field="input")
    return away()
