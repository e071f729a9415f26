"""One inference consumer: a polling thread takes work in, its driver runs it, the transaction loop commits while the
next batch runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from confluent_kafka import Message

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.codec import Codec, DecodeError, DecodeProblem, SchemaNotLoadedError
from fairlane.logs import get_logger
from fairlane.outcomes import Code, Health
from fairlane.ownership import Claim, Ownership
from fairlane.records import TokenUsage, WorkItem
from fairlane.skipping_consumer import SkippedRange, message_headers
from fairlane.trace_context import trace_headers
from fairlane_server.kafka.transactions import TransactionLoop
from inference_consumers.batching.priority_pick import PRIORITY_WEIGHTS
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.capacity.measurement import Reading
from inference_consumers.driver import EngineDriver
from inference_consumers.engine_process.failures import EngineEnd
from inference_consumers.engine_process.states import EngineState
from inference_consumers.engines.protocol import CancelledItem, Failure
from inference_consumers.group import READER
from inference_consumers.guardrails.stage import InputJob, input_job
from inference_consumers.results.retries import requeued_item
from inference_consumers.results.settled import Settled, no_run
from inference_consumers.schema_waits import SchemaWaits

log = get_logger(__name__)

_POLL_S = 0.1
_WATCH_EVERY_MS = 100
_SILENT_MS = 1_000
"""From then on the kernel is asked whether somebody stopped the engine, and whether it computes."""


class Member(Protocol):
    """The consumer group as this loop needs it; see :class:`inference_consumers.group.PoolMember`."""

    def poll(self, timeout_s: float) -> list[tuple[Claim, Message | SkippedRange]]: ...

    def pause_priorities(self, full: set[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Prefetch bounds: items per priority, and bytes in total.

    What one poll brings may come on top of that.
    """

    max_items: int
    max_bytes: int

    @property
    def bytes_each(self) -> int:
        """Of a priority: each has its own, so that none keeps another from being fetched."""
        return max(1, self.max_bytes // len(PRIORITY_WEIGHTS))


@dataclass(slots=True)
class InferenceConsumer:
    """Everything between the group and the engines of one process."""

    codec: Codec
    ownership: Ownership
    transactions: TransactionLoop
    driver: EngineDriver
    prefetch: Prefetch
    clock: ClockMs
    schema_waits: SchemaWaits
    _watched_at_ms: int = 0
    _full: set[str] = field(default_factory=set)

    def poll_once(self, member: Member) -> None:
        """One turn of the polling thread: take records, decide what to fetch next, look after the engines."""
        arrived = member.poll(_POLL_S)
        if arrived:
            self._receive(arrived, self.clock())
        if looked_up := self.schema_waits.take():
            self._receive(looked_up, self.clock(), looked_up=True)
        self.watch()
        full = self._full_priorities()
        if full != self._full or not arrived:
            self._full = full
            member.pause_priorities(full)
        if not arrived:
            self.transactions.commit_positions()

    def on_revoked(self) -> None:
        """Partitions moved on: drop their waiting work. Work that is running finishes and is then not committed."""
        self.schema_waits.discard(self.ownership.is_current)
        with self.driver.changed:
            dropped = self.driver.waiting.discard_stale(self.ownership.is_current)
            dropped += len(self.driver.guardrails.take_inputs(lambda work: not self.ownership.is_current(work.claim)))
        if dropped:
            log.info("dropped_revoked_work", items=dropped)

    def cancel(self, tenant: str, request_id: str) -> None:
        """Cancel an item, as the driver knows already: drop it if it waits, stop it at its next step if it runs, drop
        it on arrival otherwise. Any thread."""
        now_ms = self.clock()

        def is_meant(work: ReceivedWork) -> bool:
            return work.request_id == request_id and work.item.tenant == tenant and self.driver.is_cancelled(work)

        with self.driver.changed:
            waiting = self.driver.waiting.take_request(tenant, request_id, is_meant)
            waiting += self.driver.guardrails.take_inputs(is_meant)
            running = [
                (self.driver.engines.by_key[run.model_key].host, run.run_id, index)
                for run in self.driver.engines.runs
                for index in sorted(run.open)
                if is_meant(run.work[index])
            ]
        self._drop(waiting, now_ms)
        for host, run_id, index in running:
            metrics.CANCELLED_RUNNING.labels(model=host.key[0]).inc()
            host.cancel(run_id, (index,))

    def reading(self) -> Reading:
        """Capacity of the engines, and work held, waiting or running. Any thread."""
        driver = self.driver
        with driver.changed:
            now_ms = self.clock()
            engines = driver.engines
            is_failing = bool(engines.lost) or any(
                state.watch is not None and state.watch.is_overdue(now_ms) and not state.only_copies
                for state in engines
            )
            return Reading(
                rates=driver.meter.rates,
                batch_fill=driver.meter.batch_fill,
                health=Health.FAILING if is_failing else driver.meter.health(driver.idle_ms(now_ms)),
                held_items=len(driver.waiting) + engines.runs.items + driver.guardrails.held_items,
                held_tokens=driver.waiting.cost_tokens + engines.runs.cost_tokens + driver.guardrails.held_tokens,
            )

    def _receive(
        self, arrived: Sequence[tuple[Claim, Message | SkippedRange]], now_ms: int, *, looked_up: bool = False
    ) -> None:
        taken: list[tuple[ReceivedWork, InputJob | None]] = []
        for claim, message in arrived:
            work = self._read(claim, message, now_ms, looked_up=looked_up)
            if work is None:
                continue
            if work.item.priority_class not in PRIORITY_WEIGHTS or not self.driver.engines.serves(work.model_key):
                self._refuse(work, now_ms)
            else:
                taken.append((work, None if work.item.guardrails is None else input_job(work)))
        with self.driver.changed:
            # Asked with the lock held: a cancel that comes now finds the work either known or waiting.
            unwanted: list[ReceivedWork] = []
            for work, job in taken:
                if self.driver.is_cancelled(work):
                    unwanted.append(work)
                elif job is not None:
                    self.driver.guardrails.add(job)
                else:
                    self.driver.waiting.add(work)
            self.driver.changed.notify_all()
        self._drop(unwanted, now_ms)
        self.driver.guardrails.pump()

    def _read(
        self, claim: Claim, message: Message | SkippedRange, now_ms: int, *, looked_up: bool
    ) -> ReceivedWork | None:
        """The work of a record; None if it is dead-lettered, or waits for its schema. After a look-up (``looked_up``) a
        schema that is still not loaded is unknown."""
        if isinstance(message, SkippedRange):
            self._keep_unreadable(claim, None, None, None, problem=message.problem, why=str(message))
            return None
        key, raw, appended_at_ms = message.key(), message.value(), message.timestamp()[1]
        try:
            item = self.codec.decode_any((WorkItem,), raw, may_ask=False)
        except DecodeError as error:
            self._keep_unreadable(claim, key, raw, appended_at_ms, problem=error.problem, why=str(error))
            return None
        except SchemaNotLoadedError as error:
            if looked_up:
                problem = DecodeProblem.UNKNOWN_SCHEMA_ID
                self._keep_unreadable(claim, key, raw, appended_at_ms, problem=problem, why=str(error))
            else:
                self.schema_waits.add(claim, message)
            return None
        membership = self.ownership.membership
        return ReceivedWork(
            claim,
            item,
            len(raw or b""),
            now_ms,
            key,
            raw or b"",
            appended_at_ms,
            trace_headers(message_headers(message, READER)),
            generation=0 if membership is None else membership.generation,
        )

    def _keep_unreadable(
        self, claim: Claim, key: bytes | None, raw: bytes | None, appended_at_ms: int | None, *, problem: str, why: str
    ) -> None:
        """Write a dead letter for an unreadable record. There is no reply, because its tenant cannot be read."""
        if self.driver.count_dead(None, dead=True):
            letter = self.driver.settler.unreadable(claim, key, raw, appended_at_ms, problem=problem, why=why)
            self.transactions.submit(letter)

    def _refuse(self, work: ReceivedWork, now_ms: int) -> None:
        problem = f"this pool does not serve {work.item.request.model} {work.item.model_version}"
        self.driver.submit([Settled(work, Failure(Code.UNKNOWN_MODEL, problem), no_run(now_ms))])

    def _drop(self, unwanted: Sequence[ReceivedWork], now_ms: int) -> None:
        self.driver.submit([Settled(work, CancelledItem(TokenUsage()), no_run(now_ms)) for work in unwanted])

    def _full_priorities(self) -> set[str]:
        """Priorities that hold enough; one stays full until it is half empty, so that fetching does not flap.
        All are full while too much work waits for its schema: no priority is known of it."""
        waits = self.schema_waits
        if len(waits) >= self.prefetch.max_items or waits.size_bytes >= self.prefetch.bytes_each:
            return set(PRIORITY_WEIGHTS)
        with self.driver.changed:
            waiting = self.driver.waiting
            checked_bytes: dict[str, list[int]] = {}
            for work in (one for one in self.driver.guardrails.inputs() if not one.is_copy):
                checked_bytes.setdefault(work.item.priority_class, []).append(work.size_bytes)
            full = set()
            for priority in PRIORITY_WEIGHTS:
                parts = 2 if priority in self._full else 1
                checked = checked_bytes.get(priority, ())
                count, size_bytes = waiting.count(priority) + len(checked), waiting.size_bytes(priority) + sum(checked)
                metrics.PREFETCHED_ITEMS.labels(priority=priority).set(count)
                if count * parts >= self.prefetch.max_items or size_bytes * parts >= self.prefetch.bytes_each:
                    full.add(priority)
            return full

    def watch(self) -> None:
        """Expire late work, hand back that of versions which are gone, and restart engines that are silent for too
        long."""
        with self.driver.changed:
            now_ms = self.clock()
            # Nothing of this is urgent.
            if abs(now_ms - self._watched_at_ms) < _WATCH_EVERY_MS:
                return
            self._watched_at_ms = now_ms
            # A run of minutes must not count all at once, at its end.
            self.driver.count_busy(now_ms)
            unserved = self.driver.take_unserved()
            expired = self.driver.waiting.take_expired(now_ms)
            expired += self.driver.guardrails.take_inputs(lambda work: work.item.deadline_at_ms < now_ms)
            stuck: list[Settled] = []
            hung: list[tuple[EngineState, EngineEnd]] = []
            for state in self.driver.engines:
                watch = state.watch
                if watch is None:
                    continue
                is_silent = now_ms - watch.silent_since_ms > _SILENT_MS
                if is_silent:
                    watch.look(now_ms, stopped=state.host.is_stopped, cpu_ms=state.host.cpu_ms)
                else:
                    watch.look(now_ms)
                if watch.is_reported and not watch.told:
                    watch.told = True
                    stuck += self._behind(state, watch.seen_s, now_ms)
                if watch.is_hung:
                    hung.append((state, watch.end))
        for work in unserved:
            self._refuse(work, now_ms)
        for work in expired:
            self.transactions.submit(self.driver.settler.expired(work, now_ms))
        self.driver.submit(stuck)
        for state, end in hung:
            log.error("engine_hung", model=state.host.key[0], engine=state.name, reason=end.reason, kind=end.kind)
            state.host.kill(end)

    def _behind(self, stuck: EngineState, seconds: float, now_ms: int) -> list[Settled]:
        """Requeue work behind a stuck engine once: another consumer may serve it in time. Work that arrives later
        stays, because dispatchers know about the engine and have no better place."""
        behind = self.driver.engines.behind(stuck.host.key)
        why = Failure(Code.OVERLOADED, f"the engine has been busy with one batch for {seconds:.0f} s")
        waiting = self.driver.waiting.take(
            lambda work: work.model_key in behind and requeued_item(work.item, Code.OVERLOADED) is not None
        )
        return [Settled(work, why, no_run(now_ms)) for work in waiting]
