"""Transaction loop of both exactly-once hops: takes finished work and commits it in one Kafka transaction after
another.

A transaction carries the output records of its settlements and the source offsets they settle. It begins when work is
finished and the previous transaction has ended; none stays open during an engine run or any other wait. Consumer-group
fencing (KIP-447) makes the broker refuse commits of a replaced member.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

from confluent_kafka import Producer

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane.ownership import Ownership
from fairlane_server.kafka.blocked_topics import BlockedTopics, Fallback
from fairlane_server.kafka.settlement import OutputRecord, Settlement
from fairlane_server.kafka.transactional_producer import (
    FatalTransactionError,
    RefusedTransactionError,
    TransactionalProducer,
    backoff_s,
)
from fairlane_server.processes.watchdog import Watchdog

__all__ = ["Committed", "FatalTransactionError", "OutputRecord", "Settlement", "TransactionLoop"]

log = get_logger(__name__)

MAX_TRANSACTION_METADATA_BYTES = 512 * 1024
_INIT_TIMEOUT_S = 30.0
_REFUSALS_BEFORE_HALVING = 3
_REFUSALS_BEFORE_BLOCKING = 3
_RECHECK_S = 1.0
_OPTIONAL_REST_S = 60.0
"""How long optional records for a topic that refused some are left out before they are tried again."""
_MAX_NEW_TOPICS = 32
"""Topics per transaction that must be looked up first: each costs a round trip."""


@dataclass(slots=True)
class TransactionBatch:
    """Content of one transaction attempt."""

    settlements: list[Settlement]
    notes: list[OutputRecord] = field(default_factory=list)
    probed: str = ""
    """The refused topic that this batch tries again; empty for any other batch."""


Committed = Callable[[Sequence[Settlement]], None]
"""Called with the settlements of a committed transaction, on the loop's thread. Must be quick and must not raise."""


def _ignore(_settlements: Sequence[Settlement]) -> None: ...


def _none() -> None: ...


@dataclass(slots=True)
class TransactionLoop:
    """Owns the transactional producers and the thread that uses them.

    With two producers, transactions alternate between them. A transaction of the same producer would wait until the
    broker has written the markers of the one before; of the other, it begins at once. It is safe: a transaction begins
    when the one before is committed, its plan contains the offsets of that one, and the broker keeps the offset that
    was sent last, whichever producer's marker comes first.

    Records that a topic refuses wait in a retry queue (``blocked_topics``) and are tried again in transactions of their
    own; nothing for other topics waits behind them. Settlements of one topic keep their order, except those refused one
    by one. An optional record that its topic refuses is left out, and what it was to be committed with goes on at once.

    ``on_fatal`` is called once, on one of the loop's threads, when nothing can be committed any more.
    """

    producers: Sequence[Producer]
    ownership: Ownership
    on_fatal: Callable[[Exception], None]
    on_committed: Committed = _ignore
    renewed: Callable[[], Sequence[Producer] | None] = _none
    """Returns producers with the same transactional ids that are to take the place of those in use, if there are such.
    Asked before each transaction."""
    fallback: Fallback | None = None
    """Returns what to commit instead of a settlement whose first output the broker refuses for good, given the reason.
    The same settlement, or another one for the same topic, is no replacement: it waits. Set before ``start``."""
    max_records: int = 512
    max_bytes: int = 32 * 1024 * 1024
    """Bound of one transaction's outputs, so that it ends well within its timeout; a larger settlement goes alone."""
    max_blocked: int = 16_384
    """Size of the retry queue beyond which its settlements count as pending. See ``sources_held_up``."""
    max_blocked_bytes: int = 256 * 1024 * 1024
    refusal_timeout_s: float = 2.0
    """How long a topic must have refused everything before the fallback is called."""
    hang_timeout_s: float = 15.0
    """A producer call that takes longer never returns: librdkafka's send_offsets_to_transaction ignores its timeout
    while the group coordinator is unavailable (librdkafka issues 5456 and 5511: also when the group has a new one by
    then). Only a little above the timeouts of the calls, because the work waits until this process ends."""
    _pending: deque[Settlement] = field(default_factory=deque)
    _notes: deque[OutputRecord] = field(default_factory=deque)
    _taken: int = 0
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _transaction: threading.Lock = field(default_factory=threading.Lock)
    _left_out_until: dict[str, float] = field(default_factory=dict)
    """By topic that refused optional records."""
    _thread: threading.Thread | None = None
    _watchdog: Watchdog = field(init=False)
    _transactional: deque[TransactionalProducer] = field(init=False)
    """The first one runs the next transaction."""
    _stopping: bool = False
    _failed: bool = False
    _positions_wanted: bool = False
    _size_limit: int = field(init=False)
    _blocked: BlockedTopics = field(init=False)
    _probe_from: float = 0.0
    """From when a probe may run although other work waits: other work gets as much time as probes do."""
    _revocations: int = 0
    _looked_at: float = 0.0

    def __post_init__(self) -> None:
        self._size_limit = self.max_records
        self._blocked = BlockedTopics(
            self.max_blocked, self.max_blocked_bytes, self.refusal_timeout_s, self.max_records, self.max_bytes
        )
        self._watchdog = Watchdog(self.hang_timeout_s, self._hung)
        self._use(self.producers)

    def start(self) -> None:
        """Register the producers, which aborts a predecessor's open transaction and fences it, and start the thread.

        Raises KafkaException when the broker does not answer within 30 s.
        """
        self._blocked.fallback = self.fallback
        for producer in self.producers:
            producer.init_transactions(_INIT_TIMEOUT_S)
        self._thread = threading.Thread(target=self._run, name="transactions", daemon=True)
        self._thread.start()
        self._watchdog.start()

    def submit(self, settlement: Settlement) -> None:
        self.submit_many((settlement,))

    def submit_many(self, settlements: Sequence[Settlement]) -> None:
        with self._wake:
            self._pending.extend(settlements)
            self._wake.notify_all()

    def note(self, records: Sequence[OutputRecord]) -> None:
        """Write these records with the next transaction; they settle no offsets. They are written at least once while
        this process lives, before anything submitted later. A crash may lose them: callers must tolerate that."""
        with self._wake:
            self._notes.extend(records)
            self._wake.notify_all()

    def commit_positions(self) -> None:
        """Commit the positions of idle partitions, if they moved. Call it periodically; it usually costs nothing."""
        if self.ownership.has_positions:
            with self._wake:
                self._positions_wanted = True
                self._wake.notify_all()

    @property
    def pending_count(self) -> int:
        """Settlements and notes not yet committed, including the open transaction's. Callers apply backpressure by it.

        The retry queue counts only beyond ``max_blocked``: it must not stop the intake of all tenants. Callers bound it
        by not reading ``sources_held_up``.
        """
        return len(self._pending) + len(self._notes) + self._taken + self._blocked.excess_count

    @property
    def has_waiting(self) -> bool:
        """Whether settlements wait already for the transaction under way to end."""
        return bool(self._pending)

    @property
    def blocked_count(self) -> int:
        return self._blocked.count

    @property
    def unsettled_count(self) -> int:
        """Everything handed over and not yet committed, wherever it waits."""
        return len(self._pending) + len(self._notes) + self._taken + self._blocked.count

    @property
    def pending_bytes(self) -> int:
        """Output bytes of pending settlements, and of the retry queue beyond ``max_blocked_bytes``; without those
        of the open transaction."""
        with self._wake:
            return sum(settlement.size_bytes for settlement in self._pending) + self._blocked.excess_bytes

    def sources_held_up(self) -> frozenset[str]:
        """Source topics with too many settlements in the retry queue, to be paused. Topics whose records pass are never
        included."""
        with self._wake:
            return self._blocked.sources_held_up()

    @contextlib.contextmanager
    def between_transactions(self, timeout_s: float) -> Iterator[bool]:
        """Wait for the open transaction to end and hold back the next one; yields whether it ended in time.

        Used while partitions are revoked. Running late is safe: the broker then refuses the old generation.
        """
        acquired = self._transaction.acquire(timeout=timeout_s)
        try:
            yield acquired
        finally:
            if acquired:
                self._transaction.release()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything handed over is committed or no longer owned. Returns False on timeout or failure."""
        with self._wake:
            self._wake.wait_for(lambda: self._failed or not self.unsettled_count, timeout_s)
            return not self._failed and not self.unsettled_count

    def stop(self, timeout_s: float = 15.0) -> None:
        """End the thread after the open transaction; what is pending stays undone in the log."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None and not self._failed:
            self._thread.join(timeout_s)
        self._watchdog.stop()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - whatever ends this thread ends the process, never silently
            self._fail(error)

    def _hung(self, call: str) -> None:
        self._fail(FatalTransactionError(f"{call} did not return within {self.hang_timeout_s:g} s"))

    def _fail(self, error: Exception) -> None:
        with self._wake:
            told = self._failed or self._stopping
            self._failed = True
            self._wake.notify_all()
        if not told:
            log.error("transactions_stopped", error=str(error), kind=type(error).__name__)
            self.on_fatal(error)

    def _loop(self) -> None:
        failures = passed_over = 0
        while (batch := self._next_batch()) is not None:
            started = monotonic()
            try:
                committed = self._commit(batch)
            except RefusedTransactionError as refusal:
                failures = self._refused(batch, refusal, failures, monotonic() - started)
                continue
            failures = 0
            if batch.probed:
                self._passed(batch, committed, started)
                continue
            self._size_limit = min(self.max_records, self._size_limit * 2)
            # Settlements beyond the reach of the offset bitmaps go to the back: lower offsets must settle first.
            kept = self._put_back(batch.settlements, committed, front=False)
            passed_over = 0 if committed else passed_over + kept
            if committed:
                self._tell(committed)
            elif passed_over >= len(self._pending) > 0:
                self._await_more()
                passed_over = 0

    def _next_batch(self) -> TransactionBatch | None:
        """Wait for something to commit. Returns None when the loop stops."""
        with self._wake:
            while not self._stopping and not self._failed:
                now = monotonic()
                self._drop_stale_blocked(now)
                batch = self._take(now)
                if batch is not None:
                    self._taken = len(batch.settlements) + len(batch.notes)
                    return batch
                due_at = self._blocked.due_at
                self._wake.wait(None if due_at is None else min(max(due_at - now, 0.001), _RECHECK_S))
            return None

    def _take(self, now: float) -> TransactionBatch | None:
        """The next batch: a probe of a refused topic when one is due and other work had its time, else the oldest other
        work."""
        metrics.BLOCKED_SETTLEMENTS.set(self._blocked.count)
        has_others = bool(self._pending or self._notes or self._positions_wanted)
        if now >= self._probe_from or not has_others:
            topic, notes, settlements = self._blocked.probe(now, self.ownership.can_settle)
            if topic:
                return TransactionBatch(settlements, notes, topic)
        positions_wanted, self._positions_wanted = self._positions_wanted, False
        notes = [self._notes.popleft() for _ in range(min(len(self._notes), self._size_limit))]
        notes = [note for note in notes if not self._blocked.divert_note(note)]
        settlements = self._oldest(now)
        return TransactionBatch(settlements, notes) if settlements or notes or positions_wanted else None

    def _oldest(self, now: float) -> list[Settlement]:
        """The next settlements for topics that refuse nothing, as many as one transaction takes."""
        settlements: list[Settlement] = []
        new_topics: set[str] = set()
        size_bytes = 0
        while self._pending and len(settlements) < self._size_limit:
            settlement = self._blocked.divert(self._without_refused(self._pending[0], now), now)
            if settlement is not None:
                size_bytes += settlement.size_bytes
                new_topics.update(
                    out.topic for out in settlement.outputs if not self._transactional[0].is_proven(out.topic)
                )
                if settlements and (size_bytes > self.max_bytes or len(new_topics) > _MAX_NEW_TOPICS):
                    self._pending[0] = settlement
                    break
                settlements.append(settlement)
            self._pending.popleft()
        return settlements

    def _without_refused(self, settlement: Settlement, now: float) -> Settlement:
        """The settlement without its optional records for topics that refused such a while ago."""
        if not self._left_out_until:
            return settlement
        self._left_out_until = {topic: until for topic, until in self._left_out_until.items() if now < until}
        return _without_optional(settlement, self._left_out_until)

    def _leave_out(self, batch: TransactionBatch, refusal: RefusedTransactionError) -> bool:
        """Put the batch back without its optional records for the refusing topics. False if it has none."""
        kept = [_without_optional(one, refusal.topics) for one in batch.settlements]
        if all(one is before for one, before in zip(kept, batch.settlements, strict=True)):
            return False
        until = monotonic() + _OPTIONAL_REST_S
        self._left_out_until |= {topic: until for topic, one in refusal.topics.items() if one.whole_topic}
        with self._wake:
            if batch.probed:
                self._return_probe(TransactionBatch(kept, batch.notes, batch.probed))
                return True
            self._notes.extendleft(reversed(batch.notes))
        self._put_back(kept, (), front=True)
        return True

    def _drop_stale_blocked(self, now: float) -> None:
        """Drop blocked settlements of partitions that moved on: they are void."""
        revocations = self.ownership.revocations
        if not self._blocked or (now - self._looked_at < _RECHECK_S and revocations == self._revocations):
            return
        self._looked_at, self._revocations = now, revocations
        gone = self._blocked.keep(self.ownership.is_current, now)
        metrics.STALE_SETTLEMENTS.inc(gone)
        self._wake.notify_all()

    def _commit(self, batch: TransactionBatch) -> Sequence[Settlement]:
        """Run one transaction. Returns what it settled. Raises RefusedTransactionError or FatalTransactionError."""
        with self._transaction:
            plan = (
                self.ownership.plan((item.claim for item in batch.settlements), MAX_TRANSACTION_METADATA_BYTES)
                if batch.settlements
                else self.ownership.position_plan(MAX_TRANSACTION_METADATA_BYTES)
            )
            if (
                plan is None
                and not self.ownership.may_commit
                and any(self.ownership.is_current(item.claim) for item in batch.settlements)
            ):
                raise RefusedTransactionError("no_membership")
            if plan is None and not batch.notes:
                return ()
            settlements = {item.claim: item for item in batch.settlements}
            planned = [] if plan is None else [settlements[claim] for claim in plan.claims]
            started = monotonic()
            outputs = (record for item in planned for record in item.outputs)
            if (producers := self.renewed()) is not None:
                self._replace(producers)
            self._transactional[0].commit((*batch.notes, *outputs), plan)
            self._transactional.rotate(1)
            if plan is not None:
                self.ownership.settle(plan)
            metrics.TRANSACTION_SECONDS.observe(monotonic() - started)
            metrics.TRANSACTION_RECORDS.observe(len(planned))
            return planned

    def _use(self, producers: Sequence[Producer]) -> None:
        self.producers = producers
        self._transactional = deque(TransactionalProducer(producer, self._watchdog) for producer in producers)

    def _replace(self, producers: Sequence[Producer]) -> None:
        """Use these from now on; no transaction is open. Registering them fences those before. Raises KafkaException,
        which ends this loop: then neither can commit."""
        before = self.producers
        for producer in producers:
            producer.init_transactions(_INIT_TIMEOUT_S)
        self._use(producers)
        for producer in before:
            producer.close()
        log.info("transactional_producers_replaced", producers=len(producers))

    def _refused(self, batch: TransactionBatch, refusal: RefusedTransactionError, failures: int, took_s: float) -> int:
        """Decide what to try next. Returns the consecutive failures not attributed to a topic, this one included."""
        settlements = batch.settlements
        metrics.TRANSACTIONS_ABORTED.labels(reason=refusal.reason).inc()
        log.warning(
            "transaction_aborted", reason=refusal.reason, topic=", ".join(refusal.topics), records=len(settlements)
        )
        if refusal.topics and self._leave_out(batch, refusal):
            return failures
        with self._wake:
            to_blame = bool(refusal.topics) and (bool(batch.probed) or self._is_to_blame(batch, refusal, failures))
        if to_blame:
            self._block(batch, refusal, took_s)
            return failures
        if batch.probed:
            with self._wake:
                self._return_probe(batch)
                if refusal.smaller:
                    self._blocked.smaller(batch.probed, len(settlements) // 2)
        else:
            with self._wake:
                self._notes.extendleft(reversed(batch.notes))
            self._put_back(settlements, (), front=True)
        if refusal.smaller and len(settlements) > 1:
            # Halving makes progress, so it needs no backoff.
            if not batch.probed:
                self._size_limit = len(settlements) // 2
            return failures
        failures += 1
        if failures >= _REFUSALS_BEFORE_HALVING and not batch.probed and not refusal.topics:
            self._size_limit = max(1, len(settlements) // 2)
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._failed, backoff_s(failures))
        return failures

    def _is_to_blame(self, batch: TransactionBatch, refusal: RefusedTransactionError, failures: int) -> bool:
        """Whether particular topics caused the refusal, as opposed to an outage, which fails all topics and passes."""
        if any(one.lasting for one in refusal.topics.values()):
            return True
        if failures < _REFUSALS_BEFORE_BLOCKING:
            return False
        others = [*batch.settlements, *self._pending]
        return any(not any(out.topic in refusal.topics for out in one.outputs) for one in others)

    def _block(self, batch: TransactionBatch, refusal: RefusedTransactionError, took_s: float) -> None:
        """Park what goes to the refusing topics; the rest is tried again at once, without it."""
        notes, settlements = batch.notes, self._current(batch.settlements)
        replacements: list[Settlement] = []
        with self._wake:
            now = monotonic()
            for topic, reason in refusal.topics.items():
                of_it = [one for one in settlements if one.goes_to(topic)]
                settlements = [one for one in settlements if not one.goes_to(topic)]
                notes_of_it = [note for note in notes if note.topic == topic]
                notes = [note for note in notes if note.topic != topic]
                replacements += self._blocked.refused(topic, reason, notes_of_it, of_it, now, took_s)
                if batch.probed and batch.probed != topic:
                    self._blocked.move(batch.probed, topic)
            if batch.probed:
                self._return_probe(TransactionBatch(settlements, notes, batch.probed))
                self._probe_from = now + took_s
            else:
                self._notes.extendleft(reversed(notes))
                self._pending.extendleft(reversed(settlements))
            self._pending.extendleft(reversed(replacements))
            metrics.NOTES_DROPPED.inc(self._blocked.dropped_notes)
            self._blocked.dropped_notes = 0
            self._taken = 0
            self._wake.notify_all()

    def _return_probe(self, batch: TransactionBatch) -> None:
        current = self._current(batch.settlements)
        if current or batch.notes:
            self._blocked.put_back(batch.probed, batch.notes, current)
        self._taken = 0
        self._wake.notify_all()

    def _passed(self, batch: TransactionBatch, committed: Sequence[Settlement], started: float) -> None:
        done = {settlement.claim for settlement in committed}
        with self._wake:
            now = monotonic()
            self._return_probe(
                TransactionBatch([one for one in batch.settlements if one.claim not in done], [], batch.probed)
            )
            if committed or batch.notes:
                self._blocked.passed(batch.probed, now)
            else:
                self._blocked.rest(batch.probed, now + _RECHECK_S)
            self._probe_from = now + (now - started)
        if committed:
            self._tell(committed)

    def _tell(self, committed: Sequence[Settlement]) -> None:
        self._blocked.committed(committed)
        self.on_committed(committed)

    def _current(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """The settlements whose claim is current; the others are void and counted as stale."""
        current = [settlement for settlement in settlements if self.ownership.is_current(settlement.claim)]
        if len(current) < len(settlements):
            metrics.STALE_SETTLEMENTS.inc(len(settlements) - len(current))
        return current

    def _put_back(self, batch: Sequence[Settlement], committed: Sequence[Settlement], *, front: bool) -> int:
        """Requeue what was not committed and is still current. Returns how many."""
        done = {settlement.claim for settlement in committed}
        kept = self._current([settlement for settlement in batch if settlement.claim not in done])
        with self._wake:
            if front:
                self._pending.extendleft(reversed(kept))
            else:
                self._pending.extend(kept)
            self._taken = 0
            self._wake.notify_all()
        return len(kept)

    def _await_more(self) -> None:
        """Wait for further work, at most ``_RECHECK_S``: nothing pending can be committed before something else is."""
        with self._wake:
            waiting = len(self._pending)
            self._wake.wait_for(lambda: self._stopping or self._failed or len(self._pending) > waiting, _RECHECK_S)


def _without_optional(settlement: Settlement, topics: Container[str]) -> Settlement:
    kept = settlement.without_optional(topics)
    for record in settlement.outputs if kept is not settlement else ():
        if record.is_optional and record.topic in topics:
            metrics.OPTIONAL_RECORDS_LEFT_OUT.labels(topic=record.topic).inc()
    return kept
