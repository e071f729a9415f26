"""The transactional loop both exactly-once hops share: finished work in, one Kafka transaction after another out.

A transaction carries what its decisions produced and the source offsets they settle. It begins when something is
finished and the last one has ended; none stays open across an engine or any other wait. Consumer-group fencing
(KIP-447) makes the broker refuse the commit of a member that was replaced.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from confluent_kafka import Producer

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane.ownership import Claim, Ownership
from fairlane.transactional_producer import (
    FatalTransactionError,
    OutRecord,
    RefusedTransactionError,
    TransactionalProducer,
    backoff_s,
)
from fairlane.watchdog import Watchdog

__all__ = ["Committed", "FatalTransactionError", "OutRecord", "Settlement", "TransactionLoop"]

log = get_logger(__name__)

MAX_TRANSACTION_METADATA_BYTES = 512 * 1024
_INIT_TIMEOUT_S = 30.0
_TRIES_ALONE = 3
_REFUSALS_BEFORE_HALVING = 3
_RECHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class Settlement:
    """One source record and everything that was decided about it. Both are committed, or neither."""

    claim: Claim
    outputs: tuple[OutRecord, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the outputs' values."""
        return sum(len(record.value) for record in self.outputs)


class Committed(Protocol):
    """Told about the settlements of a committed transaction, on the loop's thread. Must be quick and must not raise."""

    def __call__(self, settlements: Sequence[Settlement], /) -> None: ...


def _ignore(_settlements: Sequence[Settlement], /) -> None: ...


@dataclass(slots=True)
class TransactionLoop:
    """Owns the transactional producer and the thread that uses it.

    ``on_fatal`` is called once, on a thread of the loop's, when nothing can be committed any more.
    """

    producer: Producer
    ownership: Ownership
    on_fatal: Callable[[Exception], None]
    on_committed: Committed = _ignore
    fallback: Callable[[Settlement, str], Settlement] | None = None
    """What to commit instead of a settlement whose outputs the broker refuses for good, given the reason."""
    max_records: int = 512
    max_bytes: int = 32 * 1024 * 1024
    """Bound of one transaction's outputs, so that it ends well within its time-out; a larger settlement goes alone."""
    hang_timeout_s: float = 30.0
    """A call of the producer that takes longer never returns: librdkafka's send_offsets_to_transaction ignores its
    time-out while the group's coordinator is away (its issue 5456). Above the time-outs that calls are given."""
    _pending: deque[Settlement] = field(default_factory=deque)
    _taken: int = 0
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _transaction: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _watchdog: Watchdog = field(init=False)
    _transactional: TransactionalProducer = field(init=False)
    _stopping: bool = False
    _failed: bool = False
    _positions_wanted: bool = False
    _size_limit: int = field(init=False)
    _replaced: Claim | None = None

    def __post_init__(self) -> None:
        self._size_limit = self.max_records
        self._watchdog = Watchdog(self.hang_timeout_s, self._hung)
        self._transactional = TransactionalProducer(self.producer, self._watchdog)

    def start(self) -> None:
        """Register the producer (this aborts what a predecessor left open, and fences it) and start the thread.

        Raises KafkaException when the broker does not answer within 30 s.
        """
        self.producer.init_transactions(_INIT_TIMEOUT_S)
        self._thread = threading.Thread(target=self._run, name="transactions", daemon=True)
        self._thread.start()
        self._watchdog.start()

    def submit(self, settlement: Settlement) -> None:
        """Hand over a finished record. It is committed with the next transaction."""
        self.submit_many((settlement,))

    def submit_many(self, settlements: Sequence[Settlement]) -> None:
        """Hand over several at once; they may still fall into different transactions."""
        with self._wake:
            self._pending.extend(settlements)
            self._wake.notify_all()

    def commit_positions(self) -> None:
        """Commit the positions of idle partitions, if they moved. Call it now and then; mostly it costs nothing."""
        if self.ownership.position_plan(MAX_TRANSACTION_METADATA_BYTES) is not None:
            with self._wake:
                self._positions_wanted = True
                self._wake.notify_all()

    @property
    def pending_count(self) -> int:
        """Settlements not yet committed, the open transaction's included. Callers bound themselves by it."""
        return len(self._pending) + self._taken

    @property
    def pending_bytes(self) -> int:
        """Bytes of the outputs of what is pending; what the open transaction holds is not counted."""
        with self._wake:
            return sum(settlement.size_bytes for settlement in self._pending)

    @contextlib.contextmanager
    def between_transactions(self, timeout_s: float) -> Iterator[bool]:
        """Wait for the open transaction to end and keep the next one from starting; yields whether that worked in time.

        Used while partitions are being revoked. Running late is safe: the broker then refuses the old generation.
        """
        acquired = self._transaction.acquire(timeout=timeout_s)
        try:
            yield acquired
        finally:
            if acquired:
                self._transaction.release()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything handed over is committed or no longer owned. False when the time ran out."""
        with self._wake:
            self._wake.wait_for(lambda: self._failed or not self.pending_count, timeout_s)
            return not self._failed and not self.pending_count

    def stop(self, timeout_s: float = 15.0) -> None:
        """End the thread after the open transaction; what is still pending stays undone in the log."""
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
            try:
                committed = self._commit(batch)
            except RefusedTransactionError as refusal:
                failures = self._refused(batch, refusal, failures)
                continue
            failures = 0
            self._size_limit = min(self.max_records, self._size_limit * 2)
            # What the offset bitmaps could not reach goes to the back: lower offsets must settle first.
            kept = self._put_back(batch, committed, front=False)
            passed_over = 0 if committed else passed_over + kept
            if committed:
                self.on_committed(committed)
            elif passed_over >= len(self._pending) > 0:
                self._await_more()
                passed_over = 0

    def _next_batch(self) -> list[Settlement] | None:
        with self._wake:
            self._wake.wait_for(lambda: self._pending or self._positions_wanted or self._stopping or self._failed)
            if self._stopping or self._failed:
                return None
            self._positions_wanted = False
            batch: list[Settlement] = []
            size_bytes = 0
            while self._pending and len(batch) < self._size_limit:
                size_bytes += self._pending[0].size_bytes
                if batch and size_bytes > self.max_bytes:
                    break
                batch.append(self._pending.popleft())
            self._taken = len(batch)
            return batch

    def _commit(self, batch: Sequence[Settlement]) -> Sequence[Settlement]:
        """One transaction. Returns what it committed. Raises RefusedTransactionError or FatalTransactionError."""
        with self._transaction:
            plan = (
                self.ownership.plan((settlement.claim for settlement in batch), MAX_TRANSACTION_METADATA_BYTES)
                if batch
                else self.ownership.position_plan(MAX_TRANSACTION_METADATA_BYTES)
            )
            if plan is None:
                if not self.ownership.may_commit and any(self.ownership.is_current(item.claim) for item in batch):
                    raise RefusedTransactionError("no_membership")
                return ()
            settlements = {item.claim: item for item in batch}
            planned = [settlements[claim] for claim in plan.claims]
            started = monotonic()
            self._transactional.commit((record for item in planned for record in item.outputs), plan)
            self.ownership.settle(plan)
            metrics.TRANSACTION_SECONDS.observe(monotonic() - started)
            metrics.TRANSACTION_RECORDS.observe(len(planned))
            return planned

    def _refused(self, batch: list[Settlement], refusal: RefusedTransactionError, failures: int) -> int:
        """Decide what is tried next. Returns the failures in a row, this one included."""
        metrics.TRANSACTIONS_ABORTED.labels(reason=refusal.reason).inc()
        log.warning("transaction_aborted", reason=refusal.reason, topic=refusal.topic, records=len(batch))
        if refusal.smaller and len(batch) > 1:
            # Halving is progress, so it needs no waiting.
            self._size_limit = len(batch) // 2
            self._put_back(batch, (), front=True)
            return failures
        failures += 1
        if failures >= _REFUSALS_BEFORE_HALVING:
            self._size_limit = max(1, len(batch) // 2)
        front = True
        if len(batch) == 1 and refusal.topic is not None and failures >= _TRIES_ALONE:
            if refusal.record_refused and self.fallback is not None and batch[0].claim != self._replaced:
                batch = [self.fallback(batch[0], refusal.reason)]
                self._replaced = batch[0].claim
            else:
                front = False  # a topic that takes nothing holds up nobody else
        self._put_back(batch, (), front=front)
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._failed, backoff_s(failures))
        return failures

    def _put_back(self, batch: Sequence[Settlement], committed: Sequence[Settlement], *, front: bool) -> int:
        """Keep what was not committed and still waits for it; the rest is void. Returns how many were kept."""
        done = {settlement.claim for settlement in committed}
        rest = [settlement for settlement in batch if settlement.claim not in done]
        kept = [settlement for settlement in rest if self.ownership.is_current(settlement.claim)]
        if len(kept) < len(rest):
            metrics.STALE_SETTLEMENTS.inc(len(rest) - len(kept))
        with self._wake:
            if front:
                self._pending.extendleft(reversed(kept))
            else:
                self._pending.extend(kept)
            self._taken = 0
            self._wake.notify_all()
        return len(kept)

    def _await_more(self) -> None:
        """Nothing that waits can be committed before something else is: wait for that, or look again."""
        with self._wake:
            waiting = len(self._pending)
            self._wake.wait_for(lambda: self._stopping or self._failed or len(self._pending) > waiting, _RECHECK_S)
