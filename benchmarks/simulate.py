"""simulate: an hour of the trace, scaled up, over 10,000 tenants, under a virtual clock.

It shows the order that the policies make, not speed: demand falls by a power of a tenant's rank, 64 consumers, a
quarter more load than capacity in the mean and the trace's bursts on top. The plot shows served tokens of the busiest
tenants over time.

Both gaps are the largest difference of normalised service between two of the busiest tenants within a class over any
time in which both had something of that class waiting. **At dispatch** the fair queue decides, with the bound
2 Q + M / w_i + M / w_j (``fair_queue``). **At completion** the order in which 64 consumers finish their
two micro-batches each comes on top (more than a million tokens), which no bound of the queue covers.

Only time and consumers are simulated. Admission, window, fair queue and in-flight tracking are the dispatcher's
modules; what the log carries between them is handed over after its delay on a real broker.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, chain, combinations, count, groupby
from operator import itemgetter
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.result import Bound, Figure, Result
from benchmarks.service_curve import Interval, ServedRequest, largest_gap, percentile, within
from benchmarks.simulated_pool import capacity_report
from benchmarks.trace import RequestSize, load_trace
from fairlane.names import priority_topic, requests_topic
from fairlane.outcomes import Priority
from fairlane.ownership import Claim, PartitionId
from fairlane.records import SourceCoordinate, TenantSpec
from stream_processors.dispatcher.admission.rules import AdmissionPolicy, Shed
from stream_processors.dispatcher.scheduling.capacity import CapacityBoard
from stream_processors.dispatcher.scheduling.fair_queue import DEFAULT_QUANTUM_TOKENS, Policy, service_gap_bound
from stream_processors.dispatcher.scheduling.in_flight import Dispatched, InFlight, WorkId
from stream_processors.dispatcher.scheduling.scheduler import Scheduler, SchedulerPolicy, Turn
from stream_processors.dispatcher.scheduling.window import Fleet

POOL = "simulated"
_DISPATCHER = "dispatcher-1"
_LOG_DELAY_MS = 10
_REPORT_EVERY_MS = 1_000
_SWEEP_EVERY_MS = 200


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRequest:
    """A request with the facts that decisions are made from, and no content."""

    claim: Claim
    tenant: str
    priority_class: str
    cost_tokens: int
    prompt_tokens: int
    submitted_at_ms: int
    deadline_at_ms: int
    group: str = ""
    pool: str = POOL
    model_name: str = "simulated"
    request_id: str = ""
    size_bytes: int = 4_096
    input_bytes: int = 4_096
    is_backfill: bool = False


@dataclass(frozen=True, slots=True)
class ConsumerFleet:
    """The consumers: how many, cost tokens per second of each, and the bounds of a micro-batch."""

    consumers: int
    tokens_per_s: float
    max_batch_items: int
    max_batch_tokens: int


@dataclass(slots=True)
class Observations:
    """What came out.

    Attributes:
        completions: by class, what was served, when it was done.
        dispatches: by class, of the sampled tenants alone, the same when it left the queue.
        backlogged: for each sampled tenant and class, at every sample, whether it has something waiting, and had it
            without a break since the sample before or since it began to wait.
    """

    completions: dict[str, list[ServedRequest]] = field(default_factory=lambda: defaultdict(list))
    dispatches: dict[str, list[ServedRequest]] = field(default_factory=lambda: defaultdict(list))
    latencies_ms: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    offered: int = 0
    shed: Counter[str] = field(default_factory=Counter)
    late: int = 0
    expired: int = 0
    in_time_tokens: int = 0
    backlogged: dict[tuple[str, str], list[tuple[int, bool]]] = field(default_factory=dict)


class Simulation:
    """One run. Consumers take whole micro-batches in the order of their partition, at a fixed rate."""

    def __init__(
        self, policy: Policy, tenants: Mapping[str, TenantSpec], fleet: ConsumerFleet, sampled: Sequence[str] = ()
    ) -> None:
        """``sampled``: the tenants whose dispatches and backlog are observed."""
        self._fleet = fleet
        self._seen = Observations(backlogged={(tenant, name): [] for tenant in sampled for name in Priority})
        self._events: list[tuple[int, int, Callable[[Any, int], None], Any]] = []
        self._numbers = count()
        self._offsets: Counter[tuple[str, int]] = Counter()
        self._queues: list[deque[tuple[SimulatedRequest, WorkId]]] = [deque() for _ in range(fleet.consumers)]
        self._busy = [False] * fleet.consumers
        self._emptied: set[tuple[str, str]] = set()
        """Of the sampled ones, those that had nothing waiting at some time since the last sample."""
        in_flight = InFlight(_DISPATCHER)
        for priority_class in Priority:
            in_flight.set_partitions(priority_topic(POOL, priority_class), fleet.consumers)
        admission = AdmissionPolicy(max_waiting_requests=50_000, max_waiting_bytes=2**30)
        scheduler_policy = SchedulerPolicy(policy, admission, target_queue_ms=100.0)
        self._scheduler: Scheduler[SimulatedRequest] = Scheduler(
            scheduler_policy, CapacityBoard(), in_flight, Fleet(_DISPATCHER)
        )
        self._scheduler.set_tenants(tenants)

    def run(self, requests: Iterator[SimulatedRequest], until_ms: int) -> Observations:
        """Everything that is submitted before ``until_ms``, in order of time, and what becomes of it until then."""
        for number in range(self._fleet.consumers):
            self._at(0, self._on_report, number)
        self._at(_SWEEP_EVERY_MS, self._on_sweep, None)
        upcoming = next(requests, None)
        while True:
            now_ms = self._events[0][0]
            if upcoming is not None and upcoming.submitted_at_ms <= now_ms:
                if upcoming.submitted_at_ms >= until_ms:
                    return self._seen
                self._arrive(upcoming)
                upcoming = next(requests, None)
                continue
            if now_ms >= until_ms:
                return self._seen
            _, _, event, what = heappop(self._events)
            event(what, now_ms)

    def _at(self, at_ms: int, event: Callable[[Any, int], None], what: object) -> None:
        heappush(self._events, (at_ms, next(self._numbers), event, what))

    def _arrive(self, request: SimulatedRequest) -> None:
        now_ms = request.submitted_at_ms
        self._seen.offered += 1
        load, _ = self._scheduler.predict(request)
        verdict = self._scheduler.judge(request, load, now_ms)
        if isinstance(verdict, Shed):
            self._seen.shed[verdict.code] += 1
            return
        self._scheduler.push(request)
        self._dispatch(now_ms)

    def _dispatch(self, now_ms: int) -> None:
        for turn in self._scheduler.turns(now_ms):
            request = turn.item
            if (request.tenant, request.priority_class) in self._seen.backlogged:
                queues = {name: queue for name, queue, *_ in self._scheduler.pool_views()}
                if not queues[request.pool].waiting(request.tenant, request.priority_class).requests:
                    self._emptied.add((request.tenant, request.priority_class))
                if not turn.is_late:
                    dispatch = ServedRequest(now_ms, request.tenant, request.cost_tokens)
                    self._seen.dispatches[request.priority_class].append(dispatch)
            if turn.is_late:
                self._late(request, now_ms)
            else:
                self._at(now_ms + _LOG_DELAY_MS, self._on_read_back, turn)

    def _late(self, request: SimulatedRequest, now_ms: int) -> None:
        if now_ms > request.deadline_at_ms:
            self._seen.expired += 1
        else:
            self._seen.shed["deadline_unmeetable"] += 1

    def _on_read_back(self, turn: Turn[SimulatedRequest], now_ms: int) -> None:
        request = turn.item
        topic = priority_topic(POOL, request.priority_class)
        work = WorkId(topic, turn.partition, self._offsets[topic, turn.partition])
        self._offsets[topic, turn.partition] += 1
        source = SourceCoordinate(*request.claim.partition, request.claim.offset)
        seen = Dispatched(source, request.tenant, _DISPATCHER, request.cost_tokens)
        self._scheduler.in_flight.dispatched(work, seen)
        self._queues[turn.partition].append((request, work))
        self._start(turn.partition, now_ms)

    def _start(self, consumer: int, now_ms: int) -> None:
        queue = self._queues[consumer]
        if self._busy[consumer] or not queue:
            return
        batch = [queue.popleft()]
        tokens = batch[0][0].cost_tokens
        while (
            queue
            and len(batch) < self._fleet.max_batch_items
            and tokens + queue[0][0].cost_tokens <= self._fleet.max_batch_tokens
        ):
            batch.append(queue.popleft())
            tokens += batch[-1][0].cost_tokens
        self._busy[consumer] = True
        self._at(
            now_ms + max(1, round(1000 * tokens / self._fleet.tokens_per_s)), self._on_batch_done, (consumer, batch)
        )

    def _on_batch_done(self, what: tuple[int, list[tuple[SimulatedRequest, WorkId]]], now_ms: int) -> None:
        consumer, batch = what
        self._busy[consumer] = False
        self._start(consumer, now_ms)
        for request, work in batch:
            completion = ServedRequest(now_ms, request.tenant, request.cost_tokens)
            self._seen.completions[request.priority_class].append(completion)
            self._seen.latencies_ms[request.priority_class].append(now_ms - request.submitted_at_ms)
            if now_ms <= request.deadline_at_ms:
                self._seen.in_time_tokens += request.cost_tokens
            else:
                self._seen.late += 1
            self._at(now_ms + _LOG_DELAY_MS, self._on_settled, (request, work))

    def _on_settled(self, what: tuple[SimulatedRequest, WorkId], now_ms: int) -> None:
        request, work = what
        settled = self._scheduler.in_flight.settled(work)
        if settled is not None and settled.own is not None:
            # The estimate is exact here, so that nothing is left to correct but what was not charged at first.
            spent = request.cost_tokens - self._scheduler.charged_tokens(settled.own)
            self._scheduler.correct(settled.own, spent)
        self._dispatch(now_ms)

    def _on_report(self, consumer: int, now_ms: int) -> None:
        fleet = self._fleet
        sizes = (fleet.tokens_per_s, fleet.max_batch_items, fleet.max_batch_tokens)
        report = capacity_report(f"consumer-{consumer}", POOL, "simulated", *sizes, now_ms)
        self._scheduler.capacity.report(report, now_ms)
        self._at(now_ms + _REPORT_EVERY_MS, self._on_report, consumer)

    def _on_sweep(self, _what: object, now_ms: int) -> None:
        self._scheduler.refresh(now_ms)
        for request in self._scheduler.take_late(now_ms):
            self._late(request, now_ms)
        self._dispatch(now_ms)
        for _, queue, *_ in self._scheduler.pool_views():
            for (tenant, priority_class), samples in self._seen.backlogged.items():
                waits = queue.waiting(tenant, priority_class).requests > 0
                samples.append((now_ms, waits and (tenant, priority_class) not in self._emptied))
        self._emptied.clear()
        self._at(now_ms + _SWEEP_EVERY_MS, self._on_sweep, None)


def claim_of(tenant: str, number: int) -> Claim:
    """The place in the log of the request with this number."""
    return Claim(PartitionId(requests_topic(tenant), 0), number, 1)


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
    costs = [size.cost_tokens for _, size in _sizes(seconds, scale_up)]
    fleet = ConsumerFleet(consumers, sum(costs) / seconds / OVERLOAD / consumers, 2, 8_192)
    largest_request = max(costs)
    figures: list[Figure] = []
    gaps: dict[Policy, float] = {}
    seen: dict[Policy, Observations] = {}
    for policy in _POLICIES:
        simulation = Simulation(policy, specs, fleet, busiest)
        seen[policy] = simulation.run(_requests(names, demand, seconds, scale_up), round(seconds * 1000))
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
    figures.append(Figure("wall time", monotonic() - started, "s", "at most", 120))
    if plot is not None:
        draw(plot, seen, busiest, specs, seconds)
    return Result(NAME, tuple(figures), ({figure.name: figure.value for figure in figures},))


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


def _sizes(seconds: float, scale_up: int) -> Iterator[tuple[float, RequestSize]]:
    """Arrival times in seconds, and sizes: a row of the trace becomes ``scale_up`` requests up to the next row."""
    rows = [row for row in load_trace() if row.arrived_at_s < seconds]
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        gap_s = (seconds if following is None else following.arrived_at_s) - row.arrived_at_s
        for copy in range(scale_up):
            yield row.arrived_at_s + gap_s * copy / scale_up, RequestSize(row.context_tokens, row.generated_tokens)


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
