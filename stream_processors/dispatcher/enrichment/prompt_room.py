"""Selection of passages and history that fit into the prompt, and the search query. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from fairlane.outcomes import Task
from fairlane.records import InferenceRequest, Message, ModelVersion
from fairlane_server.conversations.turns import MOST_TURNS, StoredTurn
from fairlane_server.retrieval.store import Hit
from fairlane_server.text import CHARACTERS_OF_A_TOKEN, TOKEN, reserved_tokens

MAX_QUERY_CHARS = 2_000
"""Questions are short; in a longer text the question may be at either end."""

_USER = "user"


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


@dataclass(frozen=True, slots=True)
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
