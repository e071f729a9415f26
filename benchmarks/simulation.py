"""A pool under a virtual clock: the dispatcher's own scheduler, simulated consumers, no Kafka and no waiting.

Only time and the consumers are made up. Admission, window, fair queue and in-flight tracking are the modules that the
dispatcher runs; what the log would carry between them (work read back, settlements, capacity reports) is handed over
after the delay that it has on a real broker.
"""

import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from benchmarks.service_curve import Completion
from fairlane.names import priority_topic, requests_topic
from fairlane.outcomes import Health, Priority
from fairlane.ownership import Claim, PartitionId
from fairlane.records import CapacityReport, SourceCoordinate, TenantSpec
from stream_processors.dispatcher.admission.rules import AdmissionPolicy, Shed
from stream_processors.dispatcher.scheduling.capacity import CapacityBoard
from stream_processors.dispatcher.scheduling.fair_queue import Policy
from stream_processors.dispatcher.scheduling.fleet import Fleet
from stream_processors.dispatcher.scheduling.in_flight import Dispatched, InFlight, WorkId
from stream_processors.dispatcher.scheduling.scheduler import Scheduler, SchedulerPolicy
from stream_processors.dispatcher.scheduling.turns import Turn

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

    completions: dict[str, list[Completion]] = field(default_factory=lambda: {name: [] for name in Priority})
    dispatches: dict[str, list[Completion]] = field(default_factory=lambda: {name: [] for name in Priority})
    latencies_ms: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in Priority})
    offered: int = 0
    shed: Counter[str] = field(default_factory=Counter)
    late: int = 0
    expired: int = 0
    in_time_tokens: int = 0
    backlogged: dict[tuple[str, str], list[tuple[int, bool]]] = field(default_factory=dict)


@dataclass(slots=True)
class Simulation:
    """One run. Consumers take whole micro-batches in the order of their partition, at a fixed rate."""

    policy: Policy
    tenants: Mapping[str, TenantSpec]
    fleet: ConsumerFleet
    sampled: Sequence[str] = ()
    seen: Observations = field(default_factory=Observations)
    _events: list[tuple[int, int, str, object]] = field(default_factory=list)
    _number: int = 0
    _offsets: Counter[tuple[str, int]] = field(default_factory=Counter)
    _queues: list[deque[tuple[SimulatedRequest, WorkId]]] = field(default_factory=list)
    _busy: list[bool] = field(default_factory=list)
    _emptied: set[tuple[str, str]] = field(default_factory=set)
    """Of the sampled ones, those that had nothing waiting at some time since the last sample."""
    _scheduler: Scheduler[SimulatedRequest] = field(init=False)

    def __post_init__(self) -> None:
        in_flight = InFlight(_DISPATCHER)
        for priority_class in Priority:
            in_flight.set_partitions(priority_topic(POOL, priority_class), self.fleet.consumers)
        policy = SchedulerPolicy(
            self.policy, AdmissionPolicy(max_waiting_requests=50_000, max_waiting_bytes=2**30), target_queue_ms=100.0
        )
        self._scheduler = Scheduler(policy, CapacityBoard(), in_flight, Fleet(_DISPATCHER))
        self._scheduler.set_tenants(self.tenants)
        self._queues = [deque() for _ in range(self.fleet.consumers)]
        self._busy = [False] * self.fleet.consumers
        self.seen.backlogged = {(tenant, name): [] for tenant in self.sampled for name in Priority}

    def run(self, requests: Iterator[SimulatedRequest], until_ms: int) -> Observations:
        """Everything that is submitted before ``until_ms``, in order of time, and what becomes of it until then."""
        for number in range(self.fleet.consumers):
            self._at(0, "report", number)
        self._at(_SWEEP_EVERY_MS, "sweep", None)
        upcoming = next(requests, None)
        while True:
            now_ms = self._events[0][0]
            if upcoming is not None and upcoming.submitted_at_ms <= now_ms:
                if upcoming.submitted_at_ms >= until_ms:
                    return self.seen
                self._arrive(upcoming)
                upcoming = next(requests, None)
                continue
            if now_ms >= until_ms:
                return self.seen
            _, _, kind, what = heappop(self._events)
            getattr(self, f"_on_{kind}")(what, now_ms)

    def _at(self, at_ms: int, kind: str, what: object) -> None:
        self._number += 1
        heappush(self._events, (at_ms, self._number, kind, what))

    def _arrive(self, request: SimulatedRequest) -> None:
        now_ms = request.submitted_at_ms
        self.seen.offered += 1
        load, _ = self._scheduler.predict(request)
        verdict = self._scheduler.judge(request, load, now_ms)
        if isinstance(verdict, Shed):
            self.seen.shed[verdict.code] += 1
            return
        self._scheduler.push(request)
        self._dispatch(now_ms)

    def _dispatch(self, now_ms: int) -> None:
        for turn in self._scheduler.turns(now_ms):
            if (turn.item.tenant, turn.item.priority_class) in self.seen.backlogged:
                self._left(turn, now_ms)
            if turn.is_late:
                self._late(turn.item, now_ms)
            else:
                self._at(now_ms + _LOG_DELAY_MS, "read_back", turn)

    def _left(self, turn: Turn[SimulatedRequest], now_ms: int) -> None:
        request = turn.item
        queues = {name: queue for name, queue, *_ in self._scheduler.pool_views()}
        if not queues[request.pool].waiting(request.tenant, request.priority_class).requests:
            self._emptied.add((request.tenant, request.priority_class))
        if not turn.is_late:
            dispatch = Completion(now_ms, request.tenant, request.cost_tokens)
            self.seen.dispatches[request.priority_class].append(dispatch)

    def _late(self, request: SimulatedRequest, now_ms: int) -> None:
        if now_ms > request.deadline_at_ms:
            self.seen.expired += 1
        else:
            self.seen.shed["deadline_unmeetable"] += 1

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
            and len(batch) < self.fleet.max_batch_items
            and tokens + queue[0][0].cost_tokens <= self.fleet.max_batch_tokens
        ):
            batch.append(queue.popleft())
            tokens += batch[-1][0].cost_tokens
        self._busy[consumer] = True
        self._at(now_ms + max(1, round(1000 * tokens / self.fleet.tokens_per_s)), "batch_done", (consumer, batch))

    def _on_batch_done(self, what: tuple[int, list[tuple[SimulatedRequest, WorkId]]], now_ms: int) -> None:
        consumer, batch = what
        self._busy[consumer] = False
        self._start(consumer, now_ms)
        for request, work in batch:
            completion = Completion(now_ms, request.tenant, request.cost_tokens)
            self.seen.completions[request.priority_class].append(completion)
            self.seen.latencies_ms[request.priority_class].append(now_ms - request.submitted_at_ms)
            if now_ms <= request.deadline_at_ms:
                self.seen.in_time_tokens += request.cost_tokens
            else:
                self.seen.late += 1
            self._at(now_ms + _LOG_DELAY_MS, "settled", (request, work))

    def _on_settled(self, what: tuple[SimulatedRequest, WorkId], now_ms: int) -> None:
        request, work = what
        settled = self._scheduler.in_flight.settled(work)
        if settled is not None and settled.own is not None:
            # The estimate is exact here, so that nothing is left to correct but what was not charged at first.
            spent = request.cost_tokens - self._scheduler.charged_tokens(settled.own)
            self._scheduler.correct(settled.own, spent)
        self._dispatch(now_ms)

    def _on_report(self, consumer: int, now_ms: int) -> None:
        report = CapacityReport(
            instance_id=f"consumer-{consumer}",
            pool=POOL,
            models=("simulated",),
            health=Health.HEALTHY,
            draining=False,
            prefill_tokens_per_s=self.fleet.tokens_per_s,
            decode_tokens_per_s=self.fleet.tokens_per_s / 2,
            max_batch_size=self.fleet.max_batch_items,
            max_batch_tokens=self.fleet.max_batch_tokens,
            batch_fill=1.0,
            in_flight_items=0,
            in_flight_tokens=0,
            reported_at_ms=now_ms,
            cost_tokens_per_s=self.fleet.tokens_per_s,
        )
        self._scheduler.capacity.report(report, now_ms)
        self._at(now_ms + _REPORT_EVERY_MS, "report", consumer)

    def _on_sweep(self, _what: object, now_ms: int) -> None:
        self._scheduler.refresh(now_ms)
        for request in self._scheduler.take_late(now_ms):
            self._late(request, now_ms)
        self._dispatch(now_ms)
        for _, queue, *_ in self._scheduler.pool_views():
            for (tenant, priority_class), samples in self.seen.backlogged.items():
                waits = queue.waiting(tenant, priority_class).requests > 0
                samples.append((now_ms, waits and (tenant, priority_class) not in self._emptied))
        self._emptied.clear()
        self._at(now_ms + _SWEEP_EVERY_MS, "sweep", None)


def claim_of(tenant: str, number: int) -> Claim:
    """Where the request with this number would stand."""
    return Claim(PartitionId(requests_topic(tenant), 0), number, 1)


def zipf_tenants(count: int, exponent: float, seed: int) -> tuple[list[str], list[float]]:
    """Names, and how much each asks for, falling by a power of its rank, in no order of names."""
    names = [f"tenant-{number:05}" for number in range(count)]
    random.Random(seed).shuffle(names)
    return names, [1 / (rank + 1) ** exponent for rank in range(count)]
