"""simulate: an hour of the trace, scaled up, over 10,000 tenants, and minutes of overload, under a virtual clock.

The hour shows the order that the policies make, not speed: demand falls by a power of a tenant's rank, 64 consumers, a
quarter more load than capacity in the mean and the trace's bursts on top. The plot shows served tokens of the busiest
tenants over time.

Both gaps are the largest difference of normalised service between two of the busiest tenants within a class over any
time in which both had something of that class waiting. **At dispatch** the fair queue decides, with the bound
2 Q + M / w_i + M / w_j (``fair_queue``). **At completion** the order in which 64 consumers finish their
two micro-batches each comes on top (more than a million tokens), which no bound of the queue covers.

Overload: every shape of load on the pool of the benchmark ``overload``, where an engine rests for no time; some of them
without single parts of admission; and 10,000 tenants on 1,000 consumers. The second plot shows how long the served
waited before there were latency targets, and with them.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, combinations, groupby
from operator import itemgetter
from pathlib import Path
from time import monotonic

from benchmarks import simulated_overload
from benchmarks.result import Bound, Figure, Result
from benchmarks.service_curve import Interval, ServedRequest, largest_gap, percentile, within
from benchmarks.simulated_overload import ABLATIONS, ALL_PARTS, TIMEOUT_MS, simulated
from benchmarks.simulation import ConsumerFleet, Observations, SimulatedRequest, Simulation, claim_of
from benchmarks.trace import TRACE_FILE, RequestSize, load_trace
from benchmarks.traffic import SHAPES, Traffic
from fairlane.outcomes import Priority
from fairlane.records import TenantSpec
from producers.replay.trace import TraceRow
from stream_processors.dispatcher.scheduling.fair_queue import DEFAULT_QUANTUM_TOKENS, Policy, service_gap_bound


def zipf_tenants(count: int, exponent: float, seed: int) -> tuple[list[str], list[float]]:
    """Names, and how much each asks for, falling by a power of its rank, in no order of names."""
    names = [f"tenant-{number:05}" for number in range(count)]
    random.Random(seed).shuffle(names)
    return names, [1 / (rank + 1) ** exponent for rank in range(count)]


NAME = "simulate"
PLOT = Path("docs/images/served-tokens.png")
SEED = 7
TENANTS = 10_000
CONSUMERS = 64
SCALE_UP = 16
OVERLOAD = 1.25
HOUR_S = 3_600.0
OVERLOAD_S = 65.0
LATENCY_PLOT = Path("docs/images/latency-under-overload.png")
LARGE = (10_000, 1_000)
"""Tenants and consumers."""
HOW = (
    f"one hour of a virtual clock under each policy, and {OVERLOAD_S:g} s of each overload; the same on every machine "
    "but for the wall time"
)

_POLICIES: tuple[Policy, ...] = ("fifo", "drr", "vtc")
_ZIPF_EXPONENT = 1.0
_SHOWN_TENANTS = 8
_CLASSES = (Priority.HIGH, Priority.NORMAL, Priority.LOW)
_CLASS_PARTS = (0.2, 0.6, 0.2)
_TIMEOUT_MS = {Priority.HIGH: 30_000, Priority.NORMAL: 60_000, Priority.LOW: 120_000}
_MIN_COMMON_WAIT_MS = 10_000
_OVERLOADS = (3.0, 10.0)
_OVERLOADED_TENANTS = tuple(f"tenant-{number}" for number in range(1, 9))
_OVERLOADED_FLEET = ConsumerFleet(2, 20_000.0, 8, 16_384)
_LARGE_TOKENS_PER_S = 500.0
_ABLATED = ("one-giant", "drifting-lengths")


def run(
    *,
    tenants: int = TENANTS,
    consumers: int = CONSUMERS,
    scale_up: int = SCALE_UP,
    seconds: float = HOUR_S,
    plot: Path | None = PLOT,
    latency_plot: Path | None = LATENCY_PLOT,
    overload_s: float = OVERLOAD_S,
    large: tuple[int, int] = LARGE,
    trace: Path = TRACE_FILE,
    shape: str | None = None,
) -> Result:
    """Every policy over the same requests, and every shape of overload or the one of that name."""
    started = monotonic()
    names, demand = zipf_tenants(tenants, _ZIPF_EXPONENT, SEED)
    specs = {name: TenantSpec(name, weight=float(1 + index % 2)) for index, name in enumerate(names)}
    busiest = names[:_SHOWN_TENANTS]
    rows = [row for row in load_trace(trace) if row.arrived_at_s < seconds]
    costs = [size.cost_tokens for _, size in _sizes(rows, seconds, scale_up)]
    fleet = ConsumerFleet(consumers, sum(costs) / seconds / OVERLOAD / consumers, 2, 8_192)
    largest_request = max(costs)
    figures: list[Figure] = []
    gaps: dict[Policy, float] = {}
    seen: dict[Policy, Observations] = {}
    for policy in _POLICIES:
        simulation = Simulation(policy, specs, fleet, busiest)
        seen[policy] = simulation.run(_requests(names, demand, rows, seconds, scale_up), round(seconds * 1000))
        gaps[policy], of_bound = _gap(seen[policy].dispatches, seen[policy], specs, largest_request)
        at_completion, _ = _gap(seen[policy].completions, seen[policy], specs, largest_request)
        # The bound is drr's; the others are only compared with it.
        aim: tuple[Bound | None, float | None] = ("at most", 1.0) if policy == "drr" else (None, None)
        figures += [
            Figure(f"{policy}: gap at dispatch", gaps[policy], "tokens"),
            Figure(f"{policy}: gap at dispatch divided by drr's bound", of_bound, "ratio", *aim),
            Figure(f"{policy}: gap at completion, with what is in flight", at_completion, "tokens"),
        ]
        figures += _figures(policy, seen[policy], fleet, seconds)
    bound = service_gap_bound(DEFAULT_QUANTUM_TOKENS, largest_request, 1, 1)
    figures.append(Figure("drr's bound of the gap at dispatch, weights 1 and 1", bound, "tokens"))
    of_fifo = gaps["drr"] / gaps["fifo"] if gaps["fifo"] else 1.0
    figures.append(Figure("gap at dispatch, drr divided by fifo", of_fifo, "ratio"))
    shapes = [shape] if shape else list(SHAPES)
    figures += _overload(shapes, trace, overload_s, large)
    figures.append(Figure("wall time", monotonic() - started, "s", "at most", 300))
    if plot is not None:
        draw(plot, seen, busiest, specs, seconds)
    if latency_plot is not None:
        draw_latencies(latency_plot, Traffic(SHAPES["constant"], trace), overload_s)
    return Result(NAME, tuple(figures), ({figure.name: figure.value for figure in figures},))


def _overload(shapes: Sequence[str], trace: Path, seconds: float, large: tuple[int, int]) -> Iterator[Figure]:
    def measured(name: str, fleet: ConsumerFleet, seen: Observations) -> Iterator[Figure]:
        return simulated_overload.figures(name, seen, fleet, seconds)

    fleet, tenants = _OVERLOADED_FLEET, _OVERLOADED_TENANTS
    for shape in shapes:
        traffic = Traffic(SHAPES[shape], trace)
        for name, load in traffic.shape.runs(_OVERLOADS):
            yield from measured(name, fleet, simulated(traffic, tenants, fleet, load, seconds))
        yield from simulated_overload.isolation(traffic, _OVERLOADS, seconds)
        for ablation, parts in ABLATIONS.items() if shape in _ABLATED else ():
            load = _OVERLOADS[-1]
            seen = simulated(traffic, tenants, fleet, load, seconds, parts)
            yield from measured(f"{shape}, {load:g} times, {ablation}", fleet, seen)
    many, consumers = large
    names = [f"tenant-{number:05}" for number in range(many)]
    large_fleet = ConsumerFleet(consumers, _LARGE_TOKENS_PER_S, 1, 16_384)
    seen = simulated(Traffic(SHAPES["constant"], trace), names, large_fleet, _OVERLOADS[0], seconds)
    yield from measured(f"{many:,} tenants, {consumers:,} consumers, {_OVERLOADS[0]:g} times", large_fleet, seen)


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
    served: Mapping[str, Sequence[ServedRequest]], seen: Observations, specs: Mapping[str, TenantSpec], largest: float
) -> tuple[float, float]:
    """The largest difference of normalised service between any two of the busiest tenants within a class, over any
    time in which both had something of that class waiting without a break; and the largest of a difference divided by
    drr's bound for the same two. ``served`` by class, at dispatch or at completion; ``largest``: cost of a request."""
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
    return widest, of_bound


def _common_waits(first: Sequence[tuple[int, bool]], second: Sequence[tuple[int, bool]]) -> Iterator[Interval]:
    together = [(at_ms, one and other) for (at_ms, one), (_, other) in zip(first, second, strict=True)]
    for waits, samples in groupby(together, key=itemgetter(1)):
        times = [at_ms for at_ms, _ in samples]
        # Who began to wait in the very millisecond of a sample may have done so after others were served in it.
        since, until = times[0] + 1, times[-1]
        if waits and until - since >= _MIN_COMMON_WAIT_MS:
            yield since, until


def _sizes(rows: Sequence[TraceRow], seconds: float, scale_up: int) -> Iterator[tuple[float, RequestSize]]:
    """Arrival times in seconds, and sizes: a row of the trace becomes ``scale_up`` requests up to the next row."""
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        gap_s = (seconds if following is None else following.arrived_at_s) - row.arrived_at_s
        for copy in range(scale_up):
            yield row.arrived_at_s + gap_s * copy / scale_up, RequestSize(row.context_tokens, row.generated_tokens)


def _requests(
    names: Sequence[str], demand: Sequence[float], rows: Sequence[TraceRow], seconds: float, scale_up: int
) -> Iterator[SimulatedRequest]:
    chosen = random.Random(SEED)
    cumulative = list(accumulate(demand))
    for number, (at_s, size) in enumerate(_sizes(rows, seconds, scale_up)):
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
            own = [one for one in completions if one.tenant == tenant]
            totals = [total / 1e6 for total in accumulate(one.cost_tokens for one in own)]
            minutes = [one.at_ms / 60_000 for one in own]
            panel.plot(minutes, totals, label=f"#{rank} by demand, weight {specs[tenant].weight:g}", linewidth=1.2)
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


def draw_latencies(path: Path, traffic: Traffic, seconds: float) -> None:
    """Latency of each served request over time at three times the capacity, before and with all parts, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    runs = {"deadlines alone": ABLATIONS["without all three"], "latency targets, quantiles, measured shares": ALL_PARTS}
    for panel, (title, parts) in zip(panels, runs.items(), strict=True):
        seen = simulated(traffic, _OVERLOADED_TENANTS, _OVERLOADED_FLEET, _OVERLOADS[0], seconds, parts)
        panel.plot(
            [one.done_at_ms / 1000 for one in seen.answered],
            [(one.done_at_ms - one.submitted_at_ms) / 1000 for one in seen.answered],
            ".",
            markersize=2,
        )
        panel.axhline(TIMEOUT_MS / 1000, color="black", linewidth=0.8)
        panel.set_title(title)
        panel.set_xlim(0, seconds)
        panel.set_xlabel("seconds")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("latency of the served, seconds")
    figure.suptitle("Three times the capacity; the line is the deadline")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
