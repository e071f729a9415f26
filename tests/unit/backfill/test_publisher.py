"""What an offline job writes into its tenant's topic: every record an event, every chunk once."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from fairlane import cloud_events
from fairlane.records import CancelRequest
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from producers.backfill import kafka
from producers.backfill.job import RowIds
from producers.backfill.kafka import KafkaPublisher

JOB = "ab" * 8
IDS = RowIds(JOB, 12)
ROWS = [(IDS.id_of(row), b"row %d" % row) for row in range(3)]


@dataclass
class Log:
    """A producer, a group's member and the topic they share; a transaction that is not committed is not in it."""

    records: list[dict[str, Any]] = field(default_factory=list)
    marked: int = -1001
    transaction: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, _config: dict[str, Any]) -> "Log":
        return self

    def init_transactions(self, _timeout_s: float) -> None: ...

    def committed(self, places: list[TopicPartition], timeout: float) -> list[Any]:
        return [SimpleNamespace(error=None, offset=self.marked)]

    def consumer_group_metadata(self) -> object:
        return "group metadata"

    def list_topics(self, topic: str, _timeout_s: float) -> Any:
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None)})

    def begin_transaction(self) -> None:
        self.transaction = []

    def produce(self, topic: str, **record: Any) -> None:
        self.transaction.append({"topic": topic, **record})

    def send_offsets_to_transaction(self, offsets: list[TopicPartition], _metadata: object, _timeout_s: float) -> None:
        (mark,) = offsets
        self.marked = mark.offset

    def commit_transaction(self, _timeout_s: float) -> None:
        self.records += self.transaction

    def close(self) -> None: ...


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    found = Log()
    monkeypatch.setattr(kafka, "KafkaProducer", found)
    monkeypatch.setattr(kafka, "KafkaConsumer", found)
    return found


def publisher_of() -> KafkaPublisher:
    return KafkaPublisher(Settings(), default_codec(), "acme", JOB, IDS.partition, on_hang=pytest.fail)


def test_requests_and_cancellations_are_cloud_events(log: Log) -> None:
    made = publisher_of()
    made.publish(0, ROWS)
    made.send_again(ROWS[:1])
    made.cancel([request_id for request_id, _ in ROWS])
    made.close()

    requests, again, cancels = log.records[:3], log.records[3:4], log.records[4:]
    assert [(one["key"], one["value"]) for one in requests] == [(name.encode(), value) for name, value in ROWS]
    for (request_id, _), request, cancel in zip(ROWS, requests, cancels, strict=True):
        assert request["topic"] == cancel["topic"]
        assert tuple(request["headers"]) == cloud_events.of_request("acme", request_id)
        assert tuple(cancel["headers"]) == cloud_events.of_cancellation("acme", request_id)
        assert default_codec().decode_as(CancelRequest, cancel["value"]) == CancelRequest(request_id)
    assert again[0]["headers"] == requests[0]["headers"], "it is the same event"


def test_a_chunk_that_is_in_the_log_is_not_published_again(log: Log) -> None:
    first, second = publisher_of(), publisher_of()
    assert first.start() == 0
    first.publish(0, ROWS)
    assert second.start() == 1
    second.publish(0, ROWS)
    for made in (first, second):
        made.close()

    assert len(log.records) == len(ROWS)
