"""Who is let in: never what cannot be done in time, never at a neighbour's expense, and an honest time to come back."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fairlane.outcomes import Code
from fairlane.records import LatencyTarget, TenantSpec
from fairlane_server.admission_rule import (
    LEAST_OUTAGE_MS,
    LEAST_RETRY_MS,
    MOST_RETRY_MS,
    BatchCapacity,
    CapacityState,
    PoolCapacity,
    WorkAhead,
    latency_target_ms,
    predict,
)
from stream_processors.dispatcher.admission import rules
from stream_processors.dispatcher.admission.rules import (
    AdmissionPolicy,
    Bounds,
    SharedBound,
    Shed,
    backfill_paused,
)
from tests.kit.scheduler_kit import NamedRequest, claim

T0 = 1_700_000_000_000
POLICY = AdmissionPolicy(safety_margin=0.1)
EXACT = AdmissionPolicy(safety_margin=0.1, jitter=0)


def live(rate: float = 1_000.0, consumers: int = 2) -> PoolCapacity:
    return PoolCapacity(
        CapacityState.LIVE,
        consumers=consumers,
        cost_tokens_per_s=rate,
        consumer_cost_tokens_per_s=rate / consumers,
        last_cost_tokens_per_s=rate,
        batches=(BatchCapacity(32, 16_384),) * consumers,
    )


def lost(for_ms: int, rate: float = 1_000.0) -> PoolCapacity:
    return PoolCapacity(
        CapacityState.LOST, consumer_cost_tokens_per_s=rate, last_cost_tokens_per_s=rate, lost_for_ms=for_ms
    )


@dataclass(frozen=True, slots=True, eq=False)
class CautiousRequest(NamedRequest):
    """One whose answer may be much longer than expected."""

    most_tokens: int = 0

    @property
    def cautious_cost_tokens(self) -> int:
        return self.most_tokens


IDLE = WorkAhead(live(), in_flight_tokens=0, waiting_tokens=0, own_waiting_tokens=0)
ROOMY = Bounds(
    tenant_waiting_requests=0,
    tenant_waiting_bytes=0,
    tenant_waiting_tokens=0,
    tenant_max_requests=1_000,
    tenant_max_bytes=1_000_000,
    tenant_weight=1,
    all_weights=10,
    total_waiting_requests=0,
    total_waiting_bytes=0,
    total_waiting_tokens=0,
)


def arrival(
    cost: float = 100,
    *,
    timeout_ms: int = 10_000,
    target_ms: int | None = None,
    age_ms: int = 0,
    backfill: bool = False,
    size: int = 1_000,
) -> NamedRequest:
    return NamedRequest(
        claim(1),
        submitted_at_ms=T0 - age_ms,
        deadline_at_ms=T0 - age_ms + timeout_ms,
        cost_tokens=cost,  # type: ignore[arg-type]  # the rules take fractions as well
        size_bytes=size,
        target_ms=target_ms,
        name="r-1",
        is_backfill=backfill,
    )


def decide(
    policy: AdmissionPolicy, request: NamedRequest, bounds: Bounds, load: WorkAhead, now_ms: int = T0
) -> Shed | None:
    return rules.decide(policy, request, bounds, load, now_ms)


# ------------------------------------------------------------------ latency targets


def test_a_wait_beyond_the_target_is_refused_although_the_deadline_would_be_met() -> None:
    load = replace(IDLE, waiting_tokens=3_000, own_waiting_tokens=3_000)
    assert decide(EXACT, arrival(), ROOMY, load) is None
    refused = decide(EXACT, arrival(target_ms=2_500), ROOMY, load)
    assert isinstance(refused, Shed)
    assert (refused.code, refused.retry_after_ms) == (Code.OVERLOADED, 500), "3 s, and its target is 2.5 s"
    assert "2.5 s" in refused.message
    assert decide(EXACT, arrival(target_ms=3_000), ROOMY, load) is None


def test_a_target_bounds_the_wait_and_not_the_run() -> None:
    long = arrival(cost=4_000, target_ms=500)  # 8 s of one of two consumers
    assert decide(EXACT, long, ROOMY, replace(IDLE, waiting_tokens=400, own_waiting_tokens=400)) is None
    assert decide(EXACT, long, ROOMY, replace(IDLE, waiting_tokens=600, own_waiting_tokens=600)) is not None


def test_what_is_in_flight_is_no_reason_to_refuse_for_a_target() -> None:
    """It may be all another tenant's, or backfill, and goes on being refilled."""
    assert decide(EXACT, arrival(target_ms=500), ROOMY, replace(IDLE, in_flight_tokens=8_000)) is None


def test_an_outage_is_no_backlog() -> None:
    """How long it lasts is for the deadline to decide."""
    away = replace(IDLE, capacity=lost(0))
    assert decide(EXACT, arrival(target_ms=1_000, timeout_ms=60_000), ROOMY, away) is None


def test_backfill_has_no_target() -> None:
    load = replace(IDLE, waiting_tokens=1e9, own_waiting_tokens=1e9)
    assert decide(EXACT, arrival(target_ms=1, backfill=True), ROOMY, load) is None


def test_what_an_answer_may_cost_decides_whether_it_is_in_time() -> None:
    """Nine of ten would be: that is not sure enough."""
    request = CautiousRequest(
        claim(1), submitted_at_ms=T0, deadline_at_ms=T0 + 10_000, cost_tokens=100, name="r-1", most_tokens=4_600
    )
    refused = decide(EXACT, request, ROOMY, replace(IDLE, in_flight_tokens=1))
    assert isinstance(refused, Shed)
    assert refused.code == Code.DEADLINE_UNMEETABLE


def test_the_target_of_a_request() -> None:
    spec = TenantSpec("acme", latency_targets=(LatencyTarget("high", 500), LatencyTarget("low", 90_000)))
    defaults = {"high": 700, "normal": 2_000}
    assert latency_target_ms(spec, "high", 30_000, defaults) == 500
    assert latency_target_ms(spec, "normal", 30_000, defaults) == 2_000
    assert latency_target_ms(spec, "low", 30_000, defaults) == 30_000, "never beyond its time"
    assert latency_target_ms(None, "high", 30_000, defaults) == 700
    assert latency_target_ms(None, "low", 30_000, defaults) == 7_500, "a quarter of its time"
    assert latency_target_ms(None, "low", 1, defaults) == 1


# ------------------------------------------------------------------ prediction


def test_a_measured_share_replaces_the_entitled_one() -> None:
    load = WorkAhead(live(1_000, 4), 500, waiting_tokens=3_000, own_waiting_tokens=200, own_share=0.1, served_share=0.4)
    assert predict(load, 100).wait_ms == 500 + 500
    assert predict(replace(load, served_share=0.02), 100).wait_ms == 500 + 10_000, "others that came go first"


def test_a_run_takes_longer_than_the_tokens_of_one_request() -> None:
    assert predict(replace(IDLE, service_stretch=3.0), 100).service_ms == 3 * 200


def test_the_prediction_is_the_formula() -> None:
    load = WorkAhead(
        live(1_000, 4), 500, waiting_tokens=3_000, own_waiting_tokens=200, dispatcher_share=0.5, own_share=0.1
    )
    # 0.5 s in flight; the tenant's own 200 at 100/s is 2 s, all that waits at 500/s would be 6 s; 100 at 250/s
    prediction = predict(load, 100)
    assert (prediction.wait_ms, prediction.service_ms, prediction.finish_ms) == (2_500, 400, 2_900)
    assert predict(replace(load, own_waiting_tokens=900), 100).wait_ms == 6_500


@pytest.mark.parametrize("capacity", [PoolCapacity(), live(0)], ids=["never", "nothing measured"])
def test_an_unknown_rate_predicts_no_wait(capacity: PoolCapacity) -> None:
    prediction = predict(WorkAhead(capacity, 1e9, 1e9, 1e9), 1e9)
    assert (prediction.wait_ms, prediction.service_ms) == (0, 0)


def test_an_outage_is_expected_to_last_as_long_again() -> None:
    assert predict(replace(IDLE, capacity=lost(0)), 100).wait_ms == LEAST_OUTAGE_MS
    assert predict(replace(IDLE, capacity=lost(25_000)), 100).wait_ms == 25_000
    behind_others = WorkAhead(lost(25_000), in_flight_tokens=500, waiting_tokens=2_000, own_waiting_tokens=2_000)
    assert predict(behind_others, 100).wait_ms == 25_000 + 500 + 2_000
    assert predict(replace(behind_others, capacity=lost(25_000, rate=0)), 100).wait_ms == 25_000


RATES = st.floats(1, 1e6)
TOKENS = st.floats(0, 1e7)
SHARES = st.floats(0.001, 1)
CAPACITIES = st.one_of(
    st.builds(live, RATES, st.integers(1, 64)),
    st.builds(lost, st.integers(0, 100_000), RATES),
    st.just(PoolCapacity()),
    st.just(live(0)),
)


@st.composite
def loads(draw: st.DrawFn, capacities: st.SearchStrategy[PoolCapacity] = CAPACITIES) -> WorkAhead:
    waiting, dispatcher_share = draw(TOKENS), draw(SHARES)
    return WorkAhead(
        draw(capacities),
        draw(TOKENS),
        waiting,
        waiting * draw(st.floats(0, 1)),
        dispatcher_share,
        dispatcher_share * draw(SHARES),
    )


@given(loads(), st.floats(1, 1e5), st.floats(0, 1e6))
def test_more_load_never_predicts_an_earlier_end(load: WorkAhead, cost: float, more: float) -> None:
    finish_ms = predict(load, cost).finish_ms
    assert predict(load, cost + more).finish_ms >= finish_ms
    assert predict(replace(load, in_flight_tokens=load.in_flight_tokens + more), cost).finish_ms >= finish_ms
    assert predict(replace(load, waiting_tokens=load.waiting_tokens + more), cost).finish_ms >= finish_ms
    assert predict(replace(load, own_waiting_tokens=load.own_waiting_tokens + more), cost).finish_ms >= finish_ms
    assert predict(replace(load, own_share=load.own_share / 2), cost).finish_ms >= finish_ms
    assert predict(replace(load, dispatcher_share=load.dispatcher_share / 2), cost).finish_ms >= finish_ms


@given(RATES, st.integers(1, 64), loads(), st.floats(1, 1e5))
def test_a_faster_pool_never_predicts_a_later_end(rate: float, consumers: int, load: WorkAhead, cost: float) -> None:
    slow, fast = (replace(load, capacity=live(each, consumers)) for each in (rate, 2 * rate))
    assert predict(fast, cost).finish_ms <= predict(slow, cost).finish_ms


@given(loads(), TOKENS, st.floats(1, 1e5))
def test_what_others_have_waiting_changes_nothing_for_one_who_has_nothing_waiting(
    load: WorkAhead, flood: float, cost: float
) -> None:
    alone = replace(load, own_waiting_tokens=0, waiting_tokens=0)
    flooded = predict(replace(alone, waiting_tokens=flood), cost)
    assert (flooded.wait_ms, flooded.service_ms) == (predict(alone, cost).wait_ms, predict(alone, cost).service_ms)


# ------------------------------------------------------------------ deadlines


def test_the_margin_must_be_left_over() -> None:
    """100 tokens at 500/s take 200 ms. Of 10 s allowed 9 s count, so 8.8 s of waiting is the most."""
    assert decide(POLICY, arrival(), ROOMY, replace(IDLE, in_flight_tokens=8_800)) is None
    refused = decide(POLICY, arrival(), ROOMY, replace(IDLE, in_flight_tokens=8_801))
    assert isinstance(refused, Shed)
    assert refused.code is Code.DEADLINE_UNMEETABLE
    assert refused.message == "it would be done in 9.0 s; its deadline, less the margin, is in 9.0 s"


def test_time_spent_before_the_decision_counts() -> None:
    busy = replace(IDLE, in_flight_tokens=800)
    assert decide(POLICY, arrival(age_ms=8_000), ROOMY, busy) is None
    refused = decide(EXACT, arrival(age_ms=8_001), ROOMY, busy)
    assert isinstance(refused, Shed)
    assert refused.retry_after_ms == LEAST_RETRY_MS, "sent anew it has all its time again"


def test_a_pool_that_never_reported_takes_what_has_not_expired() -> None:
    load = WorkAhead(PoolCapacity(), 1e9, 1e9, 1e9)
    assert decide(POLICY, arrival(1e9), ROOMY, load) is None
    assert decide(POLICY, arrival(1e9, age_ms=10_000), ROOMY, load) is None
    assert isinstance(decide(POLICY, arrival(1e9, age_ms=10_001), ROOMY, load), Shed)


def test_a_pool_with_nothing_to_do_takes_what_it_seems_too_slow_for() -> None:
    slow = replace(IDLE, capacity=live(1))
    assert decide(POLICY, arrival(), ROOMY, slow) is None
    refused = decide(EXACT, arrival(), ROOMY, replace(slow, in_flight_tokens=20))
    assert isinstance(refused, Shed)
    assert refused.retry_after_ms is None, "other work never leaves it room"


def test_a_lost_pool_refuses_what_would_not_live_to_its_return() -> None:
    load = replace(IDLE, capacity=lost(3_100))
    assert decide(POLICY, arrival(timeout_ms=30_000), ROOMY, load) is None
    refused = decide(EXACT, arrival(timeout_ms=10_000), ROOMY, load)
    assert isinstance(refused, Shed)
    assert (refused.code, refused.retry_after_ms) == (Code.DEADLINE_UNMEETABLE, LEAST_OUTAGE_MS)
    later = decide(EXACT, arrival(timeout_ms=30_000), ROOMY, replace(IDLE, capacity=lost(28_000)))
    assert isinstance(later, Shed)
    assert later.retry_after_ms == 28_000


@given(loads(), st.floats(1, 1e5), st.integers(1, 120_000), st.integers(0, 120_000), st.floats(0, 0.99))
def test_what_cannot_be_met_is_never_admitted(
    load: WorkAhead, cost: float, timeout_ms: int, age_ms: int, margin: float
) -> None:
    """But by a pool of which nothing is known, or that has nothing to do; and what can be met is never refused."""
    request = arrival(cost, timeout_ms=timeout_ms, age_ms=age_ms)
    verdict = decide(replace(POLICY, safety_margin=margin), request, ROOMY, load)
    in_time = T0 + predict(load, cost).finish_ms <= request.submitted_at_ms + timeout_ms * (1 - margin)
    nothing_to_do = not load.in_flight_tokens and not load.waiting_tokens
    tries = load.capacity.state is CapacityState.NEVER or (load.capacity.state is CapacityState.LIVE and nothing_to_do)
    if verdict is None:
        assert in_time or (tries and age_ms <= timeout_ms)
    else:
        assert verdict.code is Code.DEADLINE_UNMEETABLE
        assert not in_time


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"tenant_waiting_requests": 1_000}, "the tenant's queue is full: 1000 of 1000 requests wait"),
        ({"tenant_waiting_bytes": 999_001}, "the tenant's queue is full: 999001 of 1000000 bytes wait"),
        (
            # 10,000 in all, 5,000 of them shared: 1,000 of those are free, and the tenant already holds as many
            {"tenant_waiting_requests": 1_000, "tenant_max_requests": 9_000, "total_waiting_requests": 4_000},
            "the dispatcher is full: 1000 requests of the tenant wait, 999 may for now",
        ),
        (
            {"tenant_waiting_requests": 500, "total_waiting_requests": 10_000},
            "the dispatcher is full: 500 requests of the tenant wait, 500 may for now",
        ),
    ],
)
def test_full_is_overloaded(held: Mapping[str, int], message: str) -> None:
    """In a pool that never reported, too: it accepts up to the bounds."""
    bounds = replace(ROOMY, tenant_waiting_tokens=100_000, total_waiting_tokens=400_000, **held)
    for load in (IDLE, replace(IDLE, capacity=PoolCapacity())):
        verdict = decide(POLICY, arrival(), bounds, load)
        assert isinstance(verdict, Shed)
        assert (verdict.code, verdict.message) == (Code.OVERLOADED, message)


def test_a_request_larger_than_the_tenants_bound_is_served_alone() -> None:
    bounds = replace(ROOMY, tenant_max_bytes=10)
    assert decide(POLICY, arrival(), bounds, IDLE) is None
    held = replace(bounds, tenant_waiting_requests=1, tenant_waiting_bytes=1, tenant_waiting_tokens=10)
    refused = decide(EXACT, arrival(), replace(held, total_waiting_requests=1, total_waiting_bytes=1), IDLE)
    assert isinstance(refused, Shed)
    assert refused.retry_after_ms == LEAST_RETRY_MS, "when its one request of 10 tokens is done"


@dataclass
class Dispatcher:
    """Admission over some time: what it let in waits until it is drained."""

    policy: AdmissionPolicy
    weights: list[float]
    own_requests: int = 10**9
    waiting: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = [[] for _ in self.weights]

    @property
    def total_requests(self) -> int:
        return sum(map(len, self.waiting))

    @property
    def total_bytes(self) -> int:
        return sum(map(sum, self.waiting))

    def bounds(self, tenant: int) -> Bounds:
        return Bounds(
            tenant_waiting_requests=len(self.waiting[tenant]),
            tenant_waiting_bytes=sum(self.waiting[tenant]),
            tenant_waiting_tokens=100.0 * len(self.waiting[tenant]),
            tenant_max_requests=self.own_requests,
            tenant_max_bytes=10**9,
            tenant_weight=self.weights[tenant],
            all_weights=sum(self.weights),
            total_waiting_requests=self.total_requests,
            total_waiting_bytes=self.total_bytes,
            total_waiting_tokens=100.0 * self.total_requests,
        )

    def within_guarantee(self, tenant: int, size: int) -> bool:
        part = self.policy.guaranteed_part * self.weights[tenant] / sum(self.weights)
        bounds = self.bounds(tenant)
        return (
            bounds.tenant_waiting_requests + 1 <= part * self.policy.max_waiting_requests
            and bounds.tenant_waiting_bytes + size <= part * self.policy.max_waiting_bytes
        )

    def arrive(self, tenant: int, size: int) -> bool:
        verdict = decide(self.policy, arrival(size=size), self.bounds(tenant), IDLE)
        if verdict is None:
            self.waiting[tenant].append(size)
            return True
        assert verdict.code is Code.OVERLOADED
        return False


WEIGHTS = st.lists(st.sampled_from((0.1, 0.5, 1.0, 1.0, 1.0, 2.0, 4.0, 50.0)), min_size=2, max_size=8)
BURSTS = st.lists(
    st.tuples(
        st.integers(0, 7),  # who
        st.integers(-30, 60),  # how many come, or go
        st.sampled_from((1, 10, 100, 900)),  # of what size
    ),
    max_size=40,
)


@given(
    WEIGHTS,
    BURSTS,
    st.sampled_from((0.0, 0.25, 0.5, 1.0)),
    st.sampled_from((0.25, 1.0, 4.0)),
    st.sampled_from((3, 40, 200)),
    st.sampled_from((1_000, 20_000)),
)
def test_nobodys_backlog_gets_anothers_request_refused(
    weights: list[float],
    bursts: list[tuple[int, int, int]],
    guaranteed_part: float,
    alpha: float,
    max_requests: int,
    max_bytes: int,
) -> None:
    """Whoever floods, in whatever order: a request within its tenant's guaranteed part comes in, a tenant with nothing
    waiting gets in while there is any place, and the total is exceeded by the guaranteed parts at most."""
    policy = AdmissionPolicy(
        alpha=alpha,
        guaranteed_part=guaranteed_part,
        max_waiting_requests=max_requests,
        max_waiting_bytes=max_bytes,
    )
    dispatcher = Dispatcher(policy, weights)
    for who, count, size in bursts:
        tenant = who % len(weights)
        del dispatcher.waiting[tenant][: max(0, -count)]
        for _ in range(count):
            must_come_in = dispatcher.within_guarantee(tenant, size) or (
                not dispatcher.waiting[tenant]
                and dispatcher.total_requests + 1 <= max_requests
                and dispatcher.total_bytes + size <= max_bytes
            )
            came_in = dispatcher.arrive(tenant, size)
            assert came_in or not must_come_in
            assert dispatcher.total_requests <= max_requests * (1 + guaranteed_part)
            assert dispatcher.total_bytes <= max_bytes * (1 + guaranteed_part)
            if not came_in:
                break


@given(WEIGHTS, BURSTS, st.sampled_from((0.25, 1.0, 4.0)))
def test_the_dynamic_threshold_always_leaves_some_free(
    weights: list[float], bursts: list[tuple[int, int, int]], alpha: float
) -> None:
    policy = AdmissionPolicy(alpha=alpha, guaranteed_part=0, max_waiting_requests=200)
    dispatcher = Dispatcher(policy, weights)
    for who, count, _ in bursts:
        tenant = who % len(weights)
        del dispatcher.waiting[tenant][: max(0, -count)]
        for _ in range(4 * count):
            dispatcher.arrive(tenant, 1)
        holding = [weight for weight, held in zip(weights, dispatcher.waiting, strict=True) if held]
        least = 200 / prod(1 + alpha * weight for weight in holding) - len(holding)
        assert 200 - dispatcher.total_requests >= least - 1e-9


def test_a_thousand_tenants_of_one_request_each_come_in_beside_a_flood() -> None:
    """A guaranteed part of half a request is none: a tenant with nothing waiting needs only a place."""
    dispatcher = Dispatcher(AdmissionPolicy(max_waiting_requests=1_500), [1.0] * 1_004)
    for flooder in range(4):
        while dispatcher.arrive(flooder, 1):
            pass
    assert all(dispatcher.arrive(tenant, 1) for tenant in range(4, 784))


def test_one_alone_may_hold_half_of_what_is_shared_and_gives_way_to_others() -> None:
    dispatcher = Dispatcher(AdmissionPolicy(max_waiting_requests=200), [1.0] * 10)
    flooder, victim = 0, 1
    while dispatcher.arrive(flooder, 1):
        pass
    assert len(dispatcher.waiting[flooder]) == 50, "of the 100 that are shared"
    while dispatcher.arrive(victim, 1):
        pass
    assert len(dispatcher.waiting[victim]) == 25
    del dispatcher.waiting[flooder][:20]
    assert dispatcher.total_requests == 55
    while dispatcher.arrive(flooder, 1):
        pass
    assert len(dispatcher.waiting[flooder]) == 37, "as many as are then free; it may no longer hold 50"


@given(BURSTS, st.integers(1, 50))
def test_the_tenants_own_bound_holds(bursts: list[tuple[int, int, int]], own_requests: int) -> None:
    dispatcher = Dispatcher(AdmissionPolicy(), [1.0, 1.0], own_requests=own_requests)
    for who, count, size in bursts:
        tenant = who % 2
        del dispatcher.waiting[tenant][: max(0, -count)]
        for _ in range(count):
            has_place = len(dispatcher.waiting[tenant]) < own_requests
            assert dispatcher.arrive(tenant, size) == has_place


# ------------------------------------------------------------------ backfill


@given(loads(), st.integers(0, 10**6), st.integers(0, 10**9), st.integers(0, 10**9))
def test_backfill_is_never_refused(load: WorkAhead, requests: int, size: int, age_ms: int) -> None:
    bounds = replace(
        ROOMY,
        tenant_waiting_requests=requests,
        tenant_waiting_bytes=size,
        total_waiting_requests=requests,
        total_waiting_bytes=size,
    )
    assert decide(POLICY, arrival(1e9, age_ms=age_ms, backfill=True), bounds, load) is None


def test_backfill_pauses_at_half_of_the_tenants_place_and_resumes_at_half_of_that() -> None:
    def held(requests: int) -> Bounds:
        return replace(ROOMY, tenant_waiting_requests=requests, total_waiting_requests=requests)

    # the tenant may hold its own bound, 1,000
    assert not backfill_paused(POLICY, False, held(499))
    assert backfill_paused(POLICY, False, held(500))
    assert backfill_paused(POLICY, True, held(250))
    assert not backfill_paused(POLICY, True, held(249))


def test_backfill_pauses_for_bytes_and_for_the_total_too() -> None:
    assert backfill_paused(POLICY, False, replace(ROOMY, tenant_waiting_bytes=500_000, total_waiting_bytes=500_000))
    crowded = replace(ROOMY, tenant_waiting_requests=300, total_waiting_requests=4_900)
    assert backfill_paused(POLICY, False, crowded), "500 are guaranteed, and no more than 100 free"


@given(st.lists(st.integers(0, 1_000), max_size=60))
def test_backfill_does_not_flap(held: list[int]) -> None:
    """Between two changes of mind what waits moved by at least a quarter of the tenant's place."""
    paused, changed_at = False, 0
    for requests in held:
        bounds = replace(ROOMY, tenant_waiting_requests=requests, total_waiting_requests=requests)
        now = backfill_paused(POLICY, paused, bounds)
        if now != paused:
            assert abs(requests - changed_at) >= 250
            paused, changed_at = now, requests


def test_backfill_waits_while_the_shared_part_is_full_and_nothing_is_guaranteed() -> None:
    full = replace(ROOMY, all_weights=0, total_waiting_requests=5_000)
    assert backfill_paused(POLICY, False, full)
    assert backfill_paused(POLICY, True, full), "it would resume and pause for ever"
    assert not backfill_paused(POLICY, True, replace(full, total_waiting_requests=4_000))


# ------------------------------------------------------------------ the time to come back


def drained(bounds: Bounds, load: WorkAhead, ms: float) -> tuple[Bounds, WorkAhead]:
    """The same dispatcher after so much draining at the present rate, with nothing new: all that waits leaves at the
    dispatcher's share, the tenant's own at its share, and what is in flight is refilled from what waits."""
    lost_ms = max(LEAST_OUTAGE_MS, load.capacity.lost_for_ms) if load.capacity.state is CapacityState.LOST else 0
    rate = load.capacity.last_cost_tokens_per_s
    served = rate * max(0.0, ms - lost_ms) / 1000
    own_served, all_served = served * load.own_share, served * load.dispatcher_share

    def left(tokens: float, gone: float) -> float:
        return tokens - gone if tokens - gone > 1e-6 * tokens else 0.0

    def part(amount: int, before: float, after: float) -> int:
        return ceil(amount * after / before - 1e-6) if before else 0

    waiting = left(load.waiting_tokens, all_served)
    beyond = max(0.0, all_served - load.waiting_tokens) / load.dispatcher_share
    own_all = left(bounds.tenant_waiting_tokens, own_served)
    total = max(left(bounds.total_waiting_tokens, all_served), own_all)
    own_requests = part(bounds.tenant_waiting_requests, bounds.tenant_waiting_tokens, own_all)
    own_bytes = part(bounds.tenant_waiting_bytes, bounds.tenant_waiting_tokens, own_all)
    after_load = replace(
        load,
        capacity=live(rate, consumers=1) if lost_ms else load.capacity,
        in_flight_tokens=left(load.in_flight_tokens, beyond),
        waiting_tokens=waiting,
        own_waiting_tokens=min(waiting, left(load.own_waiting_tokens, own_served)),
    )
    return (
        replace(
            bounds,
            tenant_waiting_requests=own_requests,
            tenant_waiting_bytes=own_bytes,
            tenant_waiting_tokens=own_all,
            total_waiting_requests=max(
                own_requests, part(bounds.total_waiting_requests, bounds.total_waiting_tokens, total)
            ),
            total_waiting_bytes=max(own_bytes, part(bounds.total_waiting_bytes, bounds.total_waiting_tokens, total)),
            total_waiting_tokens=total,
        ),
        after_load,
    )


def told(verdict: Shed | None) -> int:
    """The time to retry of a rejection that has one."""
    assert isinstance(verdict, Shed)
    assert verdict.retry_after_ms is not None
    return verdict.retry_after_ms


@st.composite
def crowds(draw: st.DrawFn) -> tuple[Bounds, WorkAhead]:
    """A load and the backlog that makes it: a tenant's own part of it, other pools' too."""
    load = draw(
        loads(
            st.one_of(
                st.builds(live, st.floats(100, 1e5), st.integers(1, 8)),
                st.builds(lost, st.integers(0, 50_000), st.floats(100, 1e5)),
            )
        )
    )
    own_requests = draw(st.integers(0, 300))
    total_requests = own_requests + draw(st.integers(0, 300))
    own_tokens = load.own_waiting_tokens + draw(st.floats(0, 1e4)) + own_requests
    return (
        Bounds(
            tenant_waiting_requests=own_requests,
            tenant_waiting_bytes=own_requests * draw(st.integers(1, 1_000)),
            tenant_waiting_tokens=own_tokens,
            tenant_max_requests=draw(st.sampled_from((1, 5, 100, 10_000))),
            tenant_max_bytes=draw(st.sampled_from((500, 50_000, 10**9))),
            tenant_weight=draw(st.sampled_from((0.1, 1.0, 8.0))),
            all_weights=draw(st.sampled_from((0.0, 8.0, 100.0))),
            total_waiting_requests=total_requests,
            total_waiting_bytes=total_requests * 1_000,
            total_waiting_tokens=max(own_tokens, load.waiting_tokens) + total_requests,
        ),
        load,
    )


@given(
    crowds(),
    st.floats(1, 1e4),
    st.integers(1, 5_000),
    st.integers(1, 120_000),
    st.none() | st.integers(1, 120_000),
    st.sampled_from((0.0, 0.5, 1.0)),
)
def test_after_the_time_it_was_told_the_same_request_gets_in(
    crowd: tuple[Bounds, WorkAhead],
    cost: float,
    size: int,
    timeout_ms: int,
    target_ms: int | None,
    guaranteed_part: float,
) -> None:
    policy = replace(EXACT, max_waiting_requests=400, max_waiting_bytes=400_000, guaranteed_part=guaranteed_part)
    bounds, load = crowd
    request = arrival(cost, timeout_ms=timeout_ms, target_ms=target_ms, size=size)
    refused = decide(policy, request, bounds, load)
    assume(isinstance(refused, Shed) and refused.retry_after_ms is not None)
    told_ms = told(refused)
    assert LEAST_RETRY_MS <= told_ms <= MOST_RETRY_MS
    assume(told_ms < MOST_RETRY_MS)  # beyond that it is told the most there is
    later = T0 + told_ms
    again = replace(request, submitted_at_ms=later, deadline_at_ms=later + timeout_ms)
    assert decide(policy, again, *drained(bounds, load, told_ms + 1), later) is None


def test_what_never_fits_its_allowed_time_is_told_no_time() -> None:
    """10,000 tokens take 20 s at a consumer's 500/s, of which no queue is to blame."""
    load = replace(IDLE, in_flight_tokens=100.0)
    refused = decide(EXACT, arrival(10_000, timeout_ms=9_000), ROOMY, load)
    assert isinstance(refused, Shed)
    assert refused.code == Code.DEADLINE_UNMEETABLE
    assert refused.retry_after_ms is None
    # Beside others a run takes longer: alone it would fit.
    refused = decide(EXACT, arrival(4_000, timeout_ms=9_000), ROOMY, replace(load, service_stretch=2.0))
    assert told(refused) >= LEAST_RETRY_MS


def test_overloaded_comes_back_when_a_tenth_of_its_place_is_free() -> None:
    """1,000 waiting are 100,000 tokens, which drain in 200 s at half of 1,000/s; a tenth of that is 20 s."""
    bounds = replace(
        ROOMY,
        tenant_waiting_requests=1_000,
        tenant_waiting_tokens=100_000,
        total_waiting_requests=1_000,
        total_waiting_tokens=100_000,
    )
    refused = decide(EXACT, arrival(timeout_ms=10**6), bounds, replace(IDLE, own_share=0.5))
    assert isinstance(refused, Shed)
    assert refused.retry_after_ms == 20_000


def test_without_a_rate_it_comes_back_when_a_consumer_may_have_come() -> None:
    bounds = replace(ROOMY, tenant_waiting_requests=1_000, tenant_waiting_tokens=100_000)
    for capacity in (PoolCapacity(), live(0)):
        refused = decide(EXACT, arrival(), bounds, replace(IDLE, capacity=capacity))
        assert LEAST_RETRY_MS <= told(refused) <= LEAST_OUTAGE_MS


@given(loads(), st.text(min_size=1, max_size=40), st.integers(1, 1_000))
def test_jitter_lengthens_by_at_most_half_and_is_the_same_each_time(
    load: WorkAhead, request_id: str, timeout_ms: int
) -> None:
    request = replace(arrival(100, timeout_ms=timeout_ms), name=request_id)
    exact, jittered = (decide(policy, request, ROOMY, load) for policy in (EXACT, POLICY))
    assume(isinstance(exact, Shed) and exact.retry_after_ms is not None)
    jittered_ms = told(jittered)
    assert LEAST_RETRY_MS <= jittered_ms <= MOST_RETRY_MS
    base_ms = min(told(exact), MOST_RETRY_MS / 1.5)
    assert base_ms <= jittered_ms + 1
    assert jittered_ms <= 1.5 * base_ms + 1
    assert decide(POLICY, request, ROOMY, load) == jittered


def test_those_refused_together_do_not_return_together() -> None:
    """Not even when all of them are told the most there is."""
    for load in (replace(IDLE, in_flight_tokens=60_000), replace(IDLE, in_flight_tokens=1e9)):
        verdicts = [decide(POLICY, replace(arrival(), name=f"r-{i}"), ROOMY, load) for i in range(1_000)]
        times = sorted(map(told, verdicts))
        assert len(times) == 1_000
        assert times[900] - times[100] > 0.35 * times[0]


def test_the_shared_bound_says_never_to_what_can_never_come_in() -> None:
    shared = SharedBound(
        bound=100, held=10, own_bound=50, own_held=10, weight=1, all_weights=10, alpha=1, guaranteed_part=0.5
    )
    assert shared.ms_until_admitted(1, 1_000, 1_000) == 0
    assert shared.ms_until_admitted(101, 1_000, 1_000) == float("inf")


@pytest.mark.parametrize(
    "wrong",
    [
        {"safety_margin": 1.0},
        {"safety_margin": -0.1},
        {"max_waiting_requests": 0},
        {"max_waiting_bytes": 0},
        {"alpha": 0.0},
        {"guaranteed_part": 1.5},
        {"jitter": -1.0},
        {"alpha": float("nan")},
    ],
    ids=str,
)
def test_a_policy_out_of_range_is_refused(wrong: Mapping[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AdmissionPolicy(**wrong)  # type: ignore[arg-type]  # keys vary
