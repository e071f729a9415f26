"""Publishing from an event loop: every record's acknowledgement is awaited, thousands at a time, by one producer."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from confluent_kafka import KafkaError, KafkaException, Message

from fairlane.client.seams import KafkaHeaders
from fairlane.clock import ClockMs, monotonic_ms
from fairlane.cluster import reason_of
from fairlane.kafka import MAY_BE_PUBLISHED, ClientConfig, idempotent_producer
from fairlane.logs import get_logger
from fairlane.outcomes import Code
from fairlane.settings import Settings
from fairlane_server.circuit_breaker import CircuitBreaker
from producers.gateway.errors import GatewayError
from producers.gateway.limited_log import LimitedLog
from producers.gateway.pipeline.refusals import away, busy, busy_with_tenant, not_confirmed

log = get_logger(__name__)

DELIVERY_TIMEOUT_MS = 10_000
_STALLED_MS = 2_500
_LOOK_S = 0.002
"""Between two looks for acknowledgements. A thread that waits for them takes the interpreter from the event loop for
every single one, and wakes it afterwards, which costs a good part of a call."""
_IDLE_LOOK_S = 0.1
"""While nothing is on its way: for errors of the connection."""
_LINGER_MS = 2
_LAST_RECORDS_TIMEOUT_S = 5.0
# What librdkafka's own queue holds beyond our bounds, so that it is never the first to be full.
_SPARE_MESSAGES = 1_000
_SPARE_KBYTES = 16_384

DeliveryReport = Callable[[KafkaError | None, Message], None]


class ProducerSeam(Protocol):
    """An idempotent producer."""

    def produce(
        self, topic: str, value: bytes, key: bytes, *, headers: KafkaHeaders, on_delivery: DeliveryReport
    ) -> None: ...

    def poll(self, timeout: float) -> int: ...


@dataclass(frozen=True, slots=True)
class PublishLimits:
    """How much may be published and not acknowledged at a time; of one topic, which is one tenant's, half of it."""

    max_records: int = 10_000
    max_bytes: int = 134_217_728


def producer_config(settings: Settings, limits: PublishLimits, on_error: Callable[[KafkaError], None]) -> ClientConfig:
    """A producer that gives a record up soon enough for its caller to hear of it."""
    return idempotent_producer(settings) | {
        "client.id": f"{settings.instance_id}-publisher",
        "delivery.timeout.ms": DELIVERY_TIMEOUT_MS,
        "linger.ms": _LINGER_MS,
        "topic.metadata.propagation.max.ms": 2_000,
        "queue.buffering.max.messages": limits.max_records + _SPARE_MESSAGES,
        "queue.buffering.max.kbytes": limits.max_bytes // 1_024 + _SPARE_KBYTES,
        "error_cb": on_error,
    }


@dataclass(slots=True, eq=False)
class _Record:
    """One record on its way."""

    acknowledged: "asyncio.Future[None]"
    topic: str
    request_id: str
    size_bytes: int
    sent_at_ms: int


@dataclass(slots=True)
class Publisher:
    """Publishes for all calls of a process. ``publish`` is for the event loop that ``start`` was called in.

    When records are not acknowledged any more, nothing else is taken: first because the oldest waits for too long,
    then, when records were given up, by a circuit breaker that lets one through now and then. Where only one topic's
    are not, nothing else is taken for that topic alone.

    Args:
        make_producer: makes the producer, given its ``error_cb``.
        limits: of what is on its way.
        on_failure: called when nothing can be published any more: the process must end.
    """

    make_producer: Callable[[Callable[[KafkaError], None]], ProducerSeam]
    limits: PublishLimits
    on_failure: Callable[[BaseException], None]
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    clock: ClockMs = monotonic_ms
    _producer: ProducerSeam | None = field(default=None, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _log: LimitedLog = field(default_factory=lambda: LimitedLog(log), init=False)
    _next_look: asyncio.TimerHandle | None = field(default=None, init=False)
    _looks_often: bool = field(default=False, init=False)
    _has_failed: bool = field(default=False, init=False)
    _on_the_way: dict[_Record, None] = field(default_factory=dict, init=False)
    """The oldest first."""
    _of_topic: dict[str, dict[_Record, None]] = field(default_factory=dict, init=False)
    """The same; no topic has none."""
    _answered_at_ms: int | None = field(default=None, init=False)
    """When the brokers last said anything of a record."""
    _bytes: int = field(default=0, init=False)
    _bytes_of_topic: Counter[str] = field(default_factory=Counter, init=False)
    _reports: list[tuple[_Record, KafkaError | None]] = field(default_factory=list, init=False)
    """Of the look that is under way."""

    @property
    def on_the_way(self) -> int:
        """Records that are not acknowledged yet."""
        return len(self._on_the_way)

    def start(self) -> None:
        """Begin to take records from the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._producer = self.make_producer(self._on_error)
        self._look_in(_IDLE_LOOK_S)

    async def close(self) -> None:
        """Wait a moment for what is on its way, then stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_RECORDS_TIMEOUT_S):
                await asyncio.gather(*(record.acknowledged for record in self._on_the_way), return_exceptions=True)
        if self._next_look is not None:
            self._next_look.cancel()
        self._producer = self._next_look = None

    async def publish(self, topic: str, request_id: str, value: bytes, headers: KafkaHeaders) -> None:
        """Publish a record with the request's id as its key; return when the brokers have it.

        Raises:
            GatewayError: 503 ``unavailable`` or ``overloaded``, 429 ``too_many_calls``: it is not in the log, and never
                will be; 503 ``uncertain``: nobody knows, and the error names the request.
        """
        now_ms = self.clock()
        size = len(value)
        if self._refusal(topic, size, now_ms) is not None:
            # It may be this process that did not look.
            self._take_reports()
            if (refusal := self._refusal(topic, size, now_ms)) is not None:
                raise refusal
        if not self.breaker.lets_through(now_ms):
            raise away()
        assert self._loop is not None and self._producer is not None  # noqa: S101, PT018 - a mistake in this package
        record = _Record(self._loop.create_future(), topic, request_id, size, now_ms)
        try:
            self._producer.produce(
                topic, value, request_id.encode(), headers=headers, on_delivery=partial(self._reported, record)
            )
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
        """Wait for no acknowledgement any more: who still does is told that nobody knows."""
        for record in self._on_the_way:
            if not record.acknowledged.done():
                record.acknowledged.set_exception(not_confirmed(record.request_id))

    @property
    def is_available(self) -> bool:
        """Whether records were acknowledged of late, or none had to be."""
        return not self.breaker.is_open and not self.is_stalled(self.clock())

    def is_stalled(self, now_ms: int) -> bool:
        """Whether the log as a whole does not answer: the oldest record waits for its acknowledgement for too long, and
        nothing was answered for as long, or those of other topics wait as well."""
        if not self._is_late(self._on_the_way, now_ms):
            return False
        if not self._answered_of_late(now_ms):
            return True
        return sum(self._is_late(records, now_ms) for records in self._of_topic.values()) > 1

    def _refusal(self, topic: str, size_bytes: int, now_ms: int) -> GatewayError | None:
        """Why nothing more is taken for this topic."""
        # A record that is alone, of its topic or of all, may be of any size.
        of_topic, limits = self._of_topic.get(topic, {}), self.limits
        if of_topic and (
            2 * len(of_topic) >= limits.max_records or 2 * (self._bytes_of_topic[topic] + size_bytes) > limits.max_bytes
        ):
            return busy_with_tenant()
        if self._on_the_way and (
            len(self._on_the_way) >= limits.max_records or self._bytes + size_bytes > limits.max_bytes
        ):
            return busy()
        if self._has_failed or self._is_late(of_topic, now_ms) or self.is_stalled(now_ms):
            return away()
        return None

    def _answered_of_late(self, now_ms: int) -> bool:
        return self._answered_at_ms is not None and now_ms - self._answered_at_ms <= _STALLED_MS

    @staticmethod
    def _is_late(records: "Iterable[_Record]", now_ms: int) -> bool:
        """Whether the first of them, the oldest, waits for too long."""
        oldest = next(iter(records), None)
        return oldest is not None and now_ms - oldest.sent_at_ms > _STALLED_MS

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self.on_failure(KafkaException(error))

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
        """See what was acknowledged or given up since the last time; whether it can be seen again."""
        if self._producer is None or self._has_failed:
            return False
        try:
            self._producer.poll(0)
            reports, self._reports = self._reports, []
            self._settle(reports)
        except Exception as error:  # noqa: BLE001 - the process ends with it
            self._has_failed = True
            log.error("publisher_died", reason=reason_of(error))
            self.on_failure(error)
            return False
        return True

    def _reported(self, record: _Record, error: KafkaError | None, _message: Message) -> None:
        # Inside ``poll``, which must not be left before all its reports were taken.
        self._reports.append((record, error))

    def _settle(self, reports: list[tuple[_Record, KafkaError | None]]) -> None:
        now_ms = self.clock()
        for record, error in reports:
            self._on_the_way.pop(record, None)
            of_topic = self._of_topic.get(record.topic, {})
            of_topic.pop(record, None)
            self._bytes_of_topic[record.topic] -= record.size_bytes
            if not of_topic:
                self._of_topic.pop(record.topic, None)
                del self._bytes_of_topic[record.topic]
            self._bytes -= record.size_bytes
            uncertain = error is not None and error.code() in MAY_BE_PUBLISHED
            if uncertain and self._answered_of_late(now_ms):
                # Its topic is stalled, and the others are not.
                self.breaker.abandoned()
            elif uncertain:
                self.breaker.failed(now_ms, random.random())  # noqa: S311 - jitter, no secret
            else:
                # A broker that refuses a record answers.
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
    """Of a delivery that failed."""
    if error.code() in MAY_BE_PUBLISHED:
        return not_confirmed(request_id)
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return GatewayError(413, Code.INVALID, "the request is larger than its topic takes", field="input")
    return away()
