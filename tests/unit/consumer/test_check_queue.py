"""Calls that wait for a check's process."""

from inference_consumers.guardrails.check import CheckContext
from inference_consumers.guardrails.examination import CheckCall
from inference_consumers.guardrails.process.call_queue import (
    MOST_CALLS,
    MOST_CALLS_TOGETHER,
    MOST_CHARACTERS_TOGETHER,
    CallQueue,
    QueuedCall,
)

INPUT = CheckContext()


def call(text: str, context: CheckContext = INPUT, came_at_ms: int = 0, ends_at_ms: int = 10**9) -> QueuedCall:
    return QueuedCall(CheckCall("pii", context, (text,)), lambda _: None, came_at_ms, ends_at_ms)


def texts(calls: list[QueuedCall]) -> list[str]:
    return [text for one in calls for text in one.call.texts]


def queue_of(*calls: QueuedCall) -> CallQueue:
    queue = CallQueue()
    for one in calls:
        queue.add(one)
    return queue


def test_calls_with_the_same_context_go_together_and_the_others_keep_their_order() -> None:
    other = CheckContext(patterns=("x",))
    queue = queue_of(call("a"), call("b", other), call("c"), call("d", other))
    assert [texts(queue.next()) for _ in range(3)] == [["a", "c"], ["b", "d"], []]


def test_a_question_is_bounded() -> None:
    queue = queue_of(*(call(str(number)) for number in range(MOST_CALLS_TOGETHER + 1)))
    assert (len(queue.next()), len(queue.next())) == (MOST_CALLS_TOGETHER, 1)
    half = "x" * (MOST_CHARACTERS_TOGETHER // 2)
    queue = queue_of(call(half), call(half), call("x"), call(2 * half + "x"))
    assert [len(queue.next()) for _ in range(3)] == [2, 1, 1]


def test_a_queue_is_bounded() -> None:
    queue = queue_of(*(call("x") for _ in range(MOST_CALLS - 1)))
    before = queue.is_full
    queue.add(call("x"))
    assert (before, queue.is_full) == (False, True)
    assert len(queue.take_all()) == MOST_CALLS
    assert len(queue) == 0


def test_calls_of_a_process_that_ended_go_first_and_alone() -> None:
    queue = queue_of(call("a"), call("b"), call("c"))
    ended = queue.next()
    queue.add(call("d"))
    queue.again(ended[:2])
    assert [texts(queue.next()) for _ in range(4)] == [["a"], ["b"], ["d"], []]


def test_calls_that_waited_too_long_or_past_their_end_are_taken() -> None:
    queue = queue_of(call("a", came_at_ms=0), call("b", came_at_ms=90, ends_at_ms=100), call("c", came_at_ms=50))
    assert texts(queue.take_late(100, 60)) == ["a", "b"]
    assert texts(queue.take_late(100, 60)) == []
    assert texts(queue.next()) == ["c"]


def test_calls_that_waited_for_a_check_to_load_have_waited_for_nothing_else() -> None:
    queue = queue_of(call("a", came_at_ms=0), call("b", came_at_ms=0, ends_at_ms=10_050))
    queue.wait_from(10_000)
    assert texts(queue.take_late(10_060, 100)) == ["b"], "its end is its end"
    assert texts(queue.take_late(10_101, 100)) == ["a"]
