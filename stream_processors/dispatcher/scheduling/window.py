"""Dispatch window of a pool, and this dispatcher's share of it from the backlogs of all dispatchers. Pure.

A dispatched request can no longer be overtaken, so no more is dispatched than keeps the consumers busy.

Classes with a backlog anywhere share the window by class weight; within a class the dispatchers share by backlogged
weight. With w the class weights, b[d][c] the backlogged weight of class c at dispatcher d, B[c] its sum over all d:

    share[d] = sum over c with B[c] > 0 of  w[c] / (sum of w over those classes)  x  b[d][c] / B[c]

The parts within a class add up to 1, and so do the classes: dispatchers with the same reports take the whole window and
no more. Within its share a dispatcher serves its classes by w[c] x b[d][c] / B[c], so the classes of the whole fleet
are served by w.
"""

from collections.abc import Mapping
from math import inf

from fairlane.frozen import frozen_dataclass
from fairlane.records import DispatchReport
from fairlane_server.admission_rule import BatchCapacity, CapacityState, PoolCapacity
from stream_processors.dispatcher.scheduling.in_flight import Held

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
    """The window W of a pool whose requests cost ``mean_cost_tokens`` each (0 if not known), in tokens and in items::

        tokens = max(2 x sum of max_batch_tokens over the live consumers, rate x target_queue_ms / 1000)
        items  = max(2 x sum of max_batch_size over the live consumers, rate x target_queue_ms / 1000 / mean cost)

    A full batch is bounded by its tokens or its items, whichever is reached first, and so is the window: bounded by
    tokens and a mean cost alone it would shrink when small requests go before large ones, and the large ones would wait
    until the pool is empty. The second terms are larger only for consumers that finish two batches in less than the
    target queue time; they would otherwise run dry while a transaction commits. A pool that never reported gets the
    window of one consumer with ``STARTING_LIMITS``, so that its first consumer finds work. A lost pool gets none: work
    dispatched now could not be overtaken by more urgent work when the pool is back.
    """
    if capacity.state is CapacityState.LOST:
        return NO_WINDOW
    if capacity.state is CapacityState.NEVER:
        return Amount(BATCHES_PER_CONSUMER * STARTING_LIMITS.tokens, BATCHES_PER_CONSUMER * STARTING_LIMITS.items)
    target_tokens = capacity.cost_tokens_per_s * target_queue_ms / 1000
    return Amount(
        max(BATCHES_PER_CONSUMER * capacity.max_batch_tokens, target_tokens),
        max(BATCHES_PER_CONSUMER * capacity.max_batch_items, target_tokens / max(1.0, mean_cost_tokens)),
    )


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

    def report(self, report: DispatchReport, now_ms: int) -> None:
        """Add a report. A draining dispatcher is removed at once; a report older than the last is ignored."""
        if report.instance_id == self._instance_id:
            return
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
