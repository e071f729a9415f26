"""Admission rule of dispatcher and gateway: predicted wait of a request, and the time to retry. Pure.

The dispatcher applies it to its own queue before it admits a request; the gateway applies it to the heartbeats of all
dispatchers, to reject at once what they would reject.
"""

from collections.abc import Mapping
from enum import StrEnum
from math import inf, isfinite

from fairlane.backoff import jittered_ms
from fairlane.frozen import frozen_dataclass
from fairlane.records import TenantSpec

CAPACITY_TTL_MS = 3_000
"""How long a consumer's heartbeat counts, from when it was received. It sends one every 250 ms."""

LEAST_OUTAGE_MS = 10_000
"""A pool that has just lost its consumers is not expected back sooner: one needs that long to restart and load."""

OUTPUT_WEIGHT = 2
"""An output token takes about twice the engine time of a prompt token."""

DEFAULT_TARGET_PART = 0.25
"""Latency target of a request, in parts of its timeout, where neither its tenant nor the deployment sets one."""

LEAST_RETRY_MS = 100
MOST_RETRY_MS = 300_000

AFTERWARDS_FREE = 0.1
"""Part of a bound that must be free again before a tenant that was refused for it is asked to come back."""


def cost_tokens(prompt_tokens: int, output_tokens: int) -> int:
    """Cost tokens: the unit of work in all services."""
    return prompt_tokens + OUTPUT_WEIGHT * output_tokens


def latency_target_ms(
    spec: TenantSpec | None, priority_class: str, timeout_ms: int, defaults: Mapping[str, int]
) -> int:
    """The latency target of a request: that of its tenant's class, that of the deployment, or a quarter of its timeout.
    Never more than the timeout, and at least 1."""
    own = () if spec is None else spec.latency_targets
    target_ms = next((one.target_ms for one in own if one.priority_class == priority_class), None)
    if target_ms is None:
        target_ms = defaults.get(priority_class, round(DEFAULT_TARGET_PART * timeout_ms))
    return max(1, min(target_ms, timeout_ms))


class CapacityState(StrEnum):
    """Known state of a pool's consumers."""

    NEVER = "never"
    """None has reported since this process began: perhaps the pool is scaled to zero and waits for work to come."""

    LIVE = "live"
    """At least one reports."""

    LOST = "lost"
    """Some did, and all of them drained or fell silent."""


@frozen_dataclass(frozen=True, slots=True)
class BatchCapacity:
    """The largest micro-batch of one consumer: number of items, and their cost tokens together."""

    items: int
    tokens: int


@frozen_dataclass(frozen=True, slots=True)
class PoolCapacity:
    """A pool at one moment. Rates are in cost tokens per second; 0 is unknown.

    ``cost_tokens_per_s`` is that of all live consumers together, ``consumer_cost_tokens_per_s`` that of one of them, on
    average. When the pool is lost, the latter and ``last_cost_tokens_per_s`` (of the pool) are as they last were.
    ``lost_for_ms`` counts from the last sign of life. ``batches`` has one entry for each live consumer that is counted.

    ``owned_partitions`` are those of the pool's topics that a live consumer says it owns, ``work_partitions`` those of
    each consumer that is counted, which get new work. Both are None while that is not known: when nobody lives, or when
    one that lives does not name its partitions, because it is of an older version.

    ``versions`` are the versions of models that each of these consumers has loaded, ``loaded`` the part of all live
    consumers that has each version: 0 for one that was unloaded, None for one that is only being loaded. Both are None
    while that is not known, likewise.
    """

    state: CapacityState = CapacityState.NEVER
    consumers: int = 0
    cost_tokens_per_s: float = 0.0
    consumer_cost_tokens_per_s: float = 0.0
    last_cost_tokens_per_s: float = 0.0
    lost_for_ms: int = 0
    batches: tuple[BatchCapacity, ...] = ()
    owned_partitions: frozenset[int] | None = None
    work_partitions: tuple[frozenset[int], ...] | None = None
    versions: tuple[frozenset[str], ...] | None = None
    loaded: Mapping[str, float | None] | None = None

    @property
    def max_batch_items(self) -> int:
        return sum(limits.items for limits in self.batches)

    @property
    def max_batch_tokens(self) -> int:
        return sum(limits.tokens for limits in self.batches)


@frozen_dataclass(frozen=True, slots=True)
class WorkAhead:
    """Work ahead of a request in its pool, in cost tokens.

    ``in_flight_tokens``: dispatched and not settled, by any dispatcher. ``waiting_tokens``: all that waits for the pool
    at this dispatcher, whose part of the pool is ``dispatcher_share``. ``own_waiting_tokens``: the waiting work of the
    same tenant and class, and one request of the usual cost; their part of the pool, while all that wait go on
    waiting, is ``own_share``. Shares are above 0 and at most 1. ``served_share`` is the part that they really got, or
    None while that is not known.

    ``service_stretch``: how many times longer a run takes than the request's own tokens would, since others run beside
    it.
    """

    capacity: PoolCapacity
    in_flight_tokens: float
    waiting_tokens: float
    own_waiting_tokens: float
    dispatcher_share: float = 1.0
    own_share: float = 1.0
    served_share: float | None = None
    service_stretch: float = 1.0

    def own_drain_ms(self, tokens: float) -> float:
        """Time in which the tenant gets so many tokens served."""
        rate = self.capacity.cost_tokens_per_s or self.capacity.last_cost_tokens_per_s
        return drain_ms(tokens, rate * (self.own_share if self.served_share is None else self.served_share))


@frozen_dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted waiting and service time of a request: the terms of ``predict``."""

    return_ms: float
    in_flight_ms: float
    all_waiting_ms: float
    queue_ms: float
    service_ms: float

    @property
    def wait_ms(self) -> float:
        return self.return_ms + self.in_flight_ms + self.queue_ms

    @property
    def finish_ms(self) -> float:
        return self.wait_ms + self.service_ms

    def ms_until_in_time(self, allowed_ms: float, target_ms: float = inf) -> float:
        """Milliseconds that the live pool must drain until a request submitted then is predicted to finish within
        ``allowed_ms`` and to be queued no longer than ``target_ms``.

        Work in flight is refilled as long as anything waits. So the wait falls with the work before the request,
        down to nothing; what is in flight only once all that waits has gone. A pool with nothing left to do takes
        anything.
        """
        wait_ms = self.in_flight_ms + self.queue_ms
        too_long_ms = max(wait_ms + self.service_ms - allowed_ms, self.queue_ms - target_ms)
        if too_long_ms <= self.queue_ms:
            return max(0.0, too_long_ms)
        return self.all_waiting_ms + min(self.in_flight_ms, too_long_ms - self.queue_ms)


def predict(load: WorkAhead, cost_tokens: float) -> Prediction:
    """When a request of that cost would be served, with what is known now::

        wait    = in flight / rate + queue
        queue   = own waiting / (rate x served_share), once that is known; until then
                  min(waiting / (rate x dispatcher_share), own waiting / (rate x own_share))
        service = cost / rate of one consumer x service_stretch

    The first term cannot be overtaken: it was dispatched. Of what waits, no more goes first than all of it, and no more
    than what is served to others while the tenant's own backlog, and one more request, are served at its entitled
    share. The one more is the turn of each of the others that comes first, even before a tenant that has nothing
    waiting: with a hundred tenants that is a hundred requests, however much each of them has waiting behind its first.
    The usual cost is taken for it and not the request's own: a large one waits no longer for its turn than a small.
    Neighbours that come later, and go first, are in neither bound: the measured share counts them.

    While the rate is not known (no consumer has reported yet, or none has measured itself) everything is 0, so that
    requests come in and a pool scaled to zero gets its reason to start. A lost pool is expected back after
    ``max(LEAST_OUTAGE_MS, lost_for_ms)``, since an outage of unknown length is expected to last as long again as it
    has lasted, and then to serve at its last rate.
    """
    capacity = load.capacity
    lost = capacity.state is CapacityState.LOST
    return_ms = float(max(LEAST_OUTAGE_MS, capacity.lost_for_ms)) if lost else 0.0
    rate = capacity.last_cost_tokens_per_s if lost else capacity.cost_tokens_per_s
    if rate <= 0:
        return Prediction(return_ms, 0.0, 0.0, 0.0, 0.0)
    all_waiting_ms = drain_ms(load.waiting_tokens, rate * load.dispatcher_share)
    if load.served_share is None:
        queue_ms = min(all_waiting_ms, drain_ms(load.own_waiting_tokens, rate * load.own_share))
    else:
        queue_ms = drain_ms(load.own_waiting_tokens, rate * load.served_share)
    service_ms = load.service_stretch * drain_ms(cost_tokens, capacity.consumer_cost_tokens_per_s or rate)
    return Prediction(return_ms, drain_ms(load.in_flight_tokens, rate), all_waiting_ms, queue_ms, service_ms)


def takes_anything(load: WorkAhead) -> bool:
    """Whether the pool accepts every unexpired request regardless of the prediction: it never reported, or it is live
    and idle. Only work can show what a pool can do."""
    if load.capacity.state is CapacityState.LIVE:
        return load.in_flight_tokens <= 0 and load.waiting_tokens <= 0
    return load.capacity.state is CapacityState.NEVER


def drain_ms(tokens: float, tokens_per_s: float) -> float:
    """Time to serve this many tokens; infinite at rate 0."""
    if tokens <= 0:
        return 0.0
    return 1000 * tokens / tokens_per_s if tokens_per_s > 0 else inf


def retry_after_ms(wait_ms: float, jitter: float, request_id: str) -> int:
    """``wait_ms`` as a time to retry, from ``LEAST_RETRY_MS`` to ``MOST_RETRY_MS``. A hash of the request id lengthens
    it by up to ``jitter`` of itself, so that requests refused together do not return together."""
    most_ms = MOST_RETRY_MS / (1 + jitter)
    base_ms = min(max(wait_ms, LEAST_RETRY_MS), most_ms) if isfinite(wait_ms) else most_ms
    return min(MOST_RETRY_MS, jittered_ms(base_ms, jitter, request_id))
