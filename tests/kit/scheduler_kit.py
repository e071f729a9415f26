"""A scheduler with everything around it in the test's hand: requests, consumers, other dispatchers, settlements."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fairlane.names import priority_topic
from fairlane.outcomes import Health
from fairlane.ownership import Claim, PartitionId
from fairlane.records import CapacityReport, ClassLoad, DispatchReport, PoolLoad, SourceCoordinate, TenantSpec
from stream_processors.dispatcher.admission.rules import AdmissionPolicy, Shed
from stream_processors.dispatcher.scheduling.capacity import CapacityBoard
from stream_processors.dispatcher.scheduling.fair_queue import Policy
from stream_processors.dispatcher.scheduling.in_flight import Dispatched, InFlight, SettledWork, WorkId
from stream_processors.dispatcher.scheduling.scheduler import Scheduler, SchedulerPolicy, Turn
from stream_processors.dispatcher.scheduling.window import Fleet

POOL = "pool"
DISPATCHER = "me"
TARGET_QUEUE_MS = 100
POLICIES: tuple[Policy, ...] = ("drr", "vtc", "fifo")


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a scheduler needs of one."""

    claim: Claim
    tenant: str = "a"
    pool: str = POOL
    group: str = ""
    priority_class: str = "normal"
    cost_tokens: int = 100
    prompt_tokens: int = 10
    size_bytes: int = 1
    deadline_at_ms: int = 1_000_000
    submitted_at_ms: int = 0
    input_bytes: int = 40
    is_backfill: bool = False
    model_name: str = "words"
    version_key: str = "words/1"
    most_output_tokens: int = 0
    target_ms: int | None = None
    """Latency target; None: as long as it has."""

    @property
    def latency_target_ms(self) -> int:
        return self.deadline_at_ms - self.submitted_at_ms if self.target_ms is None else self.target_ms

    @property
    def cautious_cost_tokens(self) -> int:
        return self.cost_tokens

    @property
    def request_id(self) -> str:
        return f"{self.claim.partition.topic}-{self.claim.offset}"


@dataclass(frozen=True, slots=True, eq=False)
class NamedRequest(Request):
    """With an id of its own."""

    name: str = ""

    @property
    def request_id(self) -> str:
        return self.name


def claim(offset: int, tenant: str = "a") -> Claim:
    return Claim(PartitionId(f"requests.{tenant}", 0), offset, 1)


def source_of(item: Request) -> SourceCoordinate:
    return item.claim.coordinate


def capacity_report(
    instance_id: str = "c1",
    rate: float = 1_000.0,
    *,
    items: int = 32,
    tokens: int = 1_000,
    pool: str = POOL,
    draining: bool = False,
    health: Health = Health.HEALTHY,
    partitions: tuple[int, ...] = (),
) -> CapacityReport:
    return CapacityReport(
        instance_id, pool, ("words",), health, draining, 0.0, 0.0, items, tokens, 0.0, 0, 0, 0, rate, partitions
    )


def dispatch_report(instance_id: str, backlog: Mapping[str, float], at_ms: int, pool: str = POOL) -> DispatchReport:
    classes = tuple(ClassLoad(name, weight, 1, 100) for name, weight in backlog.items())
    return DispatchReport(instance_id, 0, at_ms, draining=False, pools=(PoolLoad(pool, 0, 0.0, 0, classes),))


class Kit:
    """A scheduler, the log that its work goes to, and the time. Nothing reports until a test says so."""

    def __init__(
        self,
        fairness: Policy = "drr",
        specs: Iterable[TenantSpec] = (),
        *,
        admission: AdmissionPolicy | None = None,
    ) -> None:
        self.now_ms = 0
        self.policy = SchedulerPolicy(fairness, admission or AdmissionPolicy(), TARGET_QUEUE_MS)
        self.in_flight = InFlight(DISPATCHER)
        self.scheduler: Scheduler[Request] = Scheduler(self.policy, CapacityBoard(), self.in_flight, Fleet(DISPATCHER))
        self.scheduler.set_tenants({spec.tenant: spec for spec in specs})
        self._offset = 0
        self._work_offsets: dict[tuple[str, int], int] = {}
        self._works: dict[SourceCoordinate, WorkId] = {}

    def request(self, tenant: str = "a", **fields: object) -> Request:
        """A new one, that nobody knows yet."""
        self._offset += 1
        known: dict[str, object] = {"submitted_at_ms": self.now_ms, "deadline_at_ms": self.now_ms + 1_000_000}
        return Request(claim(self._offset, tenant), tenant, **(known | fields))  # type: ignore[arg-type]  # by name

    def push(self, tenant: str = "a", **fields: object) -> Request:
        made = self.request(tenant, **fields)
        self.scheduler.push(made)
        return made

    def push_many(self, count: int, tenant: str = "a", **fields: object) -> list[Request]:
        return [self.push(tenant, **fields) for _ in range(count)]

    def report(self, *reports: CapacityReport) -> None:
        for report in reports:
            self.scheduler.capacity.report(report, self.now_ms)

    def judge(self, item: Request) -> Shed | None:
        """As the dispatcher asks about a newcomer."""
        self.scheduler.refresh(self.now_ms)
        load, _ = self.scheduler.predict(item)
        return self.scheduler.judge(item, load, self.now_ms)

    def turns(self, *first: Claim) -> list[Turn[Request]]:
        return list(self.scheduler.turns(self.now_ms, first))

    def dispatched(self, *first: Claim) -> list[Request]:
        """The requests whose turn it is now; none of them late."""
        turns = self.turns(*first)
        assert not any(turn.is_late for turn in turns)
        return [turn.item for turn in turns]

    def read_back(
        self, source: SourceCoordinate, tenant: str, cost_tokens: int, topic: str, dispatcher: str = DISPATCHER
    ) -> WorkId:
        """The work of this source came back from the log."""
        offset = self._work_offsets.get((topic, 0), 0)
        self._work_offsets[topic, 0] = offset + 1
        work = self._works[source] = WorkId(topic, 0, offset)
        self.in_flight.dispatched(work, Dispatched(source, tenant, dispatcher, cost_tokens))
        return work

    def settle(self, item: Request) -> SettledWork:
        """A consumer is done with it."""
        source = source_of(item)
        work = self._works.get(source) or self.read_back(
            source, item.tenant, item.cost_tokens, priority_topic(item.pool, item.priority_class)
        )
        settled = self.in_flight.settled(work)
        assert settled is not None
        return settled
