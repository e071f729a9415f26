"""How much conversation history fits into the prompt. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from fairlane.records import Message
from fairlane_server.conversations.turns import MOST_TURNS, StoredTurn
from fairlane_server.text import CHARACTERS_OF_A_TOKEN, TOKEN, reserved_tokens
from stream_processors.dispatcher.enrichment.passage_room import ESTIMATE_MARGIN

MAX_HISTORY_TOKENS = 16_384
"""Of one request, however much room its model has: nobody knows what is said before it is looked up, and as many as a
window holds may be looked up at a time."""

MOST_CUT_TOKENS = 2_048
"""What is shown of a turn that does not fit as a whole. More would cost the event loop more than it says."""

MESSAGE_FRAME_TOKENS = 12
"""What a chat template puts around a message."""

CUT = " … "
"""Where the middle of a text was left out."""

_MOST_READ_CHARACTERS = 8 * MOST_CUT_TOKENS
_SYSTEM, _USER, _ASSISTANT = "system", "user", "assistant"
_LEAST_TOKENS_OF_A_PART = 16
"""Less than that of a message says nothing."""


@dataclass(frozen=True, slots=True)
class BoundedHistory:
    """Messages, oldest first, the tokens that they take at most, and whether older ones were left out."""

    messages: tuple[Message, ...]
    tokens: int
    is_shortened: bool


def history_room_tokens(room: int | None) -> int:
    """Of so much room beside the prompt, half is for what was said before; None is a room without bounds."""
    return MAX_HISTORY_TOKENS if room is None else min(MAX_HISTORY_TOKENS, max(0, room) // 2)


def shown_message_tokens(message: Message) -> int:
    """What a message takes in a prompt, at most."""
    return _shown(reserved_tokens(message.content))


def bounded_history(turns: Sequence[StoredTurn], room_tokens: int) -> BoundedHistory:
    """The newest turns that fit, at most MOST_TURNS.

    A turn is kept whole or left out; the newest one alone is cut if it is too long. What stands before the first
    message of a user is left out, and so are system messages: the request brings its own.
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
    """Neighbours of one role as one message: many chat templates take nothing else."""
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
    """The newest of these messages in so much room. What is short stays as it is, and the rest is cut to be equal."""
    count = len(said)
    while count and _part(room_tokens, count) < _LEAST_TOKENS_OF_A_PART:
        count -= 1
    said = said[len(said) - count :]
    # What is longer than this is cut whatever it says, and is not read to its end for that.
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
    """The beginning and the end of a text, together of at most so many tokens, the mark between them included."""
    half = (tokens - 1) // 2
    # A mark has three characters: one token less on either side pays for them.
    characters = max(0, half - 1) * CHARACTERS_OF_A_TOKEN
    head, tail = text[:characters], text[len(text) - characters :]
    in_head, in_tail = [*TOKEN.finditer(head)], [*TOKEN.finditer(tail)]
    if len(in_head) > half:
        head = head[: in_head[half].start()]
    if len(in_tail) > half:
        tail = tail[in_tail[-half - 1].end() :] if half else ""
    return f"{head.rstrip()}{CUT}{tail.lstrip()}"
