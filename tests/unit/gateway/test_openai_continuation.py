"""What is sent of an answer that may begin again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.client.reassembly import TextDelta
from producers.gateway.openai.streams import Continuation, DivergedError

PIECES = st.lists(st.lists(st.text("ab", min_size=1, max_size=3), max_size=6), min_size=1, max_size=4)


@given(PIECES)
def test_what_was_sent_is_the_answer_or_the_stream_is_over(runs: list[list[str]]) -> None:
    sent, continuation = "", Continuation()
    answer = "".join(runs[-1])
    try:
        for attempt, pieces in enumerate(runs, 1):
            if attempt > 1:
                sent += continuation.feed(TextDelta("", True, attempt))
            for piece in pieces:
                more = continuation.feed(TextDelta(piece, False, attempt))
                # Nothing is taken back, and nothing is sent twice.
                sent += more
        continuation.finish()
    except DivergedError:
        texts = ["".join(pieces) for pieces in runs]
        assert any(not answer.startswith(text) for text in texts[:-1]) or not answer.startswith(sent)
    else:
        assert sent == continuation.sent == answer


@given(st.text("ab", max_size=8), st.integers(0, 8), st.lists(st.integers(0, 8), max_size=3))
def test_the_same_answer_again_is_followed_to_its_end(answer: str, at: int, cuts: list[int]) -> None:
    continuation = Continuation()
    sent = continuation.feed(TextDelta(answer[:at])) if answer[:at] else ""
    begin = 0
    for index, end in enumerate([*sorted(cuts), len(answer)]):
        sent += continuation.feed(TextDelta(answer[begin:end], index == 0, 2))
        begin = max(begin, min(end, len(answer)))
    continuation.finish()
    assert sent == answer


def test_another_answer_is_noticed_at_its_first_other_letter() -> None:
    continuation = Continuation()
    assert continuation.feed(TextDelta("Par")) == "Par"
    assert continuation.feed(TextDelta("P", True, 2)) == ""
    with pytest.raises(DivergedError):
        continuation.feed(TextDelta("e", False, 2))


def test_a_shorter_answer_is_noticed_at_its_end() -> None:
    continuation = Continuation()
    continuation.feed(TextDelta("Paris"))
    continuation.feed(TextDelta("Par", True, 2))
    with pytest.raises(DivergedError):
        continuation.finish()
