"""Single work items from the log: what is not there any more, and what cannot be read now."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from fairlane.codec import Codec
from fairlane.records import InferenceRequest, RequestInput, SourceCoordinate, WorkItem
from fairlane.schema_files import default_codec
from fairlane.schema_registry import RegistryError
from fairlane.settings import Settings
from fairlane.skipping_consumer import SkippedRange
from stream_processors.recorder import label_sources
from stream_processors.recorder.label_sources import WorkItemLog, WorkItemLogError

PLACE = SourceCoordinate("priority.p.normal", 0, 7)
REQUEST = InferenceRequest("r-1", "words", "generate", RequestInput(prompt="p"))
ASKED = SourceCoordinate("requests.acme", 0, 1)
ITEM = WorkItem(REQUEST, "acme", "p", "2", "normal", 1, 1, 1, 1, 1, "replies.acme", "d", ASKED)


@dataclass
class Record:
    """What a poll returns."""

    at: int = PLACE.offset
    problem: KafkaError | None = None
    content: bytes = default_codec().encode(ITEM)

    def error(self) -> KafkaError | None:
        return self.problem

    def offset(self) -> int:
        return self.at

    def value(self) -> bytes:
        return self.content


class ScriptedConsumer:
    """A consumer that finds one record, and perhaps a damaged batch before."""

    def __init__(self, found: Record | None, skipped: SkippedRange | None = None) -> None:
        self._found = found
        self._skipped = skipped
        self.on_unreadable: Callable[[SkippedRange], None] = lambda _: None
        self.is_closed = False

    def assign(self, _: list[TopicPartition]) -> None:
        """Nothing to fetch."""

    def poll(self, _: float) -> Record | None:
        if self._skipped is not None:
            self.on_unreadable(self._skipped)
        return self._found

    def close(self) -> None:
        self.is_closed = True


class SilentRegistry:
    """A source of schemas that does not answer."""

    def writer(self, record_name: str) -> tuple[int, Mapping[str, Any]]:
        raise RegistryError(f"{record_name}: no answer")

    def reader(self, schema_id: int) -> tuple[str, Mapping[str, Any]]:
        raise RegistryError(f"schema {schema_id}: no answer")

    def is_loaded(self, _: int) -> bool:
        return False

    def refresh(self) -> None:
        raise RegistryError("no answer")


def log_with(monkeypatch: pytest.MonkeyPatch, consumer: ScriptedConsumer, codec: Codec | None = None) -> WorkItemLog:
    def made(_config: object, _reader: str, on_unreadable: Callable[[SkippedRange], None]) -> ScriptedConsumer:
        consumer.on_unreadable = on_unreadable
        return consumer

    monkeypatch.setattr(label_sources, "SkippingConsumer", made)
    return WorkItemLog(Settings(), codec or default_codec())


def test_the_item_at_a_place_is_read_and_a_closed_log_reads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = ScriptedConsumer(Record())
    log = log_with(monkeypatch, consumer)
    for _ in range(2):
        assert log.read(PLACE) == ITEM
        log.close()
        assert consumer.is_closed
    assert log.read(SourceCoordinate("requests.acme", 0, 7)) is None


@pytest.mark.parametrize(
    "found",
    [
        Record(problem=KafkaError(KafkaError._AUTO_OFFSET_RESET)),
        Record(problem=KafkaError(KafkaError._PARTITION_EOF)),
        Record(at=8),
        Record(content=b"no record"),
    ],
)
def test_what_the_log_does_not_have_any_more_is_none(monkeypatch: pytest.MonkeyPatch, found: Record) -> None:
    assert log_with(monkeypatch, ScriptedConsumer(found)).read(PLACE) is None


@pytest.mark.parametrize(
    "code",
    [
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._AUTHENTICATION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN,
    ],
)
def test_every_other_error_is_tried_again_with_its_reason(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    problem = KafkaError(code, "why it failed")
    with pytest.raises(WorkItemLogError, match="why it failed"):
        log_with(monkeypatch, ScriptedConsumer(Record(problem=problem))).read(PLACE)


@pytest.mark.parametrize(("first", "end", "is_in_it"), [(5, 9, True), (7, 8, True), (8, 9, False), (3, 7, False)])
def test_a_record_in_a_damaged_batch_is_none_and_silence_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, first: int, end: int, *, is_in_it: bool
) -> None:
    damaged = SkippedRange(PLACE.topic, 0, first, end, "bad_checksum", "crc")
    log = log_with(monkeypatch, ScriptedConsumer(None, damaged))
    if is_in_it:
        assert log.read(PLACE) is None
        return
    with pytest.raises(WorkItemLogError, match="no record within"):
        log.read(PLACE)


def test_a_schema_registry_that_does_not_answer_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkItemLogError, match="no answer"):
        log_with(monkeypatch, ScriptedConsumer(Record()), Codec(SilentRegistry())).read(PLACE)
