"""The scheduler under a virtual clock: what the policies differ in, on the same requests."""

from pathlib import Path

import pytest

from benchmarks import simulate
from benchmarks.simulated_pool import SimulatedPool
from benchmarks.simulation import ConsumerFleet, SimulatedRequest, Simulation, claim_of
from benchmarks.trace import TraceSampler, load_trace
from fairlane.outcomes import Priority
from fairlane.records import TenantSpec
from stream_processors.dispatcher.scheduling.fair_queue import Policy
from tests.kit.fair_again import (
    OFFERED,
    PUBLISHED_PART,
    RESTORED_WITHIN_MS,
    WEIGHTS,
    Verdict,
    allowed_gap_tokens,
    judge,
)

FLEET = ConsumerFleet(consumers=4, tokens_per_s=1_000.0, max_batch_items=2, max_batch_tokens=4_000)
TENANTS = {name: TenantSpec(name) for name in ("victim", "flooder")}


def requests(tenant: str, every_ms: int, count: int, timeout_ms: int = 30_000) -> list[SimulatedRequest]:
    return [
        SimulatedRequest(
            claim=claim_of(tenant, number),
            tenant=tenant,
            priority_class=Priority.NORMAL,
            cost_tokens=400,
            prompt_tokens=200,
            submitted_at_ms=1_000 + number * every_ms,
            deadline_at_ms=1_000 + number * every_ms + timeout_ms,
            request_id=f"{tenant}-{number}",
        )
        for number in range(count)
    ]


def both() -> list[SimulatedRequest]:
    """A victim at a tenth of the capacity of 10 requests a second, a flooder at ten times of it."""
    planned = [*requests("victim", 1_000, 60), *requests("flooder", 10, 6_000)]
    return sorted(planned, key=lambda request: request.submitted_at_ms)


def test_a_flood_delays_a_neighbour_under_fifo_and_not_under_drr() -> None:
    waits = {}
    for policy in ("fifo", "drr", "vtc"):
        seen = Simulation(policy, TENANTS, FLEET).run(iter(both()), 61_000)
        served = [one.at_ms for one in seen.completions[Priority.NORMAL] if one.tenant == "victim"]
        waits[policy] = (len(served), sum(served) / max(1, len(served)))
        assert seen.offered == 6_060
        assert seen.shed
    assert waits["drr"][0] >= 57
    assert waits["vtc"][0] >= 57
    assert waits["fifo"][0] < 45


def test_the_same_seed_gives_the_same_result() -> None:
    first, second = (Simulation("drr", TENANTS, FLEET).run(iter(both()), 30_000) for _ in range(2))
    assert first == second


def test_a_short_hour_is_drawn_and_says_what_was_seen(tmp_path: Path) -> None:
    plot = tmp_path / "served.png"
    latency_plot = tmp_path / "latency.png"
    result = simulate.run(
        tenants=50,
        consumers=4,
        scale_up=1,
        seconds=300,
        plot=plot,
        latency_plot=latency_plot,
        overload_s=15,
        large=(50, 8),
        shape="one-giant",
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert latency_plot.read_bytes().startswith(b"\x89PNG")
    figures = {figure.name: figure.value for figure in result.figures}
    for policy in ("fifo", "drr", "vtc"):
        assert 0 < figures[f"{policy}: goodput / capacity"] <= 1
        assert 0 <= figures[f"{policy}: shed"] < 1
    assert 0 < figures["drr: gap at dispatch divided by drr's bound"] <= 1
    assert figures["fifo: gap at dispatch divided by drr's bound"] > 1


def before_and_after_a_fault(policy: Policy, seed: int, *, read_again: bool = False) -> Verdict:
    """The load of the fault test with the times of its short version, and the pool that it has. Of the fault there is
    nothing, or what a restart does to the order of arrival: everything comes at once, of each tenant some in turn."""
    sampler, pool = TraceSampler(load_trace(), seed), SimulatedPool()
    fault_ms, end_ms = 8_000, 23_000
    rate = pool.requests_per_s(sampler.mean_cost_tokens)
    published_s = (fault_ms + PUBLISHED_PART * (end_ms - fault_ms)) / 1000
    arrivals = sorted(
        (float(number) if read_again else at_s, tenant, at_s)
        for tenant, part in OFFERED.items()
        for number, at_s in enumerate(sampler.arrivals(part * rate, published_s))
    )
    planned = [
        SimulatedRequest(
            claim=claim_of(tenant, number),
            tenant=tenant,
            priority_class=Priority.NORMAL,
            cost_tokens=size.cost_tokens,
            prompt_tokens=size.prompt_tokens,
            submitted_at_ms=0 if read_again else round(at_s * 1000),
            deadline_at_ms=3_600_000,
        )
        for number, (_, tenant, at_s) in enumerate(arrivals)
        for size in (sampler.size(),)
    ]
    fleet = ConsumerFleet(pool.consumers, pool.cost_tokens_per_s / pool.consumers, pool.max_batch_size, 16_384)
    specs = {
        tenant: TenantSpec(tenant, weight=weight, max_queue_requests=200_000, max_queue_bytes=1 << 30)
        for tenant, weight in WEIGHTS.items()
    }
    seen = Simulation(policy, specs, fleet).run(iter(planned), end_ms)
    assert not seen.shed
    allowed = allowed_gap_tokens(pool, sampler)
    return judge(seen.completions[Priority.NORMAL], WEIGHTS, (3_000, fault_ms), (fault_ms, end_ms), allowed)


@pytest.mark.parametrize("seed", range(3))
def test_the_fault_test_would_see_that_fifo_is_not_fair(seed: int) -> None:
    allowed = allowed_gap_tokens(SimulatedPool(), TraceSampler(load_trace(), seed))
    fair = before_and_after_a_fault("drr", seed)
    unfair = before_and_after_a_fault("fifo", seed)

    assert fair.steady_gap_tokens < allowed / 2
    assert fair.fair_after_ms == 0
    assert unfair.steady_gap_tokens > allowed
    # The difference that the last seconds alone make is small, whatever the order.
    assert unfair.fair_after_ms > RESTORED_WITHIN_MS
    assert before_and_after_a_fault("fifo", seed, read_again=True).fair_after_ms > RESTORED_WITHIN_MS
