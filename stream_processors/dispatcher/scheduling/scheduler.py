"""Scheduler of one dispatcher: capacity, window, fleet share, fair queue and admission of every pool.

Pure: reports, settlements and ``now`` in, verdicts and turns out. The dispatcher and the simulation run the same
scheduler.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf
from operator import attrgetter
from typing import Generic, TypeVar

from fairlane.frozen import frozen_dataclass
from fairlane.names import pool_of_priority, priority_topic
from fairlane.ownership import Claim
from fairlane.records import TenantSpec
from fairlane_server.admission_rule import CapacityState, PoolCapacity, Prediction, WorkAhead, predict
from stream_processors.dispatcher.admission import rules
from stream_processors.dispatcher.admission.rules import AdmissionPolicy, Bounds, Shed
from stream_processors.dispatcher.scheduling.backlog_statistics import (
    DEFAULT_CLASS_WEIGHTS,
    Schedulable,
    Share,
)
from stream_processors.dispatcher.scheduling.capacity import CapacityBoard
from stream_processors.dispatcher.scheduling.copy_queue import CopyQueue
from stream_processors.dispatcher.scheduling.deadline_backlogs import DeadlineBacklogs
from stream_processors.dispatcher.scheduling.fair_queue import (
    DEFAULT_QUANTUM_TOKENS,
    FairQueue,
    Policy,
    make_fair_queue,
)
from stream_processors.dispatcher.scheduling.in_flight import ANY_PARTITION, Held, InFlight, Reserved
from stream_processors.dispatcher.scheduling.quantity import Quantity
from stream_processors.dispatcher.scheduling.served_shares import ServedShares
from stream_processors.dispatcher.scheduling.tenant_occupancy import RequestIndex, TenantOccupancy
from stream_processors.dispatcher.scheduling.window import (
    NO_WINDOW,
    Amount,
    ConsumerChoice,
    Fleet,
    FleetShare,
    remaining_ms,
    room_tokens,
    window,
)

CLASS_WEIGHTS = DEFAULT_CLASS_WEIGHTS

_MEAN_COST_GAIN = 0.02
_NOTABLE_FALL = 0.9
"""If the service of a tenant falls below this part of what it was, its queued requests are compared with it."""
_REVIEW_EVERY_MS = 1_000
_REVIEW_MS_PER_REQUEST = 0.25
"""A review takes some microseconds for each queued request: long queues are reviewed less often."""
_NEVER_MS = -(1 << 40)
_REVIEWS_AFTER_FALL_MS = 3_000
"""Measured shares follow a change with a delay."""
COPIES_PART = 0.25
"""The part of a pool's window that copies for evaluation may fill: a request that comes meanwhile is to find room."""
_MOST_STRETCH = 100.0
_STRETCH_TTL_MS = 30_000
"""A stretch without new runs is forgotten: if it is too high, admission refuses the requests that would correct it."""
_DEADLINE = attrgetter("deadline_at_ms")

ItemT = TypeVar("ItemT", bound=Schedulable)


@frozen_dataclass(frozen=True, slots=True)
class View:
    """The inputs of a dispatch: work in flight on partitions that a live consumer owns, the pool's window, and this
    dispatcher's share of it."""

    in_flight_tokens: int
    window_tokens: float
    in_flight_items: int
    window_items: float
    share: float


@frozen_dataclass(frozen=True, slots=True)
class Turn(Generic[ItemT]):
    """A request whose turn has come. A late one cannot be answered in time and must not run. ``partition`` is that of
    the priority topic, ANY_PARTITION while they are unknown."""

    item: ItemT
    is_late: bool
    partition: int
    view: View


@frozen_dataclass(frozen=True, slots=True)
class SchedulerPolicy:
    """Policy of a scheduler.

    Attributes:
        fairness: order within a pool.
        admission: bounds and margin of admission.
        target_queue_ms: least work kept in flight, as time.
    """

    fairness: Policy
    admission: AdmissionPolicy
    target_queue_ms: float


@dataclass(slots=True)
class _Stretch:
    """How many times longer runs take than a request's own tokens would."""

    ratio: Quantity = field(default_factory=Quantity)
    learned_at_ms: int = 0


@dataclass(slots=True)
class _Pool(Generic[ItemT]):
    queue: FairQueue[ItemT]
    capacity: PoolCapacity
    share: FleetShare
    mean_cost_tokens: float = 0.0
    window: Amount = NO_WINDOW
    served: ServedShares = field(default_factory=ServedShares)
    stretches: dict[tuple[str, int], _Stretch] = field(default_factory=dict)
    """By model and power of two of a request's cost."""
    choice: ConsumerChoice | None = None
    """Of the present round; None while it is unknown which consumers own which partitions."""
    deadlines: DeadlineBacklogs = field(default_factory=DeadlineBacklogs)
    planned: dict[str, float] = field(default_factory=dict)
    """By class, the tokens per second of a tenant of weight 1 that the queued requests were admitted for. If the pool
    gets slower, or more tenants share it, they cannot all be served."""
    reviewed_at_ms: int = _NEVER_MS
    """When all that is queued was last compared with the service."""
    review_until_ms: int = 0


def _placement(pool: _Pool[ItemT]) -> Callable[[ItemT], bool] | None:
    """A check whether some consumer has loaded a request's version and has room. If so, it becomes the next consumer of
    the round. None while the loaded versions are not known."""
    choice, versions = pool.choice, pool.capacity.versions
    if choice is None or versions is None:
        return None

    def is_placed(item: ItemT) -> bool:
        key = item.version_key
        if key in versions[choice.next_consumer]:
            return True
        return choice.prefer({number for number, loaded in enumerate(versions) if key in loaded})

    return is_placed


def _mean_cost_tokens(pool: _Pool[ItemT]) -> float:
    """Recent mean cost of this pool's requests; before the first dispatch that of the queued ones; 0 without any."""
    if pool.mean_cost_tokens:
        return pool.mean_cost_tokens
    waiting = pool.queue.total
    return waiting.tokens / waiting.requests if waiting.requests else 0.0


@dataclass(slots=True)
class Scheduler(Generic[ItemT]):
    """For one thread. Call ``refresh`` before the decisions of a batch: rates and shares are looked up once for all."""

    policy: SchedulerPolicy
    capacity: CapacityBoard
    in_flight: InFlight
    fleet: Fleet
    _pools: dict[str, _Pool[ItemT]] = field(default_factory=dict)
    _occupancy: TenantOccupancy = field(default_factory=TenantOccupancy)
    _items: dict[Claim, ItemT] = field(default_factory=dict)
    _ids: RequestIndex[ItemT] = field(default_factory=RequestIndex)
    _specs: Mapping[str, TenantSpec] = field(default_factory=dict)
    _parts: Mapping[str, float] = field(default_factory=dict)
    _all_weights: float = 0.0
    _now_ms: int = 0
    """Time of the last ``refresh``."""

    def set_tenants(self, specs: Mapping[str, TenantSpec], parts: Mapping[str, float] | None = None) -> None:
        """Set the tenants; ``parts`` is the fraction of a tenant's partitions read here, where it is not 1."""
        withdrawn = self._specs.keys() - specs.keys()
        self._specs, self._parts = specs, parts or {}
        self._all_weights = sum(map(self._weight, specs))
        for pool in self._pools.values():
            self._set_shares(pool.queue)
            for tenant in withdrawn:
                pool.queue.set_share(tenant, None)

    def part(self, tenant: str) -> float:
        """The fraction of a tenant's partitions read here, above 0 and at most 1."""
        return min(1.0, self._parts.get(tenant, 1.0))

    def refresh(self, now_ms: int) -> None:
        """Look up rates, windows and shares of every pool."""
        self._now_ms = now_ms
        for name, pool in self._pools.items():
            self._refresh(name, pool, now_ms)

    def predict(self, item: ItemT) -> tuple[WorkAhead, Prediction]:
        """The load ahead of this request, and its predicted wait and service time."""
        pool = self._pool(item.pool)
        key = item.tenant, item.priority_class
        # The earliest deadline goes first: backfill waits behind online requests of the same queue.
        own_ahead = (
            pool.queue.waiting(*key).tokens
            if item.is_backfill
            else pool.deadlines.tokens_until(*key, item.deadline_at_ms)
        )
        load = self._load(item, own_ahead)
        return load, predict(load, item.cautious_cost_tokens)

    def _load(self, item: ItemT, own_ahead_tokens: int) -> WorkAhead:
        """The load ahead of this request, if so much of its tenant's and class's own goes first."""
        pool = self._pool(item.pool)
        queue, tenant, priority_class = pool.queue, item.tenant, item.priority_class
        everything = queue.total
        waits = queue.waiting(tenant, priority_class).requests > 0
        own_share = pool.share.entitled_share(priority_class, self._weight(tenant), waits=waits)
        served_share = self.served_share(pool, tenant, priority_class)
        if self.policy.fairness == "fifo":
            own_tokens, own_share, served_share = float(everything.tokens), pool.share.share or 1.0, None
        else:
            usual_tokens = _mean_cost_tokens(pool)
            share = own_share if served_share is None else served_share
            # While the tenant pays for work that turned out larger, the others are served.
            debt_tokens = max(0.0, queue.debt_tokens(tenant, priority_class) - usual_tokens)
            own_tokens = own_ahead_tokens + debt_tokens * (1 - share)
            if served_share is None:
                # Turns of others that come first are in a measured share.
                own_tokens += usual_tokens
        stretch = pool.stretches.get((item.model_name, item.cost_tokens.bit_length()))
        is_known = stretch is not None and self._now_ms - stretch.learned_at_ms < _STRETCH_TTL_MS
        return WorkAhead(
            capacity=pool.capacity,
            in_flight_tokens=self._held(item.pool, pool).tokens,
            waiting_tokens=everything.tokens,
            own_waiting_tokens=own_tokens,
            dispatcher_share=pool.share.share or own_share,
            own_share=own_share,
            served_share=served_share,
            service_stretch=max(1.0, stretch.ratio.cautious) if stretch is not None and is_known else 1.0,
        )

    def served_share(self, pool: _Pool[ItemT], tenant: str, priority_class: str) -> float | None:
        """The measured share of a tenant's backlog, at least what it is guaranteed whoever else comes."""
        measured = pool.served.share(tenant, priority_class)
        if measured is None:
            return None
        weights = pool.share.fleet_class_weights
        of_class = weights[priority_class] / sum(weights.values())
        guaranteed = of_class * self._weight(tenant) / max(self._all_weights, self._weight(tenant))
        return max(measured, guaranteed) * (pool.share.share or 1.0)

    def learn_service(self, own: Reserved, cost_tokens: int, engine_ms: int) -> None:
        """Learn from a run of own work how much longer runs take than the request's own tokens would."""
        pool = self._pools.get(own.pool)
        rate = 0.0 if pool is None else pool.capacity.consumer_cost_tokens_per_s
        if pool is not None and rate > 0 and engine_ms > 0 and cost_tokens > 0:
            # By the estimated cost, by which it is looked up.
            stretch = pool.stretches.setdefault((own.model, own.cost_tokens.bit_length()), _Stretch())
            stretch.ratio.learn(min(_MOST_STRETCH, engine_ms / (1000 * cost_tokens / rate)))
            stretch.learned_at_ms = self._now_ms

    def judge(self, item: ItemT, load: WorkAhead, now_ms: int, target_part: float = 1.0) -> Shed | None:
        """None if the request is admitted, else its rejection. It may wait for this part of its latency target."""
        return rules.decide(self.policy.admission, item, self._bounds(item.tenant), load, now_ms, target_part)

    def rank_at_most(self, item: ItemT) -> int:
        """Upper bound on the request's rank among its tenant's requests of its class, from 1: requests with a later
        deadline go behind it and are not subtracted."""
        return self._pool(item.pool).queue.waiting(item.tenant, item.priority_class).requests + 1

    def push(self, item: ItemT) -> None:
        pool, tenant, priority_class = self._pool(item.pool), item.tenant, item.priority_class
        is_first = not pool.queue.waiting(tenant, priority_class).requests
        if is_first:
            share = pool.share.entitled_share(priority_class, self._weight(tenant), waits=False)
            turn_tokens = max(DEFAULT_QUANTUM_TOKENS, _mean_cost_tokens(pool) or item.cost_tokens)
            pool.served.begin(tenant, priority_class, turn_tokens / share)
        pool.queue.push(item)
        if is_first:
            # The others of a batch are judged with this tenant beside them.
            self._refresh_share(item.pool, pool, self._now_ms)
            for name, service in self._service_by_class(pool).items():
                pool.planned[name] = max(service, pool.planned.get(name, 0.0))
        pool.deadlines.add(item)
        self._items[item.claim] = item
        self._ids.add(item)
        self._occupancy.add(item)

    def turns(self, now_ms: int, first: Iterable[Claim] = ()) -> Iterator[Turn[ItemT]]:
        """Requests that may be dispatched now; each is reserved in flight when yielded. Requests in ``first`` hold
        their partitions back: each goes first among those of its tenant, group and class, and takes no turn from
        others. Naming one again is cheap."""
        for claim in first:
            item = self._items.get(claim)
            if item is not None:
                self._pools[item.pool].queue.expedite(item)
        for name, pool in self._pools.items():
            if len(pool.queue):
                self._refresh(name, pool, now_ms)
                self.in_flight.start_round(name)
                yield from self._turns_of(name, pool, now_ms)

    def spare_turns(self, copies: CopyQueue[ItemT], now_ms: int) -> Iterator[Turn[ItemT]]:
        """Copies that may be dispatched now, each reserved in flight and removed from ``copies`` when yielded: as long
        as nothing waits for their pool here or, by the last reports, at another dispatcher, and in a part of the
        window. A copy that is larger than that part goes alone."""
        for name in copies.pools():
            pool = self._pool(name)
            self._refresh(name, pool, now_ms)
            is_idle = not len(pool.queue) and not any(pool.share.weights_by_class.values())
            if is_idle and pool.capacity.state is CapacityState.LIVE:
                self.in_flight.start_round(name)
                self._open_window(name, pool, now_ms, for_copies=True)
                yield from self._spare_turns_of(name, pool, copies, now_ms)

    def _spare_turns_of(
        self, name: str, pool: _Pool[ItemT], copies: CopyQueue[ItemT], now_ms: int
    ) -> Iterator[Turn[ItemT]]:
        is_placed = _placement(pool)
        while True:
            part = Amount(COPIES_PART * pool.window.tokens, COPIES_PART * pool.window.items)
            flying = self.in_flight.copies(name, pool.capacity.owned_partitions)
            both = Held()
            both.merge(self._held(name, pool))
            both.merge(flying)
            room = min(room_tokens(pool.window, pool.share.share, both), room_tokens(part, pool.share.share, flying))
            heads = copies.heads(name) if room > 0 else iter(())
            item = next((one for one in heads if one.cost_tokens <= room and (not is_placed or is_placed(one))), None)
            if item is None:
                return
            copies.pop(item)
            view = self._view(name, pool)
            yield Turn(item, False, self._reserve(name, pool, item, now_ms, is_copy=True), view)

    def queue_ms(self, pool_name: str) -> float:
        """The time that the pool takes for all that waits for it here, as of the last refresh; infinite while its rate
        is unknown and something waits."""
        pool = self._pool(pool_name)
        tokens = pool.queue.total.tokens
        rate = pool.capacity.cost_tokens_per_s * (pool.share.share or 1.0)
        return 0.0 if not tokens else 1_000 * tokens / rate if rate > 0 else inf

    def take_late(self, now_ms: int) -> list[ItemT]:
        """Remove the requests that can no longer be answered in time: at once after a pool got slower or lost its
        consumers, since waiting until their turn would not make it better."""
        gone: list[ItemT] = []
        for name, pool in self._pools.items():
            if len(pool.queue):
                gone.extend(pool.queue.take_late(self._lateness(name, pool, now_ms)))
        for item in gone:
            self._forget(item)
        for name, pool in self._pools.items():
            gone.extend(self._take_unservable(name, pool, now_ms))
        return gone

    def _take_unservable(self, name: str, pool: _Pool[ItemT], now_ms: int) -> list[ItemT]:
        """Remove the online requests that the pool no longer serves in time: when it got slower or is shared by more
        tenants than before, and for some seconds after; while it is lost, once a second, since it is expected back
        later and later."""
        if self.policy.fairness == "fifo":
            # The order that others are compared with has no such review.
            return []
        is_lost = pool.capacity.state is CapacityState.LOST
        service = {} if is_lost else self._service_by_class(pool)
        fell = any(service.get(name, 0.0) < _NOTABLE_FALL * before for name, before in pool.planned.items())
        if fell:
            pool.review_until_ms = now_ms + _REVIEWS_AFTER_FALL_MS
            pool.planned = service
        else:
            # The best so far: it may get worse in small steps.
            pool.planned = {name: max(now, pool.planned.get(name, 0.0)) for name, now in service.items()}
        every_ms = max(0 if fell else _REVIEW_EVERY_MS, _REVIEW_MS_PER_REQUEST * len(pool.queue))
        is_wanted = is_lost or now_ms < pool.review_until_ms
        if not len(pool.queue) or not is_wanted or now_ms - pool.reviewed_at_ms < every_ms:
            return []
        pool.reviewed_at_ms = now_ms
        gone: list[ItemT] = []
        ahead: dict[tuple[str, str], int] = defaultdict(int)
        # What is looked up is the same for requests of one tenant, class, model and size, of which there may be many.
        loads: dict[tuple[str, str, str, int], WorkAhead] = {}
        for item in sorted((one for one in self._items.values() if one.pool == name), key=_DEADLINE):
            if item.is_backfill:
                continue
            key = item.tenant, item.priority_class
            alike = (*key, item.model_name, item.cost_tokens.bit_length())
            load = loads.get(alike)
            if load is None:
                load = loads[alike] = self._load(item, 0)
            load = replace(load, own_waiting_tokens=load.own_waiting_tokens + ahead[key])
            if now_ms + predict(load, item.cost_tokens).finish_ms > item.deadline_at_ms:
                gone.append(item)
            else:
                ahead[key] += item.cost_tokens
        for item in gone:
            self._take_out(item)
        return gone

    def _service_by_class(self, pool: _Pool[ItemT]) -> dict[str, float]:
        """Of each class with a backlog: tokens per second of a tenant of weight 1 in it. Infinite while the pool's rate
        is unknown: then requests are admitted as if they took no time."""
        rate = (pool.capacity.cost_tokens_per_s or inf) * (pool.share.share or 1.0)
        weights, backlogged = pool.share.fleet_class_weights, pool.queue.backlogged_weight
        waiting = {name: weight for name in CLASS_WEIGHTS if (weight := backlogged(name)) > 0}
        of_all = sum(weights[name] for name in waiting)
        return {name: rate * weights[name] / of_all / weight for name, weight in waiting.items()}

    def discard(self, claims: Iterable[Claim]) -> list[ItemT]:
        """Remove and return, uncharged, the queued ones of these requests."""
        gone: list[ItemT] = []
        for claim in claims:
            item = self._items.get(claim)
            if item is not None:
                self._take_out(item)
                gone.append(item)
        return gone

    def find(self, tenant: str, request_id: str) -> tuple[ItemT, ...]:
        return self._ids.find(tenant, request_id)

    def take(self, wanted: Callable[[ItemT], bool]) -> list[ItemT]:
        """Remove and return, uncharged, the matching queued requests in order of arrival. O(queued)."""
        taken = [item for item in self._items.values() if wanted(item)]
        for item in taken:
            self._take_out(item)
        return taken

    def backlogs(self) -> Iterator[tuple[str, str]]:
        for name, pool in self._pools.items():
            for priority_class in CLASS_WEIGHTS:
                if pool.queue.backlogged_weight(priority_class) > 0:
                    yield name, priority_class

    def correct(self, own: Reserved, correction_tokens: float) -> None:
        """Correct the charge of own work that is done: charge or refund the difference."""
        pool = self._pools.get(own.pool)
        if pool is not None and correction_tokens:
            pool.queue.charge(own.tenant, own.group, own.priority_class, correction_tokens)

    def change_cost(self, before: ItemT, now: ItemT) -> None:
        """Change the cost of a popped request before it is dispatched: its reservation and its charge follow."""
        if (before.cost_tokens, before.prompt_tokens) == (now.cost_tokens, now.prompt_tokens):
            return
        source = before.claim.coordinate
        self.in_flight.change_cost(source, now.cost_tokens, now.prompt_tokens)
        pool = self._pools.get(before.pool)
        if pool is not None:
            more_tokens = now.cost_tokens - before.cost_tokens
            if self.policy.fairness == "vtc":
                more_tokens = now.prompt_tokens - before.prompt_tokens
            pool.queue.charge(before.tenant, before.group, before.priority_class, more_tokens)

    def refund(self, item: ItemT) -> None:
        """Undo the charge of a popped request that is not dispatched."""
        pool = self._pools.get(item.pool)
        if pool is not None:
            tokens = item.prompt_tokens if self.policy.fairness == "vtc" else item.cost_tokens
            pool.queue.charge(item.tenant, item.group, item.priority_class, -tokens)

    def charged_tokens(self, own: Reserved) -> int:
        """Tokens charged for this work when it was dispatched."""
        if self.policy.fairness == "vtc":
            return own.prompt_tokens
        return own.cost_tokens

    def paused_backfill(self) -> set[str]:
        """Tenants with enough backfill queued, until half of it is left; all tenants while the backfill of all together
        fills the bounds."""
        policy, occupancy = self.policy.admission, self._occupancy
        paused = occupancy.paused_backfill(policy, lambda tenant: self._bounds(tenant, backfill=True))
        return paused.union(self._specs) if occupancy.is_full_of_backfill(policy) else paused

    def pool_views(self) -> Iterator[tuple[str, FairQueue[ItemT], PoolCapacity, View, FleetShare]]:
        """Every pool as of the last refresh."""
        for name, pool in self._pools.items():
            yield name, pool.queue, pool.capacity, self._view(name, pool), pool.share

    def entitled_share(self, tenant: str, pool_name: str) -> float:
        """The part of a pool that a tenant gets in all its classes together while every backlog lasts."""
        pool, spec = self._pools.get(pool_name), self._specs.get(tenant)
        if pool is None or spec is None:
            return 0.0
        waiting = [name for name in CLASS_WEIGHTS if pool.queue.waiting(tenant, name).requests]
        return sum(pool.share.entitled_share(name, self._weight(tenant), waits=True) for name in waiting)

    def holds(self, claim: Claim) -> bool:
        return claim in self._items

    def claims(self) -> tuple[Claim, ...]:
        return tuple(self._items)

    @property
    def size_bytes(self) -> int:
        return self._occupancy.size_bytes

    def __len__(self) -> int:
        return len(self._items)

    def _turns_of(self, name: str, pool: _Pool[ItemT], now_ms: int) -> Iterator[Turn[ItemT]]:
        is_placed = _placement(pool)
        try:
            while True:
                room = room_tokens(pool.window, pool.share.share, self._held(name, pool))
                popped = pool.queue.pop(room, self._lateness(name, pool, now_ms), is_placed)
                if popped is None:
                    return
                item, is_late = popped
                self._forget(item)
                view = self._view(name, pool)
                partition = ANY_PARTITION if is_late else self._reserve(name, pool, item, now_ms)
                if not is_late:
                    pool.served.dispatched(item.tenant, item.priority_class, item.cost_tokens)
                yield Turn(item, is_late, partition, view)
        finally:
            pool.queue.unblock()

    def _open_window(self, name: str, pool: _Pool[ItemT], now_ms: int, *, for_copies: bool = False) -> None:
        """Compute the pool's window for a round of dispatch. Copies in flight take room of copies alone."""
        capacity, target_ms, mean = pool.capacity, self.policy.target_queue_ms, _mean_cost_tokens(pool)
        if capacity.work_partitions is None:
            pool.window, pool.choice = window(capacity, mean, target_ms), None
        else:
            loads = self.in_flight.consumer_loads(name, capacity.work_partitions, with_copies=for_copies)
            pool.choice = ConsumerChoice(capacity, loads, mean, target_ms, now_ms)
            pool.window = pool.choice.window

    def next_turn_ms(self, now_ms: int) -> int | None:
        """Time until the next consumer takes more work although nothing is settled; None if nothing waits for that."""
        soonest: float | None = None
        for name, pool in self._pools.items():
            partitions, rate = pool.capacity.work_partitions, pool.capacity.consumer_cost_tokens_per_s
            if not len(pool.queue) or partitions is None or rate <= 0:
                continue
            for load in self.in_flight.consumer_loads(name, partitions):
                left_ms = remaining_ms(load, rate, now_ms) - self.policy.target_queue_ms
                if left_ms > 0 and (soonest is None or left_ms < soonest):
                    soonest = left_ms
        return None if soonest is None else ceil(soonest)

    def finished(self, topic: str, partition: int, now_ms: int) -> None:
        """Work of this partition of a priority topic was settled: its consumer begins its next run."""
        pool, _ = pool_of_priority(topic)
        self.in_flight.began(pool, partition, now_ms)

    def _reserve(self, name: str, pool: _Pool[ItemT], item: ItemT, now_ms: int, *, is_copy: bool = False) -> int:
        """Count the request as in flight. Returns the partition for it. Nothing is learned from the cost of a copy."""
        topic = priority_topic(name, item.priority_class)
        choice, partitions = pool.choice, pool.capacity.work_partitions
        if choice is None or partitions is None:
            partition = self.in_flight.choose_partition(topic)
        else:
            partition = self.in_flight.choose_partition(topic, [partitions[choice.next_consumer]])
            if choice.is_idle:
                self.in_flight.began(name, partition, now_ms)
            choice.add(item.cost_tokens)
            pool.window = choice.window
        gain = _MEAN_COST_GAIN if pool.mean_cost_tokens else 1.0
        if not is_copy:
            pool.mean_cost_tokens += gain * (item.cost_tokens - pool.mean_cost_tokens)
        reserved = Reserved(
            pool=name,
            priority_class=item.priority_class,
            partition=partition,
            tenant=item.tenant,
            group=item.group,
            cost_tokens=item.cost_tokens,
            prompt_tokens=item.prompt_tokens,
            model=item.model_name,
            input_bytes=item.input_bytes,
            most_output_tokens=item.most_output_tokens,
        )
        self.in_flight.reserve(item.claim.coordinate, reserved)
        return partition

    def _held(self, name: str, pool: _Pool[ItemT]) -> Held:
        """Work in flight of the live consumers but for copies, which they run when they have no request; not that on a
        dead one's partitions until the group moves them."""
        return self.in_flight.held(name, pool.capacity.owned_partitions)

    def _lateness(self, name: str, pool: _Pool[ItemT], now_ms: int) -> Callable[[ItemT], bool]:
        """Whether a request that starts at the earliest possible time would end after its deadline."""
        in_flight = self._held(name, pool).tokens
        capacity = pool.capacity
        rate = capacity.cost_tokens_per_s
        start_ms, ms_per_token = now_ms, 0.0
        # An idle pool tries every request that has not expired: a wrong rate must not reject for ever.
        if capacity.state is CapacityState.LIVE and rate > 0 and in_flight > 0:
            start_ms += round(1000 * in_flight / rate)
            ms_per_token = 1000 / capacity.consumer_cost_tokens_per_s
        return lambda item: start_ms + item.cost_tokens * ms_per_token > item.deadline_at_ms

    def _view(self, name: str, pool: _Pool[ItemT]) -> View:
        held = self._held(name, pool)
        return View(held.tokens, pool.window.tokens, held.items, pool.window.items, pool.share.share)

    def _pool(self, name: str) -> _Pool[ItemT]:
        pool = self._pools.get(name)
        if pool is None:
            now_ms = self._now_ms
            queue: FairQueue[ItemT] = make_fair_queue(self.policy.fairness)
            self._set_shares(queue)
            share = self.fleet.share(name, {}, CLASS_WEIGHTS, now_ms)
            pool = self._pools[name] = _Pool(queue, self.capacity.pool(name, now_ms), share)
            self._refresh(name, pool, now_ms)
        return pool

    def _set_shares(self, queue: FairQueue[ItemT]) -> None:
        for tenant, spec in self._specs.items():
            queue.set_share(tenant, Share(self._weight(tenant), spec.groups))

    def _refresh(self, name: str, pool: _Pool[ItemT], now_ms: int) -> None:
        pool.capacity = self.capacity.pool(name, now_ms)
        self._open_window(name, pool, now_ms)
        self._refresh_share(name, pool, now_ms)

    def _refresh_share(self, name: str, pool: _Pool[ItemT], now_ms: int) -> None:
        own = {priority_class: pool.queue.backlogged_weight(priority_class) for priority_class in CLASS_WEIGHTS}
        before = pool.share.class_weights
        pool.share = self.fleet.share(name, own, CLASS_WEIGHTS, now_ms)
        if pool.share.class_weights != before:
            pool.queue.set_class_weights(pool.share.class_weights)

    def _take_out(self, item: ItemT) -> None:
        self._pools[item.pool].queue.remove(item, charge=False)
        self._forget(item)

    def _forget(self, item: ItemT) -> None:
        pool = self._pools[item.pool]
        if not pool.queue.waiting(item.tenant, item.priority_class).requests:
            pool.served.end(item.tenant, item.priority_class)
        pool.deadlines.remove(item)
        del self._items[item.claim]
        self._ids.remove(item)
        self._occupancy.remove(item)

    def _weight(self, tenant: str) -> float:
        """Weight of the tenant's partitions read here."""
        spec = self._specs.get(tenant)
        return (1.0 if spec is None else spec.weight) * self.part(tenant)

    def _bounds(self, tenant: str, *, backfill: bool = False) -> Bounds:
        spec = self._specs.get(tenant) or TenantSpec(tenant)
        return self._occupancy.bounds(spec, self._weight(tenant), self._all_weights, backfill=backfill)
