"""A dispatcher without a broker, whose surroundings are all in the test's hand."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from aiokafka.structs import ConsumerRecord, TopicPartition

from fairlane import names
from fairlane.outcomes import CacheMode, Health, Priority, VersionState
from fairlane.ownership import Membership, Ownership, PartitionId
from fairlane.records import (
    AuditEvent,
    CacheUse,
    CapacityReport,
    InferenceReply,
    InferenceRequest,
    ModelVersion,
    Parameters,
    RequestInput,
    SourceCoordinate,
    TenantSpec,
    VersionChange,
    WorkItem,
)
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.caching.entries import CacheKey
from fairlane_server.caching.responses import CachedAnswer, response_key
from fairlane_server.costs.price_book import NO_PRICES
from fairlane_server.kafka.transactions import OutputRecord, Settlement, TransactionLoop
from fairlane_server.models.catalog import catalog_of
from stream_processors.dispatcher.admission.quota_charges import QuotaCharges
from stream_processors.dispatcher.admission.stage import AdmissionStage
from stream_processors.dispatcher.assembly import assemble
from stream_processors.dispatcher.enrichment.history import HistoryReader
from stream_processors.dispatcher.enrichment.retriever import Retriever
from stream_processors.dispatcher.feedback.work_records import AgedCapacityReport
from stream_processors.dispatcher.intake.classifier import RecordClassifier, Verdict
from stream_processors.dispatcher.queued_request import QueuedRequest, ReceivedRecord
from stream_processors.dispatcher.reading.fenced_thread import Poll
from stream_processors.dispatcher.response_cache.caches import QueryEmbeddings
from stream_processors.dispatcher.response_cache.lookup import CacheHit, CacheQuery
from tests.kit.fake_passages import FakeEmbedder, FakePassages
from tests.kit.fake_turns import FakeTurns
from tests.kit.waiting import eventually_async

NOW_MS = 1_000_000
SECRET = "a prompt nobody may see"
MODEL = ModelVersion("words", "1", "pool", "simulated", ("generate",), "words", 4_096, 512)
PARTITION = PartitionId("requests.acme", 0)


@dataclass
class Submitted:
    """Where a TransactionLoop would be."""

    settlements: list[Settlement] = field(default_factory=list)
    notes: list[OutputRecord] = field(default_factory=list)
    written: list[OutputRecord] = field(default_factory=list)
    """Notes and outputs in the order in which they would be written."""
    pending_count: int = 0
    pending_bytes: int = 0
    has_waiting: bool = False

    def note(self, records: Sequence[OutputRecord]) -> None:
        self.notes.extend(records)
        self.written.extend(records)

    def submit(self, settlement: Settlement) -> None:
        self.submit_many([settlement])

    def submit_many(self, settlements: Sequence[Settlement]) -> None:
        self.settlements.extend(settlements)
        self.written.extend(output for settlement in settlements for output in settlement.outputs)

    @property
    def outputs(self) -> list[OutputRecord]:
        return [output for settlement in self.settlements for output in settlement.outputs]


@dataclass
class Seen:
    """A duplicate index that a test fills."""

    firsts: dict[str, SourceCoordinate] = field(default_factory=dict)
    meanwhile: Any = None
    forgotten: list[str] = field(default_factory=list)

    async def first_seen(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[SourceCoordinate | None]:
        if self.meanwhile is not None:
            self.meanwhile()
        return [self.firsts.get(request_id) for _, request_id, _ in entries]

    async def forget(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> None:
        self.forgotten.extend(request_id for _, request_id, _ in entries)
        for _, request_id, coordinate in entries:
            if self.firsts.get(request_id) == coordinate:
                del self.firsts[request_id]


@dataclass
class Archive:
    reply: InferenceReply | None = None

    async def find(self, tenant: str, request_id: str, source: SourceCoordinate) -> InferenceReply | None:
        return self.reply


@dataclass
class KeptAnswers:
    """Where earlier answers would be: what a test puts there."""

    answers: dict[CacheKey, CachedAnswer] = field(default_factory=dict)
    is_available: bool = True
    finds: int = 0
    remembered: list[CacheQuery] = field(default_factory=list)
    hangs: asyncio.Event | None = None
    """Nothing is found before it is set."""

    async def question(self, queued: QueuedRequest) -> CacheQuery | None:
        key = response_key(queued.tenant, queued.request, queued.model.version, None)
        return None if key is None else CacheQuery(key)

    async def find(self, question: CacheQuery) -> CacheHit | None:
        self.finds += 1
        if self.hangs is not None:
            await self.hangs.wait()
        answer = self.answers.get(question.key)
        return None if answer is None else CacheHit(answer, CacheUse(CacheMode.EXACT, answer.request_id, 1))

    def remember(self, question: CacheQuery) -> None:
        self.remembered.append(question)


UNTARGETED = {"latency_target_ms": ",".join(f"{name}=86400000" for name in Priority)}
"""No latency target below the timeout."""


class Bench:
    """Begins with one tenant, acme, one model, words, and no consumer that ever reported."""

    def __init__(self, max_undecided: int = 100, max_span: int = 1_000, **settings: Any) -> None:
        self.ownership = Ownership(max_span)
        self.transactions = Submitted()
        self.seen = Seen()
        self.archive = Archive()
        self.passages, self.embedder = FakePassages(), FakeEmbedder()
        self.turns = FakeTurns()
        self.kept = KeptAnswers()
        self.now_ms = NOW_MS
        self.prices = NO_PRICES
        self.dispatcher = assemble(
            Settings(instance_id="dispatcher-1", **(UNTARGETED | settings)),
            default_codec(),
            self.ownership,
            cast("TransactionLoop", self.transactions),
            self.archive,
            None,
            Retriever(self.passages, QueryEmbeddings(self.embedder), lambda: self.now_ms),
            HistoryReader(self.turns, lambda: self.now_ms),
            self.kept,
            lambda: self.prices,
            lambda: self.now_ms,
        )
        self.dispatcher.output.accepted_ids = self.seen
        self.dispatcher.intake.buffer.max_records = max_undecided
        self.partitions = {PARTITION}
        self.register([TenantSpec("acme")], [MODEL])
        self.assign()
        self._read = self._committed = 0

    @property
    def classifier(self) -> RecordClassifier:
        return self.dispatcher.intake.classifier

    @property
    def admission(self) -> AdmissionStage:
        return self.dispatcher.admission

    @property
    def charges(self) -> QuotaCharges:
        return self.dispatcher.output.charges

    def register(
        self,
        tenants: Sequence[TenantSpec],
        models: Sequence[ModelVersion] = (MODEL,),
        parts: Mapping[str, float] | None = None,
    ) -> None:
        """These are the tenants and models from now on, and the parts of tenants that are read here if not all."""
        self.dispatcher.set_registry({spec.tenant: spec for spec in tenants}, catalog_of(*models), parts or {})

    def assign(self, *more: str) -> None:
        """Own partition 0 of the first topic, and of these."""
        self.partitions.update(PartitionId(topic, 0) for topic in more)
        self.ownership.assign(dict.fromkeys(self.partitions), Membership(1, "me", b""))

    def report(
        self,
        rate: float = 1_000.0,
        *,
        tokens: int = 1_000,
        pool: str = "pool",
        draining: bool = False,
        age_ms: int = 0,
        number: int = 1,
        partitions: tuple[int, ...] = (),
        versions: tuple[str, ...] = (),
        follows_models: bool = False,
        loading: tuple[str, ...] = (),
    ) -> None:
        """A consumer of the pool reports this many cost tokens per second, and batches of this many; or it did so long
        ago, before this dispatcher started."""
        report = CapacityReport(
            f"{pool}-{number}", pool, (), Health.HEALTHY, draining, 0.0, 0.0, 32, tokens, 0.0, 0, 0, self.now_ms, rate
        )
        changes = tuple(VersionChange(version, VersionState.LOADING) for version in loading)
        report = replace(
            report, partitions=partitions, versions=versions, follows_models=follows_models, changes=changes
        )
        self.dispatcher.updates.learn([AgedCapacityReport(report, age_ms)])

    def queued(
        self, one: InferenceRequest | WorkItem, topic: str = PARTITION.topic, submitted_at_ms: int | None = None
    ) -> QueuedRequest:
        """A valid request as intake hands it on."""
        verdict = self.take_in(one, topic, submitted_at_ms)
        assert isinstance(verdict, QueuedRequest), self.decoded_all(verdict) if isinstance(verdict, tuple) else verdict
        return verdict

    def take_in(self, one: Any, topic: str = PARTITION.topic, submitted_at_ms: int | None = None) -> Verdict:
        """What intake makes of a record, or of the bytes of one."""
        value = one if isinstance(one, bytes) else default_codec().encode(one)
        partition, offset = PartitionId(topic, 0), self._read
        self._read += 1
        claim = self.ownership.deliver(partition, offset)
        assert claim is not None
        at_ms = self.now_ms if submitted_at_ms is None else submitted_at_ms
        return self.classifier.classify(claim, ReceivedRecord(partition, offset, at_ms, b"key", value))

    async def write(
        self,
        offset: int,
        value: bytes | None,
        message_headers: Sequence[tuple[str, bytes]] = (),
        topic: str = PARTITION.topic,
    ) -> None:
        """A poll of one record."""
        record = ConsumerRecord(topic, 0, offset, NOW_MS, 1, b"key", value, None, 3, len(value or b""), message_headers)
        await self.dispatcher.intake.receive(Poll(self.ownership.epoch, {TopicPartition(topic, 0): [record]}))

    def run(self, *values: bytes | None, topic: str = PARTITION.topic) -> list[Settlement]:
        """Give it these records, let it decide them, and say what it settled."""

        async def turn() -> None:
            for offset, value in enumerate(values):
                await self.write(offset, value, topic=topic)
            await self.decide()

        asyncio.run(turn())
        return self.transactions.settlements

    def commit(self) -> None:
        """Everything that was handed to the transactions so far is committed."""
        settled = self.transactions.settlements[self._committed :]
        self._committed = len(self.transactions.settlements)
        plan = self.ownership.plan((settlement.claim for settlement in settled), 1_000_000)
        if plan is not None:
            self.ownership.settle(plan)
        self.dispatcher.on_committed(settled)

    async def decide(self) -> None:
        """Run its tasks until they have nothing left to do."""
        dispatcher = self.dispatcher
        tasks = [
            asyncio.create_task(task)
            for task in (dispatcher.run(), dispatcher.deliver(), dispatcher.deduplication.run())
        ]
        for _ in range(50):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            # A test may give it one loop after another: what waits in a later one says so, when all is decided.
            if isinstance(ended, Exception) and "different event loop" not in str(ended):
                raise ended

    async def eventually(self, condition: Callable[[], object]) -> None:
        """Dispatch what was looked up until the condition holds."""
        delivering = asyncio.create_task(self.dispatcher.deliver())
        try:
            await eventually_async(condition)
        finally:
            delivering.cancel()

    def new_loop(self) -> None:
        """Its events belong to the next event loop."""
        dispatcher = self.dispatcher
        dispatcher.wake = dispatcher.intake.wake = dispatcher.inbox.wake = asyncio.Event()
        dispatcher.deliverable = dispatcher.enrichment.wake = dispatcher.response_cache.wake = asyncio.Event()
        dispatcher.deduplication._arrived = asyncio.Event()

    def decoded(self, topic: str) -> list[Any]:
        """What settlements wrote to this topic."""
        return self.decoded_all(out for out in self.transactions.outputs if out.topic == topic)

    def audit(self) -> list[AuditEvent]:
        """All that was audited, in the order in which it is written."""
        return self.decoded_all(out for out in self.transactions.written if out.topic == names.LEDGER_AUDIT)

    @staticmethod
    def decoded_all(outputs: Iterable[OutputRecord]) -> list[Any]:
        return [default_codec().decode(out.value) for out in outputs]


def request(number: int = 1, **fields: Any) -> InferenceRequest:
    made = InferenceRequest(
        f"00000000-0000-0000-0000-{number:012}", "words", "generate", RequestInput(prompt=SECRET), Parameters(4)
    )
    return replace(made, **fields)


def encoded(number: int = 1, **fields: Any) -> bytes:
    return default_codec().encode(request(number, **fields))


def handed_back(**fields: Any) -> WorkItem:
    """Work of acme that this dispatcher dispatched a second ago, as its pool's consumer hands it back."""
    made = WorkItem(
        request=request(1),
        tenant="acme",
        pool="pool",
        model_version="1",
        priority_class="normal",
        cost_tokens=13,
        submitted_at_ms=NOW_MS - 1_000,
        admitted_at_ms=NOW_MS - 1_000,
        dispatched_at_ms=NOW_MS - 1_000,
        deadline_at_ms=NOW_MS + 1_000,
        reply_topic="replies.acme",
        dispatcher_id="dispatcher-1",
        source=SourceCoordinate("requests.acme", 0, 41),
        prompt_tokens=5,
        handed_back=1,
    )
    return replace(made, **fields)
