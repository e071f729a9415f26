"""Budgets over kills, replays and lags of several dispatchers: spending is exact, and overspend is at most what was
admitted and not settled."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.records import Budget, Cost, SourceCoordinate, UsageEvent
from stream_processors.dispatcher.budgets.accounts import Spending
from stream_processors.dispatcher.budgets.ledger import BudgetLedger, ReadUsage, SpendingBase
from stream_processors.dispatcher.scheduling.in_flight import WorkId

NOW, TODAY = 20_000 * 86_400_000, 20_000
BUDGET = Budget("tenant", "day", "XTS", hard_nanos=1_000)
PARTITIONS = (0, 1)
TOPIC = "priority.p.normal"


@dataclass(slots=True)
class Request:
    """A request, its estimate, what it will cost, and where its usage is."""

    source: SourceCoordinate
    estimate: int
    cost: int
    usage: tuple[int, int] | None = None


@dataclass(slots=True)
class Dispatcher:
    """One process: its ledger, what it has read, and its queue."""

    ledger: BudgetLedger
    usage_read: dict[int, int]
    base: dict[int, int] | None = None
    work_read: int = 0
    queue: list[Request] = field(default_factory=list)


class World:
    """A topic of work, ``ledger.usage``, the recorder with its sums, and dispatchers."""

    def __init__(self, dispatchers: int) -> None:
        self.work: list[Request] = []
        self.settled: set[int] = set()
        self.usage: dict[int, list[ReadUsage]] = {partition: [] for partition in PARTITIONS}
        self.recorded = dict.fromkeys(PARTITIONS, 0)
        self.requests = 0
        self.bound = BUDGET.hard_nanos or 0
        self.admitted: list[Request] = []
        self.dispatchers = [self.started() for _ in range(dispatchers)]

    def started(self) -> Dispatcher:
        """A new process: the ledger from its end, work from the first offset that is not committed."""
        ends = {partition: len(events) for partition, events in self.usage.items()}
        made = Dispatcher(BudgetLedger(), dict(ends))
        for partition, end in ends.items():
            made.ledger.started(partition, end)
        made.ledger.set_budgets({"acme": (BUDGET,)}, NOW)
        made.work_read = next((at for at in range(len(self.work)) if at not in self.settled), len(self.work))
        return made

    def arrive(self, at: Dispatcher, estimate: int, cost: int) -> None:
        self.requests += 1
        self.judge(at, Request(SourceCoordinate("requests.acme", 0, self.requests), estimate, cost))

    def judge(self, at: Dispatcher, request: Request) -> None:
        verdict = at.ledger.judge("acme", None, request.estimate, NOW)
        if verdict.refused is None and not verdict.is_unknown:
            at.ledger.reserve(request.source, "acme", None, request.estimate, NOW)
            at.queue.append(request)
            if request not in self.admitted:
                self.admitted.append(request)
            self.note_bound(at)

    def note_bound(self, at: Dispatcher) -> None:
        """The bound as of this admission: the limit, and what the admitted requests cost whose usage is not read."""
        unread = (one.cost for one in self.admitted if one.usage is None or not self.is_applied(at, *one.usage))
        self.bound = (BUDGET.hard_nanos or 0) + sum(unread)

    def is_applied(self, at: Dispatcher, partition: int, offset: int) -> bool:
        return offset < max(at.usage_read[partition], (at.base or {}).get(partition, 0))

    def dispatch(self, at: Dispatcher) -> None:
        if at.queue:
            request = at.queue.pop(0)
            if at.ledger.judge_dispatch(request.source, None, NOW).refused is not None:
                at.ledger.reservations.release(request.source)
                self.admitted.remove(request)
            else:
                at.ledger.reservations.sent(request.source, NOW)
                self.work.append(request)

    def settle(self, number: int) -> None:
        """A consumer answers one item of the work."""
        waiting = [at for at in range(len(self.work)) if at not in self.settled]
        if waiting:
            at = waiting[number % len(waiting)]
            request, partition = self.work[at], at % len(PARTITIONS)
            offset = len(self.usage[partition])
            event = UsageEvent(
                *("id", "acme", "p", "m", "1", "normal", "ok", None, 1, 1, 0, 3, 0, NOW),
                work=SourceCoordinate(TOPIC, 0, at),
                cost=Cost(request.cost, "XTS"),
            )
            self.usage[partition].append(ReadUsage(partition, offset, event))
            request.usage = partition, offset
            self.settled.add(at)

    def read_usage(self, at: Dispatcher, partition: int, most: int, again: int = 0) -> None:
        """Read on, or a part for a second time first: a log that is replayed."""
        position = at.usage_read[partition]
        events = self.usage[partition][max(0, position - again) : position + most]
        at.ledger.read(events, NOW)
        at.usage_read[partition] = max(position, position + len(events) - min(again, position))

    def read_work(self, at: Dispatcher, most: int) -> None:
        for offset in range(at.work_read, min(len(self.work), at.work_read + most)):
            request = self.work[offset]
            at.ledger.seen(WorkId(TOPIC, 0, offset), request.source, "acme", None, request.estimate, NOW)
            at.work_read = offset + 1

    def record(self, partition: int, most: int) -> None:
        self.recorded[partition] = min(len(self.usage[partition]), self.recorded[partition] + most)

    def load(self, at: Dispatcher) -> None:
        sums = [
            Spending(None, TODAY, self.cost_below(partition, end)) for partition, end in self.recorded.items() if end
        ]
        if at.base is None and at.ledger.load("acme", SpendingBase(dict(self.recorded), sums), NOW):
            at.base = dict(self.recorded)

    def cost_below(self, partition: int, end: int) -> int:
        costs = (one.event.cost for one in self.usage[partition][:end] if one.event is not None)
        return sum(cost.nanos for cost in costs if cost is not None)

    def kill(self, number: int) -> None:
        """A process ends; its requests are read again by a new one, in the order of their topic."""
        lost = self.dispatchers[number].queue
        for request in lost:
            self.admitted.remove(request)
        made = self.dispatchers[number] = self.started()
        for request in lost:
            self.judge(made, request)

    def check(self) -> None:
        """What each dispatcher takes for spent is exactly what it has read, as a sum or as a record."""
        for one in self.dispatchers:
            if one.base is not None:
                ((_, _, spent),) = one.ledger.parts(NOW)
                assert spent == sum(
                    self.cost_below(partition, max(end, one.base[partition]))
                    for partition, end in one.usage_read.items()
                )
            load = one.ledger.loads(1)[0]
            assert load.queued_nanos == sum(request.estimate for request in one.queue)
            assert load.in_flight_nanos >= 0

    def finish(self) -> int:
        """Answer everything that was dispatched. Returns what was spent."""
        while len(self.settled) < len(self.work):
            self.settle(0)
        return sum(self.cost_below(partition, len(events)) for partition, events in self.usage.items())


small = st.integers(0, 5)
steps = st.one_of(
    st.tuples(st.just("arrive"), small, st.integers(0, 300), st.integers(0, 300)),
    st.tuples(st.just("arrive"), small, st.integers(0, 300), st.integers(0, 300)),
    st.tuples(st.just("dispatch"), small),
    st.tuples(st.just("dispatch"), small),
    st.tuples(st.just("settle"), small),
    st.tuples(st.just("settle"), small),
    st.tuples(st.just("read_usage"), small, st.sampled_from(PARTITIONS), small, small),
    st.tuples(st.just("read_work"), small, small),
    st.tuples(st.just("record"), st.sampled_from(PARTITIONS), st.integers(1, 9)),
    st.tuples(st.just("load"), small),
    st.tuples(st.just("load"), small),
    st.tuples(st.just("kill"), small),
)


def carry_out(world: World, step: tuple[str, *tuple[int, ...]]) -> None:
    name, *numbers = step
    own: dict[str, Callable[..., None]] = {"settle": world.settle, "record": world.record}
    if name in own:
        own[name](*numbers)
    elif name == "kill":
        world.kill(numbers[0] % len(world.dispatchers))
    else:
        first, *rest = numbers
        getattr(world, name)(world.dispatchers[first % len(world.dispatchers)], *rest)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(0, 3), st.lists(steps, min_size=20, max_size=120))
def test_overspend_is_at_most_what_was_admitted_and_not_settled(
    dispatchers: int, known: int, taken: list[tuple[str, *tuple[int, ...]]]
) -> None:
    world = World(dispatchers)
    for one in world.dispatchers[:known]:
        world.load(one)
    for step in taken:
        carry_out(world, step)
        world.check()
    for one in world.dispatchers:
        while one.queue:
            world.dispatch(one)
    assert world.finish() <= world.bound


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400), st.integers(0, 3)), max_size=40))
def test_one_dispatcher_with_estimates_that_are_not_too_low_never_overspends(
    requests: list[tuple[int, int, int]],
) -> None:
    world = World(1)
    (only,) = world.dispatchers
    world.load(only)
    for estimate, cost, settled in requests:
        world.arrive(only, estimate, min(estimate, cost))
        world.dispatch(only)
        world.read_work(only, 1)
        for _ in range(settled):
            world.settle(0)
        for partition in PARTITIONS:
            world.read_usage(only, partition, 3)
    assert world.finish() <= (BUDGET.hard_nanos or 0)
