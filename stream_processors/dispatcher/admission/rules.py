"""Admission rules: whether a request is admitted. Pure: facts and ``now_ms`` in, a decision out.

A request is rejected at once if it cannot be served in time, or if the backlog leaves it no room: waiting in vain costs
its sender the time to go elsewhere. Backfill is always admitted: it has bounds of its own beside the online requests,
and its partitions are paused while its tenant's part is used up.

The shared bound follows the dynamic threshold of Choudhury & Hahne ("Dynamic Queue Length Thresholds for Shared-Memory
Packet Switches", IEEE/ACM Transactions on Networking 6(2), 1998) on one part of the bound, and a fixed part for each
tenant in the rest. Let B be the bound, Q the amount held by all tenants, q and w the amount held by one tenant and its
weight, w_all the weights of all tenants, G the guaranteed part of B, and s the size of one more request. It is admitted
if

1. q + s <= own bound, or q = 0 (a request larger than the bound could otherwise never be served), and
2. q + s <= G x w / w_all                                                  (the tenant's guaranteed part), or
   q = 0 and Q + s <= B                             (with thousands of tenants a guaranteed part is less than one), or
   q + s <= alpha x w x (B - G - Q - s)                                        (the dynamic threshold).

*Why a dynamic threshold.* With G = 0, a tenant alone may hold alpha x w / (1 + alpha x w) of B, so memory is used; as
others come, the free part shrinks, and every threshold with it. Some always stays free: tenants that are all at their
threshold leave B / (1 + alpha x sum of w), and in whatever order they came and went, the free part is at least B times
the product of 1 / (1 + alpha x w) over the n that hold something, less n requests (take the tenant that was admitted
last: the free part without it, divided by 1 + alpha x w, is free with it, or it holds a single request; then the last
but one). With many tenants that product is small. Hence the guaranteed part.

*What it guarantees.* **A request that keeps its tenant within G x w / w_all is never rejected because of what others
hold**, whatever they sent and in whatever order; nor is **one of a tenant without a backlog, while there is any room at
all**. So the total stays below B + G while weights are constant: up to B any request may have filled it; beyond B only
requests within guaranteed parts are admitted, and those sum up to G.

*Backfill* is not counted here. It has a bound of the same size beside this one, divided by the same rule: a tenant's
part of it decides when its partitions pause. Since records fetched by then still come in, no backfill is read at all
while the bound is full.
"""

from math import floor, inf

from fairlane.frozen import frozen_dataclass
from fairlane.outcomes import Code
from fairlane_server.admission_rule import (
    AFTERWARDS_FREE,
    LEAST_OUTAGE_MS,
    WorkAhead,
    drain_ms,
    predict,
    retry_after_ms,
    takes_anything,
)
from stream_processors.dispatcher.scheduling.backlog_statistics import Schedulable


@frozen_dataclass(frozen=True, slots=True)
class SharedBound:
    """One resource as one tenant sees it, in the resource's unit: requests or bytes."""

    bound: float
    held: float
    own_bound: float
    own_held: float
    weight: float
    all_weights: float
    alpha: float
    guaranteed_part: float

    @property
    def guaranteed(self) -> float:
        """The amount the tenant may hold whatever others hold."""
        if self.all_weights <= 0:
            return 0.0
        return self.bound * self.guaranteed_part * min(1.0, self.weight / self.all_weights)

    @property
    def shared(self) -> float:
        """The part of the bound without guarantees."""
        return self.bound * (1 - self.guaranteed_part)

    def most(self, size: float = 0.0) -> float:
        """The most the tenant may hold at present, after a request of ``size``."""
        free = self.shared - self.held - size
        return min(self.own_bound, max(self.guaranteed, self.alpha * self.weight * free))

    def admits(self, size: float) -> bool:
        wanted = self.own_held + size
        if wanted <= self.guaranteed and (self.own_held <= 0 or wanted <= self.own_bound):
            # Whatever the total: only requests admitted by another rule can have filled it.
            return True
        return (self.own_held <= 0 and self.held + size <= self.bound) or wanted <= self.most(size)

    def ms_until_admitted(self, size: float, own_drain_ms: float, drain_ms: float) -> float:
        """Time until a request of ``size`` is admitted, if no other comes.

        ``own_drain_ms`` and ``drain_ms``: time to drain all that the tenant holds, and all that all tenants hold. 0 if
        admitted now, infinite if never. Otherwise the time until a tenth of the tenant's bound is free, not only room
        for this request: its next one would be rejected again. Others drain meanwhile, which only raises the bound.
        """
        if self.admits(size):
            return 0.0
        target = floor(min((1 - AFTERWARDS_FREE) * self.most(size), self.most(size) - size))
        if target >= 0 and (self.held + size <= self.bound or target + size <= self.guaranteed):
            return own_drain_ms * (1 - target / self.own_held)
        # It does not fit beside what others hold, even alone: all must drain until it does.
        if size > self.bound:
            return inf
        must_go = self.held - floor(self.bound - size)
        return max(own_drain_ms, drain_ms * must_go / self.held) if must_go > 0 else own_drain_ms


BACKFILL_PART = 0.5
"""Fraction of a tenant's bound at which its backfill pauses; the rest is for records fetched by then."""

BACKFILL_RESUMES_AT = 0.5
"""Fraction of that at which it resumes."""


@frozen_dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Policy set by the operator.

    ``safety_margin`` is the fraction of the allowed time (0 to 1) that must be left over. The two bounds hold for the
    whole backlog of this dispatcher; ``alpha`` and ``guaranteed_part`` define how tenants share them (see
    ``SharedBound``). ``jitter`` spreads retries: each hint is lengthened by up to that fraction.

    Raises ``ValueError`` for a value out of its range.
    """

    safety_margin: float = 0.1
    max_waiting_requests: int = 10_000
    max_waiting_bytes: int = 268_435_456
    alpha: float = 1.0
    guaranteed_part: float = 0.5
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.safety_margin < 1:
            raise ValueError(f"safety_margin must be at least 0 and less than 1, not {self.safety_margin}")
        if self.max_waiting_requests < 1 or self.max_waiting_bytes < 1:
            raise ValueError("max_waiting_requests and max_waiting_bytes must be at least 1")
        if not self.alpha > 0:
            raise ValueError(f"alpha must be more than 0, not {self.alpha}")
        if not 0 <= self.guaranteed_part <= 1:
            raise ValueError(f"guaranteed_part must be from 0 to 1, not {self.guaranteed_part}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be from 0 to 1, not {self.jitter}")


@frozen_dataclass(frozen=True, slots=True)
class Bounds:
    """The backlog of this dispatcher over all pools and classes, and the tenant's limits: of online requests or of
    backfill, whichever is judged. Only ``total_waiting_tokens`` counts both: they drain together.

    ``all_weights`` is the sum of the weights of all tenants, with a backlog or not; 0 if unknown: then nothing is
    guaranteed.
    """

    tenant_waiting_requests: int
    tenant_waiting_bytes: int
    tenant_waiting_tokens: float
    tenant_max_requests: int
    tenant_max_bytes: int
    tenant_weight: float
    all_weights: float
    total_waiting_requests: int
    total_waiting_bytes: int
    total_waiting_tokens: float


@frozen_dataclass(frozen=True, slots=True)
class Shed:
    """The request is rejected: ``overloaded`` or ``deadline_unmeetable``."""

    code: Code
    message: str
    retry_after_ms: int | None
    """None: it does not fit its allowed time however short the queue is."""
    is_for_target: bool = False
    """Whether there is room, but it would be queued longer than its latency target."""


def decide(
    policy: AdmissionPolicy,
    request: Schedulable,
    bounds: Bounds,
    load: WorkAhead,
    now_ms: int,
    target_part: float = 1.0,
) -> Shed | None:
    """None if the request is admitted, else its rejection.

    - Backfill is admitted.
    - ``overloaded`` if it does not fit the tenant's own bound, or the tenant's part of the total, in requests or in
      bytes (rule: ``SharedBound``). With constant weights the total is exceeded by at most its guaranteed part.
      Backfill is not counted.
    - ``deadline_unmeetable`` if now + wait + service > submitted + (deadline - submitted) x (1 - safety_margin). A pool
      that never reported, and an idle live one, take every request that has not expired: a pool's rate is learned only
      from work, so a wrong rate must not reject for ever.
    - ``overloaded`` if it would be queued longer than ``target_part`` of its latency target: a burst fits below it, a
      standing queue does not. That is the aim of CoDel (Nichols & Jacobson, "Controlling Queue Delay", ACM Queue 10(5),
      2012), reached at arrival, by prediction, since a request that is dropped at its turn has waited in vain. Work in
      flight does not count: a refusal would not make it less, and it is mostly that of others.

    A flooder's backlog never causes the rejection of another tenant's request: the backlogs of others change the
    prediction by at most one turn each; and they never make a request ``overloaded`` that leaves its tenant within its
    guaranteed part of the total, nor the first request of a tenant while there is any room. Work of others in flight
    does count in the prediction; it is at most the dispatch window.

    A request whose own run takes longer than its allowed time, at the rate of one consumer, gets no time to retry.
    ``retry_after_ms`` is the time after which the same request, sent again, would be admitted if the pool drained at
    its present rate and nothing else came; for ``overloaded`` until a tenth of the tenant's bound is free. A hash of
    the request id lengthens it by up to ``jitter``, so that requests rejected together do not return together; it lies
    between ``LEAST_RETRY_MS`` and ``MOST_RETRY_MS``.
    """
    prediction = predict(load, request.cautious_cost_tokens)
    if request.is_backfill:
        return None
    requests, size = _shared_bounds(policy, bounds)
    is_for_target = False
    allowed_ms = (request.deadline_at_ms - request.submitted_at_ms) * (1 - policy.safety_margin)
    left_ms = request.submitted_at_ms + allowed_ms - now_ms
    if not requests.admits(1):
        code, message = Code.OVERLOADED, _full("requests", requests, 1)
    elif not size.admits(request.size_bytes):
        code, message = Code.OVERLOADED, _full("bytes", size, request.size_bytes)
    elif prediction.finish_ms > left_ms and not (takes_anything(load) and now_ms <= request.deadline_at_ms):
        code = Code.DEADLINE_UNMEETABLE
        latest = f"in {left_ms / 1000:.1f} s" if left_ms > 0 else "past"
        message = f"it would be done in {prediction.finish_ms / 1000:.1f} s; its deadline, less the margin, is {latest}"
    elif prediction.queue_ms > target_part * request.latency_target_ms and not takes_anything(load):
        code, is_for_target = Code.OVERLOADED, True
        wait_s, target_s = prediction.queue_ms / 1000, request.latency_target_ms / 1000
        message = f"it would be queued for {wait_s:.1f} s of a latency target of {target_s:.1f} s"
        if target_part < 1:
            message += f", {target_part:.0%} of which is for those who were not refused before"
    else:
        return None
    if prediction.service_ms > allowed_ms * load.service_stretch:
        return Shed(code, message, None, is_for_target)
    own_ms, all_ms = _drain_ms(bounds, load)
    retry_ms = prediction.return_ms + max(
        requests.ms_until_admitted(1, own_ms, all_ms),
        size.ms_until_admitted(request.size_bytes, own_ms, all_ms),
        prediction.ms_until_in_time(allowed_ms, request.latency_target_ms),
    )
    return Shed(code, message, retry_after_ms(retry_ms, policy.jitter, request.request_id), is_for_target)


def backfill_paused(policy: AdmissionPolicy, paused: bool, bounds: Bounds) -> bool:
    """Whether a tenant's backfill partitions are to be paused now, given whether they are. ``bounds`` are of backfill.

    They pause when the tenant holds ``BACKFILL_PART`` of its bound, in requests or in bytes, and resume when it holds
    less than ``BACKFILL_RESUMES_AT`` of that in both, so that they do not pause and resume with every request. Records
    fetched before a pause still come in.
    """
    part = BACKFILL_PART * (BACKFILL_RESUMES_AT if paused else 1)
    return not all(shared.own_held < part * shared.most() for shared in _shared_bounds(policy, bounds))


def _shared_bounds(policy: AdmissionPolicy, bounds: Bounds) -> tuple[SharedBound, SharedBound]:
    return (
        SharedBound(
            policy.max_waiting_requests,
            bounds.total_waiting_requests,
            bounds.tenant_max_requests,
            bounds.tenant_waiting_requests,
            bounds.tenant_weight,
            bounds.all_weights,
            policy.alpha,
            policy.guaranteed_part,
        ),
        SharedBound(
            policy.max_waiting_bytes,
            bounds.total_waiting_bytes,
            bounds.tenant_max_bytes,
            bounds.tenant_waiting_bytes,
            bounds.tenant_weight,
            bounds.all_weights,
            policy.alpha,
            policy.guaranteed_part,
        ),
    )


def _drain_ms(bounds: Bounds, load: WorkAhead) -> tuple[float, float]:
    """Time to drain the tenant's backlog, and the whole backlog; as if all of it were for this pool."""
    capacity = load.capacity
    rate = capacity.cost_tokens_per_s or capacity.last_cost_tokens_per_s
    if rate <= 0:
        # Unknown rate: nothing drains before a consumer comes.
        return LEAST_OUTAGE_MS, LEAST_OUTAGE_MS
    all_ms = drain_ms(bounds.total_waiting_tokens, rate * load.dispatcher_share)
    return load.own_drain_ms(bounds.tenant_waiting_tokens), all_ms


def _full(unit: str, shared: SharedBound, size: int) -> str:
    if shared.own_held + size > shared.own_bound and shared.own_held > 0:
        return f"the tenant's queue is full: {shared.own_held:.0f} of {shared.own_bound:.0f} {unit} wait"
    may_hold = max(0.0, shared.most(size))
    return f"the dispatcher is full: {shared.own_held:.0f} {unit} of the tenant wait, {may_hold:.0f} may for now"
