"""What is planned, and what is made of what was seen."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import pytest

from benchmarks import fairness, isolation
from benchmarks.fairness import are_shared
from benchmarks.load import (
    MAX_LAG_MS,
    LoadGenerator,
    Observed,
    Offered,
    completions,
    goodput_tokens,
    latency_percentile_ms,
    plan,
    refusal_times_ms,
    submitted_within,
    text_of,
    waits,
)
from benchmarks.overload import calm_again_s, growth, sampled_mib
from benchmarks.processes import resident_bytes
from benchmarks.service_curve import ServedRequest
from benchmarks.simulated_pool import SimulatedPool, dispatchers
from benchmarks.trace import TraceSampler, load_trace
from benchmarks.traffic import FLASH_S, FLASH_START_S, SHAPES, Traffic
from fairlane.names import backfill_topic, requests_topic
from fairlane.outcomes import Outcome
from fairlane.records import InferenceRequest
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from inference_consumers.engines.protocol import SimulatedCost

FLOOD = Traffic(SHAPES["constant"])
_SUBMITTED_MS = 1_000
_WAITING = Observed("id", "a", 500, _SUBMITTED_MS)
_SERVED = replace(
    _WAITING,
    outcome=str(Outcome.OK),
    dispatched_at_ms=1_200,
    replied_at_ms=1_400,
    seen_at_ms=1_410,
    cost_tokens=30,
    replies=1,
)
_REFUSED = replace(_WAITING, outcome=str(Outcome.REJECTED), replied_at_ms=1_005, seen_at_ms=1_012, replies=1)
_EXPIRED = replace(_WAITING, outcome=str(Outcome.EXPIRED), replied_at_ms=1_505, seen_at_ms=1_510, replies=1)


@pytest.fixture(scope="module")
def sampler() -> TraceSampler:
    return TraceSampler(load_trace(), 1)


def test_a_plan_holds_each_tenants_rate_and_burst_in_order(sampler: TraceSampler) -> None:
    offered = [
        Offered("a", 50.0, burst=30, timeout_ms=7),
        Offered("b", 5.0, start_s=10.0, priority="low", backfill=True),
    ]
    planned = plan(offered, 20.0, sampler)
    requests = [default_codec().decode_as(InferenceRequest, record.value) for record in planned]
    counts = Counter(record.request.tenant for record in planned)

    assert [record.at_s for record in planned] == sorted(record.at_s for record in planned)
    assert counts["a"] - 30 == pytest.approx(1_000, rel=0.15)
    assert counts["b"] == pytest.approx(50, rel=0.6)
    assert {number / 30 for number in range(30)} <= {record.at_s for record in planned}
    assert all(10 <= record.at_s < 20 for record in planned if record.request.tenant == "b")
    assert {record.topic for record in planned} == {requests_topic("a"), backfill_topic("b")}
    assert {(request.priority, request.timeout_ms) for request in requests} == {("normal", 7), ("low", 60_000)}
    assert [request.request_id for request in requests] == [record.request.request_id for record in planned]
    assert len({request.request_id for request in requests}) == len(requests)


def test_a_text_has_as_many_tokens_as_asked() -> None:
    assert len(text_of(123).encode()) == 4 * 123


def test_a_batch_takes_its_cost_at_the_declared_speed() -> None:
    pool = SimulatedPool(cost_tokens_per_s=10_000, consumers=2, max_batch_size=3)
    services = pool.services()
    env = pool.env
    cost = SimulatedCost(float(env["SIMULATED_PREFILL_TOKENS_PER_S"]), float(env["SIMULATED_DECODE_TOKENS_PER_S"]))

    assert len(services) == 2
    assert cost.prefill_seconds(100) + 50 / cost.decode_tokens_per_s == pytest.approx((100 + 2 * 50) / 5_000)
    assert pool.requests_per_s(500) == 20
    assert [service.env["FAIRNESS_POLICY"] for service in dispatchers("vtc", 2)] == ["vtc", "vtc"]


def test_what_is_late_is_told_by_what_the_client_saw() -> None:
    assert not _SERVED.late
    assert replace(_SERVED, seen_at_ms=1_501).late
    assert _EXPIRED.late
    assert not _WAITING.late
    assert not _REFUSED.late


def test_only_what_came_in_time_is_good() -> None:
    late = replace(_SERVED, seen_at_ms=1_501)
    outside = replace(_SERVED, replied_at_ms=2_000, submitted_at_ms=1_900)
    found = [_SERVED, late, outside, _REFUSED, _EXPIRED, _WAITING]

    assert goodput_tokens(found, (1_000, 2_000)) == 30
    assert completions(found) == [
        ServedRequest(1_400, "a", 30),
        ServedRequest(1_400, "a", 30),
        ServedRequest(2_000, "a", 30),
    ]
    assert refusal_times_ms(found) == [12]
    assert submitted_within(found, (1_500, 2_000)) == [outside]


def test_what_was_not_served_took_all_the_time_it_allowed() -> None:
    assert [one.latency_ms for one in (_SERVED, _REFUSED, _EXPIRED, _WAITING)] == [410, 500, 500, 500]
    assert latency_percentile_ms([_SERVED] * 9 + [_REFUSED], 0.99) == 500


def test_waiting_ends_with_dispatch_and_refused_ones_never_waited() -> None:
    other = replace(_WAITING, tenant="b")
    stranger = replace(_WAITING, tenant="c")

    assert waits([_SERVED, _REFUSED, _EXPIRED, _WAITING, other, stranger], ["a", "b"], 9_000) == {
        "a": [(1_000, 1_200), (1_000, 1_505), (1_000, 9_000)],
        "b": [(1_000, 9_000)],
    }


def test_growth_leaves_out_the_filling_up() -> None:
    assert growth([10.0, 50.0] + [100.0] * 6) == pytest.approx(1.0)
    assert growth([0.0] * 4 + [100.0] * 4 + [150.0] * 4 + [200.0] * 4) == pytest.approx(2.0)
    assert growth([5.0]) == 1.0


def test_memory_of_a_process_can_be_read() -> None:
    assert 10 < resident_bytes(os.getpid()) / 1024**2 < 10_000


def test_the_death_of_the_process_is_an_error_of_the_measurement() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()

    with pytest.raises(OSError, match=str(process.pid)), sampled_mib(process.pid):
        pytest.fail("measured nothing")


def test_load_that_comes_too_late_is_an_error() -> None:
    load = LoadGenerator(KafkaSettings(kafka_bootstrap_servers="localhost:1"), ())
    load.largest_lag_ms = MAX_LAG_MS
    assert load.checked_lag_ms() == MAX_LAG_MS
    load.largest_lag_ms += 1
    with pytest.raises(RuntimeError, match="late"):
        load.checked_lag_ms()


def test_tenants_are_shared_when_every_dispatcher_has_some_and_nobody_is_left_out() -> None:
    a, b, none = frozenset("a"), frozenset("b"), frozenset[str]()

    assert are_shared({"one": a, "two": b}, "ab", 2)
    assert not are_shared({"one": a | b, "two": none}, "ab", 2)
    assert not are_shared({"one": a | b}, "ab", 2)
    assert not are_shared({"one": a, "two": b}, "abc", 2)
    assert not are_shared({}, "ab", 2)


def test_all_offer_more_than_their_share() -> None:
    rates = {one.tenant: one.rate_per_s for one in fairness.offered(fairness.EQUAL, 80.0)}

    assert set(rates.values()) == {15.0}
    rates = {one.tenant: one.rate_per_s for one in fairness.offered(fairness.WEIGHTED, 70.0)}
    assert rates == {"one": 15.0, "two": 30.0, "four": 60.0}


def test_the_victim_sends_the_same_beside_the_flood() -> None:
    pool = isolation.POOL_UNDER_TEST

    def victim(*, flood: bool) -> list[tuple[float, int]]:
        return [
            (record.at_s, len(record.value))
            for record in isolation.planned_load(pool, 3.0, FLOOD, is_flooded=flood)
            if record.request.tenant == "victim"
        ]

    alone, beside = victim(flood=False), victim(flood=True)
    assert alone == beside
    assert len(isolation.planned_load(pool, 3.0, FLOOD, is_flooded=True)) > 30 * len(alone)


def test_fairness_compares_each_run_with_fifo_on_as_many_dispatchers(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = {("fifo", 1): 1_000.0, ("drr", 1): 50.0, ("vtc", 1): 70.0, ("fifo", 2): 800.0, ("drr", 2): 80.0}

    def measure(
        policy: str, dispatcher_count: int, weights: Mapping[str, float], _pool: SimulatedPool, *_: object
    ) -> fairness.Run:
        served = {tenant: weight * 100 * (1.1 if tenant == "one" else 1) for tenant, weight in weights.items()}
        return {
            "gap_tokens": gaps[policy, dispatcher_count],
            "tokens_per_s": 99.0 if policy == "drr" else 100.0,
            **{f"served_{tenant}": tokens for tenant, tokens in served.items()},
        }

    monkeypatch.setattr(fairness, "measure", measure)
    result = fairness.run(1.0)
    aimed = {figure.name: figure.value for figure in result.figures if figure.aim is not None}

    assert list(aimed.values()) == pytest.approx([0.05, 0.99, 110 / 710 * 7 - 1, 0.1])
    assert next(figure.value for figure in result.figures if "vtc" in figure.name) == pytest.approx(0.07)
    assert len(result.runs) == 6


def test_isolation_divides_by_the_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    p99_ms = iter((100.0, 140.0, 9_000.0))

    def measure(_servers: object, _pool: SimulatedPool, *_: object, is_flooded: bool) -> dict[str, float]:
        return {"requests": 10, "served": 10, "p50_ms": 20.0, "p99_ms": next(p99_ms)}

    monkeypatch.setattr(isolation, "running", lambda _policy, _pool: nullcontext())
    monkeypatch.setattr(isolation, "measure", measure)
    values = {figure.name: figure.value for figure in isolation.run(1.0).figures}

    assert values["p99 beside the flood divided by p99 alone"] == pytest.approx(1.4)
    assert values["the same under fifo"] == pytest.approx(90)


def test_after_a_flash_it_is_calm_when_every_second_is_as_before() -> None:
    def served(at_s: float, latency_ms: int) -> Observed:
        at_ms = _SUBMITTED_MS + round(1_000 * at_s)
        return replace(_SERVED, submitted_at_ms=at_ms, seen_at_ms=at_ms + latency_ms)

    end_s = FLASH_START_S + FLASH_S
    before = [served(second / 10, 100) for second in range(50)]
    calm = [served(end_s + second / 10, 140) for second in range(100)]
    assert calm_again_s([*before, *calm], _SUBMITTED_MS) == 0
    assert calm_again_s([*before, *calm, served(end_s + 3.5, 160)], _SUBMITTED_MS) == 4
    refused = replace(_REFUSED, submitted_at_ms=_SUBMITTED_MS + round(1_000 * (end_s + 6.5)))
    assert (
        calm_again_s([*before, *calm, replace(refused, seen_at_ms=refused.submitted_at_ms + 400)], _SUBMITTED_MS) == 7
    )
