"""One inference consumer: a polling thread feeds the micro-batcher, an engine thread empties it, the transaction loop
commits while the next batch runs."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from confluent_kafka import Message

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.codec import Codec, DecodeError
from fairlane.logs import get_logger
from fairlane.outcomes import Code
from fairlane.ownership import Claim, Ownership
from fairlane.records import WorkItem
from fairlane.transactions import Settlement, TransactionLoop
from inference_consumers.answers import AnswerWriter, EngineRun, outcome_of
from inference_consumers.engines.protocol import Engine, Failure, ItemOutcome, Success
from inference_consumers.micro_batch import PRIORITY_WEIGHTS, MicroBatch, MicroBatcher, ModelKey, ReceivedWork
from inference_consumers.runner import engine_items, run_batch

log = get_logger(__name__)

_POLL_S = 0.1
_MAX_UNCOMMITTED_BATCHES = 4


class Member(Protocol):
    """The consumer group as this loop needs it; see :class:`inference_consumers.group.PoolMember`."""

    def poll(self, timeout_s: float) -> list[tuple[Claim, Message]]: ...

    def pause_priorities(self, full: set[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class Prefetch:
    """How much a consumer holds in memory."""

    max_items: int
    max_bytes: int


@dataclass(slots=True)
class InferenceConsumer:
    """Everything between the group and the engines of one process."""

    codec: Codec
    ownership: Ownership
    transactions: TransactionLoop
    answers: AnswerWriter
    batcher: MicroBatcher
    engines: Mapping[ModelKey, Engine]
    prefetch: Prefetch
    clock: ClockMs
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stopping: bool = False
    _last_run_at_ms: int = 0
    _last_run_items: int = 0
    _full: set[str] = field(default_factory=set)

    def poll_once(self, member: Member) -> None:
        """One turn of the polling thread: take records, decide what to fetch next."""
        arrived = member.poll(_POLL_S)
        if arrived:
            now_ms = self.clock()
            with self._changed:
                for claim, message in arrived:
                    self._receive(claim, message, now_ms)
                self._changed.notify()
        full = self._full_priorities()
        if full != self._full or not arrived:
            self._full = full
            member.pause_priorities(full)
        if not arrived:
            self.transactions.commit_positions()

    def on_revoked(self) -> None:
        """Partitions moved on: drop their waiting work. Work that is running finishes and is then not committed."""
        with self._changed:
            dropped = self.batcher.discard_stale(self.ownership.is_current)
        if dropped:
            log.info("dropped_revoked_work", items=dropped)

    def run_engines(self) -> None:
        """The engine thread: one batch after another until ``stop``."""
        while (batch := self._next_batch()) is not None:
            self._run(batch)

    def stop(self) -> None:
        """Start no more batches; the running one finishes."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _receive(self, claim: Claim, message: Message, now_ms: int) -> None:
        key, raw, appended_at_ms = message.key(), message.value(), message.timestamp()[1]
        try:
            item = self.codec.decode_as(WorkItem, raw)
        except DecodeError as error:
            metrics.DEAD_LETTERS.labels(topic="dead-letter.work", problem=error.problem).inc()
            self.transactions.submit(self.answers.unreadable(claim, key, raw, appended_at_ms, str(error)))
            return
        work = ReceivedWork(claim, item, len(raw or b""), now_ms, key, raw or b"", appended_at_ms)
        if item.priority_class not in PRIORITY_WEIGHTS or work.model_key not in self.engines:
            problem = Failure(Code.UNKNOWN_MODEL, f"this pool does not serve {item.request.model} {item.model_version}")
            self.transactions.submit(self._settle(work, problem, EngineRun("none", 0, now_ms, now_ms)))
            return
        self.batcher.add(work)

    def _full_priorities(self) -> set[str]:
        """Priorities that hold enough; one stays full until it is half empty, so that fetching does not flap."""
        with self._changed:
            share = self.prefetch.max_bytes // len(PRIORITY_WEIGHTS)
            over = self.batcher.size_bytes > self.prefetch.max_bytes
            full = set()
            for priority in PRIORITY_WEIGHTS:
                bound = self.prefetch.max_items // 2 if priority in self._full else self.prefetch.max_items
                count = self.batcher.count(priority)
                metrics.PREFETCHED_ITEMS.labels(priority=priority).set(count)
                if count >= bound or (over and count and self.batcher.size_bytes > share):
                    full.add(priority)
            return full

    def _next_batch(self) -> MicroBatch | None:
        with self._changed:
            while not self._stopping:
                now_ms = self.clock()
                self._expire(now_ms)
                idle = self._is_idle(now_ms)
                batch = self._batch_if_room(now_ms, idle=idle)
                if batch is not None:
                    return batch
                due_at_ms = self.batcher.due_at_ms(idle=idle)
                self._changed.wait(None if due_at_ms is None else max(0.001, (due_at_ms - now_ms) / 1000))
            return None

    def _is_idle(self, now_ms: int) -> bool:
        """Whether waiting for company would be in vain: the engine rested, or its last run was a lone item."""
        rested = now_ms - self._last_run_at_ms > self.batcher.limits.timeout_ms
        return rested or (self._last_run_items <= 1 and len(self.batcher) <= 1)

    def _batch_if_room(self, now_ms: int, *, idle: bool) -> MicroBatch | None:
        """Commits overlap the next batch, but only so many may be outstanding."""
        if self.transactions.pending_count > _MAX_UNCOMMITTED_BATCHES * self.batcher.limits.max_items:
            self._changed.wait(0.005)
            return None
        return self.batcher.next_batch(now_ms, idle=idle)

    def _expire(self, now_ms: int) -> None:
        for work in self.batcher.take_expired(now_ms):
            metrics.REPLIES.labels(tenant=work.item.tenant, outcome="expired", code="").inc()
            self.transactions.submit(self.answers.expired(work, now_ms))

    def _run(self, batch: MicroBatch) -> None:
        engine = self.engines[batch.model_key]
        started_at_ms = self.clock()
        outcomes = run_batch(engine, engine_items(batch.work))
        finished_at_ms = self.clock()
        self._last_run_at_ms, self._last_run_items = finished_at_ms, len(batch.work)
        run = EngineRun(engine.name, len(batch.work), started_at_ms, finished_at_ms)
        self.transactions.submit_many(
            [self._settle(work, outcome, run) for work, outcome in zip(batch.work, outcomes, strict=True)]
        )
        model = batch.model_key[0]
        metrics.BATCH_ITEMS.labels(model=model).observe(len(batch.work))
        metrics.ENGINE_SECONDS.labels(model=model).observe((finished_at_ms - started_at_ms) / 1000)
        for work in batch.work:
            metrics.BATCH_WAIT_SECONDS.labels(model=model).observe((started_at_ms - work.received_at_ms) / 1000)

    def _settle(self, work: ReceivedWork, outcome: ItemOutcome, run: EngineRun) -> Settlement:
        try:
            return self._settle_outcome(work, outcome, run)
        except Exception as error:  # noqa: BLE001 - an answer that cannot be written must not take its batch along
            log.error("answer_unwritable", request_id=work.item.request.request_id, error=type(error).__name__)
            unwritable = Failure(Code.POISON, f"the answer cannot be written: {type(error).__name__}")
            return self._settle_outcome(work, unwritable, run)

    def _settle_outcome(self, work: ReceivedWork, outcome: ItemOutcome, run: EngineRun) -> Settlement:
        tenant, model = work.item.tenant, work.item.request.model
        if isinstance(outcome, Success):
            metrics.REPLIES.labels(tenant=tenant, outcome="ok", code="").inc()
            metrics.TOKENS.labels(tenant=tenant, model=model, kind="prompt").inc(outcome.usage.prompt_tokens)
            metrics.TOKENS.labels(tenant=tenant, model=model, kind="completion").inc(outcome.usage.completion_tokens)
        else:
            metrics.REPLIES.labels(tenant=tenant, outcome=outcome_of(outcome), code=outcome.code).inc()
        return self.answers.answered(work, outcome, run)
