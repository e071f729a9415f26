"""Heartbeats on ``control.dispatch`` with this dispatcher's backlog, so that dispatchers can share the pools' windows.

Runs on the event loop and never blocks it: a report enters the producer's local queue or is dropped, since the next one
replaces it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from confluent_kafka import KafkaError, KafkaException, Message

from fairlane import metrics, names
from fairlane.codec import Codec
from fairlane.kafka_clients import KafkaProducer
from fairlane.kafka_config import heartbeat_producer
from fairlane.logs import get_logger
from fairlane.records import DispatchReport
from fairlane.settings import Settings

log = get_logger(__name__)

_EVERY_S = 0.2
_AT_MOST_EVERY_S = 0.02
_TENANTS_EVERY_S = 1.0
_LAST_TIMEOUT_S = 3.0


class HeartbeatPublisher:
    """Publishes reports. ``collect`` builds one on the event loop; its argument says whether to include the tenants.

    Used on one event loop. The owner runs ``run`` as a task and sees it fail on a fatal producer error.
    """

    def __init__(self, settings: Settings, codec: Codec, collect: Callable[[bool], DispatchReport]) -> None:
        self._codec = codec
        self._collect = collect
        self._producer = KafkaProducer(heartbeat_producer(settings, "reports"))
        self._woken = asyncio.Event()
        self._stopping = False
        self._backlogged: frozenset[tuple[str, str]] = frozenset()
        """Pools and classes with a backlog in the last report."""
        self._tenants_at = 0.0
        self._failure: KafkaError | None = None

    def arrived(self, pool: str, priority_class: str) -> None:
        """Note a backlog in this pool and class. If the last report showed none, the next one is sent at once."""
        if (pool, priority_class) not in self._backlogged:
            self._woken.set()

    async def run(self) -> None:
        """Report until ``stop``. Raises KafkaException on a fatal producer error."""
        while not self._stopping:
            self._publish(self._report())
            if self._failure is not None:
                raise KafkaException(self._failure)
            await asyncio.sleep(_AT_MOST_EVERY_S)
            try:
                async with asyncio.timeout(_EVERY_S - _AT_MOST_EVERY_S):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def stop(self) -> None:
        """Publish that this dispatcher is draining; wait at most ``_LAST_TIMEOUT_S`` for delivery."""
        if self._stopping:
            return
        self._stopping = True
        self._woken.set()
        self._publish(replace(self._collect(True), draining=True))
        left = await asyncio.get_running_loop().run_in_executor(None, self._producer.flush, _LAST_TIMEOUT_S)
        if left:
            log.warning("last_report_not_written")

    def _report(self) -> DispatchReport:
        now = monotonic()
        with_tenants = now >= self._tenants_at + _TENANTS_EVERY_S
        if with_tenants:
            self._tenants_at = now
        report = self._collect(with_tenants)
        self._woken.clear()
        self._backlogged = frozenset(
            (load.pool, waiting.priority_class)
            for load in report.pools
            for waiting in load.classes
            if waiting.backlogged_weight > 0
        )
        return report

    def _publish(self, report: DispatchReport) -> None:
        try:
            self._producer.produce(
                names.CONTROL_DISPATCH,
                self._codec.encode(report),
                report.instance_id.encode(),
                on_delivery=self._delivered,
            )
        except BufferError:
            metrics.DISPATCH_REPORTS_LOST.labels(reason="_QUEUE_FULL").inc()
        except KafkaException as error:
            self._delivered(error.args[0])
        self._producer.poll(0)

    def _delivered(self, error: KafkaError | None, _message: Message | None = None) -> None:
        if error is None:
            return
        metrics.DISPATCH_REPORTS_LOST.labels(reason=error.name()).inc()
        if error.fatal() and self._failure is None:
            self._failure = error
