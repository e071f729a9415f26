"""The transactional loop both exactly-once hops share: finished work in, one Kafka transaction after another out.

A transaction carries what its decisions produced and the source offsets they settle. It begins when something is
finished and the last one has ended; none stays open across an engine or any other wait. Consumer-group fencing
(KIP-447) makes the broker refuse the commit of a member that was replaced.
"""

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane.ownership import Claim, CommitPlan, Ownership

log = get_logger(__name__)

MAX_TRANSACTION_METADATA_BYTES = 512 * 1024
_SEND_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.02
_MAX_BACKOFF_S = 1.0


@dataclass(frozen=True, slots=True)
class OutRecord:
    """A record to be written in a transaction."""

    topic: str
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]] = ()


@dataclass(frozen=True, slots=True)
class Settlement:
    """One source record and everything that was decided about it. Both are committed, or neither."""

    claim: Claim
    outputs: tuple[OutRecord, ...] = ()


class FatalTransactionError(Exception):
    """This producer can never commit again: it was fenced or broke. The process must end and be restarted.

    Rebuilding the producer in place would let two processes that share a slot fence each other for ever.
    """


class _RefusedCommitError(Exception):
    """The transaction was aborted; the same records may be tried again if they are still owned."""

    def __init__(self, reason: str, *, split: bool = False, topic: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.split = split
        self.topic = topic


class Committed(Protocol):
    """Told about the settlements of a committed transaction, on the loop's thread. Must be quick and must not raise."""

    def __call__(self, settlements: Sequence[Settlement], /) -> None: ...


def _ignore(_settlements: Sequence[Settlement], /) -> None: ...


@dataclass(slots=True)
class TransactionLoop:
    """Owns the transactional producer and the thread that uses it.

    ``on_fatal`` is called once, on the loop's thread, when nothing can be committed any more.
    """

    producer: Producer
    ownership: Ownership
    on_fatal: Callable[[Exception], None]
    on_committed: Committed = _ignore
    fallback: Callable[[Settlement, str], Settlement] | None = None
    """What to commit instead of a settlement whose outputs the broker keeps refusing, given the reason."""
    max_records: int = 512
    _pending: deque[Settlement] = field(default_factory=deque)
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _transaction: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _stopping: bool = False
    _failed: bool = False
    _in_transaction: bool = False
    _positions_wanted: bool = False
    _size_limit: int = 0
    _delivery_error: tuple[KafkaError, str] | None = None

    def start(self) -> None:
        """Register the producer (this aborts what a predecessor left open, and fences it) and start the thread.

        Raises KafkaException when the broker does not answer within 30 s.
        """
        self._size_limit = self.max_records
        self.producer.init_transactions(30.0)
        self._thread = threading.Thread(target=self._run, name="transactions", daemon=True)
        self._thread.start()

    def submit(self, settlement: Settlement) -> None:
        """Hand over a finished record. It is committed with the next transaction."""
        with self._wake:
            self._pending.append(settlement)
            self._wake.notify()

    def submit_many(self, settlements: Sequence[Settlement]) -> None:
        """Hand over several at once; they may still fall into different transactions."""
        with self._wake:
            self._pending.extend(settlements)
            self._wake.notify()

    def commit_positions(self) -> None:
        """Commit the positions of idle partitions, if they moved. Call it now and then; mostly it costs nothing."""
        if self.ownership.position_plan() is not None:
            with self._wake:
                self._positions_wanted = True
                self._wake.notify()

    @property
    def pending_count(self) -> int:
        """Settlements not yet committed, the open transaction's included. Callers bound themselves by it."""
        return len(self._pending)

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
        deadline = monotonic() + timeout_s
        with self._wake:
            while (self._pending or self._in_transaction) and not self._failed:
                remaining = deadline - monotonic()
                if remaining <= 0:
                    return False
                self._wake.wait(min(remaining, 0.5))
        return not self._failed

    def stop(self, timeout_s: float = 15.0) -> None:
        """End the thread after the open transaction; what is still pending stays undone in the log."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - whatever ends this thread ends the process, never silently
            with self._wake:
                self._failed = True
                self._wake.notify_all()
            if not self._stopping:
                log.error("transactions_stopped", error=str(error), kind=type(error).__name__)
                self.on_fatal(error)

    def _loop(self) -> None:
        failures = 0
        while True:
            batch = self._next_batch()
            if batch is None:
                return
            committed: Sequence[Settlement] = ()
            refused = False
            try:
                committed = self._commit(batch)
                failures = 0
                self._size_limit = min(self.max_records, self._size_limit * 2)
            except _RefusedCommitError as refusal:
                failures += 1
                refused = True
                metrics.TRANSACTIONS_ABORTED.labels(reason=refusal.reason).inc()
                log.warning("transaction_aborted", reason=refusal.reason, topic=refusal.topic, records=len(batch))
                if refusal.split or failures > 2:
                    self._size_limit = max(1, len(batch) // 2)
                if refusal.topic is not None and len(batch) == 1 and failures > 1 and self.fallback is not None:
                    batch = [self.fallback(batch[0], refusal.reason)]
            self._return_unsettled(batch, committed, refused=refused)
            if committed:
                self.on_committed(committed)
            if failures:
                backoff_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(failures, 10))
                with self._wake:
                    if not self._stopping:
                        self._wake.wait(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret

    def _next_batch(self) -> list[Settlement] | None:
        with self._wake:
            while not self._pending and not self._positions_wanted:
                if self._stopping:
                    return None
                self._wake.wait()
            if self._stopping:
                return None
            self._positions_wanted = False
            count = min(len(self._pending), self._size_limit)
            self._in_transaction = True
            return [self._pending.popleft() for _ in range(count)]

    def _return_unsettled(self, batch: list[Settlement], committed: Sequence[Settlement], *, refused: bool) -> None:
        """Put back what was not committed and is still owned; the rest is void.

        After a refusal it goes to the front and is tried again. What the offset bitmap could not reach goes to the
        back: lower offsets must settle first.
        """
        done = {settlement.claim for settlement in committed}
        rest = [settlement for settlement in batch if settlement.claim not in done]
        kept = [settlement for settlement in rest if self.ownership.is_current(settlement.claim)]
        if len(kept) < len(rest):
            metrics.STALE_SETTLEMENTS.inc(len(rest) - len(kept))
        with self._wake:
            if refused:
                self._pending.extendleft(reversed(kept))
            else:
                self._pending.extend(kept)
            self._in_transaction = False
            self._wake.notify_all()

    def _commit(self, batch: list[Settlement]) -> Sequence[Settlement]:
        """One transaction. Returns what it committed. Raises _RefusedCommitError or FatalTransactionError."""
        with self._transaction:
            claims = (settlement.claim for settlement in batch)
            plan = (
                self.ownership.plan(claims, MAX_TRANSACTION_METADATA_BYTES) if batch else self.ownership.position_plan()
            )
            if plan is None:
                if any(self.ownership.is_current(settlement.claim) for settlement in batch):
                    raise _RefusedCommitError("not_committable_yet")
                return ()
            planned = set(plan.claims)
            settlements = [settlement for settlement in batch if settlement.claim in planned]
            started = monotonic()
            try:
                self._send(plan, settlements)
            except KafkaException as error:
                self._abort(error)
            self.ownership.settle(plan)
            metrics.TRANSACTION_SECONDS.observe(monotonic() - started)
            metrics.TRANSACTION_RECORDS.observe(len(settlements))
            return settlements

    def _send(self, plan: CommitPlan, settlements: Sequence[Settlement]) -> None:
        self._delivery_error = None
        self.producer.begin_transaction()
        for settlement in settlements:
            for record in settlement.outputs:
                self._produce(record)
        offsets = topic_partitions(plan)
        _retrying(
            lambda: self.producer.send_offsets_to_transaction(offsets, plan.membership.group_metadata, _SEND_TIMEOUT_S)
        )
        _retrying(lambda: self.producer.commit_transaction(_SEND_TIMEOUT_S))

    def _produce(self, record: OutRecord) -> None:
        deadline = monotonic() + _SEND_TIMEOUT_S
        while True:
            try:
                self.producer.produce(
                    record.topic,
                    value=record.value,
                    key=record.key,
                    headers=list(record.headers),
                    on_delivery=self._on_delivery,
                )
            except BufferError:
                if monotonic() > deadline:
                    raise KafkaException(KafkaError(KafkaError._QUEUE_FULL)) from None
                self.producer.poll(0.01)
            except KafkaException as error:
                self._delivery_error = (error.args[0], record.topic)
                raise
            else:
                return

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and self._delivery_error is None:
            self._delivery_error = (error, str(message.topic()))

    def _abort(self, error: KafkaException) -> None:
        """Abort and say why. Always raises."""
        cause = error.args[0]
        if cause.fatal() or cause.code() == KafkaError._FENCED:
            raise FatalTransactionError(f"{cause.name()}: {cause.str()}") from error
        try:
            _retrying(lambda: self.producer.abort_transaction(_SEND_TIMEOUT_S))
        except KafkaException as abort_error:
            raise FatalTransactionError(f"abort failed: {abort_error.args[0].name()}") from abort_error
        delivery = self._delivery_error
        reason = cause.name() if delivery is None else delivery[0].name()
        topic = None if delivery is None else delivery[1]
        split = reason in {"MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE", "UNKNOWN", "OFFSET_METADATA_TOO_LARGE"}
        raise _RefusedCommitError(reason, split=split, topic=topic) from error


def topic_partitions(plan: CommitPlan) -> list[TopicPartition]:
    """The plan's offsets as confluent-kafka takes them, the bitmaps in the metadata."""
    return [
        TopicPartition(partition.topic, partition.partition, point.offset, metadata=point.metadata)
        for partition, point in plan.points.items()
    ]


def _retrying(call: Callable[[], None]) -> None:
    """Repeat a transactional call while the broker says that repeating may help; bounded in time."""
    deadline = monotonic() + 3 * _SEND_TIMEOUT_S
    while True:
        try:
            call()
        except KafkaException as error:
            if not error.args[0].retriable() or monotonic() > deadline:
                raise
        else:
            return
