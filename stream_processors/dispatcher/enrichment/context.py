"""Assemble a request with its passages and conversation history. Pure."""

from dataclasses import dataclass, replace

from fairlane.outcomes import Code, Degradation, HistoryReason, RetrievalMode, RetrievalReason, Task
from fairlane.record_bounds import MAX_VALUE_BYTES
from fairlane.records import HistoryUse, Passage
from stream_processors.dispatcher.enrichment.history import ReadHistory
from stream_processors.dispatcher.enrichment.prompt_room import (
    bounded_history,
    history_room_tokens,
    room_tokens,
    shown_text,
    shown_tokens,
    that_fit,
)
from stream_processors.dispatcher.enrichment.retriever import NO_MODE, Retrieved
from stream_processors.dispatcher.intake.validation import Rejection
from stream_processors.dispatcher.queued_request import QueuedRequest

_STEP: dict[str, Degradation] = {
    RetrievalMode.VECTOR: Degradation.VECTOR_ONLY,
    RetrievalMode.CACHED: Degradation.CACHED_ONLY,
    NO_MODE: Degradation.NO_RETRIEVAL,
}
_PASSAGES_MAY_COME = frozenset(
    {RetrievalReason.LATE, RetrievalReason.UNAVAILABLE, RetrievalReason.BUSY, RetrievalReason.EMBEDDER_FAILED}
)
"""Reasons of failures that may not recur a moment later."""

_HISTORY_MAY_COME = frozenset({HistoryReason.LATE, HistoryReason.UNAVAILABLE, HistoryReason.BUSY, HistoryReason.BEHIND})


_FRAME_BYTES = 16
"""Overhead of each text in a work item, a passage's score included."""

_ITEM_BYTES = 4_096
"""Size of a work item without its texts, at most."""


@dataclass(frozen=True, slots=True)
class Context:
    """Passages and history found for a request; None: not looked up."""

    passages: Retrieved | None = None
    history: ReadHistory | None = None

    @property
    def size_bytes(self) -> int:
        """Approximate bytes of text."""
        passages = () if self.passages is None else self.passages.hits
        turns = () if self.history is None else self.history.turns.turns
        return sum(len(hit.text) + len(hit.heading) for hit in passages) + sum(
            len(turn.answer) + sum(len(message.content) for message in turn.messages) for turn in turns
        )

    @property
    def lasting(self) -> "Context":
        """The part that need not be looked up again: found, or failed for a lasting reason."""
        passages, history = self.passages, self.history
        if passages is not None and passages.use.reason in _PASSAGES_MAY_COME:
            passages = None
        if history is not None and history.reason in _HISTORY_MAY_COME:
            history = None
        return Context(passages, history)


def needs_passages(queued: QueuedRequest) -> bool:
    """Whether passages must be looked up; requeued work has them already."""
    return queued.request.retrieval is not None and queued.retrieval_use is None


def needs_history(queued: QueuedRequest) -> bool:
    """Whether history must be looked up; requeued work has it already."""
    request = queued.request
    return request.conversation_id is not None and request.task == Task.GENERATE and queued.history_use is None


def needs_context(queued: QueuedRequest) -> bool:
    """Whether passages or history must be looked up."""
    return needs_passages(queued) or needs_history(queued)


def is_enough(queued: QueuedRequest, context: Context) -> bool:
    """Whether everything needed was looked up."""
    return not (needs_passages(queued) and context.passages is None) and not (
        needs_history(queued) and context.history is None
    )


def refusal_of(queued: QueuedRequest) -> Rejection | None:
    """The rejection of an enriched request whose collection is missing or that became too large; None otherwise."""
    use = queued.retrieval_use
    if use is not None and use.reason == RetrievalReason.NO_SUCH_COLLECTION:
        return Rejection(Code.INVALID, "retrieval.collection", "there is no such collection")
    size_bytes = _work_bytes(queued)
    if size_bytes > MAX_VALUE_BYTES:
        message = f"with the passages and messages that belong to it, it takes {size_bytes} bytes"
        return Rejection(Code.INVALID, "input", f"{message}, more than {MAX_VALUE_BYTES}")
    return None


def _work_bytes(queued: QueuedRequest) -> int:
    """Upper estimate of the bytes of its work item. Requeued work was one before."""
    if queued.handed_back or not (queued.passages or queued.history):
        return queued.size_bytes
    texts = [text for one in queued.passages for text in (one.passage_id, one.text)]
    texts += [text for said in queued.history for text in (said.role, said.content)]
    return queued.size_bytes + sum(len(text.encode(errors="replace")) + _FRAME_BYTES for text in texts) + _ITEM_BYTES


def room_for_history(queued: QueuedRequest) -> int:
    """Tokens of the prompt available to history."""
    return history_room_tokens(_room(queued))


def with_context(queued: QueuedRequest, context: Context) -> QueuedRequest:
    """The request with the history and passages that fit, and the degradations of how they were found.

    History goes first; passages have the room it leaves. The actual tokens replace the expected ones in the cost.
    """
    queued = replace(
        queued,
        prompt_tokens=queued.prompt_tokens - queued.expected_tokens,
        cost_tokens=queued.cost_tokens - queued.expected_tokens,
        expected_tokens=0,
    )
    room, needed = _room(queued), 0
    ready = queued
    if context.history is not None:
        ready, needed = _with_history(queued, context.history)
    if context.passages is not None:
        ready = _with_passages(ready, context.passages, None if room is None else room - needed)
    return ready


def _room(queued: QueuedRequest) -> int | None:
    own_tokens = queued.prompt_tokens - queued.expected_tokens
    return room_tokens(queued.request, queued.model, own_tokens, queued.max_prompt_tokens)


def _with_history(queued: QueuedRequest, remembered: ReadHistory) -> tuple[QueuedRequest, int]:
    """The request with the history that fits, and its tokens."""
    turns = remembered.turns
    bounded = bounded_history(turns.turns, room_for_history(queued))
    reason = remembered.reason
    if reason is None and turns.turns and not bounded.messages:
        reason = HistoryReason.NO_ROOM
    if reason is None and (bounded.is_shortened or not turns.is_whole):
        reason = HistoryReason.SHORTENED
    steps = queued.degradations
    if reason is not None and not bounded.messages and Degradation.NO_HISTORY not in steps:
        steps = (*steps, Degradation.NO_HISTORY)
    made = replace(
        queued,
        history=bounded.messages,
        history_use=HistoryUse(len(bounded.messages), reason, remembered.took_ms),
        degradations=steps,
        prompt_tokens=queued.prompt_tokens + bounded.tokens,
        cost_tokens=queued.cost_tokens + bounded.tokens,
    )
    return made, bounded.tokens


def _with_passages(queued: QueuedRequest, found: Retrieved, room: int | None) -> QueuedRequest:
    use, hits = found.use, found.hits
    if use.reason == RetrievalReason.NO_SUCH_COLLECTION:
        return replace(queued, retrieval_use=use)
    if hits:
        hits = that_fit(hits, room)
        if not hits:
            use = replace(use, mode=NO_MODE, reason=RetrievalReason.NO_ROOM)
    steps = list(queued.degradations)
    step = _STEP.get(use.mode)
    if use.reason is not None and step is not None and step not in steps:
        steps.append(step)
    if 0 < len(hits) < len(found.hits) and Degradation.FEWER_PASSAGES not in steps:
        steps.append(Degradation.FEWER_PASSAGES)
    more_tokens = sum(map(shown_tokens, hits))
    return replace(
        queued,
        passages=tuple(Passage(hit.passage_id, shown_text(hit), hit.score) for hit in hits),
        retrieval_use=use,
        degradations=tuple(steps),
        prompt_tokens=queued.prompt_tokens + more_tokens,
        cost_tokens=queued.cost_tokens + more_tokens,
    )
