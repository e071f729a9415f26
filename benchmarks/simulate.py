"""``simulate``: an hour of the trace, scaled up, over thousands of tenants, under a virtual clock.

What it shows is the order that the policies make, not the speed of anything: 10,000 tenants whose demand falls by a
power of their rank, 64 consumers, a quarter more load than capacity in the mean with the trace's own bursts on top. The
plot shows what the busiest tenants were served over time.

Two gaps are shown, both the largest difference of normalised service between two of the busiest tenants within a class
over any time in which both had something of that class waiting without a break. **At dispatch** is what the fair queue
decides, and what its bound is about: 2 Q + M / w_i + M / w_j (``fair_queue``). **At completion** is what the tenants
see; the order in which 64 consumers finish what is in flight (two micro-batches each, more than a million tokens) comes
on top of it, and no bound of the queue covers that.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations, groupby
from operator import itemgetter
from pathlib import Path
from time import monotonic

from benchmarks.result import Figure, Result
from benchmarks.service_curve import Completion, Interval, largest_gap, percentile, within
from benchmarks.simulation import ConsumerFleet, Observations, SimulatedRequest, Simulation, claim_of, zipf_tenants
from benchmarks.trace import RequestSize, load_trace
from fairlane.outcomes import Priority
from fairlane.records import TenantSpec
from stream_processors.dispatcher.scheduling.fair_queue import DEFAULT_QUANTUM_TOKENS, Policy, service_gap_bound

NAME = "simulate"
PLOT = Path("docs/images/served-tokens.png")
SEED = 7
TENANTS = 10_000
CONSUMERS = 64
SCALE_UP = 16
OVERLOAD = 1.25
HOUR_S = 3_600.0
HOW = "one hour of a virtual clock under each policy; the same on every machine but for the wall time"

_POLICIES: tuple[Policy, ...] = ("fifo", "drr", "vtc")
_ZIPF_EXPONENT = 1.0
_SHOWN_TENANTS = 8
_CLASSES = (Priority.HIGH, Priority.NORMAL, Priority.LOW)
_CLASS_PARTS = (0.2, 0.6, 0.2)
_TIMEOUT_MS = {Priority.HIGH: 30_000, Priority.NORMAL: 60_000, Priority.LOW: 120_000}
_MIN_COMMON_WAIT_MS = 10_000


def run(
    *,
    tenants: int = TENANTS,
    consumers: int = CONSUMERS,
    scale_up: int = SCALE_UP,
    seconds: float = HOUR_S,
    plot: Path | None = PLOT,
) -> Result:
    """Every policy over the same requests."""
    started = monotonic()
    names, demand = zipf_tenants(tenants, _ZIPF_EXPONENT, SEED)
    specs = {name: TenantSpec(name, weight=float(1 + index % 2)) for index, name in enumerate(names)}
    busiest = names[:_SHOWN_TENANTS]
    offered_per_s = _offered_tokens(seconds, scale_up) / seconds
    fleet = ConsumerFleet(consumers, offered_per_s / OVERLOAD / consumers, 2, 8_192)
    largest_request = max(size.cost_tokens for _, size in _sizes(seconds, scale_up))
    figures: list[Figure] = []
    gaps: dict[Policy, Gap] = {}
    seen: dict[Policy, Observations] = {}
    for policy in _POLICIES:
        simulation = Simulation(policy, specs, fleet, busiest)
        seen[policy] = simulation.run(_requests(names, demand, seconds, scale_up), round(seconds * 1000))
        gaps[policy] = _gap(seen[policy].dispatches, seen[policy], specs, largest_request)
        at_completion = _gap(seen[policy].completions, seen[policy], specs, largest_request)
        figures += [
            Figure(f"{policy}: gap at dispatch", gaps[policy].tokens, "tokens"),
            # The bound is drr's; the others are shown what they are beside it.
            _of_bound(policy, gaps[policy]),
            Figure(f"{policy}: gap at completion, with what is in flight", at_completion.tokens, "tokens"),
        ]
        figures += _figures(policy, seen[policy], fleet, seconds)
    bound = service_gap_bound(DEFAULT_QUANTUM_TOKENS, largest_request, 1, 1)
    figures.append(Figure("drr's bound of the gap at dispatch, weights 1 and 1", bound, "tokens"))
    of_fifo = gaps["drr"].tokens / gaps["fifo"].tokens if gaps["fifo"].tokens else 1.0
    figures.append(Figure("gap at dispatch, drr divided by fifo", of_fifo, "ratio"))
    figures.append(Figure("wall time", monotonic() - started, "s", "at most", 120))
    if plot is not None:
        draw(plot, seen, busiest, specs, seconds)
    return Result(NAME, tuple(figures), ({figure.name: figure.value for figure in figures},))


@dataclass(frozen=True, slots=True)
class Gap:
    """The largest difference of normalised service, and the largest of a difference divided by drr's bound for the same
    two tenants."""

    tokens: float
    of_bound: float


def _of_bound(policy: Policy, gap: Gap) -> Figure:
    name = f"{policy}: gap at dispatch divided by drr's bound"
    if policy == "drr":
        return Figure(name, gap.of_bound, "ratio", "at most", 1.0)
    return Figure(name, gap.of_bound, "ratio")


def _figures(policy: Policy, seen: Observations, fleet: ConsumerFleet, seconds: float) -> list[Figure]:
    capacity = fleet.consumers * fleet.tokens_per_s * seconds
    refused = sum(seen.shed.values())
    answered = sum(map(len, seen.completions.values())) + refused + seen.expired
    return [
        Figure(f"{policy}: goodput / capacity", seen.in_time_tokens / capacity, "ratio"),
        Figure(f"{policy}: shed", refused / seen.offered, "ratio"),
        Figure(f"{policy}: late or expired", (seen.late + seen.expired) / max(1, answered), "ratio"),
        *(Figure(f"{policy}: p99 {name}", percentile(seen.latencies_ms[name], 0.99) / 1000, "s") for name in _CLASSES),
    ]


def _gap(
    served: Mapping[str, Sequence[Completion]], seen: Observations, specs: Mapping[str, TenantSpec], largest: float
) -> Gap:
    """Between any two of the busiest tenants within a class, over any time in which both had something of that class
    waiting without a break. ``served`` by class, at dispatch or at completion; ``largest``: cost of a request."""
    widest = of_bound = 0.0
    for (first, first_class), (second, second_class) in combinations(seen.backlogged, 2):
        if first_class != second_class:
            continue
        weights = {name: specs[name].weight for name in (first, second)}
        both = [one for one in served[first_class] if one.tenant in weights]
        waits = _common_waits(seen.backlogged[first, first_class], seen.backlogged[second, second_class])
        gap = max((largest_gap(within(both, interval), weights) for interval in waits), default=0.0)
        bound = service_gap_bound(DEFAULT_QUANTUM_TOKENS, largest, *weights.values())
        widest, of_bound = max(widest, gap), max(of_bound, gap / bound)
    return Gap(widest, of_bound)


def _common_waits(first: Sequence[tuple[int, bool]], second: Sequence[tuple[int, bool]]) -> Iterator[Interval]:
    together = [(at_ms, one and other) for (at_ms, one), (_, other) in zip(first, second, strict=True)]
    for waits, samples in groupby(together, key=itemgetter(1)):
        times = [at_ms for at_ms, _ in samples]
        # Who began to wait in the very millisecond of a sample may have done so after others were served in it.
        since, until = times[0] + 1, times[-1]
        if waits and until - since >= _MIN_COMMON_WAIT_MS:
            yield since, until


def _sizes(seconds: float, scale_up: int) -> Iterator[tuple[float, RequestSize]]:
    """When, and how much: each row of the trace stands for ``scale_up`` requests in the gap before the next."""
    rows = [row for row in load_trace() if row.arrived_at_s < seconds]
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        gap_s = (seconds if following is None else following.arrived_at_s) - row.arrived_at_s
        for copy in range(scale_up):
            yield row.arrived_at_s + gap_s * copy / scale_up, RequestSize(row.context_tokens, row.generated_tokens)


def _offered_tokens(seconds: float, scale_up: int) -> int:
    return sum(size.cost_tokens for _, size in _sizes(seconds, scale_up))


def _requests(
    names: Sequence[str], demand: Sequence[float], seconds: float, scale_up: int
) -> Iterator[SimulatedRequest]:
    chosen = random.Random(SEED)
    cumulative = list(accumulate(demand))
    for number, (at_s, size) in enumerate(_sizes(seconds, scale_up)):
        (tenant,) = chosen.choices(names, cum_weights=cumulative)
        (priority,) = chosen.choices(_CLASSES, weights=_CLASS_PARTS)
        at_ms = round(at_s * 1000)
        yield SimulatedRequest(
            claim=claim_of(tenant, number),
            tenant=tenant,
            priority_class=priority,
            cost_tokens=size.cost_tokens,
            prompt_tokens=size.prompt_tokens,
            submitted_at_ms=at_ms,
            deadline_at_ms=at_ms + _TIMEOUT_MS[priority],
            request_id=str(number),
        )


def draw(
    path: Path, seen: dict[Policy, Observations], shown: Sequence[str], specs: dict[str, TenantSpec], seconds: float
) -> None:
    """Served tokens over time of the shown tenants, one panel per policy, as a PNG."""
    # Heavy, and only this benchmark draws.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(seen), figsize=(13, 4), sharey=True)
    for panel, (policy, observed) in zip(panels, seen.items(), strict=True):
        completions = sorted(chain.from_iterable(observed.completions.values()), key=lambda one: one.at_ms)
        for rank, tenant in enumerate(shown, 1):
            times, totals = _curve(completions, tenant)
            panel.plot(times, totals, label=f"#{rank} by demand, weight {specs[tenant].weight:g}", linewidth=1.2)
        panel.set_title(policy)
        panel.set_xlim(0, seconds / 60)
        panel.set_xlabel("minutes")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("served cost tokens, millions")
    panels[-1].legend(fontsize=7, loc="upper left")
    figure.suptitle(f"What the {len(shown)} busiest of {len(specs):,} tenants were served")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _curve(completions: Sequence[Completion], tenant: str) -> tuple[list[float], list[float]]:
    own = [one for one in completions if one.tenant == tenant]
    return [one.at_ms / 60_000 for one in own], [total / 1e6 for total in accumulate(one.cost_tokens for one in own)]
