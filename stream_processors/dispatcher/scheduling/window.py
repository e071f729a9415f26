"""Dispatch window of a pool, and this dispatcher's share of it from the backlogs of all dispatchers. Pure.

A dispatched request can no longer be overtaken, so no more is dispatched than keeps the consumers busy.

Classes with a backlog anywhere share the window by class weight; within a class the dispatchers share by backlogged
weight. With w the class weights, b[d][c] the backlogged weight of class c at dispatcher d, B[c] its sum over all d:

    share[d] = sum over c with B[c] > 0 of  w[c] / (sum of w over those classes)  x  b[d][c] / B[c]

The parts within a class add up to 1, and so do the classes: dispatchers with the same reports take the whole window and
no more. Within its share a dispatcher serves its classes by w[c] x b[d][c] / B[c], so the classes of the whole fleet
are served by w.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace
from math import floor, inf
from typing import NamedTuple

from fairlane.frozen import frozen_dataclass
from fairlane.records import DispatchReport
from fairlane_server.admission_rule import BatchCapacity, CapacityState, PoolCapacity
from stream_processors.dispatcher.scheduling.in_flight import ConsumerLoad, Held

STARTING_LIMITS = BatchCapacity(items=32, tokens=16_384)
"""One consumer with the default limits."""

BATCHES_PER_CONSUMER = 2
"""One runs and one is ready: a consumer never waits for the dispatcher between two batches."""


@frozen_dataclass(frozen=True, slots=True)
class Amount:
    """An amount of work: cost tokens and requests."""

    tokens: float
    items: float


NO_WINDOW = Amount(0.0, 0.0)


def window(capacity: PoolCapacity, mean_cost_tokens: float, target_queue_ms: float) -> Amount:
    """The window W of a pool whose requests cost ``mean_cost_tokens`` each (0 if not known), in tokens and in items,
    where nothing is known of its consumers' runs: the sum over the live consumers of ::

        max(2 x max_batch, rate x target_queue_ms / 1000)

    A full batch is bounded by its tokens or its items, whichever is reached first, and so is the window: bounded by
    tokens and a mean cost alone it would shrink when small requests go before large ones, and the large ones would wait
    until the pool is empty. The second term is larger only for consumers that finish two batches in less than the
    target queue time; they would otherwise run dry while a transaction commits. A pool that never reported gets the
    window of one consumer with ``STARTING_LIMITS``, so that its first consumer finds work. A lost pool gets none: work
    dispatched now could not be overtaken by more urgent work when the pool is back."""
    if capacity.state is CapacityState.LOST:
        return NO_WINDOW
    if capacity.state is CapacityState.NEVER:
        return Amount(BATCHES_PER_CONSUMER * STARTING_LIMITS.tokens, BATCHES_PER_CONSUMER * STARTING_LIMITS.items)
    rate = capacity.consumer_cost_tokens_per_s
    parts = [consumer_window(limits, None, rate, mean_cost_tokens, target_queue_ms, 0) for limits in capacity.batches]
    return Amount(sum(part.tokens for part in parts), sum(part.items for part in parts))


class _Load(NamedTuple):
    """A consumer in a round of dispatch, in the order in which consumers get requests."""

    is_full: bool
    remaining_ms: float
    tokens: int
    chosen: int
    number: int
    items: int
    most: Amount


class ConsumerChoice:
    """The window of a pool in one round of dispatch, and the consumer that gets the next request: the one with room
    that will be done first.

    The window is bounded in time, since what is dispatched cannot be overtaken: the sum over the consumers of ::

        max_batch + rate x target_queue_ms / 1000               while a run goes on
        max(2 x max_batch, rate x target_queue_ms / 1000)       when it will be done within target_queue_ms

    by the work in flight in ``loads``, the rate, and the time since the run began. The first line covers consumers
    whose items leave one by one. With an unknown rate the second holds. A full consumer counts with what it holds: the
    room that it has in tokens, but not in items, is nobody's. O(consumers) to begin, O(log consumers) for each request.
    """

    def __init__(
        self,
        capacity: PoolCapacity,
        loads: Sequence[ConsumerLoad],
        mean_cost_tokens: float,
        target_queue_ms: float,
        now_ms: int,
    ) -> None:
        self._limits = capacity.batches
        self._rate = capacity.consumer_cost_tokens_per_s
        self._mean_cost_tokens = mean_cost_tokens
        self._target_queue_ms = target_queue_ms
        self._now_ms = now_ms
        self._loads = list(loads)
        self._heap = [self._entry(index) for index in range(len(self._loads))]
        heapify(self._heap)
        self._is_sorted = True
        self._tokens = sum(entry.most.tokens for entry in self._heap)
        self._items = sum(entry.most.items for entry in self._heap)

    @property
    def window(self) -> Amount:
        return Amount(self._tokens, self._items)

    @property
    def next_consumer(self) -> int:
        """Its number, in the order of ``loads``."""
        return self._heap[0].number

    @property
    def is_idle(self) -> bool:
        """Whether that consumer has nothing to do."""
        return not self._heap[0].items

    def prefer(self, numbers: Container[int]) -> bool:
        """Let the next request go to the best of these consumers. False, and nothing changes, if none of them has room.
        O(consumers), unless it is the next one anyway."""
        if not self._is_sorted:
            heapify(self._heap)
            self._is_sorted = True
        if self._heap[0].number in numbers:
            return True
        found = min((entry for entry in self._heap if entry.number in numbers and not entry.is_full), default=None)
        if found is None:
            return False
        # No heap until ``add`` has put everything in order again.
        self._heap.remove(found)
        self._heap.insert(0, found)
        self._is_sorted = False
        return True

    def add(self, tokens: int) -> None:
        """That consumer gets a request."""
        before = self._heap[0]
        load = self._loads[before.number]
        since_ms = load.since_ms if load.items else self._now_ms
        self._loads[before.number] = ConsumerLoad(load.tokens + tokens, load.items + 1, since_ms, load.chosen)
        now = self._entry(before.number)
        if self._is_sorted:
            heapreplace(self._heap, now)
        else:
            self._heap[0] = now
            heapify(self._heap)
            self._is_sorted = True
        self._tokens += now.most.tokens - before.most.tokens
        self._items += now.most.items - before.most.items

    def _entry(self, index: int) -> _Load:
        load, limits = self._loads[index], self._limits[index]
        most = consumer_window(limits, load, self._rate, self._mean_cost_tokens, self._target_queue_ms, self._now_ms)
        is_full = load.items >= most.items or load.tokens >= most.tokens
        if is_full:
            most = Amount(load.tokens, load.items)
        left_ms = remaining_ms(load, self._rate, self._now_ms)
        return _Load(is_full, left_ms, load.tokens, load.chosen, index, load.items, most)


def consumer_window(
    limits: BatchCapacity,
    load: ConsumerLoad | None,
    tokens_per_s: float,
    mean_cost_tokens: float,
    target_queue_ms: float,
    now_ms: int,
) -> Amount:
    """One consumer's part of the window; ``load`` None: nothing is known of its run."""
    ahead_tokens = tokens_per_s * target_queue_ms / 1000
    ahead_items = ahead_tokens / max(1.0, mean_cost_tokens)
    if load is not None and tokens_per_s > 0 and remaining_ms(load, tokens_per_s, now_ms) > target_queue_ms:
        return Amount(limits.tokens + ahead_tokens, limits.items + floor(ahead_items))
    return Amount(
        max(BATCHES_PER_CONSUMER * limits.tokens, ahead_tokens), max(BATCHES_PER_CONSUMER * limits.items, ahead_items)
    )


def remaining_ms(load: ConsumerLoad, tokens_per_s: float, now_ms: int) -> float:
    """Time until the work in flight of a consumer is done."""
    if not load.items or tokens_per_s <= 0:
        return 0.0
    return max(0.0, 1000 * load.tokens / tokens_per_s - (now_ms - load.since_ms))


def room_tokens(whole: Amount, share: float, in_flight: Held) -> float:
    """The largest cost of the next request that this dispatcher may send into a pool with this window; 0 for none.

    ``in_flight`` counts partitions that a live consumer owns. The window is that of the live consumers: work on a dead
    consumer's partitions, until the group moves them, would otherwise use up their window and leave them idle.

    Bounded by the ``share`` of the window and by what the whole pool has left: a share that just grew is filled as fast
    as the others' surplus drains. Infinite while the whole share is free, since a request above the share could never
    be sent otherwise. So only such a request can exceed the window.
    """
    left_in_pool, own_part = whole.tokens - in_flight.tokens, whole.tokens * share
    items_left_in_pool, own_items = whole.items - in_flight.items, whole.items * share
    if in_flight.own_items <= 0 and left_in_pool > 0 and left_in_pool >= own_part:
        return inf if items_left_in_pool >= min(1.0, own_items) and items_left_in_pool > 0 else 0.0
    if min(items_left_in_pool, own_items - in_flight.own_items) < 1:
        return 0.0
    return max(0.0, min(left_in_pool, own_part - in_flight.own_tokens))


REPORT_TTL_MS = 800
"""A dispatcher counts for this long after its last report, from receipt by our own clock."""


@frozen_dataclass(frozen=True, slots=True)
class FleetShare:
    """This dispatcher's part of one pool.

    Attributes:
        share: of the window, 0 to 1; 0 when only others have a backlog.
        class_weights: for this dispatcher's own queue, all above 0. For a class without a backlog here: the weight it
            would have if a tenant of weight 1 came.
        weights_by_class: the backlogged weight of the whole fleet.
        fleet_class_weights: by which the classes share the whole pool.
    """

    share: float
    class_weights: Mapping[str, float]
    weights_by_class: Mapping[str, float]
    fleet_class_weights: Mapping[str, float]

    def entitled_share(self, priority_class: str, weight: float, *, waits: bool) -> float:
        """The part of the pool that a tenant of this weight gets in this class while every backlog lasts; ``waits``:
        whether the tenant is part of the backlog already."""
        backlogged = self.weights_by_class.get(priority_class, 0.0)
        backlogged = max(backlogged, weight) if waits else backlogged + weight
        sharing = sum(
            class_weight
            for name, class_weight in self.fleet_class_weights.items()
            if name == priority_class or self.weights_by_class.get(name, 0.0) > 0
        )
        return self.fleet_class_weights[priority_class] / sharing * weight / backlogged


@frozen_dataclass(frozen=True, slots=True)
class _Heard:
    at_ms: int
    reported_at_ms: int
    weights: Mapping[str, Mapping[str, float]]
    """Backlogged weight by pool and class."""


class Fleet:
    """The other dispatchers, by their last reports; reports of ``instance_id`` itself are ignored."""

    def __init__(self, instance_id: str) -> None:
        self._instance_id = instance_id
        self._heard: dict[str, _Heard] = {}
        self._now_ms = 0

    def report(self, report: DispatchReport, now_ms: int) -> None:
        """Add a report. A draining dispatcher is removed at once; a report older than the last is ignored."""
        if report.instance_id == self._instance_id:
            return
        if now_ms < self._now_ms:
            # The clock was set back.
            self._heard = {name: replace(one, at_ms=min(one.at_ms, now_ms)) for name, one in self._heard.items()}
        self._now_ms = now_ms
        last = self._heard.get(report.instance_id)
        if report.draining:
            self._heard.pop(report.instance_id, None)
        elif last is None or report.reported_at_ms >= last.reported_at_ms:
            weights = {
                load.pool: {
                    waiting.priority_class: waiting.backlogged_weight
                    for waiting in load.classes
                    if waiting.backlogged_weight > 0
                }
                for load in report.pools
            }
            self._heard[report.instance_id] = _Heard(now_ms, report.reported_at_ms, weights)
        self._drop_silent(now_ms)

    def dispatchers(self, now_ms: int) -> int:
        self._drop_silent(now_ms)
        return 1 + len(self._heard)

    def share(self, pool: str, own: Mapping[str, float], class_weights: Mapping[str, float], now_ms: int) -> FleetShare:
        """This dispatcher's part of ``pool``. ``own`` is its own backlogged weight by class. Without any backlog the
        dispatchers have equal parts."""
        self._drop_silent(now_ms)
        fleet = {name: own.get(name, 0.0) for name in class_weights}
        for heard in self._heard.values():
            for name, weight in heard.weights.get(pool, {}).items():
                if name in fleet:
                    fleet[name] += weight
        sharing = sum(class_weights[name] for name, weight in fleet.items() if weight > 0)
        own_weights = {
            name: class_weights[name] * (own[name] / weight if own.get(name, 0.0) > 0 else 1.0 / (1.0 + weight))
            for name, weight in fleet.items()
        }
        if sharing > 0:
            share = sum(own_weights[name] for name in fleet if own.get(name, 0.0) > 0) / sharing
        else:
            share = 1.0 / (1 + len(self._heard))
        return FleetShare(min(1.0, share), own_weights, fleet, dict(class_weights))

    def _drop_silent(self, now_ms: int) -> None:
        for instance_id in [name for name, heard in self._heard.items() if heard.at_ms < now_ms - REPORT_TTL_MS]:
            del self._heard[instance_id]
