"""The load benchmarks in a short version: that they run on real parts and see what they must, not how good it is."""

import pytest

from benchmarks import fairness, isolation, load, overload, tenants
from benchmarks.simulated_pool import SimulatedPool
from benchmarks.traffic import SHAPES, Traffic

pytestmark = [pytest.mark.full, pytest.mark.broker]

_SECONDS = 3.0
_FLOOD = Traffic(SHAPES["constant"])
_LONG_ENOUGH_TO_SHED_S = 6.0


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a load that comes late or a short time before the figures would spoil is not looked at here."""
    monkeypatch.setattr(load, "MAX_LAG_MS", 60_000.0)


@pytest.mark.alone
def test_fairness_sees_every_tenant_wait_and_be_served() -> None:
    """With two dispatchers: what the benchmark runs with one, and under the other policies, is a part of that."""
    measured = fairness.measure("drr", 2, fairness.EQUAL, SimulatedPool(), _SECONDS, _FLOOD)

    assert measured["common_s"] >= 0.9 * _SECONDS
    assert measured["gap_tokens"] > 0
    assert all(tokens > 0 for tokens in fairness.served_in(measured, fairness.EQUAL).values())


@pytest.mark.alone
def test_isolation_measures_the_victim_beside_the_flood() -> None:
    pool = SimulatedPool(consumers=5, max_batch_size=1)  # one more than the topic has partitions at first
    with isolation.running("drr", pool) as servers:
        measured = isolation.measure(servers, pool, _SECONDS, _FLOOD, is_flooded=True)

    assert measured["served"] == measured["requests"] > 0
    assert 0 < measured["p50_ms"] <= measured["p99_ms"]


@pytest.mark.alone
def test_overload_counts_what_came_in_time_and_what_was_refused() -> None:
    """Three times the capacity: a third of what is asked for can be served, less what the queue takes in at first. A
    reply too many and the death of the dispatcher are errors of the benchmark itself. How much of it is served in time
    is a matter of the machine too."""
    result = overload.run(_LONG_ENOUGH_TO_SHED_S, shape="constant")
    figures = {figure.name: figure.value for figure in result.figures}

    for run in result.runs:
        name = f"constant, {run['load']:g} times"
        assert 0 < figures[f"{name}: tokens served in time divided by capacity"] <= 1.1
        assert figures[f"{name}: replies after their deadline"] < 1
        assert 0.1 < figures[f"{name}: refused"] < 1
        # Nobody is told when its 10 s are over.
        assert 0 < figures[f"{name}: median time to a refusal"] < 5_000
        assert figures[f"{name}: Jain index"] > 0.5
        assert run["answered"] == run["requests"] > 0
    assert [run["load"] for run in result.runs] == [3.0, 10.0]
    assert figures["largest memory of the dispatcher"] > 10


def test_tenants_compares_itself_with_bare_faust_in_one_run() -> None:
    result = tenants.run(repetitions=1, requests=1_000, many=30)

    assert all(figure.value > 0 for figure in result.figures)
    assert [run["tenants"] for run in result.runs] == [10.0, 30.0]
