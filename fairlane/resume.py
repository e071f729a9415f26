"""Decide where to read on from a stored position: pure."""

from dataclasses import dataclass
from enum import StrEnum


class Finding(StrEnum):
    """How a stored position fits the log that exists now."""

    IN_LOG = "in_log"
    HEAD_REMOVED = "head_removed"
    """Retention removed records that were not read."""
    CUT = "cut"
    """The same topic ends before the position: a replica without its last records became the leader."""
    RECREATED = "recreated"
    """Another topic of the same name: the position says nothing about it."""


@dataclass(frozen=True, slots=True)
class Log:
    """A partition's log: its first offset, its end, and the id of its topic ("" where that is not known)."""

    first: int
    end: int
    topic_id: str = ""


def read_on(position: int, topic_id: str, log: Log) -> tuple[int, Finding]:
    """The offset to read on from.

    A log that was cut is read on at its end: everything that is left of it was read before. A topic that was deleted
    and created again is read from its beginning: nothing of it was read.

    Args:
        position: the stored position.
        topic_id: of the topic it was stored for; "" where that is not known, which counts as the same topic.
        log: what exists now.
    """
    if topic_id and log.topic_id and topic_id != log.topic_id:
        return log.first, Finding.RECREATED
    if position > log.end:
        return log.end, Finding.CUT
    if position < log.first:
        return log.first, Finding.HEAD_REMOVED
    return position, Finding.IN_LOG
