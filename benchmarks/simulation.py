"""The dispatcher's scheduler under a virtual clock.

Only time and consumers are simulated. Admission, window, fair queue and in-flight tracking are the dispatcher's
modules; what the log carries between them is handed over after its delay on a real broker.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from benchmarks.service_curve import ServedRequest
from benchmarks.simulated_pool import capacity_report
from fairlane.names import priority_topic, requests_topic
from fairlane.outcomes import Priority
from fairlane.ownership import Claim, PartitionId
from fairlane.records import SourceCoordinate, TenantSpec
from fairlane_server.admission_rule import DEFAULT_TARGET_PART
from stream_processors.dispatcher.admission.rules import AdmissionPolicy, Shed
from stream_processors.dispatcher.scheduling.capacity import CapacityBoard
from stream_processors.dispatcher.scheduling.fair_queue import Policy
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
    """A request with the facts that decisions are made from, and no content.

    Attributes:
        cost_tokens: as estimated.
        cautious: as ``cautious_cost_tokens``; None: the estimate.
        spent: what it really takes, in cost tokens; None: the estimate is exact.
        target_ms: its latency target; None: the default.
    """

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
    version_key: str = "simulated/1"
    request_id: str = ""
    size_bytes: int = 4_096
    input_bytes: int = 4_096
    most_output_tokens: int = 0
    is_backfill: bool = False
    cautious: int | None = None
    spent: int | None = None
    target_ms: int | None = None

    @property
    def cautious_cost_tokens(self) -> int:
        return self.cost_tokens if self.cautious is None else self.cautious

    @property
    def spent_tokens(self) -> int:
        """In cost tokens."""
        return self.cost_tokens if self.spent is None else self.spent

    @property
    def latency_target_ms(self) -> int:
        if self.target_ms is not None:
            return self.target_ms
        return round(DEFAULT_TARGET_PART * (self.deadline_at_ms - self.submitted_at_ms))


@dataclass(frozen=True, slots=True)
class ConsumerFleet:
    """The consumers: how many, cost tokens per second of each, and the bounds of a micro-batch."""

    consumers: int
    tokens_per_s: float
    max_batch_items: int
    max_batch_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that was served."""

    tenant: str
    submitted_at_ms: int
    done_at_ms: int
    deadline_at_ms: int
    cost_tokens: int

    @property
    def is_late(self) -> bool:
        return self.done_at_ms > self.deadline_at_ms


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
    answered: list[Answered] = field(default_factory=list)
    offered: int = 0
    shed: Counter[str] = field(default_factory=Counter)
    late: int = 0
    expired: int = 0
    in_time_tokens: int = 0
    refusals_ms: list[int] = field(default_factory=list)
    """Time to each refusal."""
    given_up_at_ms: list[int] = field(default_factory=list)
    """When each request was submitted that was admitted, and shed or expired in the queue."""
    backlogged: dict[tuple[str, str], list[tuple[int, bool]]] = field(default_factory=dict)


class Simulation:
    """One run. Consumers take whole micro-batches in the order of their partition, at a fixed rate."""

    def __init__(
        self,
        policy: Policy,
        tenants: Mapping[str, TenantSpec],
        fleet: ConsumerFleet,
        sampled: Sequence[str] = (),
        on_settled: Callable[[SimulatedRequest], None] = lambda _: None,
        make_scheduler: Callable[..., Scheduler[SimulatedRequest]] = Scheduler,
    ) -> None:
        """``sampled``: the tenants whose dispatches and backlog are observed. ``on_settled`` may learn from what a
        request took."""
        self._fleet = fleet
        self._next_turn_at_ms = 0
        self._learn = on_settled
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
        scheduler_policy = SchedulerPolicy(policy, admission, target_queue_ms=50.0)
        self._scheduler = make_scheduler(scheduler_policy, CapacityBoard(), in_flight, Fleet(_DISPATCHER))
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
        self._scheduler.refresh(now_ms)
        load, _ = self._scheduler.predict(request)
        verdict = self._scheduler.judge(request, load, now_ms)
        if isinstance(verdict, Shed):
            self._seen.shed[verdict.code] += 1
            self._seen.refusals_ms.append(0)
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
        due_ms = self._scheduler.next_turn_ms(now_ms)
        if due_ms is not None and not now_ms < self._next_turn_at_ms <= now_ms + due_ms:
            self._next_turn_at_ms = now_ms + due_ms
            self._at(self._next_turn_at_ms, self._on_turn, None)

    def _on_turn(self, _what: object, now_ms: int) -> None:
        self._dispatch(now_ms)

    def _late(self, request: SimulatedRequest, now_ms: int) -> None:
        self._seen.given_up_at_ms.append(request.submitted_at_ms)
        if now_ms > request.deadline_at_ms:
            self._seen.expired += 1
        else:
            self._seen.refusals_ms.append(now_ms - request.submitted_at_ms)
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
        tokens, spent = batch[0][0].cost_tokens, batch[0][0].spent_tokens
        while (
            queue
            and len(batch) < self._fleet.max_batch_items
            and tokens + queue[0][0].cost_tokens <= self._fleet.max_batch_tokens
        ):
            batch.append(queue.popleft())
            tokens += batch[-1][0].cost_tokens
            spent += batch[-1][0].spent_tokens
        self._busy[consumer] = True
        run_ms = max(1, round(1000 * spent / self._fleet.tokens_per_s))
        self._at(now_ms + run_ms, self._on_batch_done, (consumer, batch, run_ms))

    def _on_batch_done(self, what: tuple[int, list[tuple[SimulatedRequest, WorkId]], int], now_ms: int) -> None:
        consumer, batch, run_ms = what
        self._busy[consumer] = False
        self._start(consumer, now_ms)
        for request, work in batch:
            completion = ServedRequest(now_ms, request.tenant, request.spent_tokens)
            self._seen.completions[request.priority_class].append(completion)
            self._seen.answered.append(
                Answered(request.tenant, request.submitted_at_ms, now_ms, request.deadline_at_ms, request.spent_tokens)
            )
            self._seen.latencies_ms[request.priority_class].append(now_ms - request.submitted_at_ms)
            if now_ms <= request.deadline_at_ms:
                self._seen.in_time_tokens += request.spent_tokens
            else:
                self._seen.late += 1
            self._at(now_ms + _LOG_DELAY_MS, self._on_settled, (request, work, run_ms))

    def _on_settled(self, what: tuple[SimulatedRequest, WorkId, int], now_ms: int) -> None:
        request, work, run_ms = what
        self._learn(request)
        self._scheduler.finished(work.topic, work.partition, now_ms)
        settled = self._scheduler.in_flight.settled(work)
        if settled is not None and settled.own is not None:
            spent = request.spent_tokens
            self._scheduler.correct(settled.own, spent - self._scheduler.charged_tokens(settled.own))
            self._scheduler.learn_service(settled.own, spent, run_ms)
        self._dispatch(now_ms)

    def _on_report(self, consumer: int, now_ms: int) -> None:
        fleet = self._fleet
        sizes = (fleet.tokens_per_s, fleet.max_batch_items, fleet.max_batch_tokens)
        report = capacity_report(f"consumer-{consumer}", POOL, "simulated", *sizes, now_ms, (consumer,))
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
