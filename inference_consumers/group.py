"""The pool's consumer group: polling, ownership and flow control of one member over its three priority topics."""

from collections.abc import Callable, Iterable
from functools import partial

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from fairlane import metrics
from fairlane.committed import TopicIds, resume_points, stale_partitions, topic_ids_of
from fairlane.kafka_config import ClientConfig, read_committed_consumer
from fairlane.logs import get_logger
from fairlane.names import pool_group, priority_topic
from fairlane.outcomes import Priority
from fairlane.ownership import Claim, Membership, Ownership, PartitionId
from fairlane.settings import Settings
from fairlane.skipping_consumer import SkippedRange, SkippingConsumer

log = get_logger(__name__)

READER = "consumer"
"""Of the metric of unreadable records."""

_ASSIGN_TIMEOUT_S = 20.0
_MAX_POLL_RECORDS = 256
_MAX_POLL_INTERVAL_MS = 300_000


class PoolMember:
    """One member of a pool's group. All methods are called from the polling thread, and so are the callbacks."""

    def __init__(
        self,
        settings: Settings,
        pool: str,
        ownership: Ownership,
        on_revoked: Callable[[], None],
        *,
        max_poll_interval_ms: int = _MAX_POLL_INTERVAL_MS,
    ) -> None:
        """A member that does not poll for ``max_poll_interval_ms`` loses its partitions, whatever its engines do."""
        self._ownership = ownership
        self._on_revoked = on_revoked
        self._topics = {priority_topic(pool, priority): str(priority) for priority in Priority}
        self._incremental = settings.consumer_group_protocol == "consumer"
        config = _config(settings, pool_group(settings.group_prefix, pool), max_poll_interval_ms)
        self._consumer = SkippingConsumer(config, READER)
        self._topic_ids = TopicIds(settings)
        self._assigned: set[PartitionId] | None = None
        """By the group since the last poll began, and not read yet; None when it assigned nothing."""
        self._paused_priorities: set[str] = set()
        self._paused: set[PartitionId] = set()

    def join(self) -> None:
        self._consumer.subscribe(
            list(self._topics),
            on_assign=self._on_assign,
            on_revoke=partial(self._on_revoke, lost=False),
            on_lost=partial(self._on_revoke, lost=True),
        )

    def poll(self, timeout_s: float) -> list[tuple[Claim, Message | SkippedRange]]:
        """Records to work on, at once when there are any. Serves rebalances; what it was assigned in them is read from
        the next call on. Raises KafkaException when fatal.

        Records and ends of partitions are taken in order: an end that overtook a record would let its offset be
        committed as done.
        """
        self._take_up()
        found = self._consumer.poll_batch(_MAX_POLL_RECORDS, timeout_s)
        self._refresh_membership()
        return [(claim, one) for one in found if (claim := self._claim(one)) is not None]

    def pause_priorities(self, full: Iterable[str]) -> None:
        """Fetch nothing of these priorities, nor of partitions that hold too much undone work; fetch all others."""
        self._paused_priorities = set(full)
        self._apply_pauses()

    def close(self) -> None:
        self._consumer.close()

    def _claim(self, message: Message | SkippedRange) -> Claim | None:
        if isinstance(message, SkippedRange):
            return self._claim_range(message)
        error, topic, partition, offset = message.error(), message.topic(), message.partition(), message.offset()
        if topic is None or partition is None or offset is None:
            if error is not None and error.fatal():
                raise KafkaException(error)
            log.warning("consumer_error", error=None if error is None else error.name())
            return None
        if error is None:
            return self._ownership.deliver(PartitionId(topic, partition), offset)
        if error.code() == KafkaError._PARTITION_EOF:
            self._ownership.advance(PartitionId(topic, partition), offset)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            # Retention overtook this reader. The next assignment says how much is lost, and goes on from what is left.
            metrics.LOG_TRUNCATED.labels(topic=topic).inc()
            raise KafkaException(error)
        elif error.fatal():
            raise KafkaException(error)
        else:
            log.warning("consumer_error", error=error.name(), topic=topic)
        return None

    def _claim_range(self, passed: SkippedRange) -> Claim | None:
        """Claim the first undone offset for an unreadable range: the others count as done with it, like a gap. None if
        a predecessor kept them already."""
        place = PartitionId(passed.topic, passed.partition)
        claims = (self._ownership.deliver(place, offset) for offset in range(passed.first, passed.end))
        claim = next((claim for claim in claims if claim is not None), None)
        self._ownership.advance(place, passed.end)
        return claim

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # Acknowledged, and begun at the next poll: a call in here that waits for a broker would crash the client
        # library at the next callback of the same poll.
        if self._incremental:
            consumer.incremental_assign([])
        else:
            consumer.assign([])
        self._assigned = (self._assigned or set()) | _ids(partitions)

    def _take_up(self) -> None:
        """Begin to read what was assigned, where the group left off. Raises KafkaException."""
        if self._assigned is None:
            return
        wanted = sorted(self._assigned)
        found = resume_points(self._consumer, wanted, _ASSIGN_TIMEOUT_S, self._topic_ids)
        membership = self._membership(self._consumer)
        if not membership.may_commit:
            return  # lost meanwhile, as this poll will say
        self._assigned = None
        points = {partition: resume.committed for partition, resume in found.items()}
        self._ownership.assign(points, membership, topic_ids=topic_ids_of(found), stale=stale_partitions(found))
        start = [TopicPartition(*partition, found[partition].position) for partition in wanted]
        for partition in wanted:
            # A group that never committed here begins at this position, whatever is handed on first.
            self._ownership.advance(partition, found[partition].position)
        if self._incremental:
            self._consumer.incremental_assign(start)
        else:
            self._consumer.assign(start)
        # librdkafka remembers a pause over a reassignment, and would never fetch this partition again.
        self._consumer.resume(start)
        self._paused.difference_update(wanted)
        self._apply_pauses()
        log.info("assigned", partitions=[f"{partition.topic}-{partition.partition}" for partition in wanted])

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition], *, lost: bool) -> None:
        gone = _ids(partitions)
        begun = gone.intersection(self._ownership.partitions())
        if self._assigned is not None:
            self._assigned -= gone
        self._ownership.revoke(begun)
        self._paused -= begun
        self._on_revoked()
        if self._incremental:
            consumer.incremental_unassign([TopicPartition(*partition) for partition in begun])
        else:
            consumer.unassign()
        log.info("revoked", partitions=len(begun), lost=lost)

    def _refresh_membership(self) -> None:
        """The epoch may rise while partitions stay. This runs after ``poll`` has served every revocation."""
        if self._ownership.membership is not None:
            self._ownership.refresh(self._membership(self._consumer))

    @staticmethod
    def _membership(consumer: Consumer) -> Membership:
        metadata = consumer.consumer_group_metadata()
        generation, member_id = parse_group_metadata(bytes(metadata))
        return Membership(generation, member_id, metadata)

    def _apply_pauses(self) -> None:
        owned = set(self._ownership.partitions())
        self._ownership.flow()
        wanted = {partition for partition in owned if self._topics[partition.topic] in self._paused_priorities}
        wanted.update(self._ownership.paused())
        if wanted - self._paused:
            self._consumer.pause([TopicPartition(*partition) for partition in wanted - self._paused])
        resumed = (self._paused - wanted) & owned
        if resumed:
            self._consumer.resume([TopicPartition(*partition) for partition in resumed])
        self._paused = wanted


def _ids(partitions: Iterable[TopicPartition]) -> set[PartitionId]:
    return {PartitionId(partition.topic, partition.partition) for partition in partitions}


def parse_group_metadata(metadata: bytes) -> tuple[int, str]:
    """Generation and member id from librdkafka's serialised group metadata. Raises ValueError for another format."""
    prefix = b"CGMDv2:"
    if not metadata.startswith(prefix):
        raise ValueError("unknown group metadata format; confluent-kafka was upgraded past what is tested")
    generation = int.from_bytes(metadata[len(prefix) : len(prefix) + 4], "little", signed=True)
    _group, member_id, _rest = metadata[len(prefix) + 4 :].split(b"\0", 2)
    return generation, member_id.decode()


def _config(settings: Settings, group: str, max_poll_interval_ms: int) -> ClientConfig:
    config = read_committed_consumer(settings, group) | {
        "client.id": settings.instance_id,
        "enable.partition.eof": True,
        "max.poll.interval.ms": max_poll_interval_ms,
    }
    if settings.consumer_group_protocol == "consumer":
        # Range: every member gets partitions of all three priorities.
        return config | {"group.protocol": "consumer", "group.remote.assignor": "range"}
    return config | {
        "partition.assignment.strategy": "range",
        "session.timeout.ms": 6_000,
        "heartbeat.interval.ms": 1_000,
    }
