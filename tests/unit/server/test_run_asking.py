"""A run that is stopped and killed at any moment: each example is stored once, and nothing is run a second time."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.errors import Timeout
from fairlane.records import InferenceReply, Output, TokenUsage
from fairlane_server.evaluation.asking import AHEAD, BACKFILL, RunAsking
from fairlane_server.evaluation.evaluation_set import EvaluationExample
from fairlane_server.evaluation.grading import ExampleScore, JudgePlan, MeasurePlan
from fairlane_server.evaluation.judge import JUDGE, Rubric
from fairlane_server.evaluation.run_store import EvaluationRuns, RunTakenError, StoredRun
from fairlane_server.evaluation.stored_runs import RunHead

HEAD = RunHead("set", 1, "d" * 64, 9, "words/2", "words", "exact")
RUN = StoredRun("0123456789abcdef", HEAD, "running", 1, "me", None, None, None, None, 0)
EXACT = MeasurePlan("words/2", "exact")
JUDGED = MeasurePlan("words/2", JUDGE, judge=JudgePlan("judge", Rubric("Right."), against="words/1"))


class KilledError(Exception):
    """The process ends here."""


class Runs(EvaluationRuns):
    """The scores of one run in memory, for whoever holds it."""

    def __init__(self) -> None:
        self.held_by = ""
        self.stored: dict[int, ExampleScore] = {}
        self.released = 0

    def places(self, run_id: str) -> frozenset[int]:
        return frozenset(self.stored)

    def renew(self, run_id: str, runner: str) -> None:
        if runner != self.held_by:
            raise RunTakenError("another process asks")

    def add(self, run_id: str, runner: str, scores: Mapping[int, ExampleScore]) -> None:
        self.renew(run_id, runner)
        assert not scores.keys() & self.stored.keys()
        self.stored.update(scores)

    def release(self, run_id: str, runner: str) -> None:
        self.released += 1


class Service:
    """Answers in any order; an id that it knows runs no second time. Kills whoever asks, now and then."""

    def __init__(self, seed: int, *, kill_rate: float = 0.0) -> None:
        self.dice = random.Random(seed)
        self.kill_rate = kill_rate
        self.runs: Counter[str] = Counter()
        self.asked: list[dict[str, Any]] = []
        self.most_open = 0
        self._open = 0

    def submit(self, **fields: Any) -> "Handle":
        if self.dice.random() < self.kill_rate:
            raise KilledError
        self.asked.append(fields)
        if fields["request_id"] not in self.runs:
            self.runs[fields["request_id"]] += 1
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        return Handle(self, fields)

    def answer(self, fields: dict[str, Any]) -> InferenceReply:
        self._open -= 1
        text = "1" if fields["model"] == "judge" else "x"
        return InferenceReply(
            *(fields["request_id"], "acme", "ok"), model_version="2", output=Output(text=text), usage=TokenUsage(3, 1)
        )


class Handle:
    def __init__(self, service: Service, fields: dict[str, Any]) -> None:
        self._service = service
        self._fields = fields
        self._reply: InferenceReply | None = None

    def done(self) -> bool:
        if self._reply is None and self._service.dice.random() < 0.3:
            self._reply = self._service.answer(self._fields)
        return self._reply is not None

    def reply(self, timeout: float | None = None) -> InferenceReply:
        if self._service.dice.random() < self._service.kill_rate:
            raise KilledError
        if not self.done() or self._reply is None:
            raise Timeout("no reply yet")
        return self._reply


def examples(count: int) -> dict[int, EvaluationExample]:
    return {place: EvaluationExample(f"e{place}", {"prompt": "p"}, "x", {}) for place in range(count)}


def asking(runs: Runs, service: Service, plan: MeasurePlan, runner: str, **more: Any) -> RunAsking:
    runs.held_by = runner
    made = {"priority": "low", "stopping": lambda: False, **more}
    return RunAsking(runs, service.submit, RUN, runner, plan, **made)


@pytest.mark.parametrize("plan", [EXACT, JUDGED], ids=["exact", "judge"])
@given(seed=st.integers(0, 2**32), count=st.integers(1, 30))
def test_whatever_kills_it_each_example_is_stored_once(plan: MeasurePlan, seed: int, count: int) -> None:
    runs, service = Runs(), Service(seed, kill_rate=0.02)
    for number in range(10_000):
        try:
            assert asking(runs, service, plan, f"runner {number}").ask(examples(count))
        except KilledError:
            continue
        break
    assert runs.stored.keys() == set(range(count))
    assert all(one.value in {0.5, 1.0} for one in runs.stored.values())
    # Each request of each example, and none of them twice.
    assert set(service.runs.values()) == {1}
    assert len(service.runs) == count * (1 if plan is EXACT else 4)


@given(seed=st.integers(0, 2**32))
def test_it_is_left_when_it_is_to_stop_and_may_be_taken_over_at_once(seed: int) -> None:
    runs, service = Runs(), Service(seed)
    left = service.dice.randint(0, 20)

    def stopping() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    is_done = asking(runs, service, EXACT, "first", stopping=stopping).ask(examples(25))
    assert is_done == (len(runs.stored) == 25)
    assert runs.released == (0 if is_done else 1)
    assert asking(runs, service, EXACT, "second").ask(examples(25))
    assert len(runs.stored) == 25


def test_what_another_runner_has_is_not_stored() -> None:
    runs, service = Runs(), Service(1)
    first = asking(runs, service, EXACT, "first")
    runs.held_by = "second"
    with pytest.raises(RunTakenError):
        first.ask(examples(5))
    assert runs.stored == {}


def test_only_so_many_are_under_way_and_progress_is_told() -> None:
    runs, service, told = Runs(), Service(2), list[int]()
    assert asking(runs, service, EXACT, "one", tell=told.append).ask(examples(3 * AHEAD))
    assert service.most_open <= AHEAD
    assert told[0] == 0
    assert told[-1] == 3 * AHEAD
    assert told == sorted(told)


def test_the_class_is_that_of_the_requests_unless_they_are_offline_ones() -> None:
    for priority, wanted in (("high", {"high"}), (BACKFILL, {None})):
        service = Service(3)
        assert asking(Runs(), service, EXACT, "one", priority=priority).ask(examples(3))
        assert {fields.get("priority") for fields in service.asked} == wanted


def test_a_reply_that_never_comes_ends_it_after_its_patience() -> None:
    class Silent(Handle):
        def done(self) -> bool:
            return False

    service, now_s = Service(4), 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 10.0
        return now_s

    def submit(**fields: Any) -> Handle:
        return Silent(service, fields)

    made = asking(Runs(), service, EXACT, "one", clock=clock, patience_s=100.0)
    with pytest.raises(Timeout):
        replace(made, submit=submit).ask(examples(2))
    assert 100 < now_s < 500
