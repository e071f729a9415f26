"""Every benchmark in a short version: that it runs on real parts and says what it promises, not how fast they are."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import (
    cost,
    dispatch_rate,
    exactly_once_cost,
    hop_latency,
    peers,
    recorder_rate,
    recovery,
    secured,
    stack_rate,
)
from benchmarks.cluster import BenchStack, cluster
from benchmarks.peer_programs import PEERS
from benchmarks.result import Result

pytestmark = pytest.mark.full

Measure = Callable[[int], dict[str, float]]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(measure: Measure) -> tuple[dict[str, float], ...]:
        return (measure(0),)

    for module in (hop_latency, dispatch_rate, exactly_once_cost):
        monkeypatch.setattr(module, "repeated", once)
    monkeypatch.setattr(hop_latency, "REQUESTS", 10)
    monkeypatch.setattr(hop_latency, "_WARM_UP", 2)
    monkeypatch.setattr(dispatch_rate, "REQUESTS", 1_000)
    monkeypatch.setattr(exactly_once_cost, "BATCHES", 6)


@pytest.fixture(autouse=True)
def one_cluster_for_all_rates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each program is measured on a cluster of its own, whose start takes most of a short run. One after the other on
    the first one's they do the same, with the backlog of those before them in its topics."""
    with ExitStack() as running:
        made: list[BenchStack] = []

        @contextmanager
        def shared(*arguments: Any, **options: Any) -> Iterator[BenchStack]:
            if not made:
                made.append(running.enter_context(cluster(*arguments, **options)))
            yield made[0]

        monkeypatch.setattr(dispatch_rate, "cluster", shared)
        yield


@pytest.mark.parametrize("module", [hop_latency, dispatch_rate, exactly_once_cost], ids=lambda module: module.NAME)
def test_a_benchmark_compares_itself_with_its_baseline_in_one_run(module: ModuleType) -> None:
    result: Result = module.run()

    assert result.benchmark == module.NAME
    assert all(figure.value > 0 for figure in result.figures)
    assert next(figure.unit for figure in result.figures if figure.aim is not None) == "ratio"
    assert len(result.runs) == 1


def test_a_secured_stack_is_held_against_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secured, "repeated", lambda measure: (measure(0),))
    for name, requests in (("WARM_UP", 40), ("ALONE", 5), ("TOGETHER", 64), ("OPEN", 100)):
        monkeypatch.setattr(secured, name, requests)

    figures = {figure.name: figure.value for figure in secured.run().figures}

    assert all(value > 0 for value in figures.values())
    assert sum("secured as a part of plaintext" in name for name in figures) == 3


def test_replies_flow_again_after_kills() -> None:
    result = recovery.run(kills=2)

    assert [run["dispatcher"] for run in result.runs] == [1.0, 0.0]
    assert all(0 < run["s"] < 60 for run in result.runs)


def test_the_cost_of_a_request_is_reported_for_every_process_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "repeated", lambda measure: (measure(0),))
    monkeypatch.setattr(cost, "IDLE_S", 0.5)
    for name, requests in (("WARM_UP", 40), ("ALONE", 5), ("TOGETHER", 64), ("OPEN", 100)):
        monkeypatch.setattr(cost, name, requests)

    result = cost.run()

    measured = {figure.name: figure.value for figure in result.figures}
    loads = ("open loop", "32 callers", "one at a time")
    assert all(measured[f"processor time of a request, {load}"] > 0 for load in loads)
    assert {f"{process}, open loop" for process in ("broker", "client", "consumer", "dispatcher")} <= measured.keys()


def test_the_rates_of_the_stack_stand_beside_those_of_a_bare_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_rate, "repeated", lambda measure: (measure(0),))
    for name, requests in (("WARM_UP", 40), ("ALONE", 5), ("TOGETHER", 64), ("OPEN", 100)):
        monkeypatch.setattr(stack_rate, name, requests)

    result = stack_rate.run()

    measured = {figure.name: figure.value for figure in result.figures}
    for figure in ("rate, open loop", "rate, 32 callers", "median latency, one at a time"):
        assert measured[figure] / measured[f"{figure}, bare chain"] == pytest.approx(
            measured[f"{figure}, divided by the bare chain's"]
        )


def test_the_recorder_stands_beside_what_the_stack_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_rate, "repeated", lambda measure: (measure(0),))
    # Several batches of the recorder, and looks between them.
    monkeypatch.setattr(recorder_rate, "REQUESTS", 4_000)
    monkeypatch.setattr(recorder_rate, "_LOOK_S", 0.01)

    result = recorder_rate.run()

    assert all(figure.value > 0 for figure in result.figures)


def test_peers_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that need no library of their own."""
    monkeypatch.setattr(peers, "repeated", lambda measure: (measure(0),))
    monkeypatch.setattr(peers, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(peers, "PEERS", {name: PEERS[name] for name in ("redis-streams", "fastapi")})
    monkeypatch.setattr(peers, "REQUESTS", {"open": 100, "callers": 64, "alone": 5})
    for name, value in (("_WARM_UP", 20), ("KILLS", 1), ("KILL_EVERY_S", 1.0)):
        monkeypatch.setattr(peers, name, value)

    result = peers.run()

    measured = {figure.name: figure.value for figure in result.figures}
    assert measured["rate divided by redis-streams's, open loop"] > 0
    assert measured["fairlane, without an answer after 1 kills"] == 0
    assert measured["redis-streams, without an answer after 1 kills"] == 0
