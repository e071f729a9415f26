"""Where the replies of a job are read from, and what is noticed when some of them are gone."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from fairlane.names import JOBS_REPLIES
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply
from fairlane.schema_files import default_codec
from fairlane.schema_registry import RegistryError
from fairlane.settings import Settings
from producers.backfill import kafka
from producers.backfill.errors import JobFailedError, UnavailableError
from producers.backfill.job import Fingerprint, Job, JobSpec, RowIds
from producers.backfill.kafka import KafkaReplies

PARTITIONS = 12


class Failure:
    """A message that is none."""

    def __init__(self, code: int, offset: int = 0) -> None:
        self._error = KafkaError(code)
        self._offset = offset

    def error(self) -> KafkaError:
        return self._error

    def offset(self) -> int:
        return self._offset


class Log:
    """One partition: its bounds, what the next reads give, and from where it was to be read."""

    def __init__(self) -> None:
        self.bounds = (100, 200)
        self.partitions = PARTITIONS
        self.messages: list[Failure | Reply] = []
        self.is_away = False
        self.assigned: list[int] = []

    def __call__(self, _config: object, _reader: str, _on_unreadable: object) -> "Log":
        return self

    def list_topics(self, topic: str, timeout: float) -> Any:
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=range(self.partitions))})

    def get_watermark_offsets(self, _place: TopicPartition, timeout: float) -> tuple[int, int]:
        if self.is_away:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return self.bounds

    def assign(self, places: Sequence[TopicPartition]) -> None:
        (place,) = places
        assert place.topic == JOBS_REPLIES
        self.assigned.append(place.offset)

    def consume(self, most: int, _timeout_s: float) -> "list[Failure | Reply]":
        found, self.messages = self.messages[:most], self.messages[most:]
        return found


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    monkeypatch.setattr(kafka, "SkippingConsumer", made)
    return made


@pytest.fixture
def replies(log: Log) -> KafkaReplies:
    job = Job("00c0ffee00c0ffee", "acme", JobSpec("in", "out"), Fingerprint(1, "1"), 10, PARTITIONS)
    return KafkaReplies(Settings(), default_codec(), job)


@pytest.mark.parametrize(
    ("offset", "position", "losses"),
    [
        (None, 200, 0),
        (100, 100, 0),
        (150, 150, 0),
        (200, 200, 0),
        (99, 100, 1),  # retention was faster
        (201, 200, 1),  # the log lost its end, or the topic was made anew
    ],
)
def test_a_job_begins_where_its_replies_can_be(
    log: Log, replies: KafkaReplies, offset: int | None, position: int, losses: int
) -> None:
    replies.start(offset)
    assert (replies.position, replies.losses, log.assigned) == (position, losses, [position])


def test_what_is_removed_while_it_is_read_is_noticed_once_and_read_on_behind(log: Log, replies: KafkaReplies) -> None:
    replies.start(150)
    log.bounds = (180, 220)
    log.messages = [Failure(KafkaError._AUTO_OFFSET_RESET)]
    assert replies.read(0) == []
    log.is_away = True
    with pytest.raises(UnavailableError):
        replies.read(0)
    assert replies.losses == 0
    log.is_away = False

    for _ in range(3):
        assert replies.read(0) == []

    assert (replies.position, replies.losses, log.assigned) == (180, 1, [150, 180])


def test_the_end_of_the_partition_is_a_place(log: Log, replies: KafkaReplies) -> None:
    replies.start(150)
    log.messages = [Failure(KafkaError._PARTITION_EOF, 200)]
    assert replies.read(0) == []
    assert replies.position == 200


def test_ids_that_were_made_for_other_partitions_fail_the_job(log: Log, replies: KafkaReplies) -> None:
    log.partitions = PARTITIONS + 1
    with pytest.raises(JobFailedError, match="13 partitions"):
        replies.start(None)


class Reply:
    """A reply of the job, at an offset of its partition."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def error(self) -> None:
        return None

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes:
        return RowIds("00c0ffee00c0ffee", PARTITIONS).prefix.encode()

    def value(self) -> bytes:
        return b"%d" % self._offset


class Registry:
    """A codec whose schema registry is unavailable for the records from an offset on."""

    def __init__(self, available_until: int) -> None:
        self.available_until = available_until

    def decode_as(self, _record_type: type[InferenceReply], value: bytes) -> InferenceReply:
        if int(value) >= self.available_until:
            raise RegistryError("no answer")
        return InferenceReply(value.decode(), "acme", Outcome.OK)


def test_replies_wait_for_an_unavailable_schema_registry_and_none_is_lost(
    log: Log, replies: KafkaReplies, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(152)
    monkeypatch.setattr(replies, "_codec", registry)
    replies.start(150)
    log.messages = [Reply(offset) for offset in range(150, 154)]

    assert [reply.request_id for reply in replies.read(0)] == ["150", "151"]
    for _ in range(2):
        with pytest.raises(UnavailableError, match="no answer"):
            replies.read(0)
    assert (replies.position, replies.losses) == (152, 0)

    registry.available_until = 200
    assert [reply.request_id for reply in replies.read(0)] == ["152", "153"]
    assert (replies.position, replies.losses) == (154, 0)
    assert replies.read(0) == []
