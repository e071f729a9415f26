"""Dispatch window: the bound on a pool's work in flight, in cost tokens. Pure.

A dispatched request can no longer be overtaken, so no more is dispatched than keeps the consumers busy.
"""

from dataclasses import dataclass
from math import inf

from fairlane_server.admission_rule import BatchLimits, CapacityState, PoolCapacity
from stream_processors.dispatcher.scheduling.in_flight_ledger import Held

STARTING_LIMITS = BatchLimits(items=32, tokens=16_384)
"""One consumer with the default limits."""

BATCHES_PER_CONSUMER = 2
"""One runs and one is ready: a consumer never waits for the dispatcher between two batches."""


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of work: cost tokens and requests."""

    tokens: float
    items: float


NO_WINDOW = Amount(0.0, 0.0)


def window(
    capacity: PoolCapacity,
    mean_cost_tokens: float,
    target_queue_ms: float,
    *,
    starting_limits: BatchLimits = STARTING_LIMITS,
) -> Amount:
    """The window W of a pool whose requests cost ``mean_cost_tokens`` each (0 if not known), in tokens and in items::

        tokens = max(2 x sum of max_batch_tokens over the live consumers, rate x target_queue_ms / 1000)
        items  = max(2 x sum of max_batch_size over the live consumers, rate x target_queue_ms / 1000 / mean cost)

    A full batch is bounded by its tokens or its items, whichever is reached first, and so is the window: bounded by
    tokens and a mean cost alone it would shrink when small requests go before large ones, and the large ones would wait
    until the pool is empty. The second terms are larger only for consumers that finish two batches in less than the
    target queue time; they would otherwise run dry while a transaction commits. A pool that never reported gets the
    window of one consumer with ``starting_limits``, so that its first consumer finds work. A lost pool gets none: work
    dispatched now could not be overtaken by more urgent work when the pool is back.
    """
    if capacity.state is CapacityState.LOST:
        return NO_WINDOW
    if capacity.state is CapacityState.NEVER:
        return Amount(BATCHES_PER_CONSUMER * starting_limits.tokens, BATCHES_PER_CONSUMER * starting_limits.items)
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
