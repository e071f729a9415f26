"""The offset tracker against a plain model of a partition: any delivery, any order of completion, any crash."""

from bisect import bisect_left
from enum import Enum
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fairlane.offsets import MAX_METADATA_CHARS, MAX_SPAN, CommitPoint, Flow, MetadataError, OffsetTracker

REACH = 23_832
TOPIC_ID = "AbCdEfGhIjKlMnOpQrSt-_"
"""Offsets from the first undone that 4,000 characters can record."""

GAPS = st.sampled_from((0, 0, 1, 2, 7, 300, 9_000, REACH - 1, REACH, REACH + 1, 10**6, 10**13))


class Ending(Enum):
    """How a commit ends for the one who began it."""

    SUCCEEDS = "succeeds"
    FAILS = "fails"
    UNHEARD = "it succeeds, and the reader crashes before it hears of that"


ENDINGS = st.sampled_from((Ending.SUCCEEDS, Ending.SUCCEEDS, Ending.FAILS, Ending.UNHEARD))
RANDOM = st.randoms(use_true_random=False)


class PartitionModel(RuleBasedStateMachine):
    """A partition, its readers one after another, and the promise: every record is done once, none is left out.

    What outlives a reader is the log and what was committed, as the broker keeps it: an offset and a string.
    """

    MAX_SPAN = 40

    def __init__(self) -> None:
        super().__init__()
        self.records: list[int] = []
        self.end = 0
        self.head = 0
        self.committed: tuple[int, str] | None = None
        self.done: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """A new reader takes over: it knows what was committed and nothing else."""
        point = None if self.committed is None else CommitPoint.parse(*self.committed)
        self.tracker = OffsetTracker(point, self.MAX_SPAN)
        self.position = self.head if point is None else max(self.head, point.offset)
        self.in_hand: set[int] = set()
        self.paused = False

    @initialize(runs=st.lists(st.tuples(st.integers(1, 30), GAPS), max_size=5))
    def something_stands_in_the_log(self, runs: list[tuple[int, int]]) -> None:
        self.write(runs)

    @rule(runs=st.lists(st.tuples(st.integers(1, 30), GAPS), min_size=1, max_size=3))
    def write(self, runs: list[tuple[int, int]]) -> None:
        """Records, and gaps: the markers of transactions, the records of an aborted one."""
        for count, gap in runs:
            self.records.extend(range(self.end, self.end + count))
            self.end += count + gap

    @rule(count=st.integers(1, 60))
    def read(self, count: int) -> None:
        start = bisect_left(self.records, self.position)
        for offset in self.records[start : start + count]:
            wanted = self.tracker.deliver(offset)
            known = offset in self.done or offset in self.in_hand
            assert wanted is not known, f"{offset} was {'delivered again' if wanted else 'skipped'}"
            if wanted:
                self.in_hand.add(offset)
            self.position = offset + 1

    @precondition(lambda self: bisect_left(self.records, self.position) == len(self.records))
    @rule()
    def reach_the_end(self) -> None:
        self.tracker.advance(self.end)
        self.position = self.end

    @rule(farther=st.integers(0, 30))
    def seek_back(self, farther: int) -> None:
        """A rebalance that leaves the partition where it is: the reader starts again at its first undone record, or
        even before it."""
        first_undone = self.tracker.first_undone
        if first_undone is not None:
            self.position = max(self.head, min(self.position, first_undone - farther))

    @rule(chance=st.floats(0, 1), oldest=st.booleans(), random=RANDOM, meanwhile=st.integers(0, 20), ending=ENDINGS)
    def commit(self, chance: float, oldest: bool, random: Random, meanwhile: int, ending: Ending) -> None:
        """Some of the work is finished, in any order; more is read between the plan and its end."""
        settling = {offset for offset in sorted(self.in_hand) if random.random() < chance}
        if oldest and self.in_hand:
            settling.add(min(self.in_hand))
        settling = {offset for offset in settling if self.tracker.can_settle(offset)}
        point = self.tracker.commit_point(settling)
        if point is None:
            return
        assert len(point.metadata) <= MAX_METADATA_CHARS
        self.read(meanwhile)
        if ending is Ending.FAILS:
            return
        assert not settling & self.done
        self.done |= settling
        self.committed = point.offset, point.metadata
        if ending is Ending.UNHEARD:
            self.begin()
            return
        self.tracker.settle(settling)
        self.in_hand -= settling

    @rule()
    def crash(self) -> None:
        self.begin()

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        """Retention removes the oldest part of the log, done or not."""
        self.head = max(self.head, int(self.end * share))
        del self.records[: bisect_left(self.records, self.head)]
        self.position = max(self.position, self.head)

    @rule()
    def control_the_flow(self) -> None:
        span = self.tracker.span
        if self.paused:
            expected = Flow.RESUME if span < self.MAX_SPAN // 2 else Flow.KEEP
        else:
            expected = Flow.PAUSE if span > self.MAX_SPAN else Flow.KEEP
        assert self.tracker.flow() is expected
        self.paused = {Flow.PAUSE: True, Flow.RESUME: False, Flow.KEEP: self.paused}[expected]
        assert self.tracker.paused is self.paused

    @invariant()
    def tracker_agrees(self) -> None:
        tracker = self.tracker
        oldest = min(self.in_hand, default=None)
        assert tracker.oldest_undone == oldest
        assert all(map(tracker.is_undone, self.in_hand))
        assert tracker.escalated is (tracker.span > self.MAX_SPAN // 2)
        if oldest is not None:
            assert tracker.first_undone == oldest
            assert tracker.can_settle(oldest), "the oldest can always be settled: nothing blocks for ever"
            assert all(tracker.is_undone(offset) for offset in self.in_hand)

    @invariant()
    def committed_offsets_are_honest(self) -> None:
        """Below the committed offset nothing is undone; beyond it, exactly the marked records are done."""
        if self.committed is None:
            assert not self.done
            return
        point = CommitPoint.parse(*self.committed)
        for offset in self.records:
            marked = offset < point.offset or bool(point.done_beyond >> (offset - point.offset) & 1)
            assert marked is (offset in self.done)

    def teardown(self) -> None:
        """A last reader finishes everything: what is done in the end is what stands in the log."""
        self.begin()
        self.read(len(self.records))
        while self.in_hand:
            self.commit(1.0, True, Random(0), 0, Ending.SUCCEEDS)
        assert self.done >= set(self.records)


TestPartition = PartitionModel.TestCase
TestPartition.settings = settings(stateful_step_count=30)


@given(
    offset=st.integers(0, 2**62),
    done_beyond=st.integers(0, 2**REACH - 1),
    topic_id=st.just("") | st.from_regex(r"[A-Za-z0-9_-]{22}", fullmatch=True),
)
def test_metadata_round_trip(offset: int, done_beyond: int, topic_id: str) -> None:
    point = CommitPoint(offset, done_beyond, topic_id)
    assert len(point.metadata) <= MAX_METADATA_CHARS
    assert CommitPoint.parse(offset, point.metadata) == point


def test_a_full_bitmap_can_be_shown() -> None:
    assert repr(CommitPoint(7, 0b101)) == "CommitPoint(offset=7, done_beyond=0x5)"
    assert len(repr(CommitPoint(7, 2**REACH - 1))) > REACH // 4


def test_metadata_of_a_plain_offset_is_empty() -> None:
    assert CommitPoint(7).metadata == ""
    assert CommitPoint.parse(7, "") == CommitPoint.parse(7, None) == CommitPoint(7)


@pytest.mark.parametrize("topic_id", ["", TOPIC_ID])
def test_what_a_log_lost_at_its_end_is_not_done(topic_id: str) -> None:
    point = CommitPoint(10, 0b1010, topic_id)
    assert point.cut_at(14) == point
    assert point.cut_at(13) == CommitPoint(10, 0b10, topic_id)
    assert point.cut_at(11) == point.cut_at(10) == point.cut_at(2) == CommitPoint(10, 0, topic_id)


def test_a_tracker_commits_the_id_of_its_topic() -> None:
    tracker = OffsetTracker(None, topic_id=TOPIC_ID)
    tracker.deliver(5)
    assert tracker.commit_point([5]) == CommitPoint(6, 0, TOPIC_ID)
    assert tracker.commit_point() == CommitPoint(5, 0, TOPIC_ID)


@pytest.mark.parametrize("metadata", ["1:Ug==", f"2:{TOPIC_ID}:Ug=="])
def test_both_formats_are_read(metadata: str) -> None:
    point = CommitPoint.parse(100, metadata)
    assert (point.offset, point.done_beyond) == (100, 0b1010010)
    assert point.metadata == metadata


@given(
    metadata=st.text()
    | st.text().map(lambda text: f"1:{text}")
    | st.text().map(lambda text: f"2:{text}")
    | st.text("ABCDabcd0123+/=").map("1:{}".format)
    | st.text("ABCDabcd0123+/=").map(f"2:{TOPIC_ID}:{{}}".format)
)
def test_any_metadata_is_read_or_refused(metadata: str) -> None:
    try:
        point = CommitPoint.parse(3, metadata)
    except MetadataError:
        return
    assert point.offset == 3


@pytest.mark.parametrize(
    "metadata",
    ["somebody else's", "1:é", "1:AAA", "2:AAAA", "2::AAAA", f"2:{TOPIC_ID}", f"3:{TOPIC_ID}:AAAA", "1:" + "A" * 4_000],
)
def test_foreign_metadata_is_refused(metadata: str) -> None:
    with pytest.raises(MetadataError):
        CommitPoint.parse(0, metadata)


def test_a_full_bitmap_fits_and_reaches_no_farther() -> None:
    tracker = OffsetTracker(CommitPoint(100))
    assert all(tracker.deliver(offset) for offset in range(100, 100 + REACH + 2))
    assert tracker.can_settle(100 + REACH - 1)
    assert not tracker.can_settle(100 + REACH)
    with pytest.raises(ValueError, match="reach"):
        tracker.commit_point([100 + REACH])
    tracker.settle(range(101, 100 + REACH))
    point = tracker.commit_point()
    assert point is not None
    assert point.offset == 100
    with_id = CommitPoint(point.offset, point.done_beyond, TOPIC_ID)
    assert MAX_METADATA_CHARS - 4 < len(with_id.metadata) <= MAX_METADATA_CHARS
    tracker.settle([100])
    assert tracker.oldest_undone == 100 + REACH
    assert tracker.can_settle(100 + REACH + 1)
    assert tracker.commit_point([100 + REACH, 100 + REACH + 1]) == CommitPoint(100 + REACH + 2)


def test_a_huge_gap_costs_nothing() -> None:
    tracker = OffsetTracker(CommitPoint(0))
    assert tracker.deliver(0)
    assert tracker.deliver(10**15)
    assert tracker.deliver(10**15 + 5)
    assert not tracker.deliver(10**15), "delivered again after a seek"
    assert tracker.span == 10**15 + 6
    assert tracker.flow() is Flow.PAUSE
    assert tracker.commit_point([0]) == CommitPoint(10**15)
    tracker.settle([0])
    assert tracker.commit_point([10**15 + 5]) == CommitPoint(10**15, 1 << 5)


def test_pause_escalation_and_resume() -> None:
    tracker = OffsetTracker(None, max_span=10)
    seen = []
    for offset in range(12):
        tracker.deliver(offset)
        seen.append((tracker.span, tracker.escalated, tracker.flow(), tracker.paused))
    assert seen == [
        *((span, False, Flow.KEEP, False) for span in range(1, 6)),
        *((span, True, Flow.KEEP, False) for span in range(6, 11)),
        (11, True, Flow.PAUSE, True),
        (12, True, Flow.KEEP, True),
    ]
    seen.clear()
    for offset in range(9):
        tracker.settle([offset])
        seen.append((tracker.span, tracker.escalated, tracker.flow(), tracker.paused))
    assert seen == [
        *((span, True, Flow.KEEP, True) for span in range(11, 5, -1)),
        (5, False, Flow.KEEP, True),
        (4, False, Flow.RESUME, False),
        (3, False, Flow.KEEP, False),
    ]


def test_old_items_beyond_a_gap_do_not_pause_a_partition() -> None:
    tracker = OffsetTracker(CommitPoint(0), max_span=10)
    tracker.advance(1_000_000)
    assert tracker.span == 0
    assert tracker.deliver(1_000_000)
    assert tracker.flow() is Flow.KEEP


@pytest.mark.parametrize("max_span", [1, MAX_SPAN + 1])
def test_a_span_that_the_metadata_cannot_cover_is_refused(max_span: int) -> None:
    with pytest.raises(ValueError, match="max_span"):
        OffsetTracker(None, max_span)


@pytest.mark.parametrize("offset", [4, 6, 7])
def test_only_what_is_undone_can_be_settled(offset: int) -> None:
    tracker = OffsetTracker(CommitPoint(5))
    tracker.deliver(5)
    tracker.deliver(6)
    tracker.settle([6])
    with pytest.raises(ValueError, match=f"offset {offset}"):
        tracker.settle([offset])
    assert tracker.oldest_undone is not None


def test_nothing_is_committed_before_the_first_record() -> None:
    tracker = OffsetTracker()
    assert tracker.first_undone is None
    assert tracker.commit_point() is None
    tracker.advance(12)
    assert tracker.commit_point() == CommitPoint(12)
