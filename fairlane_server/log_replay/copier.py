"""Writes the copies of one replay: each transaction holds copies and how far the log is read, with the counts of it.

A writer that takes over fences the one before, by the transactional id, and goes on behind what that one has committed.
So every sampled request is copied once, whenever the process is killed.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from confluent_kafka import Consumer, KafkaException, TopicPartition

from fairlane.closing import Closing
from fairlane.cluster import LastConnectionError, quiet_config, reason_of
from fairlane.codec import Codec
from fairlane.evaluation_records import EvaluationMark
from fairlane.kafka_clients import KafkaProducer
from fairlane.kafka_config import transactional_producer
from fairlane.names import EVALUATION_WORK, log_replay_transactional_id
from fairlane.offsets import MetadataError
from fairlane.ownership import CommitPlan, Membership, PartitionId
from fairlane.record_bounds import MAX_VALUE_BYTES
from fairlane.records import WorkItem
from fairlane.settings import Settings
from fairlane_server.evaluation.copies import EvaluationArm, EvaluationKind, copy_of
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.kafka.settlement import OutputRecord
from fairlane_server.kafka.transactional_producer import (
    FatalTransactionError,
    RefusedTransactionError,
    TransactionalProducer,
    close_producer,
    while_retriable,
)
from fairlane_server.log_replay.journal import ReplayedWork, ReplayJournal
from fairlane_server.log_replay.progress import ReplayCounts, ReplayPoint, ReplayRange
from fairlane_server.log_replay.ranges import LoggedWork, WorkRanges
from fairlane_server.log_replay.selection import CopyDecision, ReplaySelection, counts_of
from fairlane_server.log_replay.store import LogReplay
from fairlane_server.processes.watchdog import Watchdog

MAX_AGE_MS = 12 * 3_600_000
"""A copy that has not run by then is dropped: it runs when nothing else waits, and its topic keeps it for a day."""
MOST_PER_TRANSACTION = 100
"""Requests; each has a copy for each arm."""

_MOST_TRANSACTION_BYTES = 16 << 20
_CALL_TIMEOUT_S = 20.0
_TRIES = 5
_READ_TIMEOUT_S = 0.5


class ProgressLostError(Exception):
    """The committed progress of a replay that was begun does not exist, or cannot be read."""


class ReplayCopier(Closing):
    """The writer of one replay. For one thread. Raises ClusterError, RegistryError and StoreError; it must then be
    closed, and another one goes on."""

    def __init__(
        self, settings: Settings, codec: Codec, replay: LogReplay, journal: ReplayJournal, watchdog: Watchdog
    ) -> None:
        """Connects nowhere yet."""
        self._settings = settings
        self._codec = codec
        self._replay = replay
        self._journal = journal
        self._watchdog = watchdog
        self._selection = ReplaySelection(replay.model, replay.against, frozenset(replay.tenants), replay.sample)
        self._errors = LastConnectionError()
        self._producer: TransactionalProducer | None = None
        self._ranges = WorkRanges(settings, codec, replay.replay)
        self._listed: Sequence[ReplayRange] = ()
        self._points: dict[PartitionId, ReplayPoint] = {}
        self._pending: deque[LoggedWork] = deque()
        """Records that were read and are not copied yet."""

    def close(self) -> None:
        """Disconnect. An open transaction is aborted."""
        self._ranges.close()
        if self._producer is not None:
            close_producer(self._producer.producer)

    def find(self, topics: Iterable[str]) -> list[ReplayRange]:
        """The ranges of a replay that was not begun."""
        return self._ranges.find(topics, self._replay.from_ms, self._replay.until_ms)

    def start(self, ranges: Sequence[ReplayRange]) -> None:
        """Fence earlier writers, and go on behind what they have committed. Raises ProgressLostError."""
        id_ = log_replay_transactional_id(self._settings.group_prefix, self._replay.replay)
        config = transactional_producer(self._settings, id_, self._settings.transaction_timeout_ms)
        producer = KafkaProducer(quiet_config(config, self._errors))
        self._producer = TransactionalProducer(producer, self._watchdog)
        try:
            with self._watchdog.watching("init_transactions"):
                while_retriable(partial(producer.init_transactions, _CALL_TIMEOUT_S), _TRIES)
            # Behind it: a transaction of a predecessor is committed or aborted by then.
            self._points = committed_points(self._ranges.consumer, ranges)
        except KafkaException as error:
            raise ClusterError(self._errors.text or reason_of(error)) from None
        except MetadataError as error:
            raise ProgressLostError(str(error)) from None
        if not self._points and self._replay.progress.counts.read:
            raise ProgressLostError("Kafka does not hold its offsets any more (offsets.retention.minutes)")
        self._listed = ranges
        self._ranges.open(ranges, {place: point.offset for place, point in self._points.items()})

    @property
    def counts(self) -> ReplayCounts:
        """Of everything that is committed."""
        return ReplayCounts.total(point.counts for point in self._points.values())

    @property
    def done_offsets(self) -> int:
        return sum(
            self._points[place].offset - one.first
            for one in self._listed
            if (place := PartitionId(one.topic, one.partition)) in self._points
        )

    @property
    def all_offsets(self) -> int:
        return sum(map(len, self._listed))

    @property
    def is_read(self) -> bool:
        """Whether the ranges are copied to their ends."""
        return self._ranges.is_read and not self._pending

    def step(self, room: int, now_ms: int) -> int:
        """Copy at most ``room`` more requests. Returns how many records were dealt with; 0: nothing to read now."""
        if not self._pending:
            self._pending.extend(self._ranges.read(_READ_TIMEOUT_S))
        taken = self._take(min(room, MOST_PER_TRANSACTION))
        sampled = {place: ReplayedWork(one.place, item) for place, one in enumerate(taken) if (item := self._of(one))}
        decided = dict(zip(sampled, self._journal.decide(self._replay, list(sampled.values())), strict=True))
        records: list[OutputRecord] = []
        points = dict(self._points)
        for place, one in enumerate(taken):
            decision = decided.get(place)
            if decision is CopyDecision.COPIED:
                copies = self._copies(sampled[place].item, now_ms)
                if any(len(copy.value) > MAX_VALUE_BYTES for copy in copies):
                    decision = CopyDecision.TOO_LARGE
                else:
                    records += copies
            points[one.partition] = _behind(points.get(one.partition), one, decision)
        if taken:
            self._commit(records, points, {one.partition for one in taken})
        return len(taken)

    def _take(self, most_sampled: int) -> list[LoggedWork]:
        """The next records, up to the one that would be a sampled one too many, or would make too large a
        transaction."""
        taken: list[LoggedWork] = []
        sampled = size_bytes = 0
        while self._pending:
            one = self._pending[0]
            if self._of(one) is not None:
                if sampled == most_sampled or (sampled and size_bytes + one.size_bytes > _MOST_TRANSACTION_BYTES):
                    break
                sampled += 1
                size_bytes += len(EvaluationArm) * one.size_bytes
            taken.append(self._pending.popleft())
        return taken

    def _of(self, one: LoggedWork) -> WorkItem | None:
        """The work item, if the replay is about it."""
        return one.item if one.item is not None and self._selection.takes(one.item) else None

    def _copies(self, item: WorkItem, now_ms: int) -> list[OutputRecord]:
        """The copies of one request, for both arms."""
        versions = {EvaluationArm.CANDIDATE: self._replay.candidate, EvaluationArm.CHAMPION: self._replay.against}
        made = []
        for arm, version in versions.items():
            mark = EvaluationMark(
                *(EvaluationKind.REPLAY, self._replay.replay, arm, item.tenant),
                item.request.request_id,
                item.request.conversation_id,
            )
            copy = copy_of(item, mark, version, now_ms, MAX_AGE_MS)
            made.append(OutputRecord(EVALUATION_WORK, copy.request.request_id.encode(), self._codec.encode(copy)))
        return made

    def _commit(
        self,
        records: Sequence[OutputRecord],
        points: Mapping[PartitionId, ReplayPoint],
        changed: Iterable[PartitionId],
    ) -> None:
        assert self._producer is not None  # noqa: S101 - it was started
        try:
            # Nobody joins the group: the transactional id fences, not the generation.
            membership = Membership(-1, "", self._ranges.consumer.consumer_group_metadata())
            plan = CommitPlan(membership, (), {place: points[place] for place in changed})
            self._producer.commit(records, plan)
        except (RefusedTransactionError, FatalTransactionError) as error:
            raise ClusterError(f"the copies were not committed: {error}") from None
        except KafkaException as error:
            raise ClusterError(self._errors.text or reason_of(error)) from None
        self._points = dict(points)


def _behind(point: ReplayPoint | None, one: LoggedWork, decision: CopyDecision | None) -> ReplayPoint:
    """The point behind one more record."""
    found = ReplayCounts(gone=one.gone)
    if one.item is not None:
        found += counts_of(decision)
    elif one.is_unreadable:
        found += ReplayCounts(unreadable=1)
    return ReplayPoint(one.end, counts=found if point is None else point.counts + found)


def committed_points(consumer: Consumer, ranges: Sequence[ReplayRange]) -> dict[PartitionId, ReplayPoint]:
    """What the group of the consumer has committed of these ranges. Raises KafkaException, MetadataError."""
    if not ranges:
        return {}
    asked = [TopicPartition(one.topic, one.partition) for one in ranges]
    points = {}
    for found in consumer.committed(asked, timeout=_CALL_TIMEOUT_S):
        if found.error is not None:
            raise KafkaException(found.error)
        if found.offset >= 0:
            points[PartitionId(found.topic, found.partition)] = ReplayPoint.parse(found.offset, found.metadata)
    return points
