"""The text of a stream, from chunks that come as they like."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.client import reassembly
from fairlane.client.reassembly import Reassembly, TextDelta
from fairlane.records import InferenceReply, Output, ReplyChunk

TAKE = "take"
TEXTS = st.lists(st.text("abé ", max_size=3), max_size=6)


def chunk(seq: int, text: str, attempt: int = 1, generation: int = 1, *, last: bool = False) -> ReplyChunk:
    return ReplyChunk("r-1", "acme", generation, attempt, seq, text, last)


def reply(text: str | None = None, outcome: str = "ok") -> InferenceReply:
    return InferenceReply("r-1", "acme", outcome, output=None if text is None else Output(text=text))


class Viewer:
    """Heeds restarts, as the documentation asks."""

    def __init__(self, source: Reassembly) -> None:
        self.source = source
        self.text = ""
        self.deltas: list[TextDelta] = []

    def take(self) -> TextDelta | None:
        delta = self.source.take()
        if delta is not None:
            self.text = delta.text if delta.restarted else self.text + delta.text
            assert delta.text or delta.restarted, "an empty delta says nothing"
            assert delta.restarted == (bool(self.deltas) and delta.attempt == self.deltas[-1].attempt + 1)
            self.deltas.append(delta)
        assert self.text == self.source.text
        return delta

    def take_all(self) -> None:
        while self.take() is not None:
            pass


@pytest.fixture
def answer() -> Reassembly:
    return Reassembly()


def test_text_comes_as_its_chunks_come(answer: Reassembly) -> None:
    assert answer.take() is None
    for seq, text in enumerate(["Par", "is", "."]):
        assert answer.add(chunk(seq, text))
        assert answer.take() == TextDelta(text)
        assert answer.take() is None
    assert not answer.add(chunk(3, "", last=True))
    answer.finish(reply("Paris."))
    assert answer.take() is None
    assert answer.text == "Paris."


def test_who_takes_late_gets_one_long_piece(answer: Reassembly) -> None:
    for seq, text in enumerate("Paris"):
        answer.add(chunk(seq, text))
    assert answer.take() == TextDelta("Paris")


def test_a_chunk_that_is_early_waits_for_those_before_it(answer: Reassembly) -> None:
    assert not answer.add(chunk(2, "c"))
    assert not answer.add(chunk(1, "b"))
    assert answer.take() is None
    assert answer.add(chunk(0, "a"))
    assert answer.take() == TextDelta("abc")


def test_a_chunk_that_comes_again_is_ignored(answer: Reassembly) -> None:
    assert answer.add(chunk(0, "a"))
    assert not answer.add(chunk(0, "a"))
    assert not answer.add(chunk(2, "c"))
    assert not answer.add(chunk(2, "c"))
    assert answer.add(chunk(1, "b"))
    assert answer.take() == TextDelta("abc")


def test_what_is_lost_comes_with_the_reply(answer: Reassembly) -> None:
    answer.add(chunk(0, "a"))
    answer.take()
    answer.add(chunk(2, "c"))
    answer.finish(reply("abc"))
    assert answer.take() == TextDelta("bc")
    assert not answer.add(chunk(3, "d"))
    assert answer.take() is None


def test_without_any_chunk_the_reply_is_one_piece(answer: Reassembly) -> None:
    answer.finish(reply("Paris."))
    assert answer.take() == TextDelta("Paris.")


@pytest.mark.parametrize("newer", [(1, 2), (2, 1)])
def test_a_newer_run_starts_the_text_again_and_says_so(answer: Reassembly, newer: tuple[int, int]) -> None:
    generation, attempt = newer
    answer.add(chunk(0, "Lond"))
    assert answer.take() == TextDelta("Lond")
    answer.add(chunk(1, "on"))  # not taken, so nobody hears of it
    answer.add(chunk(0, "Par", attempt, generation))
    assert not answer.add(chunk(2, "."))
    assert answer.take() == TextDelta("Par", restarted=True, attempt=2)
    answer.add(chunk(1, "is", attempt, generation))
    assert answer.take() == TextDelta("is", attempt=2)
    assert answer.text == "Paris"


def test_what_was_held_back_of_an_older_run_is_forgotten(answer: Reassembly) -> None:
    answer.add(chunk(1, "don"))
    answer.add(chunk(0, "Par", attempt=2))
    answer.add(chunk(1, "is", attempt=2))
    assert answer.take() == TextDelta("Paris")


def test_a_newer_run_is_no_restart_for_whom_nothing_was_given(answer: Reassembly) -> None:
    answer.add(chunk(0, "Lond"))
    answer.add(chunk(0, "Par", attempt=2))
    assert answer.take() == TextDelta("Par")


def test_a_newer_run_without_text_takes_nothing_away(answer: Reassembly) -> None:
    answer.add(chunk(0, "Par"))
    answer.take()
    answer.add(chunk(1, "is", attempt=2))
    assert answer.take() is None
    answer.finish(reply("Paris"))
    assert answer.take() == TextDelta("is")


def test_a_reply_that_differs_starts_the_text_again(answer: Reassembly) -> None:
    answer.add(chunk(0, "London"))
    answer.take()
    answer.finish(reply("Paris"))
    assert answer.take() == TextDelta("Paris", restarted=True, attempt=2)


@pytest.mark.parametrize("final", ["", None])
def test_a_reply_without_text_takes_away_what_was_given(answer: Reassembly, final: str | None) -> None:
    answer.add(chunk(0, "London"))
    answer.take()
    answer.finish(reply(final))
    assert answer.take() == TextDelta("", restarted=True, attempt=2)
    assert (answer.take(), answer.text) == (None, "")


def test_a_reply_that_is_not_ok_leaves_the_text_as_far_as_it_came(answer: Reassembly) -> None:
    answer.add(chunk(0, "a"))
    answer.take()
    answer.add(chunk(1, "b"))
    answer.finish(reply(outcome="cancelled"))
    assert answer.take() == TextDelta("b")
    assert (answer.take(), answer.text) == (None, "ab")


def test_a_reply_that_is_not_ok_ends_a_run_that_said_nothing_yet(answer: Reassembly) -> None:
    answer.add(chunk(0, "a"))
    answer.take()
    answer.add(chunk(1, "b", attempt=2))
    answer.finish(reply(outcome="failed"))
    assert (answer.take(), answer.text) == (None, "a")


def test_what_is_held_back_is_bounded(answer: Reassembly, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassembly, "_MAX_HELD_CHUNKS", 3)
    monkeypatch.setattr(reassembly, "_MAX_CHARS", 10)
    for seq in range(1, 10):
        answer.add(chunk(seq, str(seq)))
    assert answer.add(chunk(0, "0"))
    assert answer.take() == TextDelta("0123")
    assert not answer.add(chunk(4, "4567890"))
    assert answer.add(chunk(4, "456789"))
    answer.finish(reply("0123456789 and more"))
    assert answer.take() == TextDelta("456789 and more")


def test_what_comes_again_takes_no_room_of_what_is_held_back(
    answer: Reassembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reassembly, "_MAX_HELD_CHUNKS", 1)
    for _ in range(2):
        answer.add(chunk(0, "a"))
    answer.add(chunk(2, "c"))
    answer.add(chunk(1, "b"))
    assert answer.take() == TextDelta("abc")


def test_a_delta_is_a_frozen_value_that_prints_its_text() -> None:
    delta = TextDelta("Par")
    assert str(delta) == f"{delta}" == "Par"
    with pytest.raises(FrozenInstanceError):
        delta.text = "x"  # type: ignore[misc]  # the mistake under test


def test_printed_deltas_do_not_hide_that_the_text_started_again() -> None:
    assert str(TextDelta("Paris", restarted=True, attempt=2)) == "\n[started again]\nParis"


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[ReplyChunk | str], list[str], str]:
    """Chunks of some runs, lost, repeated and in any order, with takes between; the runs' texts; the final text."""
    numbers = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), unique=True, min_size=1, max_size=4))
    runs = [draw(TEXTS) for _ in numbers]
    sent = [
        chunk(seq, text, attempt, generation)
        for (generation, attempt), texts in zip(numbers, runs, strict=True)
        for seq, text in enumerate(texts)
    ]
    events: list[ReplyChunk | str] = []
    if sent:
        shuffled = draw(st.permutations(sent))
        kept: list[ReplyChunk] = (
            shuffled if draw(st.booleans()) else draw(st.lists(st.sampled_from(shuffled), max_size=20))
        )
        if draw(st.booleans()):
            kept.sort(key=sent.index)
        events += kept
    for place in draw(st.lists(st.integers(0, len(events)), max_size=10)):
        events.insert(place, TAKE)
    whole = ["".join(texts) for texts in runs]
    final = draw(st.sampled_from(whole) | st.text("abé ", max_size=6))
    return events, whole, final


@given(deliveries(), st.integers(0, 30))
def test_whatever_comes_the_text_ends_as_the_reply(
    delivery: tuple[list[ReplyChunk | str], list[str], str], finished_after: int
) -> None:
    events, runs, final = delivery
    answer = Reassembly()
    viewer = Viewer(answer)
    for number, event in enumerate(events):
        if number == finished_after:
            answer.finish(reply(final))
        if isinstance(event, ReplyChunk):
            answer.add(event)
        else:
            viewer.take()
        # Never the text of two runs in one, and never a hole.
        assert any(text.startswith(viewer.text) for text in [*runs, final])
    if finished_after >= len(events):
        answer.finish(reply(final))
    viewer.take_all()
    assert viewer.text == answer.text == final


@given(TEXTS.filter(any), st.data())
def test_chunks_that_all_come_make_the_text_without_the_reply(texts: list[str], data: st.DataObject) -> None:
    answer = Reassembly()
    viewer = Viewer(answer)
    for one in data.draw(st.permutations([chunk(seq, text) for seq, text in enumerate(texts)])):
        told = answer.add(one)
        assert told == (viewer.take() is not None), "who is told finds something, and nobody else does"
    assert viewer.text == "".join(texts)
    answer.finish(reply("".join(texts)))
    assert viewer.take() is None
