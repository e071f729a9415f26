"""Whom a fault run strikes, and what its figures are made of."""

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.faults.plan import (
    END,
    EVERY_KIND,
    KILL,
    PAUSE,
    SEED_VARIABLE,
    SEEDS,
    Cast,
    Fault,
    FaultTarget,
    count_kinds,
    fault_seed,
    long_plan,
)
from benchmarks.faults.traffic import longest_gap_s

CAST = Cast(("d1", "d2"), ("c1", "c2", "c3"), "r")


@given(st.integers(0, SEEDS), st.integers(0, 60))
def test_a_plan_has_as_many_faults_as_asked_for_and_the_restart_is_not_the_first(seed: int, faults: int) -> None:
    plan = long_plan(random.Random(seed), CAST, faults)

    assert len(plan) == faults + 1
    assert [fault.target for fault in plan].count(FaultTarget.BROKER) == 1
    assert faults == 0 or plan[0].target is not FaultTarget.BROKER
    assert all(len(set(fault.victims)) == len(fault.victims) for fault in plan)


@given(st.integers(0, SEEDS))
def test_a_long_plan_has_every_kind_and_pairs(seed: int) -> None:
    plan = long_plan(random.Random(seed), CAST, len(EVERY_KIND) + 4)

    kinds = count_kinds(CAST, plan)
    assert kinds.keys() == {*EVERY_KIND, (END, FaultTarget.BROKER)}
    assert [len(fault.victims) for fault in plan].count(2) == 4
    assert sum(kinds.values()) == len(plan) + 4


def test_the_same_dice_make_the_same_plan() -> None:
    plans = [long_plan(random.Random(seed), CAST, 30) for seed in (7, 7, 8)]

    assert plans[0] == plans[1] != plans[2]


def test_a_pair_counts_for_what_each_of_it_is() -> None:
    struck = [Fault(KILL, FaultTarget.CONSUMER, ("d1", "c2")), Fault(PAUSE, FaultTarget.ENGINE, ("c1",))]

    assert count_kinds(CAST, struck) == {
        (KILL, FaultTarget.DISPATCHER): 1,
        (KILL, FaultTarget.CONSUMER): 1,
        (PAUSE, FaultTarget.ENGINE): 1,
    }
    assert [str(fault) for fault in struck] == ["SIGKILL d1 and c2", "SIGSTOP the engine of c1"]


def test_a_seed_that_is_given_is_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED_VARIABLE, "4711")
    assert fault_seed() == 4711
    monkeypatch.delenv(SEED_VARIABLE)
    assert len({fault_seed() for _ in range(20)}) > 1


@pytest.mark.parametrize(
    ("published", "replied", "longest"),
    [
        ({}, {}, 0.0),
        ({"a": 1.0}, {"a": 4.0}, 3.0),
        ({"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 7.0}, 4.0),
        ({"a": 1.0, "b": 50.0}, {"a": 2.0, "b": 52.0}, 2.0),
    ],
    ids=["nothing", "one", "two at once", "rest in between"],
)
def test_the_longest_gap_is_one_in_which_somebody_waited(
    published: Mapping[str, float], replied: Mapping[str, float], longest: float
) -> None:
    assert longest_gap_s(published, replied) == longest
