"""The reader of a reply topic, step by step."""

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException

from fairlane.client import reader as reader_module
from fairlane.client.reader import TopicReader
from fairlane.errors import Unavailable
from fairlane.records import InferenceReply
from fairlane.schema_files import default_codec
from tests.kit.client_fakes import FakeConsumer, error_message, no_broker, reply_message

NOW_MS = 1_700_000_000_000


@pytest.fixture
def consumer() -> FakeConsumer:
    return FakeConsumer()


@pytest.fixture
def settled() -> list[tuple[str, int]]:
    return []


@pytest.fixture
def reader(
    consumer: FakeConsumer, settled: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> TopicReader[InferenceReply]:
    monkeypatch.setattr(reader_module, "_REFRESH_S", 0.0)

    def settle(reply: InferenceReply, received_at_ms: int) -> None:
        settled.append((reply.request_id, received_at_ms))

    made = TopicReader(
        consumer, "replies.acme", InferenceReply, default_codec(), lambda _: True, settle, lambda: NOW_MS
    )
    made.seek_to_end(1.0)
    return made


def reply(request_id: str) -> InferenceReply:
    return InferenceReply(request_id, "acme", "ok")


def test_all_that_is_there_is_taken_in_one_step(
    reader: TopicReader[InferenceReply], consumer: FakeConsumer, settled: list[tuple[str, int]]
) -> None:
    consumer.push(*(reply_message(reply(str(number))) for number in range(5)))
    reader.step(0)
    assert settled == [(str(number), NOW_MS) for number in range(5)]


def test_a_record_without_a_key_is_decoded(
    reader: TopicReader[InferenceReply], consumer: FakeConsumer, settled: list[tuple[str, int]]
) -> None:
    message = reply_message(reply("1"))
    message.set_key(None)
    consumer.push(message)
    reader.step(0)
    assert settled == [("1", NOW_MS)]


def test_partitions_that_are_added_later_are_read_from_their_beginning(
    reader: TopicReader[InferenceReply], consumer: FakeConsumer
) -> None:
    consumer.partitions = 3
    reader.step(0)
    reader.step(0)
    assert [(start.partition, start.offset) for start in consumer.assigned] == [
        (0, 5),
        (1, OFFSET_BEGINNING),
        (2, OFFSET_BEGINNING),
    ]


def test_a_broker_that_does_not_answer_for_a_while_is_no_reason_to_stop(
    reader: TopicReader[InferenceReply], consumer: FakeConsumer, settled: list[tuple[str, int]]
) -> None:
    consumer.partitions = no_broker()
    consumer.push(error_message(KafkaError._ALL_BROKERS_DOWN))
    reader.step(0)
    consumer.partitions = 1
    consumer.push(reply_message(reply("1")))
    reader.step(0)
    assert settled == [("1", NOW_MS)]


def test_a_topic_that_is_gone_for_good_ends_the_reader(
    reader: TopicReader[InferenceReply], consumer: FakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.partitions = None
    reader.step(0)
    consumer.partitions = 1
    reader.step(0)
    consumer.partitions = None
    reader.step(0)
    monkeypatch.setattr(reader_module, "_GONE_AFTER_S", -1.0)
    with pytest.raises(Unavailable, match="does not exist any more"):
        reader.step(0)


def test_a_log_that_retention_cut_is_taken_up_where_it_begins(
    reader: TopicReader[InferenceReply], consumer: FakeConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    consumer.push(error_message(KafkaError._AUTO_OFFSET_RESET))
    reader.step(0)
    assert [(place.partition, place.offset) for place in consumer.sought] == [(0, OFFSET_BEGINNING)]
    assert "records_lost" in caplog.text


def test_a_topic_that_may_not_be_read_ends_the_reader(
    reader: TopicReader[InferenceReply], consumer: FakeConsumer
) -> None:
    consumer.push(error_message(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    with pytest.raises(Unavailable, match=r"replies\.acme: says the broker"):
        reader.step(0)


def test_a_fatal_error_ends_the_reader(reader: TopicReader[InferenceReply], consumer: FakeConsumer) -> None:
    consumer.push(error_message(KafkaError._FATAL, fatal=True))
    with pytest.raises(KafkaException):
        reader.step(0)
