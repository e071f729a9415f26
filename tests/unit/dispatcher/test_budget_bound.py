"""Budgets over kills, replays, lags, requeues, renewals and changed policies, of dispatchers whose clocks differ.

Spending is exact, overspend is at most what was admitted and not settled, and every reservation ends.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.records import Budget, Cost, SourceCoordinate, UsageEvent
from fairlane_server.budgets.budgets import CLOCKS_WITHIN_MS, day_of
from stream_processors.dispatcher.budgets.accounts import Spending
from stream_processors.dispatcher.budgets.ledger import BudgetLedger, ReadUsage, SpendingBase
from stream_processors.dispatcher.budgets.reservations import MISSED_AFTER_MS
from stream_processors.dispatcher.scheduling.in_flight import WorkId

MIDNIGHT = 20_001 * 86_400_000
TENANT = Budget("tenant", "day", "XTS", hard_nanos=1_000)
EACH = Budget("each_user", "day", "XTS", hard_nanos=400)
POLICIES = ((TENANT,), (TENANT, EACH), (Budget("tenant", "day", "XTS", hard_nanos=600), EACH), ())
CALLERS = (None, "user:a", "user:b")
PARTITIONS = (0, 1)
TOPIC = "priority.p.normal"
MOST_SKEW_MS = CLOCKS_WITHIN_MS // 2


@dataclass(slots=True, eq=False)
class Request:
    """A request, the record that it waits in, its estimate, what it will cost, and where its usage is."""

    place: SourceCoordinate
    estimate: int
    cost: int
    caller: str | None = None
    is_batch: bool = False
    is_returned: bool = False
    usage: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """One item of the priority topic; ``place`` and whether it is reserved are in its headers."""

    request: Request
    place: SourceCoordinate
    is_reserved: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """A record of usage. The recorder can read it, and dispatchers unless it ``is_unreadable``."""

    event: UsageEvent
    is_unreadable: bool

    def read_at(self, partition: int, offset: int) -> ReadUsage:
        return ReadUsage(partition, offset, None if self.is_unreadable else self.event)


@dataclass(slots=True, eq=False)
class Dispatcher:
    """One process: its clock, its ledger and policy, what it has read, and its queue."""

    ledger: BudgetLedger
    usage_read: dict[int, int]
    skew_ms: int
    policy: int
    base: dict[int, int] | None = None
    work_read: int = 0
    queue: list[Request] = field(default_factory=list)
    had_no_budgets: bool = False
    """Requests that were admitted then have no reservation."""


class World:
    """A topic of work, ``ledger.usage``, the recorder with its sums, and dispatchers."""

    def __init__(self, skews_ms: list[int]) -> None:
        self.now_ms = MIDNIGHT - 8_000
        self.work: list[Work] = []
        self.settled: set[int] = set()
        self.usage: dict[int, list[Usage]] = {partition: [] for partition in PARTITIONS}
        self.recorded = dict.fromkeys(PARTITIONS, 0)
        self.records = 0
        self.bounds: dict[tuple[str | None, int], int] = {}
        """By caller (None: of the tenant) and day: the limit, and what the admitted requests cost whose usage was not
        read, at the last admission that was judged by this day."""
        self.admitted: list[Request] = []
        self.dispatchers = [self.started(skew_ms, 0) for skew_ms in skews_ms]

    def clock_of(self, at: Dispatcher) -> int:
        return self.now_ms + at.skew_ms

    def next_place(self, topic: str) -> SourceCoordinate:
        self.records += 1
        return SourceCoordinate(topic, 0, self.records)

    # ------------------------------------------------------------------ processes

    def started(self, skew_ms: int, policy: int) -> Dispatcher:
        """A new process: the ledger from its end, work from the first offset that is not committed."""
        ends = {partition: len(events) for partition, events in self.usage.items()}
        made = Dispatcher(BudgetLedger(), dict(ends), skew_ms, policy)
        for partition, end in ends.items():
            made.ledger.started(partition, end)
        self.set_policy(made, policy)
        made.work_read = next((at for at in range(len(self.work)) if at not in self.settled), len(self.work))
        self.read_committed(made)
        return made

    def kill(self, killed: Dispatcher) -> None:
        """A process ends; its requests are read again by a new one, in the order of their topics."""
        made = self.started(killed.skew_ms, killed.policy)
        self.dispatchers[self.dispatchers.index(killed)] = made
        for request in killed.queue:
            if request.is_returned:
                self.requeue(made, request)
            else:
                self.admitted.remove(request)
                self.judge(made, request)

    def set_policy(self, at: Dispatcher, policy: int) -> None:
        at.policy = policy
        budgets = POLICIES[policy]
        at.ledger.set_budgets({"acme": budgets} if budgets else {}, self.clock_of(at))
        if not budgets:
            at.base, at.had_no_budgets = None, True

    def pass_time(self, at: Dispatcher, ms: int) -> None:
        self.now_ms += ms
        at.ledger.expire(self.clock_of(at))

    # ------------------------------------------------------------------ requests

    def arrive(
        self, at: Dispatcher, estimate: int, cost: int, caller: str | None = None, is_batch: bool = False
    ) -> None:
        topic = "backfill.acme" if is_batch else "requests.acme"
        self.judge(at, Request(self.next_place(topic), estimate, cost, caller, is_batch))

    def judge(self, at: Dispatcher, request: Request) -> bool:
        now_ms = self.clock_of(at)
        verdict = at.ledger.judge("acme", request.caller, request.estimate, now_ms, is_batch=request.is_batch)
        if not verdict.is_refusal:
            self.reserve(at, request)
            at.queue.append(request)
            self.note_admitted(at, request)
        return not verdict.is_refusal

    def reserve(self, at: Dispatcher, request: Request) -> None:
        now_ms, place = self.clock_of(at), request.place
        at.ledger.reserve(place, "acme", request.caller, request.estimate, now_ms, is_batch=request.is_batch)

    def requeue(self, at: Dispatcher, request: Request) -> None:
        """Work that was handed back is reserved, and not judged before its turn."""
        self.reserve(at, request)
        at.queue.append(request)

    def answer_cached(self, at: Dispatcher, cost: int, caller: str | None) -> None:
        """Answer from the cache, for a price: the answer and its usage are one transaction."""
        request = Request(self.next_place("requests.acme"), cost, cost, caller)
        if self.judge(at, request):
            at.queue.remove(request)
            at.ledger.reservations.sent(request.place, self.clock_of(at))
            self.account(request, request.place, self.records, self.clock_of(at), is_cached=True)

    def promise(self, at: Dispatcher, nanos: int) -> None:
        """What batch jobs have reserved, as it was read from Postgres."""
        at.ledger.promise("acme", {None: nanos, "user:a": nanos // 2}, self.clock_of(at))

    def dispatch(self, at: Dispatcher) -> None:
        if not at.queue:
            return
        request = at.queue.pop(0)
        has_budgets = at.ledger.has_budgets("acme")
        if has_budgets:
            # By its present estimate.
            self.reserve(at, request)
        if at.ledger.judge_dispatch(request.place, request.caller, self.clock_of(at)).is_refusal:
            at.ledger.reservations.release(request.place)
            self.admitted.remove(request)
        else:
            if has_budgets:
                at.ledger.reservations.sent(request.place, self.clock_of(at))
            self.work.append(Work(request, request.place, has_budgets))

    # ------------------------------------------------------------------ consumers

    def settle(self, number: int, skew_ms: int = 0, *, is_unreadable: bool = False) -> None:
        """A consumer answers one item of the work."""
        offset = self.take_work(number)
        if offset is not None:
            request, place = self.work[offset].request, SourceCoordinate(TOPIC, 0, offset)
            self.account(request, place, offset, self.now_ms + skew_ms, is_unreadable=is_unreadable)

    def hand_back(self, at: Dispatcher, number: int) -> None:
        """A consumer hands an item back, for which nothing is charged, and a dispatcher reads it."""
        offset = self.take_work(number)
        if offset is not None:
            request, partition = self.work[offset].request, offset % len(PARTITIONS)
            event = self.event(request, SourceCoordinate(TOPIC, 0, offset), 0, self.now_ms)
            self.usage[partition].append(Usage(event, is_unreadable=False))
            request.place, request.is_returned = self.next_place("returned.p"), True
            self.requeue(at, request)

    def take_work(self, number: int) -> int | None:
        waiting = [offset for offset in range(len(self.work)) if offset not in self.settled]
        if not waiting:
            return None
        offset = waiting[number % len(waiting)]
        self.settled.add(offset)
        return offset

    def account(
        self,
        request: Request,
        place: SourceCoordinate,
        number: int,
        at_ms: int,
        *,
        is_cached: bool = False,
        is_unreadable: bool = False,
    ) -> None:
        for account in {None, request.caller}:
            # Before any admission on this day.
            unsettled = sum(one.cost for one in self.admitted_of(account) if one.usage is None)
            self.bounds.setdefault((account, day_of(at_ms)), unsettled)
        partition = number % len(PARTITIONS)
        request.usage = partition, len(self.usage[partition])
        event = self.event(request, place, request.cost, at_ms, is_cached=is_cached)
        self.usage[partition].append(Usage(event, is_unreadable))

    @staticmethod
    def event(
        request: Request, place: SourceCoordinate, cost: int, at_ms: int, *, is_cached: bool = False
    ) -> UsageEvent:
        return UsageEvent(
            *("id", "acme", "p", "m", "1", "normal", "ok", None, 1, 1, 0, 3, 0, at_ms),
            work=place,
            cached=is_cached,
            cost=Cost(cost, "XTS"),
            requested_by=request.caller,
        )

    # ------------------------------------------------------------------ reading

    def read_usage(self, at: Dispatcher, partition: int, most: int, again: int = 0) -> None:
        """Read on, or a part for a second time first: a log that is replayed."""
        position = at.usage_read[partition]
        first = max(0, position - again)
        records = self.usage[partition][first : position + most]
        at.ledger.read((one.read_at(partition, first + number) for number, one in enumerate(records)), self.now_ms)
        at.usage_read[partition] = max(position, first + len(records))
        if any(one.is_unreadable for one in self.usage[partition][position : at.usage_read[partition]]):
            at.base = None

    def read_work(self, at: Dispatcher, most: int) -> None:
        for offset in range(at.work_read, min(len(self.work), at.work_read + most)):
            item, work = self.work[offset], WorkId(TOPIC, 0, offset)
            if item.is_reserved:
                one, now_ms = item.request, self.clock_of(at)
                known = "acme", one.caller, one.estimate, now_ms
                at.ledger.seen(work, item.place, *known, is_batch=one.is_batch)
            at.work_read = offset + 1

    def read_committed(self, at: Dispatcher) -> None:
        done = frozenset(self.settled)
        at.ledger.reservations.committed(TOPIC, 0, done.__contains__, self.clock_of(at))

    def record(self, partition: int, most: int) -> None:
        self.recorded[partition] = min(len(self.usage[partition]), self.recorded[partition] + most)

    def load(self, at: Dispatcher) -> None:
        if at.ledger.wanted("acme") is None:
            return
        rows = [
            Spending(account, day_of(event.occurred_at_ms), event.cost.nanos)
            for event in self.events_below(self.recorded)
            for account in {None, event.requested_by}
            if event.cost is not None
        ]
        if at.ledger.load("acme", SpendingBase(dict(self.recorded), rows), self.clock_of(at)):
            at.base = dict(self.recorded)

    # ------------------------------------------------------------------ promises

    def admitted_of(self, account: str | None) -> list[Request]:
        return [one for one in self.admitted if account is None or one.caller == account]

    def note_admitted(self, at: Dispatcher, request: Request) -> None:
        self.admitted.append(request)
        now_ms = self.clock_of(at)
        limits = {budget.of: budget.hard_nanos or 0 for _, budget, _ in at.ledger.parts(now_ms)}
        for account in {None, request.caller}:
            mine = self.admitted_of(account)
            limit = limits.get("tenant" if account is None else "each_user")
            # Without a limit, or while it is too new to be known, anything is admitted.
            bound = sum(one.cost for one in mine)
            if limit is not None:
                bound = limit + sum(one.cost for one in mine if not self.is_applied(at, one))
            days = {day_of(now_ms - CLOCKS_WITHIN_MS), day_of(now_ms + CLOCKS_WITHIN_MS)}
            for day in days:
                self.bounds[account, day] = bound
            for later in [day for known, day in self.bounds if known == account and day > max(days)]:
                # By a clock that is behind: it may be settled in a day by which it was not judged.
                self.bounds[account, later] += request.cost

    @staticmethod
    def is_applied(at: Dispatcher, request: Request) -> bool:
        if request.usage is None:
            return False
        partition, offset = request.usage
        return offset < max(at.usage_read[partition], (at.base or {}).get(partition, 0))

    def events_below(self, ends: dict[int, int]) -> Iterator[UsageEvent]:
        for partition, end in ends.items():
            yield from (one.event for one in self.usage[partition][:end])

    def spent(self, account: str | None, day: int, ends: dict[int, int]) -> int:
        return sum(
            event.cost.nanos
            for event in self.events_below(ends)
            if event.cost is not None
            and day_of(event.occurred_at_ms) == day
            and (account is None or event.requested_by == account)
        )

    def check(self) -> None:
        """What each dispatcher takes for spent is exactly what it has read, as a sum or as a record."""
        for one in self.dispatchers:
            now_ms = self.clock_of(one)
            if one.base is not None:
                ends = {partition: max(end, one.base[partition]) for partition, end in one.usage_read.items()}
                for _, budget, spent in one.ledger.parts(now_ms):
                    accounts = (None,) if budget.of == "tenant" else CALLERS[1:]
                    assert spent == max(self.spent(account, day_of(now_ms), ends) for account in accounts)
            for load in one.ledger.loads(9):
                queued = [request for request in one.queue if load.caller in (None, request.caller)]
                if not one.had_no_budgets and load.caller is None:
                    assert load.queued_nanos == sum(request.estimate for request in queued)
                assert 0 <= load.queued_nanos <= sum(request.estimate for request in queued)
                assert load.in_flight_nanos >= 0

    def finish(self) -> None:
        """Dispatch and answer everything; then every dispatcher reads all there is."""
        for one in self.dispatchers:
            while one.queue:
                self.dispatch(one)
        while len(self.settled) < len(self.work):
            self.settle(0)
        everything = max(len(self.work), *map(len, self.usage.values()))
        for one in self.dispatchers:
            self.read_work(one, everything)
            self.read_committed(one)
            for partition in PARTITIONS:
                self.read_usage(one, partition, everything)

    def ends_in_the_bound(self) -> None:
        ends = {partition: len(records) for partition, records in self.usage.items()}
        for (account, day), bound in self.bounds.items():
            assert self.spent(account, day, ends) <= bound

    def leaves_no_reservation(self) -> None:
        """Ended by its work's usage; or at last by the commit of its work, if that usage could not be read, or was read
        while the tenant had no budgets."""
        is_readable = not any(one.is_unreadable for records in self.usage.values() for one in records)
        for one in self.dispatchers:
            if is_readable and not one.had_no_budgets:
                assert self.is_idle(one)
            one.ledger.expire(self.clock_of(one) + MISSED_AFTER_MS)
            assert self.is_idle(one)

    @staticmethod
    def is_idle(at: Dispatcher) -> bool:
        return not any(load.queued_nanos or load.in_flight_nanos for load in at.ledger.loads(9))


def some(dice: Random) -> int:
    return dice.randint(0, 5)


def money(dice: Random) -> int:
    return dice.randint(0, 300)


def skew(dice: Random) -> int:
    return dice.randint(-MOST_SKEW_MS, MOST_SKEW_MS)


STEPS: tuple[tuple[float, Callable[[World, Dispatcher, Random], object]], ...] = (
    (4, lambda world, at, dice: world.arrive(at, money(dice), money(dice), dice.choice(CALLERS))),
    (2, lambda world, at, dice: world.arrive(at, money(dice), money(dice), dice.choice(CALLERS), is_batch=True)),
    (1, lambda world, at, dice: world.answer_cached(at, money(dice), dice.choice(CALLERS))),
    (4, lambda world, at, _: world.dispatch(at)),
    (3, lambda world, _, dice: world.settle(some(dice), skew(dice))),
    (0.4, lambda world, _, dice: world.settle(some(dice), skew(dice), is_unreadable=True)),
    (1, lambda world, at, dice: world.hand_back(at, some(dice))),
    (1, lambda world, at, dice: world.promise(at, money(dice))),
    (2, lambda world, at, dice: world.read_usage(at, dice.choice(PARTITIONS), some(dice), some(dice))),
    (2, lambda world, at, dice: world.read_work(at, some(dice))),
    (1, lambda world, at, _: world.read_committed(at)),
    (2, lambda world, _, dice: world.record(dice.choice(PARTITIONS), some(dice) + 1)),
    (3, lambda world, at, _: world.load(at)),
    (0.3, lambda world, at, dice: world.set_policy(at, dice.randrange(len(POLICIES)))),
    (1, lambda world, at, dice: world.pass_time(at, dice.choice((500, 2_000, 6_000)))),
    (0.3, lambda world, at, _: world.kill(at)),
)
"""What happens in a world, to a dispatcher of it, and how often."""


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_overspend_is_at_most_what_was_admitted_and_not_settled(seed: int) -> None:
    """Of a seed, since a list of steps that hypothesis draws is too short to get anywhere."""
    dice = Random(seed)
    world = World([skew(dice) for _ in range(dice.randint(1, 3))])
    for one in world.dispatchers[: dice.randint(0, 3)]:
        world.load(one)
    weights = [weight for weight, _ in STEPS]
    for _, step in dice.choices(STEPS, weights, k=dice.randint(20, 200)):
        step(world, dice.choice(world.dispatchers), dice)
        world.check()
    world.finish()
    world.ends_in_the_bound()
    world.leaves_no_reservation()


small, nanos = st.integers(0, 5), st.integers(0, 300)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(nanos, nanos, small, st.sampled_from(CALLERS), st.booleans()), max_size=40))
def test_one_dispatcher_with_estimates_that_are_not_too_low_never_overspends(
    requests: list[tuple[int, int, int, str | None, bool]],
) -> None:
    world = World([0])
    (only,) = world.dispatchers
    world.load(only)
    world.set_policy(only, 1)
    world.load(only)
    for estimate, cost, settled, caller, is_handed_back in requests:
        world.arrive(only, estimate, min(estimate, cost), caller)
        world.dispatch(only)
        world.read_work(only, 1)
        if is_handed_back:
            world.hand_back(only, settled)
            world.dispatch(only)
            world.read_work(only, 1)
        for _ in range(settled):
            world.settle(0)
        for partition in PARTITIONS:
            world.read_usage(only, partition, 3)
    world.finish()
    ends = {partition: len(records) for partition, records in world.usage.items()}
    for account in CALLERS:
        limit = TENANT if account is None else EACH
        assert world.spent(account, day_of(world.now_ms), ends) <= (limit.hard_nanos or 0)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 10), st.lists(st.tuples(st.booleans(), nanos, small), max_size=60))
def test_rows_of_a_job_find_what_it_has_reserved_whatever_else_arrives(
    rows: int, steps: list[tuple[bool, int, int]]
) -> None:
    world, row_nanos = World([0]), 100
    (only,) = world.dispatchers
    world.load(only)
    world.promise(only, rows * row_nanos)
    sent = answered = 0
    for is_row, cost, settled in (*steps, *[(True, 0, 0)] * rows):
        if not is_row:
            world.arrive(only, cost, cost)
        elif sent < rows:
            world.arrive(only, row_nanos, row_nanos, is_batch=True)
            sent += 1
            assert only.queue, "the row is admitted"
        world.dispatch(only)
        world.read_work(only, 1)
        for _ in range(settled):
            world.settle(0)
        for partition in PARTITIONS:
            world.read_usage(only, partition, 9)
        done = [one for one in world.admitted if one.is_batch and one.usage is not None]
        if settled % 2:
            # Read from Postgres now and then.
            answered = len(done)
        world.promise(only, (rows - answered) * row_nanos)
    assert sent == rows
