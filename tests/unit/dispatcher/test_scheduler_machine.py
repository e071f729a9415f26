"""Whatever happens to a scheduler: the window is kept, nothing is lost, repeated or run too late, no flood hurts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fairlane.names import priority_topic
from fairlane.outcomes import Code
from fairlane.records import SourceCoordinate, TenantSpec
from stream_processors.dispatcher.admission.rules import AdmissionPolicy, Shed
from stream_processors.dispatcher.scheduling.backlog_statistics import DEFAULT_CLASS_WEIGHTS
from stream_processors.dispatcher.scheduling.fair_queue import Policy
from stream_processors.dispatcher.scheduling.in_flight import WorkId
from stream_processors.dispatcher.scheduling.scheduler import Turn
from tests.kit.scheduler_kit import (
    POLICIES,
    POOL,
    Kit,
    Request,
    capacity_report,
    dispatch_report,
)

CLASSES = ("high", "normal", "low")
TENANTS = ("a", "b", "c")
POOLS = (POOL, "other-pool")

policies = pytest.mark.parametrize("policy", POLICIES)


class SchedulerMachine(RuleBasedStateMachine):
    """Everything that can happen to a scheduler, beside a list of what waits and a list of what is in flight."""

    @initialize(policy=st.sampled_from(POLICIES))
    def begin(self, policy: Policy) -> None:
        self.kit = Kit(policy, [TenantSpec(tenant) for tenant in TENANTS])
        self.waiting: dict[object, Request] = {}
        self.gone: set[object] = set()
        self.in_flight: list[Request] = []
        self.others: list[tuple[WorkId, str, int]] = []
        self.other_sources = 0

    # What happens

    @rule(
        tenant=st.sampled_from(TENANTS),
        priority_class=st.sampled_from(CLASSES),
        pool=st.sampled_from(POOLS),
        cost_tokens=st.integers(1, 40) | st.integers(1, 5_000),
        allowed_ms=st.integers(0, 200) | st.integers(0, 100_000),
        count=st.integers(1, 5),
    )
    def push(self, tenant: str, priority_class: str, pool: str, cost_tokens: int, allowed_ms: int, count: int) -> None:
        for _ in range(count):
            item = self.kit.push(
                tenant,
                priority_class=priority_class,
                pool=pool,
                cost_tokens=cost_tokens,
                deadline_at_ms=self.kit.now_ms + allowed_ms,
            )
            self.waiting[item.claim] = item

    @rule(
        consumer=st.sampled_from(("c1", "c2")),
        pool=st.sampled_from(POOLS),
        rate=st.sampled_from((0.0, 10.0, 1_000.0, 100_000.0)),
        items=st.integers(1, 8),
        tokens=st.integers(1, 2_000),
        draining=st.booleans(),
    )
    def report(self, consumer: str, pool: str, rate: float, items: int, tokens: int, draining: bool) -> None:
        self.kit.report(capacity_report(consumer, rate, items=items, tokens=tokens, pool=pool, draining=draining))

    @rule(priority_class=st.sampled_from(CLASSES), weight=st.sampled_from((0.0, 0.5, 3.0)))
    def other_dispatcher(self, priority_class: str, weight: float) -> None:
        self.kit.scheduler.fleet.report(
            dispatch_report("other", {priority_class: weight}, self.kit.now_ms), self.kit.now_ms
        )

    @rule(pool=st.sampled_from(POOLS), cost_tokens=st.integers(1, 3_000))
    def work_of_another(self, pool: str, cost_tokens: int) -> None:
        self.other_sources += 1
        source = SourceCoordinate("requests.z", 0, self.other_sources)
        work = self.kit.read_back(source, "z", cost_tokens, priority_topic(pool, "normal"), "other")
        self.others.append((work, pool, cost_tokens))

    @precondition(lambda self: self.others)
    @rule()
    def work_of_another_is_done(self) -> None:
        work, _, _ = self.others.pop()
        assert self.kit.in_flight.settled(work) is not None

    @rule(ms=st.integers(0, 50) | st.integers(0, 4_000))
    def time_passes(self, ms: int) -> None:
        self.kit.now_ms += ms

    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(0, len(self.in_flight)))):
            self.kit.settle(self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1))))

    @rule(data=st.data())
    def dispatch(self, data: st.DataObject) -> None:
        claims = sorted(self.waiting, key=str)
        first = data.draw(st.lists(st.sampled_from(claims), max_size=3, unique=True)) if claims else []
        for turn in self.kit.scheduler.turns(self.kit.now_ms, first):  # type: ignore[arg-type]  # claims they are
            self._leaves(turn)
        self._nothing_is_left_that_fits()

    @rule()
    def take_late(self) -> None:
        for item in self.kit.scheduler.take_late(self.kit.now_ms):
            self._is_gone(item)

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        moved = data.draw(st.sampled_from(TENANTS))
        claims = [item.claim for item in self.waiting.values() if item.tenant == moved]
        self.kit.scheduler.discard(claims)
        for one in claims:
            self._is_gone(self.waiting[one])
        self.kit.scheduler.discard(claims)

    @rule(weight=st.sampled_from((0.1, 1.0, 7.0)), known=st.booleans())
    def tenants_change(self, weight: float, known: bool) -> None:
        names = TENANTS if known else TENANTS[1:]
        self.kit.scheduler.set_tenants({name: TenantSpec(name, weight=weight) for name in names})

    @rule(tokens=st.integers(-1_000, 5_000), tenant=st.sampled_from(TENANTS))
    def learn(self, tokens: int, tenant: str) -> None:
        item = self.kit.push(tenant)
        self.waiting[item.claim] = item
        for turn in self.kit.scheduler.turns(self.kit.now_ms):
            self._leaves(turn)
        if item in self.in_flight:
            self.in_flight.remove(item)
            own = self.kit.settle(item).own
            assert own is not None
            self.kit.scheduler.correct(own, tokens)

    # What must be so

    def _leaves(self, turn: Turn[Request]) -> None:
        item, view = turn.item, turn.view
        self._is_gone(item)
        if turn.is_late:
            return
        assert item.deadline_at_ms >= self.kit.now_ms
        own, everybodys = self._in_flight(item.pool)
        assert (view.in_flight_tokens, view.in_flight_items) == everybodys
        part_tokens, part_items = view.window_tokens * view.share, view.window_items * view.share
        fits = (
            own[0] + item.cost_tokens <= part_tokens + 1e-6
            and everybodys[0] + item.cost_tokens <= view.window_tokens + 1e-6
            and own[1] + 1 <= part_items + 1e-6
            and everybodys[1] + 1 <= view.window_items + 1e-6
        )
        goes_alone = own == (0, 0) and (item.cost_tokens > part_tokens or part_items < 1)
        assert fits or (goes_alone and everybodys[0] < view.window_tokens and everybodys[1] < view.window_items)
        self.in_flight.append(item)

    def _is_gone(self, item: Request) -> None:
        assert self.waiting.pop(item.claim) is item
        assert item.claim not in self.gone
        self.gone.add(item.claim)

    def _nothing_is_left_that_fits(self) -> None:
        """Nobody jumps over the head, so what fits may wait behind a head that does not: the head does not."""
        for name, queue, _capacity, view, _share in self.kit.scheduler.pool_views():
            assert len(queue) == sum(item.pool == name for item in self.waiting.values())
            own, everybodys = self._in_flight(name)
            left_tokens, left_items = view.window_tokens - everybodys[0], view.window_items - everybodys[1]
            part_tokens, part_items = view.window_tokens * view.share, view.window_items * view.share
            if own == (0, 0) and left_tokens >= part_tokens > 0 and left_items >= min(1.0, part_items) > 0:
                assert not len(queue), "its whole part is free"
            if min(left_items, part_items - own[1]) >= 1:
                room = min(left_tokens, part_tokens - own[0])
                assert queue.pop(room, lambda _item: False) is None

    def _in_flight(self, pool: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """Tokens and items: our own, and everybody's."""
        own = [one.cost_tokens for one in self.in_flight if one.pool == pool]
        everybodys = own + [cost for _, of_pool, cost in self.others if of_pool == pool]
        return (sum(own), len(own)), (sum(everybodys), len(everybodys))

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "kit"):
            return
        scheduler = self.kit.scheduler
        assert set(scheduler.claims()) == set(self.waiting)
        assert len(scheduler) == len(self.waiting)
        assert scheduler.size_bytes == sum(item.size_bytes for item in self.waiting.values())
        for pool in POOLS:
            own = sum(item.cost_tokens for item in self.in_flight if item.pool == pool)
            assert self.kit.in_flight.own_tokens(pool) == own
        backlogs = {(item.pool, item.priority_class) for item in self.waiting.values()}
        assert set(scheduler.backlogs()) == backlogs


SchedulerMachine.TestCase.settings = settings(stateful_step_count=30)
TestSchedulerMachine = SchedulerMachine.TestCase


# Floods


@given(
    policy=st.sampled_from(("drr", "vtc")),
    flood=st.lists(st.tuples(st.integers(1, 4_000), st.sampled_from(CLASSES)), max_size=300),
    flooders=st.integers(1, 3),
    rate=st.floats(10, 100_000),
    tokens=st.integers(100, 4_000),
    victims_class=st.sampled_from(CLASSES),
)
def test_a_flood_never_gets_another_tenants_request_refused(
    policy: Policy,
    flood: list[tuple[int, str]],
    flooders: int,
    rate: float,
    tokens: int,
    victims_class: str,
) -> None:
    """Whatever was let in of it: a tenant with nothing waiting is let in, with time for what is in flight and for one
    turn of each of the others."""
    names = [f"flooder-{number}" for number in range(flooders)]
    bounds = AdmissionPolicy(max_waiting_requests=40, max_waiting_bytes=40_000)
    kit = Kit(policy, map(TenantSpec, [*names, "victim"]), admission=bounds)
    kit.report(capacity_report(rate=rate, tokens=tokens))
    refused = 0
    for number, (cost, priority_class) in enumerate(flood):
        item = kit.request(names[number % flooders], cost_tokens=cost, size_bytes=cost, priority_class=priority_class)
        if kit.judge(item) is None:
            kit.scheduler.push(item)
        else:
            refused += 1
        kit.turns()
    in_flight = kit.in_flight.tokens(POOL)
    # The turns of the others: each sends one request before, as its class does of each other class.
    turns = (flooders + 1) * sum(DEFAULT_CLASS_WEIGHTS.values()) / DEFAULT_CLASS_WEIGHTS[victims_class]
    mean_cost = max((cost for cost, _ in flood), default=0)
    needed_ms = 1_000 * (in_flight + turns * mean_cost + 100) / rate / (1 - bounds.safety_margin) + 1
    victim = kit.request("victim", priority_class=victims_class, deadline_at_ms=round(needed_ms) + 1)
    assert kit.judge(victim) is None
    assert len(kit.scheduler) <= 40


def test_a_flood_is_refused_when_its_own_part_is_full() -> None:
    kit = Kit(specs=map(TenantSpec, ("flooder", "victim")), admission=AdmissionPolicy(max_waiting_requests=100))
    kit.report(capacity_report(rate=1_000.0, tokens=100))
    verdicts = []
    for _ in range(200):
        item = kit.request("flooder", deadline_at_ms=10**9)
        verdict = kit.judge(item)
        verdicts.append(verdict)
        if verdict is None:
            kit.scheduler.push(item)
            kit.turns()
    shed = [verdict for verdict in verdicts if isinstance(verdict, Shed)]
    assert {verdict.code for verdict in shed} == {Code.OVERLOADED}
    assert all(verdict.retry_after_ms is not None and verdict.retry_after_ms >= 100 for verdict in shed)
    assert 100 <= len(shed) < 200
