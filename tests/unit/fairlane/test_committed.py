"""Where a group left off, asked of a source that answers by a script; integration tests ask the real broker."""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pytest
from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, TopicPartition
from prometheus_client import REGISTRY

from fairlane.committed import ResumePoint, resume_points
from fairlane.offsets import CommitPoint
from fairlane.ownership import PartitionId

FIRST, SECOND = PartitionId("work", 0), PartitionId("work", 1)


@dataclass
class Answers(Consumer):
    """What the group committed and where the log begins."""

    committed_by_partition: dict[PartitionId, tuple[int, str | None]] = field(default_factory=dict)
    heads: dict[PartitionId, int] = field(default_factory=dict)
    ends: dict[PartitionId, int] = field(default_factory=dict)
    errors: deque[int] = field(default_factory=deque)
    """Codes that the next questions are answered with."""
    asked: list[float] = field(default_factory=list)
    """Time-outs of the questions, in seconds."""

    def committed(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        self.asked.append(timeout)
        if self.errors:
            raise KafkaException(KafkaError(self.errors.popleft()))
        return [self._found(partition) for partition in partitions]

    def _found(self, partition: TopicPartition) -> TopicPartition:
        wanted = PartitionId(partition.topic, partition.partition)
        offset, metadata = self.committed_by_partition.get(wanted, (OFFSET_INVALID, None))
        if metadata is None:
            return TopicPartition(*wanted, offset)
        return TopicPartition(*wanted, offset, metadata=metadata)

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int]:
        wanted = PartitionId(partition.topic, partition.partition)
        return self.heads.get(wanted, 0), self.ends.get(wanted, 10**6)


def truncations() -> float:
    return REGISTRY.get_sample_value("fairlane_log_truncated_total", {"topic": "work"}) or 0.0


def test_no_partitions_ask_nothing() -> None:
    source = Answers()
    assert resume_points(source, [], 1.0) == {}
    assert source.asked == []


def test_a_committed_offset_comes_with_what_is_done_beyond_it() -> None:
    point = CommitPoint(40, 0b1011000)
    source = Answers({FIRST: (40, point.metadata), SECOND: (7, "")})
    before = truncations()
    assert resume_points(source, [FIRST, SECOND], 1.0) == {
        FIRST: ResumePoint(point, 40),
        SECOND: ResumePoint(CommitPoint(7), 7),
    }
    assert truncations() == before


def test_a_group_that_never_committed_starts_at_the_head() -> None:
    before = truncations()
    assert resume_points(Answers(heads={FIRST: 12}), [FIRST], 1.0) == {FIRST: ResumePoint(None, 12)}
    assert truncations() == before


def test_a_committed_offset_that_was_truncated_is_an_alarm() -> None:
    point = CommitPoint(40, 0b10)
    before = truncations()
    found = resume_points(Answers({FIRST: (40, point.metadata)}, {FIRST: 90}), [FIRST], 1.0)
    assert found == {FIRST: ResumePoint(point, 90)}
    assert truncations() == before + 1


@pytest.mark.parametrize("metadata", ["reset by hand", "1:ü", "1:####"])
def test_metadata_of_somebody_else_leaves_the_offset(metadata: str) -> None:
    assert resume_points(Answers({FIRST: (40, metadata)}), [FIRST], 1.0) == {FIRST: ResumePoint(CommitPoint(40), 40)}


def test_an_answer_that_is_not_there_yet_is_asked_for_again() -> None:
    errors = [KafkaError._TIMED_OUT, KafkaError.UNSTABLE_OFFSET_COMMIT, KafkaError._TRANSPORT]
    source = Answers({FIRST: (40, None)}, errors=deque(errors))
    assert resume_points(source, [FIRST], 30.0) == {FIRST: ResumePoint(CommitPoint(40), 40)}
    assert len(source.asked) == 4
    assert all(0 < timeout <= 5 for timeout in source.asked)


def test_the_questions_end_in_time() -> None:
    source = Answers(errors=deque([KafkaError._TIMED_OUT] * 1_000))
    with pytest.raises(KafkaException):
        resume_points(source, [FIRST], 0.3)
    assert 2 <= len(source.asked) < 20, "with a pause between them"


def test_any_other_error_is_raised_at_once() -> None:
    source = Answers(errors=deque([KafkaError.GROUP_AUTHORIZATION_FAILED]))
    with pytest.raises(KafkaException):
        resume_points(source, [FIRST], 30.0)
    assert len(source.asked) == 1


ID, OTHER_ID = "AbCdEfGhIjKlMnOpQrStUv", "bbCdEfGhIjKlMnOpQrStUv"


def replacements(finding: str) -> float:
    labels = {"topic": "work", "finding": finding}
    return REGISTRY.get_sample_value("fairlane_log_replaced_total", labels) or 0.0


def ids(topics: Collection[str], _timeout_s: float) -> Mapping[str, str]:
    return dict.fromkeys(topics, ID)


@pytest.mark.parametrize("metadata", ["", CommitPoint(0, 0b101).metadata, CommitPoint(0, 0b101, ID).metadata])
def test_a_commit_beyond_the_end_goes_on_at_the_end(metadata: str) -> None:
    before = replacements("cut")
    source = Answers({FIRST: (40, metadata)}, ends={FIRST: 25})
    assert resume_points(source, [FIRST], 1.0, ids) == {FIRST: ResumePoint(None, 25, ID, lost=True)}
    assert replacements("cut") == before + 1


@pytest.mark.parametrize("end", [25, 10**6])
def test_a_topic_created_again_is_read_from_its_beginning(end: int) -> None:
    before = replacements("recreated")
    source = Answers({FIRST: (40, CommitPoint(40, 0b101, OTHER_ID).metadata)}, {FIRST: 3}, ends={FIRST: end})
    assert resume_points(source, [FIRST], 1.0, ids) == {FIRST: ResumePoint(None, 3, ID, lost=True)}
    assert replacements("recreated") == before + 1


def test_done_records_that_the_log_lost_are_not_done_any_more() -> None:
    before = replacements("cut")
    point = CommitPoint(40, (1 << 3) | (1 << 60), ID)
    source = Answers({FIRST: (40, point.metadata)}, ends={FIRST: 50})
    assert resume_points(source, [FIRST], 1.0, ids) == {FIRST: ResumePoint(CommitPoint(40, 1 << 3, ID), 40, ID)}
    assert replacements("cut") == before + 1


def test_a_commit_without_an_id_takes_that_of_the_topic() -> None:
    source = Answers({FIRST: (40, CommitPoint(40, 0b100).metadata)})
    assert resume_points(source, [FIRST, SECOND], 1.0, ids) == {
        FIRST: ResumePoint(CommitPoint(40, 0b100, ID), 40, ID),
        SECOND: ResumePoint(None, 0, ID),
    }


def test_ids_that_are_not_told_yet_are_asked_for_again() -> None:
    errors = deque([KafkaError._TIMED_OUT, KafkaError._TRANSPORT])

    def late(topics: Collection[str], timeout_s: float) -> Mapping[str, str]:
        if errors:
            raise KafkaException(KafkaError(errors.popleft()))
        return ids(topics, timeout_s)

    found = resume_points(Answers({FIRST: (40, None)}), [FIRST], 30.0, late)
    assert found == {FIRST: ResumePoint(CommitPoint(40, 0, ID), 40, ID)}
