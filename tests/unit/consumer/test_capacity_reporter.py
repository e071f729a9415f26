"""The thread that reports: it goes on whatever the broker does, says a last word, and does not die unheard."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from fairlane import metrics, names
from fairlane.records import CapacityReport
from fairlane.schema_files import default_codec
from inference_consumers.capacity.reporter import CapacityReporter
from tests.kit.waiting import eventually

CODEC = default_codec()
REPORT = CapacityReport("consumer-1", "pool", ("words",), "healthy", False, 1, 2, 32, 16_384, 0.5, 3, 30, 1_000, 5)


class FakeProducer:
    """Acknowledges at the next poll, or does what the test says instead."""

    def __init__(self) -> None:
        self.sent: list[CapacityReport] = []
        self.problem: Exception | None = None
        self.delivery_error: KafkaError | None = None
        self.flushed: list[float] = []
        self._waiting: list[Callable[[KafkaError | None, object], None]] = []

    def produce(self, topic: str, *, value: bytes, key: bytes, on_delivery: Any) -> None:
        if self.problem is not None:
            raise self.problem
        assert (topic, key) == (names.CONTROL_CAPACITY, b"consumer-1")
        self.sent.append(CODEC.decode_as(CapacityReport, value))
        self._waiting.append(on_delivery)

    def poll(self, _timeout_s: float) -> int:
        waiting, self._waiting = self._waiting, []
        for told in waiting:
            told(self.delivery_error, None)
        return len(waiting)

    def flush(self, timeout_s: float) -> int:
        self.flushed.append(timeout_s)
        return self.poll(timeout_s)


class Death:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.came = threading.Event()

    def __call__(self, error: Exception) -> None:
        self.error = error
        self.came.set()


def reporter(
    producer: FakeProducer, death: Death, observe: Callable[[bool], CapacityReport | None] | None = None
) -> CapacityReporter:
    made: Any = producer
    observe = observe or (lambda draining: replace(REPORT, draining=draining))
    return CapacityReporter(made, CODEC, observe, death, interval_s=0.005)


def test_it_reports_until_it_is_stopped_and_then_once_more() -> None:
    producer, death = FakeProducer(), Death()
    running = reporter(producer, death)
    running.start()
    eventually(lambda: len(producer.sent) >= 5)
    running.stop()
    running.join()
    assert [report.draining for report in producer.sent[:-1]] == [False] * (len(producer.sent) - 1)
    assert producer.sent[-1] == replace(REPORT, draining=True)
    assert producer.flushed == [pytest.approx(2.0)]
    assert death.error is None


@pytest.mark.parametrize(
    ("problem", "reason"),
    [(BufferError(), "queue_full"), (KafkaException(KafkaError(KafkaError._UNKNOWN_TOPIC)), "_UNKNOWN_TOPIC")],
)
def test_a_report_that_cannot_be_sent_is_counted_and_the_next_one_is_sent(problem: Exception, reason: str) -> None:
    producer, death = FakeProducer(), Death()
    producer.problem = problem
    lost = metrics.CAPACITY_REPORTS_LOST.labels(reason=reason)
    before = lost._value.get()
    running = reporter(producer, death)
    running.start()
    eventually(lambda: lost._value.get() >= before + 3)
    producer.problem = None
    eventually(lambda: producer.sent)
    running.stop()
    running.join()
    assert death.error is None


def test_a_report_that_is_not_acknowledged_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    producer, death = FakeProducer(), Death()
    producer.delivery_error = KafkaError(KafkaError._MSG_TIMED_OUT)
    lost = metrics.CAPACITY_REPORTS_LOST.labels(reason="_MSG_TIMED_OUT")
    before = lost._value.get()
    running = reporter(producer, death)
    running.start()
    eventually(lambda: lost._value.get() >= before + 5)
    running.stop()
    running.join()
    assert death.error is None
    output = "".join(capsys.readouterr())
    assert output.count("capacity_report_lost") == 1, "one line for an outage, not four a second"


def test_nothing_is_said_while_there_is_nothing_to_say() -> None:
    producer, death, asked = FakeProducer(), Death(), []

    def observe(draining: bool) -> CapacityReport | None:
        asked.append(draining)
        return REPORT if draining else None

    running = reporter(producer, death, observe)
    running.start()
    eventually(lambda: len(asked) > 3)
    assert not producer.sent
    running.stop()
    running.join()
    assert producer.sent == [REPORT]


@pytest.mark.parametrize("where", ["producer", "observe"])
def test_its_death_is_told(where: str) -> None:
    producer, death = FakeProducer(), Death()
    error: Exception = ValueError("a bug")

    def broken(_draining: bool) -> CapacityReport:
        raise error

    if where == "producer":
        error = KafkaException(KafkaError(KafkaError._FATAL, "gone", fatal=True))
        producer.problem = error
    running = reporter(producer, death, broken if where == "observe" else None)
    running.start()
    assert death.came.wait(10)
    assert death.error is error
    running.join()


def test_one_that_was_never_started_can_be_stopped() -> None:
    running = reporter(FakeProducer(), Death())
    running.stop()
    running.join()
