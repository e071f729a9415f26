"""The scheduler as a whole: window, order, deadlines, predictions, backfill, case by case."""

from collections import Counter

import pytest

from fairlane.names import priority_topic
from fairlane.outcomes import Code
from fairlane.records import TenantSpec
from stream_processors.dispatcher.admission.rules import AdmissionPolicy, Shed
from stream_processors.dispatcher.scheduling.fair_queue import Policy
from stream_processors.dispatcher.scheduling.in_flight import ANY_PARTITION, Reserved
from tests.kit.scheduler_kit import (
    POLICIES,
    POOL,
    TARGET_QUEUE_MS,
    Kit,
    Request,
    capacity_report,
    dispatch_report,
    source_of,
)

CLASSES = ("high", "normal", "low")
TENANTS = ("a", "b", "c")
POOLS = (POOL, "other-pool")

policies = pytest.mark.parametrize("policy", POLICIES)


# The window


def test_a_pool_that_lives_is_filled_up_to_its_window_and_refilled_as_it_settles() -> None:
    kit = Kit()
    kit.report(capacity_report(items=4, tokens=400))
    kit.push_many(20)
    first = kit.dispatched()
    assert [item.claim.offset for item in first] == list(range(1, 9))
    assert not kit.dispatched()
    kit.settle(first[3])
    assert len(kit.dispatched()) == 1


def test_one_request_larger_than_the_window_goes_alone() -> None:
    kit = Kit("fifo")
    kit.report(capacity_report(tokens=100))
    small, large, last = kit.push(), kit.push(cost_tokens=5_000), kit.push()
    assert kit.dispatched() == [small]
    kit.settle(small)
    assert kit.dispatched() == [large]
    kit.settle(large)
    assert kit.dispatched() == [last]


def test_a_lost_pool_gets_nothing_until_it_is_back() -> None:
    kit = Kit()
    kit.report(capacity_report())
    kit.report(capacity_report(draining=True))
    kit.push()
    assert not kit.dispatched()
    kit.report(capacity_report())
    assert len(kit.dispatched()) == 1


def test_a_share_of_the_window_beside_another_dispatcher() -> None:
    """It has three tenants waiting, this one has one: a quarter of a window of 2,000 tokens."""
    kit = Kit(specs=[TenantSpec("a")])
    kit.report(capacity_report(tokens=1_000))
    kit.scheduler.fleet.report(dispatch_report("other", {"normal": 3.0}, 0), 0)
    kit.push_many(20)
    assert len(kit.dispatched()) == 5


def test_the_share_grows_when_the_other_dispatcher_falls_silent() -> None:
    kit = Kit(specs=[TenantSpec("a")])
    kit.report(capacity_report(tokens=1_000))
    kit.scheduler.fleet.report(dispatch_report("other", {"normal": 3.0}, 0), 0)
    kit.push_many(30)
    kit.turns()
    kit.now_ms = 1_000
    assert len(kit.dispatched()) == 15


def test_work_goes_to_the_partition_with_least_in_flight() -> None:
    kit = Kit()
    kit.push()
    (turn,) = kit.turns()
    assert turn.partition == ANY_PARTITION
    kit.in_flight.set_partitions(priority_topic(POOL, "normal"), 2)
    kit.push_many(4)
    assert Counter(turn.partition for turn in kit.turns()) == {0: 2, 1: 2}


# The order


def two_engines(kit: Kit) -> None:
    """Each runs one request at a time, 1,000 tokens a second."""
    reports = [
        capacity_report(f"c{number}", rate=1_000.0, items=1, tokens=10_000, partitions=(number,)) for number in (0, 1)
    ]
    kit.in_flight.set_partitions(priority_topic(POOL, "normal"), 2)
    kit.report(*reports)


def test_a_consumer_gets_its_next_request_shortly_before_it_is_done() -> None:
    kit = Kit(specs=[TenantSpec("a")])
    two_engines(kit)
    kit.push_many(6, "a", cost_tokens=500)
    assert kit.scheduler.next_turn_ms(0) is None, "none has anything to do"
    assert [turn.partition for turn in kit.turns()] == [0, 1]
    kit.now_ms = 100
    assert kit.dispatched() == []
    assert kit.scheduler.next_turn_ms(kit.now_ms) == 500 - 100 - TARGET_QUEUE_MS
    kit.now_ms = 400
    assert [turn.partition for turn in kit.turns()] == [0, 1]
    assert kit.dispatched() == []
    assert kit.scheduler.next_turn_ms(kit.now_ms) == 500


def test_the_consumer_that_is_done_first_gets_the_next_request() -> None:
    kit = Kit(specs=[TenantSpec("a")])
    two_engines(kit)
    long, short = kit.push("a", cost_tokens=900), kit.push("a", cost_tokens=300)
    assert [turn.partition for turn in kit.turns()] == [0, 1]
    kit.push_many(3, "a", cost_tokens=300)
    kit.now_ms = 250
    assert [turn.partition for turn in kit.turns()] == [1]
    topic = priority_topic(POOL, "normal")
    work = kit.read_back(source_of(short), "a", 300, topic)
    kit.in_flight.settled(work)
    kit.scheduler.finished(topic, 1, 310)
    kit.now_ms = 310
    assert kit.dispatched() == [], "its next run has just begun"
    assert kit.in_flight.held(POOL).items == 2
    assert long.cost_tokens == 900


@policies
def test_each_policy_has_its_order(policy: Policy) -> None:
    """Tenant a was first with four requests of 400 tokens, b came with as many of 100; the window is 400."""
    kit = Kit(policy, [TenantSpec("a"), TenantSpec("b")])
    kit.report(capacity_report(tokens=200))
    kit.push_many(4, "a", cost_tokens=400, prompt_tokens=40)
    kit.push_many(16, "b", cost_tokens=100, prompt_tokens=10)
    served: list[str] = []
    tokens: Counter[str] = Counter()
    while tokens["a"] + tokens["b"] < 1_600:
        for item in kit.dispatched():
            served.append(item.tenant)
            tokens[item.tenant] += item.cost_tokens
            own = kit.settle(item).own
            assert own is not None
            kit.scheduler.correct(own, item.cost_tokens - kit.scheduler.charged_tokens(own))
    if policy == "fifo":
        assert served[:4] == ["a"] * 4
    else:
        assert abs(tokens["a"] - tokens["b"]) <= 2 * 512 + 400 + 100
        assert "b" in served[:4]


@policies
def test_a_correction_sets_the_charge_right(policy: Policy) -> None:
    kit = Kit(policy)
    item = kit.push()
    kit.turns()
    own = kit.settle(item).own
    assert own is not None
    assert kit.scheduler.charged_tokens(own) == (10 if policy == "vtc" else 100)
    kit.scheduler.correct(own, -50)


def test_weights_change_while_requests_wait() -> None:
    kit = Kit(specs=[TenantSpec("a"), TenantSpec("b")])
    kit.report(capacity_report(tokens=500))

    def served(count: int) -> Counter[str]:
        found: Counter[str] = Counter()
        while sum(found.values()) < count:
            for item in kit.dispatched():
                found[item.tenant] += 1
                kit.settle(item)
        return found

    kit.push_many(2_000, "a")
    kit.push_many(2_000, "b")
    equal = served(400)
    assert abs(equal["a"] - equal["b"]) <= 15
    kit.scheduler.set_tenants({"a": TenantSpec("a", weight=3.0), "b": TenantSpec("b")})
    weighted = served(400)
    assert abs(weighted["a"] - 300) <= 30


def test_a_tenant_that_is_withdrawn_leaves_nothing_behind() -> None:
    kit = Kit(specs=[TenantSpec("a", weight=9.0), TenantSpec("b")])
    kit.push("a")
    kit.scheduler.set_tenants({"b": TenantSpec("b")})
    (queue,) = (queue for _, queue, *_ in kit.scheduler.pool_views())
    kit.turns()
    kit.push("a")
    assert queue.backlogged_weight("normal") == 1.0


def test_part_of_a_tenants_partitions_is_part_of_its_weight() -> None:
    kit = Kit()
    kit.scheduler.set_tenants({"a": TenantSpec("a", weight=4.0)}, {"a": 0.25})
    kit.push("a")
    (queue,) = (queue for _, queue, *_ in kit.scheduler.pool_views())
    assert queue.backlogged_weight("normal") == 1.0
    kit.scheduler.set_tenants({"a": TenantSpec("a", weight=4.0)})
    assert queue.backlogged_weight("normal") == 4.0


# Those whose partition would block


@pytest.mark.parametrize("policy", ["drr", "vtc"])
def test_an_expedited_request_goes_first_among_its_own(policy: Policy) -> None:
    kit = Kit(policy)
    kit.report(capacity_report(tokens=100))
    items = kit.push_many(4, "a")
    kit.push_many(4, "b")
    assert kit.dispatched(items[3].claim)[0] is items[3]


@policies
def test_an_expedited_request_overtakes_nobody_else(policy: Policy) -> None:
    """Neither another tenant's, nor its own tenant's of a higher class."""

    def turns(*, escalated: bool) -> list[tuple[str, str]]:
        kit = Kit(policy)
        kit.report(capacity_report(tokens=500))
        kit.push_many(8, "a", priority_class="high")
        kit.push_many(8, "b", priority_class="high")
        old = kit.push_many(8, "b", priority_class="low")[-1]
        gone = kit.dispatched(old.claim) if escalated else kit.dispatched()
        return [(item.tenant, item.priority_class) for item in gone]

    assert turns(escalated=True) == turns(escalated=False)


def test_expedited_requests_keep_to_the_window() -> None:
    kit = Kit()
    kit.report(capacity_report(tokens=100))
    items = kit.push_many(5)
    claims = [item.claim for item in items]
    assert kit.dispatched(*claims) == items[:2]
    assert not kit.dispatched(*claims)


def test_an_expedited_request_keeps_no_room_free() -> None:
    """It costs half a window, the others a tenth of one, and a tenth at a time becomes free: that is theirs."""
    kit = Kit()
    kit.report(capacity_report(tokens=500))
    in_flight = kit.push_many(10, "a", priority_class="high") and kit.dispatched()
    kit.push_many(50, "a", priority_class="high")
    old = kit.push("b", priority_class="low", cost_tokens=500)
    for done in in_flight[:4]:
        kit.settle(done)
        (gone,) = kit.dispatched(old.claim)
        assert gone.tenant == "a"


def test_an_expedited_claim_that_does_not_wait_is_no_turn() -> None:
    kit = Kit()
    item = kit.push()
    kit.scheduler.discard([item.claim])
    assert not kit.dispatched(item.claim)


# Deadlines


def test_what_expired_is_late_and_takes_no_room() -> None:
    kit = Kit()
    kit.push(deadline_at_ms=10)
    kit.now_ms = 11
    (turn,) = kit.turns()
    assert turn.is_late
    assert kit.in_flight.tokens(POOL) == 0


def test_what_would_end_too_late_is_late_already() -> None:
    """1,000 tokens in flight at 1,000 tokens/s, so it would be done after 1.1 s."""
    kit = Kit()
    kit.report(capacity_report(rate=1_000.0, tokens=500))
    kit.push_many(10)
    kit.turns()
    kit.push(deadline_at_ms=1_099)
    good = kit.push(deadline_at_ms=1_100)
    assert [item.deadline_at_ms for item in kit.scheduler.take_late(0)] == [1_099]
    assert kit.scheduler.claims() == (good.claim,)


def test_late_ones_are_taken_whoevers_turn_it_is() -> None:
    """Neither pool has room, and the late ones stand in different classes."""
    kit = Kit()
    for pool in POOLS:
        kit.report(capacity_report(rate=0.0, pool=pool, tokens=50))
        kit.push(pool=pool)
    kit.turns()
    for pool in POOLS:
        kit.push("a", pool=pool, deadline_at_ms=5)
        kit.push("b", pool=pool, deadline_at_ms=5, priority_class="low")
        kit.push("a", pool=pool)
    assert not kit.turns()
    assert not kit.scheduler.take_late(5)
    assert len(kit.scheduler.take_late(6)) == 4
    assert len(kit.scheduler) == 2


def test_an_idle_pool_takes_anything_that_has_not_expired() -> None:
    """Its rate was measured at one token per second: at that it would never be tried again."""
    kit = Kit()
    kit.report(capacity_report(rate=1.0))
    item = kit.request(deadline_at_ms=1_000)
    assert kit.judge(item) is None
    kit.scheduler.push(item)
    assert kit.dispatched() == [item]
    verdict = kit.judge(kit.request(deadline_at_ms=1_000))
    assert isinstance(verdict, Shed)
    assert verdict.code == Code.DEADLINE_UNMEETABLE


def test_a_pool_that_never_reported_takes_what_comes() -> None:
    kit = Kit()
    kit.push_many(500, cost_tokens=1_000)
    kit.turns()
    item = kit.request(cost_tokens=100_000, deadline_at_ms=1)
    assert kit.judge(item) is None


def test_a_pool_that_was_lost_refuses_what_cannot_wait_for_it() -> None:
    kit = Kit()
    kit.report(capacity_report())
    kit.now_ms = 4_000
    short = kit.judge(kit.request(deadline_at_ms=kit.now_ms + 5_000))
    assert isinstance(short, Shed)
    assert short.code == Code.DEADLINE_UNMEETABLE
    assert short.retry_after_ms is not None
    assert short.retry_after_ms >= 10_000
    assert kit.judge(kit.request(deadline_at_ms=kit.now_ms + 60_000)) is None
    assert kit.judge(kit.request(deadline_at_ms=kit.now_ms + 5_000, is_backfill=True)) is None


# Predictions


def predicted_wait_ms(kit: Kit, tenant: str) -> float:
    kit.scheduler.refresh(kit.now_ms)
    return kit.scheduler.predict(kit.request(tenant))[1].wait_ms


@policies
def test_a_prediction_is_what_lies_before_a_request(policy: Policy) -> None:
    """At 1,000 tokens/s: 1,000 in flight, 1,000 more waiting of a; before the first of b goes one of a, 100 tokens."""
    kit = Kit(policy, [TenantSpec("a"), TenantSpec("b")])
    kit.report(capacity_report(rate=1_000.0, tokens=500))
    kit.push_many(20, "a")
    kit.turns()
    assert kit.in_flight.tokens(POOL) == 1_000
    assert predicted_wait_ms(kit, "a") == pytest.approx(2_000)
    assert predicted_wait_ms(kit, "b") == pytest.approx(2_000 if policy == "fifo" else 1_200)


def test_a_prediction_counts_ones_own_backlog_at_ones_own_share() -> None:
    """Of b wait 1,000 tokens, 1,100 with one more: 4.4 s at its quarter of the pool, but no more goes first than all
    that waits: 2 s."""
    kit = Kit(specs=[TenantSpec("a", weight=3.0), TenantSpec("b")])
    kit.report(capacity_report(rate=1_000.0, tokens=500))
    kit.push_many(10, "a")
    kit.turns()
    kit.push_many(10, "a")
    kit.push_many(10, "b")
    assert predicted_wait_ms(kit, "b") == pytest.approx(1_000 + 2_000)
    kit.push_many(100, "a")
    assert predicted_wait_ms(kit, "b") == pytest.approx(1_000 + 4_400)


def test_a_backlog_that_lasts_is_predicted_by_what_it_was_served() -> None:
    """b's queue runs empty again and again, and b still takes four fifths of what is served. a is entitled to
    everything at such a moment, to a tenth at others, and gets a fifth."""
    kit = Kit(specs=[TenantSpec("a"), TenantSpec("b", weight=9.0)])
    kit.report(capacity_report(rate=1_000.0, tokens=50))
    kit.scheduler.refresh(kit.now_ms)
    kit.push_many(100, "a")
    for _ in range(40):
        for tenant in "abbbb":
            if tenant == "b":
                kit.push("b")
            kit.now_ms += 100
            kit.report(capacity_report(rate=1_000.0, tokens=50))
            for item in kit.dispatched():
                kit.settle(item)
    kit.scheduler.refresh(kit.now_ms)
    load, prediction = kit.scheduler.predict(kit.request("a"))
    assert load.served_share is not None
    assert load.served_share == pytest.approx(0.2, abs=0.1)
    assert prediction.wait_ms == pytest.approx(load.own_waiting_tokens / load.served_share)
    assert load.own_share in (pytest.approx(0.1), 1.0)


def test_runs_that_take_longer_than_a_requests_own_tokens_are_learned_by_its_size() -> None:
    kit = Kit()
    kit.report(capacity_report(rate=1_000.0))
    kit.scheduler.refresh(kit.now_ms)

    def service_ms(cost_tokens: int) -> float:
        return kit.scheduler.predict(kit.request(cost_tokens=cost_tokens))[1].service_ms

    assert service_ms(100) == 100
    own = Reserved(POOL, "normal", 0, "a", "", 100, 10, "words")
    for _ in range(20):
        kit.scheduler.learn_service(own, 100, 300)
    assert service_ms(100) == pytest.approx(service_ms(120) * 100 / 120) == pytest.approx(300, rel=0.1)
    assert service_ms(4_000) == 4_000, "nothing is known of those"
    assert kit.scheduler.predict(kit.request(cost_tokens=100, model_name="other"))[1].service_ms == 100, "nor of those"
    kit.scheduler.learn_service(own, 100, 10**12)
    assert service_ms(100) < 100 * 100
    kit.now_ms = 31_000
    kit.report(capacity_report(rate=1_000.0))
    kit.scheduler.refresh(kit.now_ms)
    assert service_ms(100) == 100, "what refuses what would teach it anew does not stay"


def test_what_was_queued_before_the_rate_was_known_is_compared_with_it() -> None:
    """A new deployment: 200 s of work came in before the first measurement."""
    kit = Kit()
    kit.report(capacity_report(rate=0.0))
    kit.scheduler.refresh(kit.now_ms)
    waiting = [kit.push(deadline_at_ms=20_000) for _ in range(2_000)]
    assert kit.scheduler.take_late(kit.now_ms) == []
    kit.now_ms = 1_000
    kit.report(capacity_report(rate=1_000.0))
    kit.scheduler.refresh(kit.now_ms)
    gone = kit.scheduler.take_late(kit.now_ms)
    assert len(waiting) - len(gone) == pytest.approx(190, abs=20)


@pytest.mark.parametrize("tenants", [1, 8])
def test_a_batch_is_judged_as_its_requests_one_by_one(tenants: int) -> None:
    """At 1,000 tokens a second, 5 s of target are 5,000 tokens, whoever they are of."""
    kit = Kit(specs=[TenantSpec(str(number)) for number in range(tenants)])
    kit.report(capacity_report(rate=1_000.0))
    kit.scheduler.refresh(kit.now_ms)
    admitted = 0
    for number in range(400):
        item = kit.request(str(number % tenants), cost_tokens=100, deadline_at_ms=20_000, target_ms=5_000)
        load, _ = kit.scheduler.predict(item)
        if kit.scheduler.judge(item, load, kit.now_ms) is None:
            kit.scheduler.push(item)
            admitted += 1
    assert admitted == pytest.approx(50, abs=tenants + 2)


def test_who_was_admitted_alone_is_told_when_others_of_the_same_batch_leave_it_too_little() -> None:
    kit = Kit(specs=[TenantSpec(str(number)) for number in range(8)])
    kit.report(capacity_report(rate=1_000.0))
    kit.scheduler.refresh(kit.now_ms)
    for number in range(8):
        kit.push_many(50, str(number), cost_tokens=100, deadline_at_ms=20_000)
    gone = Counter(item.tenant for item in kit.scheduler.take_late(kit.now_ms))
    assert all(20 <= gone[str(number)] <= 30 for number in range(8)), "each has 20 s at an eighth of the rate"


def test_a_pool_that_gets_slower_answers_at_once_what_it_cannot_serve_any_more() -> None:
    """Two consumers, 4 s of work, deadlines in 5 s: with one of them the second half cannot be done in time."""
    kit = Kit(specs=[TenantSpec("a"), TenantSpec("b")])
    kit.report(capacity_report("c1", rate=500.0, tokens=50), capacity_report("c2", rate=500.0, tokens=50))
    kit.scheduler.refresh(kit.now_ms)
    waiting = [kit.push(tenant, deadline_at_ms=5_000) for tenant in "ab" * 20]
    backfill = kit.push("a", deadline_at_ms=5_000, is_backfill=True)
    assert kit.scheduler.take_late(kit.now_ms) == []
    kit.now_ms = 250
    kit.report(capacity_report("c2", draining=True), capacity_report("c1", rate=500.0, tokens=50))
    kit.scheduler.refresh(kit.now_ms)
    gone = kit.scheduler.take_late(kit.now_ms)
    assert 12 <= len(gone) <= 24
    assert {item.tenant for item in gone} == {"a", "b"}
    assert backfill not in gone, "it waits"
    kept = [item for item in waiting if item not in gone]
    assert {item.tenant for item in kept} == {"a", "b"}
    assert kit.scheduler.take_late(kit.now_ms) == [], "once"


def test_what_a_tenant_cannot_be_served_any_more_beside_others_is_answered_at_once() -> None:
    """Alone it would be served in 4 s of the 5 s that it has; then three others come, and its share is a fourth."""
    kit = Kit(specs=[TenantSpec(tenant) for tenant in "abcd"])
    kit.report(capacity_report(rate=1_000.0, tokens=50))
    kit.scheduler.refresh(kit.now_ms)
    for _ in range(40):
        kit.push("a", deadline_at_ms=5_000)
    assert kit.scheduler.take_late(kit.now_ms) == []
    kit.now_ms = 100
    kit.report(capacity_report(rate=1_000.0, tokens=50))
    for tenant in "bcd":
        for _ in range(10):
            kit.push(tenant, deadline_at_ms=10_000)
    kit.scheduler.refresh(kit.now_ms)
    gone = kit.scheduler.take_late(kit.now_ms)
    assert 20 <= len(gone) <= 36
    assert {item.tenant for item in gone} == {"a"}


def test_a_debt_delays_the_tenant_and_the_prediction_knows_it() -> None:
    kit = Kit(specs=[TenantSpec("a"), TenantSpec("b")])
    kit.report(capacity_report(rate=1_000.0, tokens=50))
    kit.scheduler.refresh(kit.now_ms)
    kit.push("a")
    for _ in range(200):
        kit.push("b")
    kit.scheduler.refresh(kit.now_ms)
    before = {tenant: kit.scheduler.predict(kit.request(tenant))[1].queue_ms for tenant in "ab"}
    kit.scheduler.correct(Reserved(POOL, "normal", 0, "a", "", 100, 10, "words"), 10_000)
    after = {tenant: kit.scheduler.predict(kit.request(tenant))[1].queue_ms for tenant in "ab"}
    assert before["a"] + 8_000 < after["a"] < before["a"] + 11_000
    assert after["b"] == before["b"]


def test_only_work_with_an_earlier_deadline_is_ahead_of_a_request() -> None:
    kit = Kit()
    kit.report(capacity_report(rate=1_000.0, tokens=50))
    kit.scheduler.refresh(kit.now_ms)
    for _ in range(50):
        kit.push(deadline_at_ms=600_000)
    kit.push(deadline_at_ms=8_000)

    def ahead(deadline_at_ms: int) -> float:
        return kit.scheduler.predict(kit.request(deadline_at_ms=deadline_at_ms))[0].own_waiting_tokens

    assert ahead(10_000) == ahead(7_000) + 100 == ahead(600_000) - 5_000


def test_a_pool_that_is_lost_answers_at_once_what_would_not_live_to_its_return() -> None:
    kit = Kit()
    kit.report(capacity_report(rate=1_000.0))
    kit.scheduler.refresh(kit.now_ms)
    soon, later = kit.push(deadline_at_ms=9_000), kit.push(deadline_at_ms=60_000)
    assert kit.scheduler.take_late(kit.now_ms) == []
    kit.report(capacity_report(draining=True))
    kit.scheduler.refresh(kit.now_ms)
    assert kit.scheduler.take_late(kit.now_ms) == [soon]
    assert kit.scheduler.holds(later.claim)
    kit.now_ms = 25_000
    kit.scheduler.refresh(kit.now_ms)
    assert kit.scheduler.take_late(kit.now_ms) == [], "expected back after 25 s more"
    kit.now_ms = 31_000
    kit.scheduler.refresh(kit.now_ms)
    assert kit.scheduler.take_late(kit.now_ms) == [later]


def test_with_many_tenants_a_newcomer_waits_for_the_turns_of_all() -> None:
    """A hundred others, each with one of 100 tokens in front of more: 10 s, whether they have 2 or 20 waiting."""
    others = [f"other-{number}" for number in range(100)]
    for waiting in (2, 20):
        kit = Kit(specs=map(TenantSpec, (*others, "b")))
        kit.report(capacity_report(rate=1_000.0, tokens=50))
        for other in others:
            kit.push_many(waiting, other)
        kit.turns()
        assert predicted_wait_ms(kit, "b") == pytest.approx(100 + 10_100, rel=0.01)


def test_the_window_in_items_holds_before_anything_was_dispatched() -> None:
    """20,000 tokens/s for 100 ms are 200 requests of 10 tokens."""
    kit = Kit()
    kit.report(capacity_report(rate=20_000.0, tokens=16_384, items=32))
    kit.push_many(1_000, "a", cost_tokens=10)
    assert len(kit.turns()) == 200


def test_the_rank_is_the_place_among_ones_own() -> None:
    kit = Kit()
    kit.push_many(3, "a")
    kit.push_many(2, "b")
    kit.push("a", priority_class="high")
    assert [kit.scheduler.rank_at_most(kit.request(tenant)) for tenant in TENANTS] == [4, 3, 1]


def test_the_share_that_a_tenant_is_entitled_to() -> None:
    """Normal and low wait, 3 to 1; in normal a has half of the weight."""
    kit = Kit(specs=[TenantSpec("a", weight=2.0), TenantSpec("b", weight=2.0)])
    kit.push("a")
    kit.push("b")
    kit.push("b", priority_class="low")
    kit.scheduler.refresh(0)
    assert kit.scheduler.entitled_share("a", POOL) == pytest.approx(0.75 / 2)
    assert kit.scheduler.entitled_share("b", POOL) == pytest.approx(0.75 / 2 + 0.25)
    assert kit.scheduler.entitled_share("c", POOL) == 0.0
    assert kit.scheduler.entitled_share("a", "unknown") == 0.0


# Backfill


def test_backfill_pauses_and_resumes_with_hysteresis() -> None:
    """Of 100 a tenant alone may hold 50: it pauses at 25 and resumes below 12.5."""
    kit = Kit(specs=[TenantSpec("a")], admission=AdmissionPolicy(max_waiting_requests=100))
    kit.report(capacity_report(draining=True))
    items: list[Request] = []

    def hold(count: int) -> set[str]:
        while len(items) > count:
            kit.scheduler.discard([items.pop().claim])
        items.extend(kit.push_many(count - len(items), "a", is_backfill=True))
        return kit.scheduler.paused_backfill()

    assert not hold(20)
    assert hold(40) == {"a"}
    assert hold(20) == {"a"}
    assert not hold(5)
    assert not hold(20)


def test_a_pause_ends_with_the_last_that_waits() -> None:
    kit = Kit(specs=[TenantSpec("a")], admission=AdmissionPolicy(max_waiting_requests=10))
    items = kit.push_many(10, "a", is_backfill=True)
    assert kit.scheduler.paused_backfill() == {"a"}
    kit.scheduler.discard([item.claim for item in items])
    assert not kit.scheduler.paused_backfill()


def test_one_tenants_pause_is_not_anothers() -> None:
    kit = Kit(specs=map(TenantSpec, TENANTS), admission=AdmissionPolicy(max_waiting_requests=100))
    kit.push_many(60, "a", is_backfill=True)
    kit.push("b", is_backfill=True)
    assert kit.scheduler.paused_backfill() == {"a"}


@pytest.mark.parametrize("online", [30, 100])
def test_backfill_resumes_whatever_waits_online(online: int) -> None:
    """A queue that stays between a quarter and a half of the tenant's place, or is full."""
    kit = Kit(specs=[TenantSpec("a", max_queue_requests=100), TenantSpec("b")])
    kit.push_many(online, "a", priority_class="high")
    assert not kit.scheduler.paused_backfill()
    items = kit.push_many(50, "a", is_backfill=True)
    assert kit.scheduler.paused_backfill() == {"a"}
    kit.scheduler.discard([item.claim for item in items[:25]])
    assert kit.scheduler.paused_backfill() == {"a"}
    kit.scheduler.discard([items[25].claim])
    assert not kit.scheduler.paused_backfill()


def test_no_backfill_gets_an_online_request_refused() -> None:
    """Neither another tenant's nor its own, however much of it had been fetched before the pauses."""
    tenants = [f"t{number}" for number in range(40)]
    kit = Kit(specs=map(TenantSpec, tenants), admission=AdmissionPolicy(max_waiting_requests=400))
    kit.report(capacity_report(rate=1e6))
    kit.push_many(20, "t1")
    for tenant in tenants:
        kit.push_many(200, tenant, is_backfill=True, size_bytes=10**8)
    assert kit.judge(kit.request("t1")) is None
    assert kit.scheduler.paused_backfill() == set(tenants)


def test_no_backfill_is_read_while_as_much_as_the_bound_waits() -> None:
    """Also of a tenant with none waiting: what is fetched before a pause would add up over many tenants."""
    kit = Kit(specs=map(TenantSpec, TENANTS), admission=AdmissionPolicy(max_waiting_requests=100))
    items = kit.push_many(100, "a", is_backfill=True)
    assert kit.scheduler.paused_backfill() == set(TENANTS)
    kit.scheduler.discard([items[0].claim])
    assert kit.scheduler.paused_backfill() == {"a"}
    kit.push("a", is_backfill=True, size_bytes=AdmissionPolicy().max_waiting_bytes)
    assert kit.scheduler.paused_backfill() == set(TENANTS)


# Taking out


@pytest.mark.parametrize("policy", ["drr", "vtc"])
def test_what_is_taken_out_is_not_charged(policy: Policy) -> None:
    kit = Kit(policy, map(TenantSpec, TENANTS))
    gone = kit.push_many(5, "a", cost_tokens=5_000, prompt_tokens=5_000)
    for tenant in ("a", "b"):
        kit.push_many(3, tenant, cost_tokens=600, prompt_tokens=600)
    assert kit.scheduler.take(lambda item: item.cost_tokens == 5_000) == gone
    assert len(kit.scheduler) == 6
    kit.report(capacity_report(tokens=10_000))
    assert [item.tenant for item in kit.dispatched()] == ["a", "b"] * 3


# Forgetting


def test_what_is_discarded_may_come_again() -> None:
    kit = Kit()
    item = kit.push()
    kit.scheduler.discard([item.claim])
    assert not kit.turns()
    kit.scheduler.push(item)
    assert kit.dispatched() == [item]


def test_a_request_that_waits_is_not_pushed_again() -> None:
    kit = Kit()
    item = kit.push()
    with pytest.raises(ValueError, match="waits already"):
        kit.scheduler.push(item)
    assert kit.dispatched() == [item]
    assert (len(kit.scheduler), kit.scheduler.size_bytes) == (0, 0)


def test_a_transaction_that_never_commits_gives_its_room_back() -> None:
    kit = Kit()
    kit.report(capacity_report(tokens=50))
    first = kit.push()
    kit.turns()
    kit.push()
    assert not kit.dispatched()
    kit.in_flight.release(source_of(first))
    assert len(kit.dispatched()) == 1


def test_backfill_that_was_fetched_before_a_pause_gets_nobody_elses_request_refused() -> None:
    """It is let in whatever waits, so it may fill more than there is."""
    kit = Kit(specs=map(TenantSpec, ("a", "b")), admission=AdmissionPolicy(max_waiting_requests=100))
    kit.report(capacity_report(rate=100_000.0))
    kit.push_many(1_000, "a", is_backfill=True)
    for _ in range(25):
        item = kit.request("b")
        assert kit.judge(item) is None
        kit.scheduler.push(item)
    verdict = kit.judge(kit.request("b"))
    assert isinstance(verdict, Shed)
    assert verdict.retry_after_ms is not None
    assert verdict.retry_after_ms < 10_000


@pytest.mark.parametrize("policy", ["drr", "vtc"])
def test_what_is_not_dispatched_after_its_turn_costs_its_tenant_nothing(policy: Policy) -> None:
    kit = Kit(policy)
    kit.report(capacity_report(items=1, tokens=100))
    kit.push_many(300, "a", prompt_tokens=100)
    kit.push_many(300, "b", prompt_tokens=100)
    served: Counter[str] = Counter()
    while served.total() < 150:
        for item in kit.dispatched():
            if item.tenant == "a" and item.claim.offset % 2:
                kit.in_flight.release(source_of(item))
                kit.scheduler.refund(item)
            else:
                served[item.tenant] += 1
                kit.settle(item)
    assert abs(served["a"] - served["b"]) <= 15, served
