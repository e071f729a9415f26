"""Heartbeats with the process's capacity, four a second, from a thread of its own."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from fairlane import metrics, names
from fairlane.codec import Codec
from fairlane.logs import get_logger
from fairlane.outcomes import Health
from fairlane.records import CapacityReport

log = get_logger(__name__)

_INTERVAL_S = 0.25
_FLUSH_TIMEOUT_S = 2.0
_JOIN_MARGIN_S = 1.0


@dataclass(eq=False)
class CapacityReporter:
    """Publishes to ``control.capacity`` until ``stop``, then once more with ``draining``.

    A report that does not get through is dropped and counted: the next one says more. Any other error goes to
    ``on_death``, on the ending thread: a consumer without heartbeats gets no work.
    """

    producer: Producer
    codec: Codec
    observe: Callable[[bool], CapacityReport | None]
    """The report to send now, given whether the process drains; None when there is nothing to say."""
    on_death: Callable[[Exception], None]
    interval_s: float = _INTERVAL_S
    _stopping: threading.Event = field(default_factory=threading.Event)
    _losing: bool = False

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="capacity", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send the last report now; returns at once."""
        self._stopping.set()

    def join(self) -> None:
        """Wait until the last report is sent or given up; bounded in time."""
        if self._thread.ident is not None:
            self._thread.join(_FLUSH_TIMEOUT_S + _JOIN_MARGIN_S)

    def _run(self) -> None:
        try:
            due = monotonic()
            while not self._stopping.wait(max(0.0, due - monotonic())):
                self._publish(draining=False)
                # After a pause of the process the missed reports are not made up for.
                due = max(due + self.interval_s, monotonic())
            self._publish(draining=True)
            self.producer.flush(_FLUSH_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever ends this thread ends the process, never silently
            log.error("capacity_reporter_stopped", error=str(error), kind=type(error).__name__)
            if not self._stopping.is_set():
                self.on_death(error)

    def _publish(self, *, draining: bool) -> None:
        report = self.observe(draining)
        if report is not None:
            _show(report)
            try:
                self.producer.produce(
                    names.CONTROL_CAPACITY,
                    value=self.codec.encode(report),
                    key=report.instance_id.encode(),
                    on_delivery=self._delivered,
                )
            except BufferError:
                self._lost("queue_full")
            except KafkaException as error:
                if error.args[0].fatal():
                    raise
                self._lost(error.args[0].name())
        self.producer.poll(0)

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is None:
            self._losing = False
        else:
            self._lost(error.name())

    def _lost(self, reason: str) -> None:
        metrics.CAPACITY_REPORTS_LOST.labels(reason=reason).inc()
        if not self._losing:
            log.warning("capacity_report_lost", reason=reason)
        self._losing = True


def _show(report: CapacityReport) -> None:
    for kind, rate in (
        ("prompt", report.prefill_tokens_per_s),
        ("completion", report.decode_tokens_per_s),
        ("cost", report.cost_tokens_per_s),
    ):
        metrics.CAPACITY_TOKENS_PER_SECOND.labels(kind=kind).set(rate)
    metrics.ENGINE_FAILING.set(report.health == Health.FAILING)
