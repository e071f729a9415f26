"""Calls that wait for a check's process: what goes together, in which order, and what waits too long."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.guardrails.check import CheckContext, Finding, Processed, QuestionSize
from inference_consumers.guardrails.examination import CheckCall
from inference_consumers.guardrails.process.call_queue import (
    LEAST_ROOM,
    MOST_CALLS,
    TEXT_COST,
    CallQueue,
    Piece,
    QueuedCall,
    Speed,
)

INPUT = CheckContext()
WHOLE = QuestionSize()
CUT = QuestionSize(overlap=300)
ROOM = 10_000


def call(
    *texts: str, tenant: str = "a", context: CheckContext = INPUT, came_at_ms: int = 0, ends_at_ms: int = 10**9
) -> QueuedCall:
    return QueuedCall(tenant, CheckCall("pii", context, texts), lambda _: None, came_at_ms, ends_at_ms)


def queue_of(*calls: QueuedCall, size: QuestionSize = WHOLE) -> CallQueue:
    queue = CallQueue(size)
    for one in calls:
        queue.add(one)
    return queue


def texts(pieces: Sequence[Piece]) -> list[str]:
    return [piece.text for piece in pieces]


def questions(queue: CallQueue, room: int = ROOM) -> list[list[Piece]]:
    """All that are left."""
    asked = []
    while pieces := queue.next(room):
        asked.append(pieces)
    return asked


def test_calls_of_a_tenant_with_the_same_context_go_together_in_their_order() -> None:
    other = CheckContext(patterns=("x",))
    queue = queue_of(call("a"), call("b"), call("c", context=other), call("d", context=other), call("e"))
    assert list(map(texts, questions(queue))) == [["a", "b"], ["c", "d"], ["e"]]


def test_a_question_has_no_more_than_the_process_looks_at_in_its_time() -> None:
    queue = queue_of(*(call("x" * 900) for _ in range(7)))
    assert [len(pieces) for pieces in questions(queue, room=3_000)] == [3, 3, 1]
    queue = queue_of(*(call("") for _ in range(100)))
    assert [len(pieces) for pieces in questions(queue, room=TEXT_COST * 40)] == [40, 40, 20], "a text is not free"


def test_a_question_is_bounded_however_fast_the_process_is() -> None:
    queue = queue_of(call(*("x" * 10_000,) * 9), size=QuestionSize(characters=40_000))
    assert [len(pieces) for pieces in questions(queue, room=10**9)] == [3, 3, 3]
    queue = queue_of(call(*("",) * 9), size=QuestionSize(texts=4))
    assert [len(pieces) for pieces in questions(queue, room=10**9)] == [4, 4, 1]


def test_a_text_that_cannot_be_cut_goes_alone() -> None:
    queue = queue_of(call("x"), call("y" * 2 * ROOM, "z"))
    assert [list(map(len, texts(pieces))) for pieces in questions(queue)] == [[1], [2 * ROOM], [1]]


def test_tenants_take_turns_and_a_flood_delays_no_other() -> None:
    flood = [call("x" * 4_900) for _ in range(20)]
    queue = queue_of(*flood, call("small", tenant="b"), *(call("y" * 4_900, tenant="c") for _ in range(4)))
    order = [[piece.of.tenant for piece in pieces] for pieces in questions(queue)]
    assert order[:4] == [["a", "a"], ["b", "c"], ["c", "c"], ["a", "a"]]


def test_what_a_turn_leaves_goes_to_the_next_tenants_and_costs_them_no_turn() -> None:
    large = [call("y" * 8_000, tenant="b") for _ in range(2)]
    queue = queue_of(call("small"), *large, call("late", tenant="c"))
    order = [[piece.of.tenant for piece in pieces] for pieces in questions(queue)]
    assert order == [["a", "b", "c"], ["b"]]


def test_a_long_text_is_cut_and_its_findings_are_where_they_are() -> None:
    text = " ".join(f"word{number}" for number in range(3_000))
    long = call("before", text)
    queue = queue_of(long, size=CUT)
    found = None
    for pieces in questions(queue, room=2_000):
        for piece in pieces:
            assert piece.cost <= 2_000
            at = piece.text.find("word1700 ")
            found = long.answered(piece, [Finding("A", at, at + 8, 1.0)] if at >= 0 else [])
    assert found is not None
    before, hits = found
    assert before == []
    assert not isinstance(hits, Processed)
    (hit,) = hits
    assert text[hit.start : hit.end] == "word1700"


@given(st.lists(st.integers(0, 5_000), min_size=1, max_size=5), st.integers(0, 3_000))
def test_every_character_is_in_a_piece_and_neighbours_overlap(lengths: list[int], room: int) -> None:
    asked = call(*[("abcd " * length)[:length] for length in lengths])
    covered = [0] * len(lengths)
    for pieces in questions(queue_of(asked, size=CUT), room):
        assert sum(piece.cost for piece in pieces) <= max(LEAST_ROOM, room)
        for piece in pieces:
            assert piece.start == 0 or covered[piece.number] - piece.start >= 300
            covered[piece.number] = piece.start + len(piece.text)
    assert covered == lengths
    assert asked.is_asked


def test_a_queue_is_bounded_and_a_tenant_has_half_of_it() -> None:
    queue = queue_of(*(call("x") for _ in range(MOST_CALLS // 2)))
    assert (queue.is_full("a"), queue.is_full("b")) == (True, False)
    for _ in range(MOST_CALLS // 2):
        queue.add(call("x", tenant="b"))
    assert queue.is_full("c")
    assert len(queue.take_all()) == MOST_CALLS
    assert len(queue) == 0


def test_pieces_of_a_question_that_failed_go_first_and_alone() -> None:
    queue = queue_of(call("a"), call("b"), call("c"))
    failed = queue.next(ROOM)
    queue.add(call("d"))
    failed[1].of.is_over = True
    queue.again(failed)
    assert list(map(texts, questions(queue))) == [["a"], ["c"], ["d"]]
    assert [piece.alone for piece in failed] == [True, True, True]


def test_what_is_left_of_a_call_that_failed_is_not_asked() -> None:
    long = call("x" * ROOM, "y")
    queue = queue_of(long, call("next"))
    queue.next(ROOM)
    queue.remove(long)
    assert list(map(texts, questions(queue))) == [["next"]]
    queue.remove(long)


def test_calls_wait_for_their_turn_until_their_end() -> None:
    queue = queue_of(call("a", ends_at_ms=100), call("b"))
    assert [one.call.texts for one in queue.late(10**8, None, 60)] == [("a",)]


@pytest.mark.parametrize(("now_ms", "late"), [(160, []), (161, ["a"]), (210, ["a"]), (211, ["a", "b"])])
def test_calls_wait_for_a_process_that_is_absent_no_longer_than_they_may(now_ms: int, late: list[str]) -> None:
    queue = queue_of(call("a", came_at_ms=0), call("b", came_at_ms=150))
    assert [one.call.texts[0] for one in queue.late(now_ms, 100, 60)] == late


def test_a_call_that_is_to_be_asked_again_may_be_late() -> None:
    queue = queue_of(call("a", "b", ends_at_ms=100))
    queue.again(queue.next(ROOM))
    assert len(queue.late(100, None, 60)) == 1


def test_the_speed_is_that_of_the_time_spent() -> None:
    speed = Speed()
    assert speed.room(500) == 0
    for _ in range(50):
        speed.answered(10, 10)
        speed.answered(9_990, 990)
    assert 4_700 < speed.room(500) < 5_300
    speed.given_up(1_000, 50_000)
    assert speed.room(500) < 1_500, "one that was given up counts by its time"


def test_a_question_is_at_most_twice_as_large_as_those_before() -> None:
    speed = Speed()
    speed.answered(200, 1)
    assert speed.room(500) == 400
    speed.answered(400, 1)
    assert speed.room(500) == 800
