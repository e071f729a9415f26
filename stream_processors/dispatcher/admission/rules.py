"""Admission rules: whether a request is admitted. Pure: facts and ``now_ms`` in, a decision out.

A request is refused at once if it cannot be served in time, or if what already waits leaves it no place; waiting in
vain costs its sender the time to go elsewhere. Backfill has no such hurry and is never refused: it is let in always,
has a place of its own beside the online requests, and its partitions are paused while its tenant's part is taken.
"""

from dataclasses import dataclass

from fairlane.outcomes import Code
from fairlane_server.admission_rule import Load, Prediction, drain_ms, predict, retry_after_ms, takes_anything
from fairlane_server.heartbeats import LEAST_OUTAGE_MS
from stream_processors.dispatcher.admission.shared_bound import SharedBound

BACKFILL_PART = 0.5
"""Part of what a tenant may hold at which its backfill pauses; the rest is for what was fetched by then."""

BACKFILL_RESUMES_AT = 0.5
"""Part of that again at which it resumes."""


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """What the operator decides.

    ``safety_margin`` is the part of the time allowed (0 to 1) that must be left over. The two bounds hold for all that
    waits at this dispatcher; ``alpha`` and ``guaranteed_part`` say how tenants share them (see ``SharedBound``).
    ``jitter`` spreads retries: each is told up to that part more.

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


@dataclass(frozen=True, slots=True)
class Arrival:
    """The request that is to be decided. Its cost is in cost tokens."""

    now_ms: int
    submitted_at_ms: int
    deadline_at_ms: int
    cost_tokens: float
    size_bytes: int
    request_id: str
    backfill: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """What waits at this dispatcher, over all pools and classes, and what the tenant may have of it: of the online
    requests, or of the backfill, whichever is judged. Only ``total_waiting_tokens`` are of both: they drain together.

    ``all_weights`` sums the weights of all tenants there are, waiting or not; 0 if not known, and then nothing is
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


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request is let in."""

    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Shed:
    """The request is refused: ``overloaded`` or ``deadline_unmeetable``."""

    code: Code
    message: str
    retry_after_ms: int
    prediction: Prediction


def decide(policy: AdmissionPolicy, arrival: Arrival, bounds: Bounds, load: Load) -> Admitted | Shed:
    """Let the request in, or refuse it.

    - Backfill is let in.
    - ``overloaded`` if it does not fit the tenant's own bound, or the tenant's part of the total, in requests or in
      bytes (``SharedBound`` gives the rule). While weights stand, the total is exceeded by no more than the
      guaranteed part of it. Backfill is not counted.
    - ``deadline_unmeetable`` if now + wait + service > submitted + (deadline - submitted) x (1 - safety_margin). A pool
      that never reported, and one that lives and has nothing to do, take whatever has not expired: what a pool can do
      is learned only by work that comes to it, so that a rate measured wrong must not refuse for ever.

    A flooder's backlog never gets another tenant's request refused. Exactly: how much others have waiting does not
    change the prediction beyond one turn for each of them; and it never makes a request ``overloaded`` that leaves its
    tenant within its guaranteed part of the total, nor the first one of a tenant while there is any place. What others
    have in flight does count in the prediction; that is at most the dispatch window.

    ``retry_after_ms`` is the time after which the same request, sent anew, would be let in if the pool drained at its
    present rate and nothing else came; for ``overloaded`` until a tenth of what the tenant may hold is free. It is
    lengthened by up to ``jitter`` by a hash of the request id, so that those who were refused together do not return
    together, and lies between ``LEAST_RETRY_MS`` and ``MOST_RETRY_MS``.
    """
    prediction = predict(load, arrival.cost_tokens)
    if arrival.backfill:
        return Admitted(prediction)
    requests, size = _shared_bounds(policy, bounds)
    allowed_ms = (arrival.deadline_at_ms - arrival.submitted_at_ms) * (1 - policy.safety_margin)
    left_ms = arrival.submitted_at_ms + allowed_ms - arrival.now_ms
    if not requests.admits(1):
        code, message = Code.OVERLOADED, _full("requests", requests, 1)
    elif not size.admits(arrival.size_bytes):
        code, message = Code.OVERLOADED, _full("bytes", size, arrival.size_bytes)
    elif prediction.finish_ms > left_ms and not (takes_anything(load) and arrival.now_ms <= arrival.deadline_at_ms):
        code = Code.DEADLINE_UNMEETABLE
        latest = f"in {left_ms / 1000:.1f} s" if left_ms > 0 else "past"
        message = f"it would be done in {prediction.finish_ms / 1000:.1f} s; its deadline, less the margin, is {latest}"
    else:
        return Admitted(prediction)
    own_ms, all_ms = _drain_ms(bounds, load)
    retry_ms = prediction.return_ms + max(
        requests.ms_until_admitted(1, own_ms, all_ms),
        size.ms_until_admitted(arrival.size_bytes, own_ms, all_ms),
        prediction.ms_until_in_time(allowed_ms),
    )
    return Shed(code, message, retry_after_ms(retry_ms, policy.jitter, arrival.request_id), prediction)


def backfill_paused(policy: AdmissionPolicy, paused: bool, bounds: Bounds) -> bool:
    """Whether a tenant's backfill partitions are to be paused now, given whether they are. ``bounds`` are of backfill.

    They pause when the tenant holds ``BACKFILL_PART`` of what it may hold, in requests or in bytes, and resume when it
    holds less than ``BACKFILL_RESUMES_AT`` of that in both, so that they do not pause and resume with every request.
    What was fetched before a pause still comes in.
    """
    part = BACKFILL_PART * (BACKFILL_RESUMES_AT if paused else 1)
    return not all(shared.own_held < part * shared.most() for shared in _shared_bounds(policy, bounds))


def _shared_bounds(policy: AdmissionPolicy, bounds: Bounds) -> tuple[SharedBound, SharedBound]:
    """The bound in requests and the one in bytes."""
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


def _drain_ms(bounds: Bounds, load: Load) -> tuple[float, float]:
    """How long all that the tenant has waiting, and all that waits, takes to drain; as if all of it were for this pool,
    and every request cost the same."""
    capacity = load.capacity
    rate = capacity.cost_tokens_per_s or capacity.last_cost_tokens_per_s
    if rate <= 0:
        # Nothing is known of how it drains; nothing drains before a consumer comes.
        return LEAST_OUTAGE_MS, LEAST_OUTAGE_MS
    return (
        drain_ms(bounds.tenant_waiting_tokens, rate * load.own_share),
        drain_ms(bounds.total_waiting_tokens, rate * load.dispatcher_share),
    )


def _full(unit: str, shared: SharedBound, size: int) -> str:
    if shared.own_held + size > shared.own_bound and shared.own_held > 0:
        return f"the tenant's queue is full: {shared.own_held:.0f} of {shared.own_bound:.0f} {unit} wait"
    may_hold = max(0.0, shared.most(size))
    return f"the dispatcher is full: {shared.own_held:.0f} {unit} of the tenant wait, {may_hold:.0f} may for now"
