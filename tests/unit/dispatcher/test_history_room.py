"""What of a conversation goes into a prompt: the newest of it, in order, and never more than there is room for."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import Message
from fairlane_server.conversations.turns import MOST_TURNS, StoredTurn, turn_tokens
from fairlane_server.text import reserved_tokens
from stream_processors.dispatcher.enrichment.context import (
    CUT,
    MAX_HISTORY_TOKENS,
    bounded_history,
    history_room_tokens,
    shown_message_tokens,
)
from tests.kit.fake_turns import turn

TEXTS = st.text(alphabet=st.sampled_from("ab cdé\n.1字"), max_size=60) | st.integers(1, 400).map(lambda n: "word " * n)
MESSAGES = st.lists(
    st.builds(Message, st.sampled_from(["user", "user", "assistant", "system"]), TEXTS), min_size=1, max_size=4
)


@st.composite
def conversations(draw: st.DrawFn) -> list[StoredTurn]:
    made = []
    for number in range(draw(st.integers(0, 40))):
        messages, answer = tuple(draw(MESSAGES)), draw(TEXTS)
        made.append(StoredTurn(f"id-{number}", messages, answer, turn_tokens(messages, answer), number))
    return made


def alternating(messages: list[Message]) -> list[Message]:
    """Neighbours of one role as one."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            merged[-1] = Message(message.role, f"{merged[-1].content}\n\n{message.content}")
        else:
            merged.append(message)
    return merged


def said(turns: list[StoredTurn]) -> list[Message]:
    return [
        message
        for one in turns
        for message in (*(m for m in one.messages if m.role != "system"), Message("assistant", one.answer))
    ]


@given(conversations(), st.integers(-10, 3_000))
def test_it_is_the_end_of_the_conversation_and_fits(turns: list[StoredTurn], room: int) -> None:
    bounded = bounded_history(turns, room)
    shown = list(bounded.messages)
    assert sum(map(shown_message_tokens, shown)) <= bounded.tokens <= max(0, room)
    assert not shown or shown[0].role == "user"
    assert all(one.role != other.role for one, other in pairwise(shown))
    if any(CUT in message.content for message in shown):
        assert bounded.is_shortened
        newest = said(turns[-1:])
        assert len(shown) <= len(newest)  # the newest turn alone is cut, and then it stands alone
        # Pieces of what was said, between the cuts and where neighbours of one role were put together.
        pieces = [piece.strip() for one in shown for cut in one.content.split(CUT) for piece in cut.split("\n\n")]
        assert all(any(piece in one.content for one in newest) for piece in pieces)
        assert newest[-1].content.endswith(shown[-1].content.rpartition(CUT)[2].rpartition("\n\n")[2])
        return
    everything = said(turns)
    ends = [alternating(everything[first:]) for first in range(len(everything) + 1)]
    assert shown in ends
    if shown != alternating(everything):
        assert bounded.is_shortened
    if not bounded.is_shortened:
        assert shown == alternating(everything)


def test_turns_are_kept_whole_or_left_out() -> None:
    turns = [turn(number, "word " * 20, "word " * 20) for number in range(5)]
    one = sum(shown_message_tokens(message) for message in said(turns[:1]))
    for room, kept in ((5 * one, 5), (5 * one - 1, 4), (2 * one, 2), (one, 1)):
        bounded = bounded_history(turns, room)
        assert bounded.messages == tuple(said(turns[5 - kept :]))
        assert bounded.is_shortened == (kept < 5)
        assert bounded.tokens == kept * one


def test_the_newest_turn_alone_is_cut_in_the_middle() -> None:
    words = " ".join(f"w{number}" for number in range(1_000))
    newest = turn(2, f"first {words} last", "short answer")
    bounded = bounded_history([turn(1), newest], 200)
    question, answer = bounded.messages
    assert answer.content == "short answer"
    assert question.content.startswith("first w0 ")
    assert question.content.endswith(" last")
    assert CUT in question.content
    assert 150 < bounded.tokens <= 200
    assert bounded_history([newest], 30).messages == ()
    assert bounded_history([newest], 0).messages == ()


def test_no_more_than_the_newest_turns_are_kept_however_much_room_there_is() -> None:
    turns = [turn(number) for number in range(MOST_TURNS + 5)]
    bounded = bounded_history(turns, 1_000_000)
    assert bounded.messages == tuple(said(turns[5:]))
    assert bounded.is_shortened


def test_a_conversation_that_begins_with_an_answer_begins_with_the_first_question() -> None:
    messages = (Message("system", "be brief"), Message("assistant", "Hello!"), Message("user", "Hi"))
    odd = StoredTurn("id", messages, "So?", turn_tokens(messages, "So?"), 1)
    bounded = bounded_history([odd], 1_000)
    assert bounded.messages == (Message("user", "Hi"), Message("assistant", "So?"))
    assert bounded.is_shortened


def test_history_has_half_of_the_room() -> None:
    assert history_room_tokens(1_000) == 500
    assert history_room_tokens(-5) == 0
    assert history_room_tokens(None) == MAX_HISTORY_TOKENS
    assert history_room_tokens(10_000_000) == MAX_HISTORY_TOKENS


def test_tokens_are_counted_with_a_margin_and_what_frames_a_message() -> None:
    assert shown_message_tokens(Message("user", "word " * 100)) == 125 + 12


def test_spaces_take_room() -> None:
    assert reserved_tokens(" " * 800) == 100
    assert reserved_tokens("word " * 100) == 100
    assert reserved_tokens("") == 0
