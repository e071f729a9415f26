"""A value that comes once."""

import threading

import pytest

from fairlane.client.handle import ReplyFuture
from tests.kit.waiting import eventually


@pytest.fixture
def future() -> ReplyFuture[int]:
    return ReplyFuture(threading.Lock())


def test_the_first_settlement_counts(future: ReplyFuture[int]) -> None:
    assert future.keep(1)
    assert not future.keep(2)
    assert not future.break_with(ValueError("late"))
    assert future.done
    assert future.get() == 1


def test_a_broken_promise_raises_for_everybody(future: ReplyFuture[int]) -> None:
    future.break_with(LookupError("gone"))
    for _ in range(2):
        with pytest.raises(LookupError, match="gone"):
            future.get()


def test_callbacks_are_called_once_and_at_once_when_it_is_late(future: ReplyFuture[int]) -> None:
    calls: list[str] = []

    def before() -> None:
        calls.append("before")

    def forgotten() -> None:
        calls.append("forgotten")

    future.when_done(before)
    future.when_done(forgotten)
    future.forget(forgotten)
    future.keep(1)
    future.keep(1)
    future.when_done(lambda: calls.append("after"))
    assert calls == ["before", "after"]


def test_a_wait_ends_with_the_value_or_the_time(future: ReplyFuture[int]) -> None:
    assert not future.wait(0.01)
    seen: list[bool] = []
    waiters = [threading.Thread(target=lambda: seen.append(future.wait(10))) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    future.keep(3)
    for waiter in waiters:
        waiter.join(10)
    assert seen == [True] * 3
    assert future.wait(0)


def test_many_promises_may_share_a_lock() -> None:
    lock = threading.Lock()
    first: ReplyFuture[int] = ReplyFuture(lock)
    second: ReplyFuture[int] = ReplyFuture(lock)
    first.when_done(lambda: (second.keep(2), None)[1])
    first.keep(1)
    eventually(lambda: second.done)
    assert (first.get(), second.get()) == (1, 2)
