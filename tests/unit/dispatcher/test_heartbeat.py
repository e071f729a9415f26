"""What a dispatcher says about itself: what waits by class, its part of the window, and its busiest tenants."""

from collections import Counter

import pytest

from fairlane.records import ClassLoad, PoolLoad, ShedCount, SourceCoordinate, TenantSpec
from fairlane.schema_files import default_codec
from stream_processors.dispatcher.output.heartbeat_report import (
    MAX_TENANTS,
    QUIET_AFTER_MS,
    WAITS_LAST_MS,
    TenantStats,
    pool_loads,
    report,
    tenant_loads,
)
from stream_processors.dispatcher.scheduling.backlog_statistics import Backlog
from stream_processors.dispatcher.scheduling.fair_queue import FairQueue
from stream_processors.dispatcher.scheduling.window import Fleet
from tests.kit.scheduler_kit import DISPATCHER, POOL, Kit, Request, capacity_report, dispatch_report

WEIGHTS = {"high": 8.0, "normal": 3.0, "low": 1.0}


def crowded(*specs: TenantSpec) -> Kit:
    """A pool with a window of 200 tokens, filled by two requests of a: what comes next waits."""
    kit = Kit(specs=specs)
    kit.report(capacity_report(tokens=100))
    kit.push_many(2, "a", priority_class="high")
    kit.turns()
    return kit


def nobody_is_busy(_tenant: str, _pool: str) -> bool:
    return False


def test_a_pool_says_what_waits_by_class() -> None:
    kit = crowded(TenantSpec("a", weight=2.0), TenantSpec("b"))
    kit.push_many(3, "a", cost_tokens=50)
    kit.push("b")
    kit.push("b", priority_class="low", cost_tokens=7)
    kit.scheduler.refresh(0)
    assert pool_loads(kit.scheduler, TenantStats()) == (
        PoolLoad(
            POOL,
            window_tokens=200,
            share=1.0,
            in_flight_tokens=200,
            classes=(ClassLoad("normal", 3.0, 4, 250), ClassLoad("low", 1.0, 1, 7)),
        ),
    )


def test_a_pool_in_which_nothing_waits_says_so() -> None:
    (load,) = pool_loads(crowded().scheduler, TenantStats())
    assert load.classes == ()


def test_only_own_work_counts_as_in_flight() -> None:
    """The others say what is theirs."""
    kit = crowded()
    kit.read_back(SourceCoordinate("requests.z", 0, 1), "z", 500, f"priority.{POOL}.normal", "other")
    assert kit.in_flight.tokens(POOL) == 700
    (load,) = pool_loads(kit.scheduler, TenantStats())
    assert load.in_flight_tokens == 200


def test_of_a_tenant_too_only_own_work_counts_as_in_flight() -> None:
    """After a rebalance two dispatchers have work of one tenant in flight, and each knows of all of it."""
    kit = crowded()
    kit.read_back(SourceCoordinate("requests.a", 0, 77), "a", 500, f"priority.{POOL}.normal", "former-owner")
    stats = TenantStats()
    stats.dispatched("a", POOL, 1, 0)
    (load,) = tenant_loads(kit.scheduler, stats, 0)
    assert load.in_flight_tokens == 200
    assert pool_loads(kit.scheduler, stats)[0].in_flight_tokens == 200


def test_a_pool_says_what_was_served_to_everybody() -> None:
    kit = crowded()
    stats = TenantStats()
    for number in range(2 * MAX_TENANTS):
        stats.served(f"t{number}", POOL, 5, 0)
    stats.served("t0", "another", 7, 0)
    assert pool_loads(kit.scheduler, stats)[0].served_tokens == 1_000
    stats.age(QUIET_AFTER_MS, nobody_is_busy)
    assert pool_loads(kit.scheduler, stats)[0].served_tokens == 1_000, "it counts from the start"


def test_what_one_says_is_what_the_others_share_by() -> None:
    """a waits here with weight 2 and b there with weight 1: a third of the window is theirs."""
    kit = crowded(TenantSpec("a", weight=2.0))
    kit.push("a")
    said = report(kit.scheduler, TenantStats(), DISPATCHER, 0, 5, with_tenants=False)
    other = Fleet("other")
    other.report(said, 5)
    assert other.share(POOL, {"normal": 1.0}, WEIGHTS, 5).share == pytest.approx(1 / 3)
    kit.scheduler.fleet.report(dispatch_report("other", {"normal": 1.0}, 5), 5)
    kit.scheduler.refresh(5)
    (load,) = pool_loads(kit.scheduler, TenantStats())
    assert load.share == pytest.approx(2 / 3)


def test_a_report_is_a_record() -> None:
    kit = crowded()
    kit.push("a")
    made = report(kit.scheduler, TenantStats(), DISPATCHER, 3, 5, with_tenants=True)
    assert (made.instance_id, made.started_at_ms, made.reported_at_ms, made.draining) == (DISPATCHER, 3, 5, False)
    assert default_codec().decode(default_codec().encode(made)) == made
    assert [load.tenant for load in made.tenants] == ["a"]
    assert report(kit.scheduler, TenantStats(), DISPATCHER, 3, 5, with_tenants=False).tenants == ()


def test_a_tenant_says_what_became_of_its_requests() -> None:
    kit = crowded(TenantSpec("a"), TenantSpec("b"))
    kit.push_many(3, "a")
    kit.push("b")
    kit.scheduler.refresh(0)
    stats = TenantStats()
    stats.served("a", POOL, 1_000, 0)
    for code in ("overloaded", "deadline_unmeetable", "overloaded"):
        stats.shed("a", POOL, code, 0)
    for waited_ms in range(1, 201):
        stats.dispatched("a", POOL, waited_ms, 0)
    first, second = tenant_loads(kit.scheduler, stats, 0)
    assert (first.tenant, first.pool, second.tenant) == ("a", POOL, "b")
    assert (first.waiting_requests, first.waiting_tokens, first.in_flight_tokens) == (3, 300, 200)
    assert (first.served_tokens, first.entitled_share, first.wait_p99_ms) == (1_000, 0.5, 198.0)
    assert first.shed == (ShedCount("deadline_unmeetable", 1), ShedCount("overloaded", 2))
    assert (second.served_tokens, second.shed, second.wait_p99_ms) == (0, (), 0.0)


def test_a_tenant_that_was_served_and_has_nothing_waiting_is_there_too() -> None:
    kit = Kit(specs=[TenantSpec("a")])
    stats = TenantStats()
    stats.served("a", "some-pool", 5, 0)
    (load,) = tenant_loads(kit.scheduler, stats, 0)
    assert (load.tenant, load.pool, load.waiting_requests, load.served_tokens) == ("a", "some-pool", 0, 5)
    assert load.entitled_share == 0.0


def test_the_busiest_tenants_go_first_and_the_report_stays_small() -> None:
    kit = crowded()
    stats = TenantStats()
    for number in range(MAX_TENANTS + 20):
        kit.push(f"t{number}", cost_tokens=1 + number)
        stats.served(f"served-{number}", POOL, 1, 0)
    loads = tenant_loads(kit.scheduler, stats, 0)
    assert len(loads) == MAX_TENANTS
    assert [load.tenant for load in loads[:2]] == ["t119", "t118"]
    assert not any(load.tenant.startswith("served") for load in loads)


def test_of_those_with_nothing_waiting_the_last_served_go_first() -> None:
    kit = Kit()
    stats = TenantStats()
    for number in range(MAX_TENANTS + 20):
        stats.served(f"t{number}", POOL, 1, 0)
    stats.shed("t0", POOL, "overloaded", 0)
    loads = tenant_loads(kit.scheduler, stats, 0)
    assert len(loads) == MAX_TENANTS
    assert [load.tenant for load in loads[:2]] == ["t0", "t119"]


def test_a_former_owner_speaks_no_more_of_a_tenant() -> None:
    kit = Kit()
    stats = TenantStats()
    stats.dispatched("a", POOL, 9_000, 0)
    stats.served("a", POOL, 5, 1_000)
    stats.served("b", POOL, 5, 2_000)
    (_, load) = tenant_loads(kit.scheduler, stats, WAITS_LAST_MS - 1)
    assert (load.tenant, load.wait_p99_ms) == ("a", 9_000.0)
    (_, load) = tenant_loads(kit.scheduler, stats, WAITS_LAST_MS)
    assert (load.tenant, load.wait_p99_ms, load.served_tokens) == ("a", 0.0, 5)
    assert [load.tenant for load in tenant_loads(kit.scheduler, stats, 1_000 + QUIET_AFTER_MS)] == ["b"]
    assert tenant_loads(kit.scheduler, stats, 2_000 + QUIET_AFTER_MS) == ()


def test_old_waits_say_nothing_about_new_ones() -> None:
    stats = TenantStats()
    stats.dispatched("a", POOL, 9_000, 0)
    stats.dispatched("a", POOL, 10, 30_000)
    assert stats.of("a", POOL).wait_p99_ms(30_000) == 9_000.0
    assert stats.of("a", POOL).wait_p99_ms(WAITS_LAST_MS) == 10.0
    assert stats.of("a", POOL).wait_p99_ms(30_000 + WAITS_LAST_MS) == 0.0


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (2, 2), (99, 99), (100, 99), (101, 100), (256, 254)])
def test_the_p99_is_the_wait_of_the_nearest_rank(count: int, expected: int) -> None:
    stats = TenantStats()
    for waited_ms in range(1, count + 1):
        stats.dispatched("a", POOL, waited_ms, 0)
    assert stats.of("a", POOL).wait_p99_ms(0) == expected


def test_who_waits_or_runs_keeps_its_counts_however_long_nothing_becomes_of_it() -> None:
    kit = crowded(TenantSpec("a"), TenantSpec("b"))  # a runs
    kit.push("b")
    stats = TenantStats()
    for tenant in ("a", "b", "c"):
        stats.shed(tenant, POOL, "overloaded", 0)
    for minute in range(1, 5):
        loads = tenant_loads(kit.scheduler, stats, minute * QUIET_AFTER_MS)
        assert {load.tenant: load.shed for load in loads} == dict.fromkeys("ab", (ShedCount("overloaded", 1),))


def test_tenants_come_and_go_and_leave_nothing_behind() -> None:
    stats = TenantStats()
    looked_at: list[str] = []
    for second in range(300):
        now_ms = 1_000 * second
        for number in range(100):
            stats.served(f"t{second}-{number}", POOL, 1, now_ms)
        stats.age(now_ms, nobody_is_busy)
        assert len(list(stats.items())) <= 100 * 61

    def is_busy(tenant: str, _pool: str) -> bool:
        looked_at.append(tenant)
        return True

    stats.age(10**9, is_busy)
    assert len(looked_at) == 500, "not all of them in one moment"


def test_a_report_costs_little_however_many_tenants_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: what is asked of the queue is asked for those that are reported."""
    kit = crowded()
    stats = TenantStats()
    for number in range(1_000):
        kit.push(f"t{number}", cost_tokens=1 + number)
        stats.shed(f"t{number}", POOL, "overloaded", 0)
    asked: Counter[str] = Counter()
    queue = next(queue for _, queue, *_ in kit.scheduler.pool_views())
    waiting = type(queue).waiting

    def counted(self: FairQueue[Request], tenant: str, priority_class: str) -> Backlog:
        asked[tenant] += 1
        return waiting(self, tenant, priority_class)

    monkeypatch.setattr(type(queue), "waiting", counted)
    assert len(tenant_loads(kit.scheduler, stats, 0)) == MAX_TENANTS
    assert len(asked) == MAX_TENANTS


def test_of_every_class_the_busiest_are_there() -> None:
    kit = crowded()
    for number in range(MAX_TENANTS):
        kit.push(f"n{number}", cost_tokens=10)
        kit.push(f"l{number}", priority_class="low", cost_tokens=20)
    kit.push("n7", priority_class="low", cost_tokens=50)
    loads = tenant_loads(kit.scheduler, TenantStats(), 0)
    assert (loads[0].tenant, loads[0].waiting_tokens, loads[0].waiting_requests) == ("n7", 60, 2)
    assert sum(load.tenant.startswith("l") for load in loads) == MAX_TENANTS - 1


def test_the_book_of_tenants_is_bounded() -> None:
    stats = TenantStats()
    for number in range(20_010):
        stats.served(f"t{number}", POOL, 1, 0)
    assert len(list(stats.items())) == 20_000
    assert stats.of("t0", POOL).served_tokens == 0
    assert stats.of("t20009", POOL).served_tokens == 1
