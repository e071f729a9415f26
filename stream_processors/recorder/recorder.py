"""The recorder's loop: read the log, project it, store rows and offsets in one transaction.

When a position is uncertain (new assignment, outage, another recorder, truncated log), the recorder stops fetching the
partition, reads its stored offset from Postgres and resumes there.
"""

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.clock import ClockMs, now_ms
from fairlane.codec import Codec
from fairlane.committed import LogPosition, PartitionLog, alarm, resume_offset
from fairlane.logs import get_logger
from fairlane.schema_registry import RegistryError
from fairlane.skipping_consumer import SkippedRange
from fairlane_server.processes.service import Readiness
from stream_processors.recorder.positions import Move, Partition, Positions, Stored
from stream_processors.recorder.projection import LogRecord, Projection, ends_of_copies, project
from stream_processors.recorder.retention import Rule, drop_old
from stream_processors.recorder.source import End, Event, LogConsumer, LogUnavailableError, OutOfRange
from stream_processors.recorder.store import (
    PostgresTimeoutError,
    PostgresUnavailableError,
    RecorderStore,
    Repetition,
    RowsRefusedError,
    SupersededError,
)
from stream_processors.recorder.tables import ALL_TABLES

BATCH_BYTES = 8 * 1024 * 1024
"""Of the records' values. As rows and as what is sent to Postgres they may take many times as much memory."""

_GROWTH = 1 / 8


@dataclass(slots=True)
class AdaptiveBatchSize:
    """Half as many records after a batch that took Postgres too long, down to one, and an eighth more after each that
    is stored: slowly, since what is too much costs a time-out. ``records`` is the bound of the next batch."""

    most_records: int
    records: int = field(init=False)

    def __post_init__(self) -> None:
        self.records = self.most_records

    def timed_out(self, records: int) -> None:
        if records:
            self.records = max(1, min(self.records, records // 2))

    def stored(self, records: int) -> None:
        if records:
            self.records = min(self.most_records, self.records + max(1, int(self.records * _GROWTH)))


log = get_logger(__name__)

KAFKA, POSTGRES = "kafka", "postgres"
CONDITIONS = (KAFKA, POSTGRES)

_POLL_S = 0.1
_FLUSH_INTERVAL_S = 1.0
_CHECK_INTERVAL_S = 2.0
_LAG_INTERVAL_S = 1.0
_BLIND_LAG_INTERVAL_S = 5.0
_BACKOFF = Backoff()
_PLACING_BUDGET_S = 10.0
_SCHEMA_AGAIN = Backoff(first_s=0.25, longest_s=10.0)
_REFUSED = "refused_by_postgres"


class Recorder:
    """Projects the log into the database, each record once. Runs in one thread."""

    def __init__(
        self,
        source: LogConsumer,
        store: RecorderStore,
        codec: Codec,
        readiness: Readiness,
        *,
        batch_records: int,
        retention: Sequence[Rule],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: ClockMs = now_ms,
        backoff: Backoff = _BACKOFF,
    ) -> None:
        self._source = source
        self._store = store
        self._codec = codec
        self._readiness = readiness
        self._batch_size = AdaptiveBatchSize(batch_records)
        self._retention = retention
        self._clock = clock
        self._wall_clock = wall_clock
        self._backoff = backoff
        self._positions = Positions()
        self._out_of_range: set[Partition] = set()
        self._store_answers = False
        self._failures = 0
        self._retry_at = 0.0
        self._stored_at = 0.0
        self._schema_waits: set[Partition] = set()
        self._schema_failures = 0
        self._lag_due_at = 0.0
        self._lag_topics: set[str] = set()

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until ``stopping`` returns true, then store the last positions and leave the group.

        Raises KafkaException when the consumer cannot go on; the process must then be started again.
        """
        self._source.start(self._assigned, self._revoked)
        try:
            while not stopping():
                self.step()
            self._readiness.set(KAFKA, "stopping")
            self._write([])
        finally:
            self._source.close()
            self._store.close()

    def step(self) -> None:
        """One round: place partitions, read a batch, store it."""
        now = self._clock()
        if self._placing_is_due(now):
            self._place()
        records = self._take(self._source.read(self._batch_size.records, BATCH_BYTES, _POLL_S))
        if records or (now - self._stored_at >= _FLUSH_INTERVAL_S and self._positions.moves()):
            self._write(records)
        if now >= self._lag_due_at:
            self._report_lag(now)

    def _assigned(self, partitions: frozenset[Partition]) -> None:
        self._positions.own(partitions)
        self._readiness.set(KAFKA)
        log.info("assigned", partitions=len(partitions))

    def _revoked(self, partitions: frozenset[Partition]) -> None:
        # A batch is stored before the next read, so nothing of these is half done.
        self._positions.disown(partitions)
        self._schema_waits -= partitions
        self._out_of_range -= partitions
        log.info("revoked", partitions=len(partitions))

    def _take(self, events: Iterable[Event]) -> list[LogRecord]:
        records: list[LogRecord] = []
        for event in events:
            match event:
                case LogRecord():
                    if self._positions.accept(Partition(event.topic, event.partition), event.offset):
                        records.append(event)
                case End():
                    self._positions.reach(event.partition, event.offset)
                case SkippedRange():
                    partition = Partition(event.topic, event.partition)
                    self._positions.reach(partition, event.end)
                    metrics.RECORDER_SKIPPED.labels(event.topic, event.problem).inc(event.end - event.first)
                case OutOfRange():
                    self._out_of_range.add(event.partition)
                    self._doubt([event.partition])
        return records

    # ------------------------------------------------------------------ where to go on

    def _placing_is_due(self, now: float) -> bool:
        if self._store_answers and not self._positions.waiting:
            # Asked now and then when idle, so that readiness does not wait for the next record to find out.
            return now - self._stored_at >= _CHECK_INTERVAL_S
        return now >= self._retry_at

    def _place(self) -> None:
        """Start fetching what is owned from where it is stored."""
        waiting = self._positions.waiting
        try:
            stored = self._store.next_offsets(waiting)
            ids = self._source.topic_ids({partition.topic for partition in waiting})
            new = waiting.keys() - stored.keys()
            lost = (self._out_of_range & stored.keys()) | {
                partition
                for partition, place in stored.items()
                if place.topic_id and place.topic_id != ids.get(partition.topic, place.topic_id)
            }
            bounds = self._bounds(new | lost)
            if beginnings := {
                partition: Stored(bounds[partition][0], ids.get(partition.topic, ""))
                for partition in new & bounds.keys()
            }:
                self._store.start_at(beginnings)
                stored |= self._store.next_offsets(beginnings)
            offsets = {partition: place.next_offset for partition, place in stored.items() if partition not in lost}
            for partition in lost & bounds.keys():
                log_now = PartitionLog(*bounds[partition], ids.get(partition.topic, ""))
                offsets[partition] = self._back_in_log(partition, stored[partition], log_now)
            # Stored before ids were.
            if unnamed := {
                partition: ids[partition.topic]
                for partition in offsets.keys() & stored.keys()
                if not stored[partition].topic_id and partition.topic in ids
            }:
                self._store.move({}, unnamed)
        except LogUnavailableError as error:
            log.warning("topic_ids_unknown", reason=str(error))
            self._retry_later()
            return
        except PostgresUnavailableError as error:
            self._lost_store(str(error))
            return
        except SupersededError:
            self._retry_later()
            return
        if offsets:
            self._source.fetch(offsets)
            for partition, offset in offsets.items():
                self._positions.place(partition, offset)
            log.info("placed", partitions=len(offsets))
        self._out_of_range -= offsets.keys()
        if self._positions.waiting:
            self._retry_later()
        else:
            self._failures = 0
        if not self._store_answers:
            log.info("postgres_answers")
        self._store_answers = True
        self._stored_at = self._clock()
        self._readiness.set(POSTGRES)

    def _bounds(self, partitions: Collection[Partition]) -> dict[Partition, tuple[int, int]]:
        """First offset and end of each log, as far as the broker says within the budget; the rest has to wait."""
        bounds: dict[Partition, tuple[int, int]] = {}
        give_up_at = self._clock() + _PLACING_BUDGET_S
        # In any order: one that never answers must not delay the same others every time.
        for partition in random.sample(list(partitions), len(partitions)):
            if self._clock() >= give_up_at:
                break
            try:
                bounds[partition] = self._source.bounds(partition)
            except LogUnavailableError as error:
                log.warning("log_bounds_unknown", topic=partition.topic, partition=partition.number, reason=str(error))
        return bounds

    def _back_in_log(self, partition: Partition, stored: Stored, log_now: PartitionLog) -> int:
        """The offset to go on from where a stored one may not be in the log. Raises as ``RecorderStore.write``."""
        position, finding = resume_offset(stored.next_offset, stored.topic_id, log_now)
        if finding is not LogPosition.IN_LOG:
            alarm(finding, partition.topic, partition.number, stored.next_offset, log_now)
            topic_ids = {partition: log_now.topic_id} if log_now.topic_id else {}
            self._store.move({partition: Move(stored.next_offset, position)}, topic_ids)
        return position

    def _doubt(self, partitions: Collection[Partition]) -> None:
        self._source.stop_fetching(partitions)
        self._positions.unplace(partitions)

    def _lost_store(self, reason: str) -> None:
        self._doubt(list(self._positions.reached))
        self._readiness.set(POSTGRES, reason)
        self._store_answers = False
        self._retry_later()
        log.warning("postgres_unavailable", reason=reason, failures=self._failures)

    def _retry_later(self) -> None:
        self._failures += 1
        delay_s = self._backoff.delay_s(self._failures, random.random())  # noqa: S311 - jitter, not a secret
        self._retry_at = self._clock() + delay_s

    # ------------------------------------------------------------------ storing

    def _write(self, records: Sequence[LogRecord]) -> None:
        moves = self._positions.moves()
        if not moves:
            return
        try:
            self._store_batch(records, moves)
            self._batch_size.stored(len(records))
            self._schema_waits -= moves.keys()
            if not self._schema_waits:
                self._schema_failures = 0
        except PostgresTimeoutError as error:
            self._batch_size.timed_out(len(records))
            log.warning("batch_timed_out", records=len(records), next_records=self._batch_size.records)
            self._lost_store(str(error))
        except PostgresUnavailableError as error:
            self._lost_store(str(error))
        except SupersededError:
            log.warning("superseded", partitions=len(moves), records=len(records))
            self._doubt(moves.keys())
        except RegistryError as error:
            self._wait_for_schemas(records, moves, str(error))
        self._stored_at = self._clock()

    def _wait_for_schemas(self, records: Sequence[LogRecord], moves: Mapping[Partition, Move], reason: str) -> None:
        """Read the partitions with an unknown schema again later; store the records of all others now."""
        partitions = {
            Partition(record.topic, record.partition) for record in records if not self._codec.is_loaded(record.value)
        } or set(moves)
        self._doubt(partitions)
        self._schema_waits |= partitions
        self._schema_failures += 1
        self._retry_at = self._clock() + _SCHEMA_AGAIN.delay_s(self._schema_failures, random.random())  # noqa: S311 - jitter
        log.warning("schemas_not_known", partitions=len(partitions), reason=reason)
        if moves.keys() - partitions:
            # Their schemas are loaded: the registry is not asked again.
            self._write([one for one in records if Partition(one.topic, one.partition) not in partitions])

    def _store_batch(self, records: Sequence[LogRecord], moves: Mapping[Partition, Move]) -> None:
        """Store a batch; when a row of it is refused, each half for itself, down to the one record to skip."""
        projection = project(records, self._codec)
        drop_old(projection, self._retention, self._wall_clock())
        try:
            repetitions = self._store.write(projection, moves)
        except RowsRefusedError as error:
            if len(records) > 1:
                middle = len(records) // 2
                for half in (records[:middle], records[middle:]):
                    self._store_batch(half, self._positions.moves_through(half))
                return
            if not records:
                raise
            _report_skipped(records[0].topic, records[0].partition, records[0].offset, _REFUSED, str(error))
            self._store.write(Projection(), moves)
            self._positions.stored(moves)
            return
        self._positions.stored(moves)
        _report(projection, repetitions)

    # ------------------------------------------------------------------ lag

    def _report_lag(self, now: float) -> None:
        lags: dict[str, int] = {}
        ends = [(partition, at, self._source.known_end(partition)) for partition, at in self._positions.reached.items()]
        blind = {partition: at for partition, at in self._positions.waiting.items() if at is not None}
        try:
            # Nothing of these is fetched, and an outage is when the lag matters most.
            ends += [(partition, at, self._source.bounds(partition)[1]) for partition, at in blind.items()]
        except LogUnavailableError:
            log.debug("lag_unknown")
        for partition, at, end in ends:
            if end is not None:
                lags[partition.topic] = lags.get(partition.topic, 0) + max(0, end - at)
        for topic, lag in lags.items():
            metrics.RECORDER_LAG.labels(topic).set(lag)
        owned = {partition.topic for partition in (*self._positions.reached, *self._positions.waiting)}
        for topic in self._lag_topics - owned:
            metrics.RECORDER_LAG.remove(topic)
        self._lag_topics = (self._lag_topics & owned) | lags.keys()
        self._lag_due_at = now + (_BLIND_LAG_INTERVAL_S if blind else _LAG_INTERVAL_S)


def _report(projection: Projection, repetitions: Iterable[Repetition]) -> None:
    for table in ALL_TABLES:
        if count := projection.count(table) + len(projection.withdrawn.get(table.name, ())):
            metrics.RECORDED.labels(table.record).inc(count)
    for (kind, arm, ended), count in ends_of_copies(projection).items():
        metrics.COPIES_ENDED.labels(kind, arm, ended).inc(count)
    for skipped in projection.skipped:
        _report_skipped(skipped.topic, skipped.partition, skipped.offset, skipped.problem)
    for repetition in repetitions:
        metrics.COMMITTED_TWICE.labels(repetition.record).inc()
        log.error("committed_twice", record=repetition.record, key=repetition.key, seen=repetition.seen)


def _report_skipped(topic: str, partition: int, offset: int, problem: str, reason: str | None = None) -> None:
    metrics.RECORDER_SKIPPED.labels(topic, problem).inc()
    log.error("record_skipped", topic=topic, partition=partition, offset=offset, problem=problem, reason=reason)
