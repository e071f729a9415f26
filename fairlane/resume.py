"""Decide where to resume reading from a stored position. Pure."""

from dataclasses import dataclass
from enum import StrEnum


class LogPosition(StrEnum):
    """How a stored position fits the current log."""

    IN_LOG = "in_log"
    HEAD_REMOVED = "head_removed"
    """Retention removed records that were not read."""
    CUT = "cut"
    """The same topic ends before the position: a replica without the last records became the leader."""
    RECREATED = "recreated"
    """Another topic of the same name: the position does not apply to it."""


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """A partition's log: first offset, end offset, and topic id ("" when unknown)."""

    first: int
    end: int
    topic_id: str = ""


def resume_offset(position: int, topic_id: str, log: PartitionLog) -> tuple[int, LogPosition]:
    """The offset to resume from, and why.

    A truncated log is resumed at its end: all that is left of it was read before. A topic that was deleted and created
    again is read from its beginning: nothing of it was read.

    Args:
        position: the stored position.
        topic_id: of the topic it was stored for; "" (unknown) counts as the same topic.
        log: the current log.
    """
    if topic_id and log.topic_id and topic_id != log.topic_id:
        return log.first, LogPosition.RECREATED
    if position > log.end:
        return log.end, LogPosition.CUT
    if position < log.first:
        return log.first, LogPosition.HEAD_REMOVED
    return position, LogPosition.IN_LOG
