"""What an erasure does not delete at once, and the latest time by which it is gone. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fairlane.names import topic_name
from fairlane_server.topics.families import TopicFamily

DEFAULT_SEGMENT_MS = 7 * 86_400_000
"""Kafka's: a segment takes records for so long, and is deleted as a whole."""
CLEANUP_MS = 6 * 60_000
"""Between the end of a segment's retention and the end of its file: Kafka looks every five minutes, and deletes it a
minute later."""
RUN_MS = 3_600_000
"""A run that began before its request's deadline has ended, and its answer is written."""
COPY_MS = 24 * 3_600_000
"""A copy for evaluation, made of what was under way, waits at most so long until it is dispatched or dropped."""
_TEXTS = frozenset({"InferenceRequest", "WorkItem", "InferenceReply", "ReplyChunk", "Feedback"})
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
        request_ms: of a request that is under way: after its deadline nobody works on it.
        cached_results_ms: of a gateway's results in Redis.
        cached_answers_ms: of answers, passages and vectors of questions in Redis, and in dispatchers' memory.
        gateway_memory_ms: of replies and unread streams in a gateway's memory.
        audit_ms: of the audit of decisions.
        usage_ms: of usage records.
    """

    request_ms: int
    cached_results_ms: int
    cached_answers_ms: int
    gateway_memory_ms: int
    audit_ms: int
    usage_ms: int


def expiries(erased_at_ms: int, tenant: str, families: Iterable[TopicFamily], lives: Lifetimes) -> tuple[Expiry, ...]:
    """Where copies may be after an erasure, the first to go first. A request that was under way is worked on until its
    deadline, and each copy lives from then on; a record that nobody can read becomes a dead letter when it is read."""
    families = tuple(families)
    longest = {family.family: _longest_ms(family) for family in families}
    ended_at_ms = erased_at_ms + lives.request_ms + RUN_MS
    cached_until_ms = ended_at_ms + lives.cached_answers_ms
    written_by_ms = {
        **dict.fromkeys(_REQUESTS, erased_at_ms),
        **dict.fromkeys((*_WORK, "evaluation-replies"), ended_at_ms + COPY_MS),
        "dead-letter-requests": erased_at_ms + _longest_of(_REQUESTS, longest),
        "dead-letter-work": ended_at_ms + _longest_of(_WORK, longest),
        "dead-letter-replies": ended_at_ms + _longest_of(_REPLIES, longest),
    }
    found = [
        Expiry("memory:gateway", "replies just read, streams not yet read", ended_at_ms + lives.gateway_memory_ms),
        Expiry("redis:result", "replies to requests that were under way", ended_at_ms + lives.cached_results_ms),
        Expiry("redis:response", "answers that are given again", cached_until_ms),
        Expiry("redis:retrieval", "passages found for a question", cached_until_ms),
        Expiry("redis:embedding", "vectors of questions", cached_until_ms),
        Expiry("memory:dispatcher", "passages found for a question", cached_until_ms),
    ]
    for family in families:
        if family.retention_ms is not None and _holds_text(family):
            name = topic_name(family.name).replace("{tenant}", tenant)
            gone_by_ms = written_by_ms.get(family.family, ended_at_ms) + longest[family.family]
            found.append(Expiry(f"topic:{name}", family.description, gone_by_ms))
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
    return sum(_longest_of(stage, longest) for stage in _STAGES)


def _longest_of(stage: Iterable[str], longest: Mapping[str, int]) -> int:
    return max(longest.get(family, 0) for family in stage)


def _holds_text(family: TopicFamily) -> bool:
    """Dead letters hold any bytes."""
    return not family.records or not _TEXTS.isdisjoint(family.records)


def _longest_ms(family: TopicFamily) -> int:
    """From a record's time to the end of the segment that it is in."""
    if family.retention_ms is None:
        return 0
    segment_ms = int(family.config.get("segment.ms", DEFAULT_SEGMENT_MS))
    return family.retention_ms + segment_ms + CLEANUP_MS
