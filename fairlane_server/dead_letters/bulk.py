"""Many dead letters at once, for the command line and the admin API: which are due, replaying one, where to cut."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal
from uuid import uuid4

from fairlane.names import DEAD_LETTER_REQUESTS, DEAD_LETTER_WORK
from fairlane.records import SourceCoordinate
from fairlane_server.dead_letters.letters import Letter, ReplayMark
from fairlane_server.dead_letters.log import DeadLetterReader, PartitionRange
from fairlane_server.dead_letters.replay import NotReplayableError, NotReplayedError, Replay, Replayer, make_replay
from fairlane_server.dead_letters.selection import OffsetRange, Selection

SELECTED, REPLAYED = 1, 2


class DeadLetters(StrEnum):
    """The dead-letter topics, as operators call them."""

    REQUESTS = "requests"
    WORK = "work"


TOPICS = {DeadLetters.REQUESTS: DEAD_LETTER_REQUESTS, DeadLetters.WORK: DEAD_LETTER_WORK}

Read = Callable[[PartitionRange], Iterable[Letter | ReplayMark]]
"""Reads a stretch, and may show how far it is. Raises ClusterError."""


def topics_of(topic: DeadLetters | None) -> list[str]:
    """One topic, or both."""
    return list(TOPICS.values()) if topic is None else [TOPICS[topic]]


def short_name(place: SourceCoordinate) -> str:
    """A letter's place as operators write it: ``work-0@12``."""
    short = next((name for name, topic in TOPICS.items() if topic == place.topic), place.topic)
    return f"{short}-{place.partition}@{place.offset}"


def survey(
    found: Iterable[Letter | ReplayMark],
    stretch: PartitionRange,
    selection: Selection,
    tenants: set[str] | None = None,
) -> bytearray:
    """One byte for each offset of a partition, which may hold millions: whether its letter is selected, and whether it
    was replayed as well. Adds the tenants of the selected letters to ``tenants``."""
    marks = bytearray(len(stretch))
    for one in found:
        if isinstance(one, ReplayMark):
            _mark(one, stretch, marks)
        elif selection.takes(one):
            marks[one.place.offset - stretch.first] = SELECTED
            if tenants is not None:
                with suppress(NotReplayableError):
                    tenants.add(make_replay(one, "").tenant)
    return marks


Surveys = Sequence[tuple[PartitionRange, bytearray]]


def surveys_of(
    log: DeadLetterReader,
    replayer: Replayer | None,
    topics: Sequence[str],
    selection: Selection,
    partition: int | None,
    read: Read,
) -> list[tuple[PartitionRange, bytearray]]:
    """Survey the partitions of these topics. With a replayer, other replays for the tenants of the selected letters are
    fenced, and what they did until then is found. Raises ClusterError."""
    tenants: set[str] = set()
    stretches = log.stretches(topics, since_ms=selection.since_ms, partition=partition)
    surveys = [(stretch, survey(read(stretch), stretch, selection, tenants)) for stretch in stretches]
    if replayer is not None:
        replayer.fence(sorted(tenants))
        # Once more, up to the very end of the log: what the others did is found now, and they do no more.
        _catch_up(log, surveys, log.stretches(topics, partition=partition, whole=True))
    return surveys


def _catch_up(log: DeadLetterReader, surveys: Surveys, now: Iterable[PartitionRange]) -> None:
    """Find the marks that were written since the survey. Raises ClusterError."""
    surveyed = {(stretch.topic, stretch.partition): (stretch, marks) for stretch, marks in surveys}
    for whole in now:
        stretch, marks = surveyed[whole.topic, whole.partition]
        since = PartitionRange(whole.topic, whole.partition, stretch.end, max(stretch.end, whole.end))
        for _, found in log.read(since):
            if isinstance(found, ReplayMark):
                _mark(found, stretch, marks)


def _mark(mark: ReplayMark, stretch: PartitionRange, marks: bytearray) -> None:
    index = mark.letter.offset - stretch.first
    if 0 <= index < len(marks) and marks[index]:
        marks[index] = REPLAYED


def due_letters(log: DeadLetterReader, surveys: Surveys) -> Iterator[Letter]:
    """The letters that are selected and were not replayed. Raises ClusterError."""
    for stretch, marks in surveys:
        first, last = marks.find(SELECTED), marks.rfind(SELECTED)
        if first >= 0:
            due = PartitionRange(stretch.topic, stretch.partition, stretch.first + first, stretch.first + last + 1)
            for offset, found in log.read(due):
                if marks[offset - stretch.first] == SELECTED and isinstance(found, Letter):
                    yield found


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What became of one letter. ``replay`` is None for a skipped one, ``place`` unless its request was sent."""

    letter: SourceCoordinate
    result: Literal["replayed", "skipped", "failed"]
    replay: Replay | None = None
    place: SourceCoordinate | None = None
    reason: str | None = None


def replay_letter(
    letter: Letter, replayer: Replayer | None, may_send: Callable[[], bool] = lambda: True
) -> ReplayResult | None:
    """Send a letter's request again; without a replayer only look whether that is possible.

    ``may_send`` is called right before and may wait; if it returns False nothing is sent, and the result is None.
    Raises ClusterError when no further letter can be sent.
    """
    try:
        replay = make_replay(letter, str(uuid4()))
    except NotReplayableError as error:
        return ReplayResult(letter.place, "skipped", reason=str(error))
    if replayer is None:
        return ReplayResult(letter.place, "replayed", replay)
    if not may_send():
        return None
    try:
        return ReplayResult(letter.place, "replayed", replay, replayer.send(replay))
    except NotReplayedError as error:
        return ReplayResult(letter.place, "failed", replay, reason=str(error))


@dataclass(frozen=True, slots=True)
class Cut:
    """Records to delete of a partition: those before ``before_offset``, of which ``letters`` are dead letters."""

    topic: str
    partition: int
    before_offset: int
    letters: int
    replayed: int


def cut_of(log: DeadLetterReader, stretch: PartitionRange, until_ms: int | None, last: int | None, read: Read) -> Cut:
    """Where to cut a partition, and what goes; before offset 0 when nothing does. Raises ClusterError."""
    end = stretch.end if last is None else min(stretch.end, last + 1)
    if until_ms is not None and (until := log.offset_at(stretch.topic, stretch.partition, until_ms)) is not None:
        end = min(end, until)
    if end <= stretch.first:
        return Cut(stretch.topic, stretch.partition, 0, 0, 0)
    # To the end of the partition: a mark may come after the cut that removes its letter.
    marks = survey(read(stretch), stretch, Selection(offsets=OffsetRange(last=end - 1)))
    replayed = marks.count(REPLAYED)
    return Cut(stretch.topic, stretch.partition, end, marks.count(SELECTED) + replayed, replayed)
