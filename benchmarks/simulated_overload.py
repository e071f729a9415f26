"""Overload under a virtual clock: the shapes of ``traffic`` on any number of tenants and consumers, and what each part
of admission adds.

Every second tenant allows more tokens than it gets. Estimates are learned as in the dispatcher, from what is done.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.load import GENEROUS_TOKENS, make_usage
from benchmarks.result import Figure
from benchmarks.service_curve import percentile
from benchmarks.simulation import POOL, ConsumerFleet, Observations, SimulatedRequest, Simulation, claim_of
from benchmarks.trace import MAX_CONTEXT_TOKENS, TraceSampler, load_trace
from benchmarks.traffic import Arrival, Traffic
from fairlane.outcomes import Priority, Task
from fairlane.records import ModelVersion, TenantSpec
from stream_processors.dispatcher.scheduling.cost import BYTES_PER_TOKEN, CostModel
from stream_processors.dispatcher.scheduling.scheduler import Scheduler

TIMEOUT_MS = 10_000
_WARM_UP_MS = 5_000
_DRAIN_MS = 15_000
_SEED = 11
_MODEL = ModelVersion(
    "simulated", "1", POOL, "simulated", (str(Task.GENERATE),), "-", 2 * MAX_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS
)


class EntitledScheduler(Scheduler[SimulatedRequest]):
    """Predicts by entitled shares alone."""

    def served_share(self, _pool: object, _tenant: str, _priority_class: str) -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of admission that are in use."""

    targets: bool = True
    measured_shares: bool = True
    quantiles: bool = True


ALL_PARTS = Parts()
ABLATIONS: Mapping[str, Parts] = {
    "without targets": Parts(targets=False),
    "without measured shares": Parts(measured_shares=False),
    "without quantiles": Parts(quantiles=False),
    "without all three": Parts(targets=False, measured_shares=False, quantiles=False),
}


class _Estimates:
    """Requests from arrivals, as the dispatcher would estimate them; it learns from those that are done."""

    def __init__(self, generous: Container[str], parts: Parts) -> None:
        self._costs = CostModel()
        self._parts = parts
        self._generous = generous
        self._answers: dict[str, Arrival] = {}

    def requests(self, arrivals: Sequence[Arrival]) -> Iterator[SimulatedRequest]:
        """One at a time, so that each estimate knows all that was done before."""
        for number, arrival in enumerate(arrivals):
            size, most = arrival.size, arrival.size.output_tokens
            if arrival.tenant in self._generous:
                most = max(most, GENEROUS_TOKENS)
            input_bytes = BYTES_PER_TOKEN * size.prompt_tokens
            cost = self._costs.estimate(arrival.tenant, _MODEL, input_bytes, most)
            at_ms, request_id = round(1000 * arrival.at_s), str(number)
            self._answers[request_id] = arrival
            yield SimulatedRequest(
                claim=claim_of(arrival.tenant, number),
                tenant=arrival.tenant,
                priority_class=Priority.NORMAL,
                cost_tokens=cost.total,
                prompt_tokens=cost.prompt_tokens,
                submitted_at_ms=at_ms,
                deadline_at_ms=at_ms + TIMEOUT_MS,
                request_id=request_id,
                input_bytes=input_bytes,
                most_output_tokens=most,
                cautious=cost.cautious_total if self._parts.quantiles else cost.total,
                spent=size.cost_tokens,
                target_ms=None if self._parts.targets else TIMEOUT_MS,
            )

    def learn(self, request: SimulatedRequest) -> None:
        size = self._answers.pop(request.request_id).size
        usage = make_usage(request.tenant, _MODEL, size)
        self._costs.learn(request.tenant, _MODEL.model, request.input_bytes, request.most_output_tokens, usage)


def simulated(
    traffic: Traffic,
    tenants: Sequence[str],
    fleet: ConsumerFleet,
    load: float,
    seconds: float,
    parts: Parts = ALL_PARTS,
) -> Observations:
    """Simulate this load for a number of seconds and return the outcomes of its requests."""
    capacity = fleet.consumers * fleet.tokens_per_s
    arrivals = traffic.arrivals(tenants, load, capacity, seconds, _SEED)
    return _run(arrivals, tenants, fleet, seconds, parts, generous=tenants[1::2])


def _run(
    arrivals: Sequence[Arrival],
    tenants: Sequence[str],
    fleet: ConsumerFleet,
    seconds: float,
    parts: Parts = ALL_PARTS,
    generous: Container[str] = (),
) -> Observations:
    estimates = _Estimates(generous, parts)
    simulation = Simulation(
        "drr",
        {tenant: TenantSpec(tenant) for tenant in tenants},
        fleet,
        on_settled=estimates.learn,
        make_scheduler=Scheduler if parts.measured_shares else EntitledScheduler,
    )
    return simulation.run(estimates.requests(arrivals), round(1000 * seconds) + _DRAIN_MS)


_VICTIM, _FLOODER = "victim", "flooder"
_VICTIM_LOAD = 0.2
_ENGINES = ConsumerFleet(8, 2_500.0, 1, 16_384)
"""As in the benchmark ``isolation``."""


def isolation(traffic: Traffic, loads: Sequence[float], seconds: float) -> Iterator[Figure]:
    """The p99 of a tenant that asks at a steady pace for a fifth of the capacity, beside one that sends this traffic,
    divided by its p99 alone."""
    capacity = _ENGINES.consumers * _ENGINES.tokens_per_s
    sampler = TraceSampler(load_trace(traffic.trace), _SEED)
    rate = _VICTIM_LOAD * capacity / sampler.mean_cost_tokens
    own = [Arrival(at_s, _VICTIM, sampler.size()) for at_s in sampler.arrivals(rate, seconds, steady=True)]

    def p99_ms(others: Sequence[Arrival]) -> float:
        arrivals = sorted([*own, *others], key=lambda one: one.at_s)
        seen = _run(arrivals, (_VICTIM, _FLOODER), _ENGINES, seconds)
        served = [one for one in seen.answered if one.tenant == _VICTIM and one.submitted_at_ms >= _WARM_UP_MS]
        due = sum(one.at_s >= _WARM_UP_MS / 1000 for one in own)
        latencies = [one.done_at_ms - one.submitted_at_ms for one in served]
        # One that was not served counts with all the time it allowed.
        return percentile([*latencies, *[TIMEOUT_MS] * (due - len(served))], 0.99)

    alone_ms = p99_ms(())
    for name, load in traffic.shape.runs(loads):
        flood = traffic.arrivals((_FLOODER,), load, capacity, seconds, _SEED + 1)
        ratio = p99_ms(flood) / alone_ms
        yield Figure(f"{name}: a victim's p99 beside the flood divided by p99 alone", ratio, "ratio", "at most", 1.2)


def figures(name: str, seen: Observations, fleet: ConsumerFleet, seconds: float) -> Iterator[Figure]:
    """Of one run, without its first seconds."""
    since_ms, until_ms = _WARM_UP_MS, round(1000 * seconds)
    done = [one for one in seen.answered if since_ms <= one.submitted_at_ms < until_ms]
    in_time = sum(one.cost_tokens for one in seen.answered if since_ms <= one.done_at_ms < until_ms and not one.is_late)
    capacity = fleet.consumers * fleet.tokens_per_s * (until_ms - since_ms) / 1000
    latencies = [one.done_at_ms - one.submitted_at_ms for one in done]
    late = sum(one.is_late for one in done)
    given_up = sum(since_ms <= at_ms < until_ms for at_ms in seen.given_up_at_ms)
    broken = (late + given_up) / max(1, len(done) + given_up)
    p99 = percentile(latencies, 0.99) / TIMEOUT_MS
    yield Figure(f"{name}: tokens served in time divided by capacity", in_time / capacity, "ratio")
    yield Figure(f"{name}: p99 of the served divided by the deadline", p99, "ratio")
    yield Figure(f"{name}: late, expired or shed in the queue, of those admitted", broken, "ratio")
    yield Figure(f"{name}: p99 of the time to a refusal", percentile(seen.refusals_ms or [0], 0.99), "ms")
