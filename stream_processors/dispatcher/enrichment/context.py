"""Context of a request: the passages and history that fit into its prompt, and the search query. Pure."""

from collections.abc import Sequence
from dataclasses import field, replace

from fairlane.frozen import frozen_dataclass
from fairlane.outcomes import Code, Degradation, HistoryReason, RetrievalMode, RetrievalReason, Task
from fairlane.record_bounds import MAX_VALUE_BYTES
from fairlane.records import HistoryUse, InferenceRequest, Message, ModelVersion, Passage, RetrievalUse
from fairlane_server.conversations.turns import MOST_TURNS, StoredTurn, StoredTurns
from fairlane_server.retrieval.store import Hit
from fairlane_server.text import CHARACTERS_OF_A_TOKEN, TOKEN, reserved_tokens
from stream_processors.dispatcher.intake.validation import Rejection
from stream_processors.dispatcher.queued_request import QueuedRequest

MAX_QUERY_CHARS = 2_000
"""Questions are short; in a longer text the question may be at either end."""


def query_text(request: InferenceRequest) -> str:
    """The user's last message, or the prompt; above MAX_QUERY_CHARS its beginning and its end. Empty without text."""
    given = request.input
    text = given.prompt or given.query or ""
    for message in given.messages or ():
        if message.role == _USER and message.content.strip():
            text = message.content
    text = text.replace("\0", " ").strip()
    if len(text) <= MAX_QUERY_CHARS:
        return text
    half = MAX_QUERY_CHARS // 2
    return f"{text[:half]} {text[-half + 1 :]}"


_FRAME_TOKENS = 48
"""Tokens of the prompt template around all passages."""

_PASSAGE_FRAME_TOKENS = 12
"""Tokens of the prompt template around each passage."""

ESTIMATE_MARGIN = 1.25
"""Safety factor: token counts are estimates."""


def room_tokens(
    request: InferenceRequest, model: ModelVersion, prompt_tokens: int, max_prompt_tokens: int | None = None
) -> int | None:
    """Tokens left for passages besides the prompt: within the model's context, output included, and the tenant's prompt
    bound. None if neither has a limit; negative if nothing is left."""
    bounds = [] if max_prompt_tokens is None else [max_prompt_tokens]
    if model.max_context_tokens > 0:
        output = 0
        if request.task == Task.GENERATE:
            output = request.parameters.max_tokens or model.max_output_tokens
        bounds.append(model.max_context_tokens - output)
    return int(min(bounds) - prompt_tokens * ESTIMATE_MARGIN) - _FRAME_TOKENS if bounds else None


def shown_tokens(hit: Hit) -> int:
    """Upper estimate of a passage's tokens in a prompt: they were counted by another model's tokenizer."""
    return int(hit.tokens * ESTIMATE_MARGIN) + _PASSAGE_FRAME_TOKENS


def shown_text(hit: Hit) -> str:
    """The passage as shown in a prompt, below its headings, which often name its subject."""
    return f"{hit.heading}\n{hit.text}" if hit.heading else hit.text


def that_fit(hits: Sequence[Hit], room: int | None) -> tuple[Hit, ...]:
    """The best passages that fit together; one that is too long does not exclude a shorter, lower-ranked one."""
    if room is None:
        return tuple(hits)
    kept = []
    for hit in hits:
        needs = shown_tokens(hit)
        if needs <= room:
            kept.append(hit)
            room -= needs
    return tuple(kept)


MAX_HISTORY_TOKENS = 16_384
"""Bound for one request, however large its model's context: a whole dispatch window of look-ups may run at a time."""

MOST_CUT_TOKENS = 2_048
"""Shown of a turn that does not fit as a whole. More would cost the event loop too much time."""

MESSAGE_FRAME_TOKENS = 12
"""Tokens of a chat template around a message."""

CUT = " … "
"""Replaces the middle of a text."""

_MOST_READ_CHARACTERS = 8 * MOST_CUT_TOKENS
_SYSTEM, _USER, _ASSISTANT = "system", "user", "assistant"
_LEAST_TOKENS_OF_A_PART = 16
"""A shorter part of a message is useless."""


@frozen_dataclass(frozen=True, slots=True)
class BoundedHistory:
    """Messages, oldest first, their tokens at most, and whether older ones were left out."""

    messages: tuple[Message, ...]
    tokens: int
    is_shortened: bool


def history_room_tokens(room: int | None) -> int:
    """The part of the room available to history: half; None is a room without bounds."""
    return MAX_HISTORY_TOKENS if room is None else min(MAX_HISTORY_TOKENS, max(0, room) // 2)


def shown_message_tokens(message: Message) -> int:
    """Upper estimate of a message's tokens in a prompt."""
    return _shown(reserved_tokens(message.content))


def bounded_history(turns: Sequence[StoredTurn], room_tokens: int) -> BoundedHistory:
    """The newest turns that fit, at most MOST_TURNS.

    A turn is kept whole or left out; only the newest one is cut if it is too long. Messages before the first one of a
    user are left out, and so are system messages: the request has its own.
    """
    kept: list[tuple[Message, ...]] = []
    left = room_tokens
    for turn in reversed(turns[-MOST_TURNS:]):
        said = _said(turn)
        needed = _shown(turn.tokens) + MESSAGE_FRAME_TOKENS * (len(said) - 1)
        if needed > left:
            break
        kept.append(said)
        left -= needed
    is_shortened = len(kept) < len(turns)
    if turns and not kept:
        kept.append(_cut(_said(turns[-1]), min(room_tokens, MOST_CUT_TOKENS)))
        left -= sum(map(shown_message_tokens, kept[0]))
    messages = [message for said in reversed(kept) for message in said]
    first = next((index for index, message in enumerate(messages) if message.role == _USER), len(messages))
    shown = _alternating(messages[first:])
    return BoundedHistory(shown, room_tokens - left if shown else 0, is_shortened or first > 0)


def _alternating(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Merge neighbours of the same role: many chat templates accept nothing else."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            merged[-1] = Message(message.role, f"{merged[-1].content}\n\n{message.content}")
        else:
            merged.append(message)
    return tuple(merged)


def _said(turn: StoredTurn) -> tuple[Message, ...]:
    return (*(said for said in turn.messages if said.role != _SYSTEM), Message(_ASSISTANT, turn.answer))


def _shown(tokens: int) -> int:
    return int(tokens * ESTIMATE_MARGIN) + MESSAGE_FRAME_TOKENS


def _cut(said: tuple[Message, ...], room_tokens: int) -> tuple[Message, ...]:
    """The newest of these messages within the room. Short ones stay whole, the others are cut to equal length."""
    count = len(said)
    while count and _part(room_tokens, count) < _LEAST_TOKENS_OF_A_PART:
        count -= 1
    said = said[len(said) - count :]
    # Longer texts are cut in any case, so they are not tokenized to the end.
    sizes = [reserved_tokens(message.content[:_MOST_READ_CHARACTERS]) for message in said]
    left, shares = int((room_tokens - MESSAGE_FRAME_TOKENS * count) / ESTIMATE_MARGIN) - count, [0] * count
    for done, index in enumerate(sorted(range(count), key=sizes.__getitem__)):
        shares[index] = min(sizes[index], left // (count - done))
        left -= shares[index]
    return tuple(
        message
        if size <= share and len(message.content) <= _MOST_READ_CHARACTERS
        else Message(message.role, _cut_text(message.content, share))
        for message, size, share in zip(said, sizes, shares, strict=True)
    )


def _part(room_tokens: int, count: int) -> int:
    return int((room_tokens // count - MESSAGE_FRAME_TOKENS) / ESTIMATE_MARGIN) - 1


def _cut_text(text: str, tokens: int) -> str:
    """The beginning and the end of a text, together at most ``tokens``, the mark between them included."""
    half = (tokens - 1) // 2
    # The mark has three characters: one token less on either side makes room for them.
    characters = max(0, half - 1) * CHARACTERS_OF_A_TOKEN
    head, tail = text[:characters], text[len(text) - characters :]
    in_head, in_tail = [*TOKEN.finditer(head)], [*TOKEN.finditer(tail)]
    if len(in_head) > half:
        head = head[: in_head[half].start()]
    if len(in_tail) > half:
        tail = tail[in_tail[-half - 1].end() :] if half else ""
    return f"{head.rstrip()}{CUT}{tail.lstrip()}"


NO_MODE = "none"
"""Mode of a retrieval without result."""

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


@frozen_dataclass(frozen=True, slots=True)
class Retrieved:
    """Passages, best first, and how they were retrieved."""

    hits: tuple[Hit, ...]
    use: RetrievalUse


def nothing(name: str, reason: RetrievalReason, version: int | None = None) -> Retrieved:
    return Retrieved((), RetrievalUse(name, NO_MODE, reason, version))


@frozen_dataclass(frozen=True, slots=True)
class ReadHistory:
    """The newest turns of a conversation, and the reason if they are incomplete."""

    turns: StoredTurns = field(default_factory=StoredTurns)
    reason: HistoryReason | None = None
    took_ms: int = 0


@frozen_dataclass(frozen=True, slots=True)
class Context:
    """Passages and history found for a request; None: not looked up."""

    passages: Retrieved | None = None
    history: ReadHistory | None = None

    @property
    def size_bytes(self) -> int:
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
    return needs_passages(queued) or needs_history(queued)


def is_enough(queued: QueuedRequest, context: Context) -> bool:
    return not (needs_passages(queued) and context.passages is None) and not (
        needs_history(queued) and context.history is None
    )


def refusal_of(queued: QueuedRequest) -> Rejection | None:
    """The rejection of an enriched request whose collection is missing or that became too large; None otherwise."""
    use = queued.retrieval_use
    if use is not None and use.reason == RetrievalReason.NO_SUCH_COLLECTION:
        return Rejection(Code.INVALID, "retrieval.collection", "there is no such collection")
    size_bytes = queued.size_bytes
    # An upper estimate. Requeued work was a work item before.
    if (queued.passages or queued.history) and not queued.handed_back:
        texts = [text for one in queued.passages for text in (one.passage_id, one.text)]
        texts += [text for said in queued.history for text in (said.role, said.content)]
        size_bytes += sum(len(text.encode(errors="replace")) + _FRAME_BYTES for text in texts) + _ITEM_BYTES
    if size_bytes > MAX_VALUE_BYTES:
        message = f"with the passages and messages that belong to it, it takes {size_bytes} bytes"
        return Rejection(Code.INVALID, "input", f"{message}, more than {MAX_VALUE_BYTES}")
    return None


def room_for_history(queued: QueuedRequest) -> int:
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
