"""A value that comes once."""

import threading

import pytest

from fairlane.client.handle import Promise
from tests.kit.waiting import eventually


@pytest.fixture
def promise() -> Promise[int]:
    return Promise(threading.Lock())


def test_the_first_settlement_counts(promise: Promise[int]) -> None:
    assert promise.keep(1)
    assert not promise.keep(2)
    assert not promise.break_with(ValueError("late"))
    assert promise.done
    assert promise.get() == 1


def test_a_broken_promise_raises_for_everybody(promise: Promise[int]) -> None:
    promise.break_with(LookupError("gone"))
    for _ in range(2):
        with pytest.raises(LookupError, match="gone"):
            promise.get()


def test_callbacks_are_called_once_and_at_once_when_it_is_late(promise: Promise[int]) -> None:
    calls: list[str] = []

    def before() -> None:
        calls.append("before")

    def forgotten() -> None:
        calls.append("forgotten")

    promise.when_done(before)
    promise.when_done(forgotten)
    promise.forget(forgotten)
    promise.keep(1)
    promise.keep(1)
    promise.when_done(lambda: calls.append("after"))
    assert calls == ["before", "after"]


def test_a_wait_ends_with_the_value_or_the_time(promise: Promise[int]) -> None:
    assert not promise.wait(0.01)
    seen: list[bool] = []
    waiters = [threading.Thread(target=lambda: seen.append(promise.wait(10))) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    promise.keep(3)
    for waiter in waiters:
        waiter.join(10)
    assert seen == [True] * 3
    assert promise.wait(0)


def test_many_promises_may_share_a_lock() -> None:
    lock = threading.Lock()
    first: Promise[int] = Promise(lock)
    second: Promise[int] = Promise(lock)
    first.when_done(lambda: (second.keep(2), None)[1])
    first.keep(1)
    eventually(lambda: second.done)
    assert (first.get(), second.get()) == (1, 2)
