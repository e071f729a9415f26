"""What an erasure does not delete at once, and the latest time by which it is gone. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from fairlane.names import topic_name
from fairlane_server.topics.families import TopicFamily

DEFAULT_SEGMENT_MS = 7 * 86_400_000
"""Kafka's: a segment takes records for so long, and is deleted as a whole."""
CLEANUP_MS = 6 * 60_000
"""Between the end of a segment's retention and the end of its file: Kafka looks every five minutes, and deletes it a
minute later."""
_TEXTS = frozenset({"InferenceRequest", "WorkItem", "InferenceReply", "ReplyChunk"})
_REQUESTS, _WORK = ("requests", "backfill"), ("priority", "returned")
_DEAD_LETTERS = ("dead-letter-requests", "dead-letter-work")
_REPLIES = ("replies", "service-replies", "gateway-replies", "jobs-replies")
_STAGES = (_REQUESTS, _WORK, _DEAD_LETTERS, _REQUESTS, _WORK, _REPLIES)
"""The longest way of a text to its reply: dead in the last moment, and sent again by an operator in the last moment."""


@dataclass(frozen=True, slots=True)
class Expiry:
    """A place where something of what was erased may still be.

    Attributes:
        store: the place: a topic, a family of keys, the memory of a process.
        what: what may be there.
        gone_by_ms: the latest time, since the epoch.
    """

    store: str
    what: str
    gone_by_ms: int


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """How long copies live, in milliseconds.

    Attributes:
        cached_results_ms: of a gateway's results in Redis.
        cached_answers_ms: of answers, passages and vectors of questions in Redis, and in dispatchers' memory.
        gateway_memory_ms: of replies and unread streams in a gateway's memory.
        audit_ms: of the audit of decisions.
        usage_ms: of usage records.
    """

    cached_results_ms: int
    cached_answers_ms: int
    gateway_memory_ms: int
    audit_ms: int
    usage_ms: int


def expiries(erased_at_ms: int, tenant: str, families: Iterable[TopicFamily], lives: Lifetimes) -> tuple[Expiry, ...]:
    """Where copies may be after an erasure, the first to go first. A request that was under way is covered from the
    time of its last record."""
    found = [
        Expiry("memory:gateway", "replies just read, streams not yet read", erased_at_ms + lives.gateway_memory_ms),
        Expiry("redis:result", "replies to requests that were under way", erased_at_ms + lives.cached_results_ms),
        Expiry("redis:response", "answers that are given again", erased_at_ms + lives.cached_answers_ms),
        Expiry("redis:retrieval", "passages found for a question", erased_at_ms + lives.cached_answers_ms),
        Expiry("redis:embedding", "vectors of questions", erased_at_ms + lives.cached_answers_ms),
        Expiry("memory:dispatcher", "passages found for a question", erased_at_ms + lives.cached_answers_ms),
    ]
    for family in families:
        if family.retention_ms is not None and _holds_text(family):
            name = topic_name(family.name).replace("{tenant}", tenant)
            found.append(Expiry(f"topic:{name}", family.description, erased_at_ms + _longest_ms(family)))
    return tuple(sorted(found, key=lambda one: (one.gone_by_ms, one.store)))


def kept(erased_at_ms: int, lives: Lifetimes) -> tuple[Expiry, ...]:
    """What is kept although it was erased: records about it that hold no text."""
    return (
        Expiry("postgres:audit_logs", "ids, times and decisions, no text", erased_at_ms + lives.audit_ms),
        Expiry("postgres:erasures", "this erasure", erased_at_ms + lives.audit_ms),
        Expiry("postgres:usage", "ids, tokens and costs, no text", erased_at_ms + lives.usage_ms),
    )


def tombstone_ms(families: Iterable[TopicFamily]) -> int:
    """How long the log may hold, or still bring, a reply to a request that was published before an erasure: it may wait
    as long as each topic on its way keeps it, also as a dead letter that is replayed once."""
    longest = {family.family: _longest_ms(family) for family in families}
    return sum(max((longest.get(name, 0) for name in stage), default=0) for stage in _STAGES)


def _holds_text(family: TopicFamily) -> bool:
    """Dead letters hold any bytes."""
    return not family.records or not _TEXTS.isdisjoint(family.records)


def _longest_ms(family: TopicFamily) -> int:
    """From a record's time to the end of the segment that it is in."""
    if family.retention_ms is None:
        return 0
    segment_ms = int(family.config.get("segment.ms", DEFAULT_SEGMENT_MS))
    return family.retention_ms + segment_ms + CLEANUP_MS
