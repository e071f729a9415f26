"""The bound on what is under way."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.client.window import Waiter, Window
from fairlane.errors import ClientClosed
from tests.kit.waiting import eventually


def nothing() -> None:
    """A wake that nobody needs."""


def test_both_bounds_hold() -> None:
    window = Window(max_in_flight=2, max_buffered_bytes=100)
    assert window.try_acquire(60)
    assert not window.try_acquire(60)
    assert window.try_acquire(40)
    assert not window.try_acquire(0)
    window.release(buffered_bytes=100)
    assert not window.try_acquire(1)
    window.release(requests=1)
    assert window.try_acquire(1)


def test_a_request_above_the_byte_bound_passes_when_nothing_else_is_buffered() -> None:
    window = Window(max_in_flight=9, max_buffered_bytes=10)
    assert window.try_acquire(1)
    assert not window.try_acquire(50)
    window.release(buffered_bytes=1)
    assert window.try_acquire(50)
    assert not window.try_acquire(1)


def test_first_come_first_served_even_if_the_first_needs_more() -> None:
    window = Window(max_in_flight=9, max_buffered_bytes=10)
    assert window.try_acquire(8)
    large, small = window.enqueue(9, nothing), window.enqueue(1, nothing)
    assert not small.granted
    assert not window.try_acquire(1), "nobody overtakes the line"
    window.release(buffered_bytes=8)
    assert large.granted
    assert small.granted


def test_a_wait_ends_with_the_release() -> None:
    window = Window(max_in_flight=1, max_buffered_bytes=10)
    assert window.try_acquire(1)
    got: list[bool] = []
    waiter = threading.Thread(target=lambda: got.append(window.acquire(1, 10)))
    waiter.start()
    eventually(lambda: not window.try_acquire(1) and not got)
    window.release(requests=1, buffered_bytes=1)
    waiter.join(10)
    assert got == [True]
    assert (window.in_flight, window.buffered_bytes) == (1, 1)


def test_a_wait_that_takes_too_long_leaves_the_line() -> None:
    window = Window(max_in_flight=1, max_buffered_bytes=10)
    assert window.try_acquire(1)
    assert not window.acquire(1, 0.01)
    window.release(requests=1, buffered_bytes=1)
    assert (window.in_flight, window.buffered_bytes) == (0, 0)


def test_who_leaves_after_being_granted_passes_it_on() -> None:
    window = Window(max_in_flight=1, max_buffered_bytes=10)
    assert window.try_acquire(1)
    first, second = window.enqueue(1, nothing), window.enqueue(2, nothing)
    window.release(requests=1, buffered_bytes=1)
    assert first.granted
    window.dequeue(first)
    assert second.granted
    assert (window.in_flight, window.buffered_bytes) == (1, 2)


def test_closing_ends_every_wait_with_its_error() -> None:
    window = Window(max_in_flight=1, max_buffered_bytes=10)
    assert window.try_acquire(1)
    caught: list[Exception] = []

    def wait() -> None:
        try:
            window.acquire(1, 10)
        except ClientClosed as error:
            caught.append(error)

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    closed = ClientClosed("over")
    window.close(closed)
    for waiter in waiters:
        waiter.join(10)
    assert caught == [closed] * 3
    with pytest.raises(ClientClosed, match="over"):
        window.try_acquire(1)


@given(
    steps=st.lists(st.tuples(st.sampled_from(["try", "line", "leave", "answer", "publish"]), st.integers(0, 30))),
    max_in_flight=st.integers(1, 4),
    max_buffered_bytes=st.integers(1, 20),
)
def test_whatever_happens_the_bounds_hold_and_nothing_is_lost(
    steps: list[tuple[str, int]], max_in_flight: int, max_buffered_bytes: int
) -> None:
    window = Window(max_in_flight, max_buffered_bytes)
    waiting: list[Waiter] = []
    unanswered = 0
    unpublished: list[int] = []

    def collect() -> None:
        nonlocal unanswered
        for ticket in [ticket for ticket in waiting if ticket.granted]:
            waiting.remove(ticket)
            unanswered += 1
            unpublished.append(ticket.size_bytes)

    for step, number in steps:
        if step == "try" and window.try_acquire(number):
            unanswered += 1
            unpublished.append(number)
        elif step == "line":
            waiting.append(window.enqueue(number, nothing))
        elif step == "leave" and waiting:
            window.dequeue(waiting.pop(number % len(waiting)))
        elif step == "answer" and unanswered:
            unanswered -= 1
            window.release(requests=1)
        elif step == "publish" and unpublished:
            window.release(buffered_bytes=unpublished.pop(number % len(unpublished)))
        collect()
        assert window.in_flight == unanswered <= max_in_flight
        assert window.buffered_bytes == sum(unpublished)
        assert sum(unpublished) <= max_buffered_bytes or sum(1 for size in unpublished if size) == 1

    for ticket in waiting:
        window.dequeue(ticket)
    window.release(requests=unanswered, buffered_bytes=sum(unpublished))
    assert (window.in_flight, window.buffered_bytes) == (0, 0)
