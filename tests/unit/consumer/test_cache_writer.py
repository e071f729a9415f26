"""Answers kept for the next who asks: which ones, under which key, and what a Redis that does not answer costs."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from pydantic import SecretStr
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fairlane.outcomes import Outcome
from fairlane.records import ConversationTurn, HistoryUse, InferenceReply, Message, Output, Parameters, WorkItem
from fairlane.settings import Settings
from fairlane_server.caching.entries import MOST_ENTRY_BYTES, unseal
from fairlane_server.caching.responses import decode_answer, response_key
from inference_consumers.results.cache_writer import CacheWriter, cache_writer_for, entry_of
from tests.kit.cache_kit import MODEL_VERSION, reply, request, work
from tests.kit.waiting import eventually

WORK = work(request(), cache_answer=True)
SECRET = "what only this tenant's user said"


class FakeRedis:
    """Answers pipelines; ``error`` is raised by every one while set, ``open`` is what they wait for."""

    def __init__(self) -> None:
        self.stored: dict[str, tuple[bytes, int]] = {}
        self.sizes: list[int] = []
        self.error: Exception | None = None
        self.refuses = False
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.is_closed = False

    def pipeline(self, *, transaction: bool) -> "FakePipeline":
        assert not transaction
        return FakePipeline(self)

    def close(self) -> None:
        self.is_closed = True


class FakePipeline:
    def __init__(self, redis: FakeRedis) -> None:
        self._redis = redis
        self._commands: list[tuple[str, bytes, int]] = []

    def __enter__(self) -> "FakePipeline":
        return self

    def __exit__(self, *_: object) -> None: ...

    def set(self, name: str, data: bytes, *, px: int) -> None:
        self._commands.append((name, data, px))

    def execute(self, *, raise_on_error: bool) -> Sequence[object]:
        assert not raise_on_error
        self._redis.sizes.append(len(self._commands))
        self._redis.entered.set()
        assert self._redis.open.wait(10)
        if self._redis.error is not None:
            raise self._redis.error
        if self._redis.refuses:
            return [ResponseError("OOM command not allowed") for _ in self._commands]
        self._redis.stored |= {name: (data, px) for name, data, px in self._commands}
        return [True] * len(self._commands)


class Time:
    def __init__(self) -> None:
        self.ms = 0

    def now(self) -> int:
        return self.ms


def make(redis: FakeRedis, time: Time | None = None, **limits: Any) -> CacheWriter:
    part: Any = redis
    return CacheWriter(part, 300, (time or Time()).now, lambda: 0.5, **limits)


def counted(result: str) -> float:
    return REGISTRY.get_sample_value("fairlane_cache_writes_total", {"cache": "response", "result": result}) or 0.0


def numbered(number: int, text: str = "The red one.") -> tuple[WorkItem, InferenceReply]:
    """Another question each time."""
    done = work(request(f"question {number}"), cache_answer=True)
    return done, reply(done, text)


def test_what_is_kept_is_found_under_the_key_that_is_looked_under() -> None:
    redis, before = FakeRedis(), counted("stored")
    kept = make(redis)
    kept.start()
    kept.keep(WORK, reply(WORK))
    kept.close(10)
    key = response_key("acme", WORK.request, MODEL_VERSION, None)
    assert key is not None
    assert redis.stored.keys() == {key.name}
    data, life_ms = redis.stored[key.name]
    payload = unseal(key, data)
    assert payload is not None
    answer = decode_answer(payload)
    assert answer is not None
    assert (answer.request_id, answer.output) == ("id-1", Output(text="The red one."))
    assert life_ms == 285_000
    assert counted("stored") - before == 1
    assert redis.is_closed
    foreign = response_key("other", WORK.request, MODEL_VERSION, None)
    assert foreign is not None
    assert foreign.name not in redis.stored
    assert unseal(foreign, data) is None


HISTORY = (Message("user", SECRET), Message("assistant", SECRET))
TURN = ConversationTurn("c-1", (Message("user", SECRET),))
NOT_KEPT: dict[str, tuple[WorkItem, dict[str, Any]]] = {
    "not asked to": (work(request()), {}),
    "no answer": (WORK, {"outcome": Outcome.FAILED, "output": None}),
    "a conversation": (work(request(conversation_id="c-1"), cache_answer=True), {"turn": TURN}),
    "what was said before": (work(request(), cache_answer=True, history=HISTORY), {}),
    "history and a conversation": (
        work(request(conversation_id="c-1"), cache_answer=True, history=HISTORY, history_use=HistoryUse(2)),
        {"turn": TURN, "history_use": HistoryUse(2)},
    ),
    "a degradation": (work(request(), cache_answer=True, degradations=("shorter_context",)), {}),
    "by chance": (work(request(parameters=Parameters(temperature=0.5)), cache_answer=True), {}),
}


@pytest.mark.parametrize("case", NOT_KEPT)
def test_what_others_would_not_get_is_not_kept(case: str) -> None:
    redis = FakeRedis()
    kept = make(redis)
    kept.start()
    item, changed = NOT_KEPT[case]
    kept.keep(item, reply(item, **changed))
    kept.keep(*numbered(1))
    kept.close(10)
    assert len(redis.stored) == 1
    assert SECRET.encode() not in b"".join(data for data, _ in redis.stored.values())


def test_an_entry_that_is_too_large_is_counted_and_not_kept() -> None:
    before = counted("too_large")
    assert entry_of(WORK, reply(WORK, "x" * MOST_ENTRY_BYTES)) is None
    assert counted("too_large") - before == 1


def test_an_answer_that_cannot_be_written_down_fails_nothing() -> None:
    redis = FakeRedis()
    kept = make(redis)
    kept.keep(WORK, reply(WORK, "half of a pair: \ud83d"))
    kept.start()
    kept.close(10)
    assert not redis.stored


def test_answers_that_come_together_are_written_together_up_to_a_bound() -> None:
    redis = FakeRedis()
    kept = make(redis, batch_entries=4, batch_bytes=10_000)
    for number in range(6):
        kept.keep(*numbered(number))
    for number in range(6, 9):
        kept.keep(*numbered(number, "x" * 6_000))
    kept.start()
    kept.close(10)
    assert redis.sizes == [4, 3, 1, 1]
    assert len(redis.stored) == 9


@pytest.mark.parametrize("limits", [{"max_entries": 3}, {"max_bytes": 35_000}])
def test_a_redis_that_hangs_holds_nobody_up_and_what_finds_no_place_is_dropped(limits: dict[str, Any]) -> None:
    redis, before = FakeRedis(), (counted("dropped"), counted("stored"))
    redis.open.clear()
    kept = make(redis, **limits)
    kept.start()
    kept.keep(*numbered(0, "x" * 10_000))
    assert redis.entered.wait(10)
    for number in range(1, 11):
        kept.keep(*numbered(number, "x" * 10_000))
    assert counted("dropped") - before[0] == 7
    redis.open.set()
    eventually(lambda: counted("stored") - before[1] == 4, what="those that found a place")
    kept.keep(*numbered(11, "x" * 10_000))
    kept.close(10)
    assert len(redis.stored) == 5, "there is room again"


def test_closing_waits_so_long_and_no_longer() -> None:
    redis, before = FakeRedis(), counted("dropped")
    redis.open.clear()
    kept = make(redis, batch_entries=1)
    kept.start()
    for number in range(3):
        kept.keep(*numbered(number))
    assert redis.entered.wait(10)
    kept.close(0.05)
    assert not redis.is_closed, "somebody is still in there"
    kept.keep(*numbered(4))
    assert counted("dropped") - before == 3
    redis.open.set()
    kept.close(10)
    assert (len(redis.stored), redis.is_closed) == (1, True)


@pytest.mark.parametrize("trouble", ["late", "refuses", "broken library"])
def test_a_redis_that_keeps_nothing_is_left_alone_for_a_while(trouble: str) -> None:
    redis, time, before = FakeRedis(), Time(), (counted("unavailable"), counted("stored"))
    redis.error = {"late": RedisTimeoutError("late"), "broken library": RuntimeError("unforeseen")}.get(trouble)
    redis.refuses = trouble == "refuses"
    kept = make(redis, time, batch_entries=1)
    kept.start()

    def keep(numbers: range) -> None:
        done = counted("unavailable") + counted("stored") + len(numbers)
        for number in numbers:
            kept.keep(*numbered(number))
        eventually(lambda: counted("unavailable") + counted("stored") == done, what="the writer")

    keep(range(20))
    assert (len(redis.sizes), counted("unavailable") - before[0]) == (3, 20)
    time.ms += 10_000
    keep(range(20, 25))
    assert len(redis.sizes) == 4, "one looks whether it is back"
    redis.error, redis.refuses = None, False
    time.ms += 10_000
    keep(range(25, 30))
    kept.close(10)
    assert (len(redis.stored), counted("stored") - before[1]) == (5, 5)


def test_without_a_redis_nothing_is_kept() -> None:
    assert cache_writer_for(Settings()) is None
    made = cache_writer_for(Settings(redis_cache_url=SecretStr("redis://127.0.0.1:1/0")))
    assert made is not None
    made.close(1)


def test_what_comes_of_a_hand_made_item_is_looked_at_once_more() -> None:
    """The reply of another request, or of another tenant, is no answer to this one."""
    assert entry_of(WORK, reply(WORK)) is not None
    for changed in ({"request_id": "id-2"}, {"tenant": "other"}, {"model_version": "4"}, {"replayed": True}):
        assert entry_of(WORK, reply(WORK, **changed)) is None
    assert entry_of(replace(WORK, tenant="other"), reply(WORK)) is None
