"""Whether service is fair before a fault and again after it: pure, so that it can be shown on a virtual clock that the
check fails where nobody is fair.

All tenants ask for more than their share, and not in proportion to it. Nothing bounds their queues or their time: a
bound that each tenant's queue stands at makes one line by arrival fair as well. So does a restart where tenants have
equal weights: what waited is read again, some of each tenant's in turn. Hence a tenant of more weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.load import Observed
from benchmarks.service_curve import Interval, ServedRequest, largest_gap, within
from benchmarks.simulated_pool import SimulatedPool
from benchmarks.trace import TraceSampler
from stream_processors.dispatcher.scheduling.fair_queue import DEFAULT_QUANTUM_TOKENS, service_gap_bound

OFFERED = {"flood": 1.4, "b": 0.35, "c": 0.35, "heavy": 0.9}
"""In parts of the capacity, three times which it is."""
WEIGHTS = {"flood": 1.0, "b": 1.0, "c": 1.0, "heavy": 3.0}
"""Their shares are a sixth, and a half."""
RESTORED_WITHIN_MS = 10_000
"""Of the kill: the session of the dead one (6 s, or its successor's start, which takes its place at once), and what was
dispatched unfairly meanwhile."""
PUBLISHED_PART = 0.6
"""Part of the time after the fault in which requests still come. What waits then lasts for the rest of it."""
_MARGIN = 2.0
"""One line by arrival exceeds it within seconds, two dispatchers that share the window do not."""


def allowed_gap_tokens(pool: SimulatedPool, sampler: TraceSampler) -> float:
    """A small multiple of what the fair queue is bound to, at dispatch, with the window that comes on top of it, at
    completion: two batches for each consumer."""
    at_dispatch = service_gap_bound(DEFAULT_QUANTUM_TOKENS, sampler.largest_cost_tokens, 1, 1)
    window = 2 * pool.consumers * pool.max_batch_size * sampler.mean_cost_tokens
    return _MARGIN * (at_dispatch + window)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was seen.

    Attributes:
        steady_gap_tokens: the largest difference of service by weight before the fault.
        gap_tokens: the same after it.
        fair_after_ms: from the fault, until no difference is above the bound any more.
    """

    steady_gap_tokens: float
    gap_tokens: float
    fair_after_ms: int


def judge(
    served: Sequence[ServedRequest], weights: Mapping[str, float], before: Interval, after: Interval, allowed: float
) -> Verdict:
    """The fault stands between the two intervals; all these tenants wait all the time in both."""
    return Verdict(
        largest_gap(within(served, before), weights),
        largest_gap(within(served, after), weights),
        restored_after_ms(served, weights, after, allowed),
    )


def served_again_after_ms(observed: Sequence[Observed], tenants: Sequence[str], fault_at_ms: int) -> int:
    """From the fault until every tenant has had an answer to what was dispatched after it."""
    answers = {tenant: [one for one in observed if one.tenant == tenant and one.served] for tenant in tenants}
    firsts = [min(one.replied_at_ms for one in own if one.dispatched_at_ms > fault_at_ms) for own in answers.values()]
    return max(firsts) - fault_at_ms


def restored_after_ms(
    completions: Sequence[ServedRequest], weights: Mapping[str, float], interval: Interval, bound_tokens: float
) -> int:
    """Milliseconds into the interval from which on no difference is above the bound any more.

    The whole interval's length when that never happens. Found by bisection: dropping the beginning of an interval
    never makes its largest difference larger.
    """
    start, end = interval
    low, high = start, end
    while low < high:
        middle = (low + high) // 2
        if largest_gap(within(completions, (middle, end)), weights) <= bound_tokens:
            high = middle
        else:
            low = middle + 1
    return low - start
