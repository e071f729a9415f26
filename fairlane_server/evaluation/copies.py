"""Copies of admitted work that run for evaluation, and how each of them ended. Pure.

A copy keeps what the original ran with: input, parameters with the seed, passages, history and guardrails. It has a
tenant, an id and a deadline of its own, is not streamed, not cached, adds nothing to its conversation, and is charged
to no budget. Its reply goes to a topic that no tenant reads.
"""

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from hashlib import blake2b
from uuid import UUID

from fairlane.evaluation_records import EvaluationMark
from fairlane.names import EVALUATION_REPLIES, EVALUATION_TENANT
from fairlane.outcomes import Code, Outcome, Priority
from fairlane.records import InferenceReply, WorkItem
from fairlane_server.models.routes import NAMED_VERSION


class EvaluationKind(StrEnum):
    """What made a copy."""

    SHADOW = "shadow"
    REPLAY = "replay"


class EvaluationArm(StrEnum):
    """What runs a copy."""

    CANDIDATE = "candidate"
    CHAMPION = "champion"


class CopyEnd(StrEnum):
    """How a copy ended, exactly once."""

    COMPLETED = "completed"
    FAILED = "failed"
    DROPPED = "dropped"
    """It did not run: its time was over, or its tenant no longer allows evaluation."""


_ENDS: Mapping[str, CopyEnd] = {
    Outcome.OK: CopyEnd.COMPLETED,
    Outcome.EXPIRED: CopyEnd.DROPPED,
    Outcome.CANCELLED: CopyEnd.DROPPED,
}


def copy_id(run: str, arm: str, tenant: str, request_id: str) -> str:
    """The request id of a copy: the same whenever the same request is copied in the same run for the same arm."""
    digest = blake2b("\0".join((run, arm, tenant, request_id)).encode(), digest_size=16).digest()
    return str(UUID(bytes=digest))


def copy_of(item: WorkItem, mark: EvaluationMark, model_version: str, now_ms: int, max_age_ms: int) -> WorkItem:
    """The copy of admitted work for a version of its model. It is dropped if it has not run after ``max_age_ms``.

    ``mark.tenant`` and ``mark.request_id`` must be those of the item. Its pool is set when it is dispatched.
    """
    # It keeps its conversation: an engine renders a turn of one otherwise than a plain prompt.
    original = item.request
    request = replace(
        original,
        request_id=copy_id(mark.run, mark.arm, mark.tenant, mark.request_id),
        parameters=replace(original.parameters, stream=False),
        priority=Priority.LOW,
        timeout_ms=None,
        tenant=None,
        reply_to=None,
        metadata={},
        group=None,
        cache=None,
        requested_by=None,
    )
    return replace(
        item,
        request=request,
        tenant=EVALUATION_TENANT,
        model_version=model_version,
        priority_class=Priority.LOW,
        submitted_at_ms=now_ms,
        admitted_at_ms=now_ms,
        dispatched_at_ms=now_ms,
        deadline_at_ms=now_ms + max_age_ms,
        reply_topic=EVALUATION_REPLIES,
        handed_back=0,
        unserved=0,
        cache_answer=False,
        budget=None,
        arm=NAMED_VERSION,
        evaluation=mark,
    )


def end_of(reply: InferenceReply) -> CopyEnd:
    """How the copy with this reply ended."""
    if reply.code == Code.FORBIDDEN:
        return CopyEnd.DROPPED
    return _ENDS.get(reply.outcome, CopyEnd.FAILED)
