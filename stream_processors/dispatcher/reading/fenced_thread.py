"""Faust's Kafka consumer thread with fencing: committed reads, own start positions, group metadata for commits."""

import asyncio
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import aiokafka.consumer.consumer
from aiokafka.consumer.fetcher import OffsetResetStrategy
from aiokafka.structs import ConsumerRecord, TopicPartition
from confluent_kafka import Consumer as ConfluentConsumer
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread

from fairlane.committed import TopicIdLookup, resume_points, stale_partitions, topic_ids_of
from fairlane.kafka_clients import CredentialsSource, credentials_watch
from fairlane.logs import get_logger
from fairlane.ownership import Membership, Ownership, PartitionId
from stream_processors.dispatcher.reading.assignor import TenantAssignor
from stream_processors.dispatcher.reading.bounded_fetcher import BoundedFetcher

log = get_logger(__name__)

# aiokafka has no parameter for the fetcher class. Versions are pinned, and a test on the real broker checks that this
# class is used.
aiokafka.consumer.consumer.Fetcher = BoundedFetcher

# Well below the 40 s after which Faust would go on reading without the seek.
_SEEK_TIMEOUT_S = 20.0
_NO_STATIC_INSTANCE = b"\x01"


class Poll(NamedTuple):
    """The records of one poll by partition, and the epoch of the assignment in which they were fetched."""

    epoch: int
    records: Mapping[TopicPartition, list[ConsumerRecord]]


def group_metadata(group: str, generation: int, member_id: str) -> bytes:
    """Group metadata as librdkafka's ``consumer_group_metadata()`` serialises it for a classic group (format v2)."""
    return (
        b"CGMDv2:"
        + struct.pack("<i", generation)
        + group.encode()
        + b"\0"
        + member_id.encode()
        + b"\0"
        + _NO_STATIC_INSTANCE
    )


def _set_credentials(consumer: Any, username: str, password: str) -> None:
    # aiokafka has no call for it; its client passes both on with every connection that it opens.
    consumer._client._sasl_plain_username, consumer._client._sasl_plain_password = username, password


class FencedThread(AIOKafkaConsumerThread):  # type: ignore[misc]  # Faust has no types
    """Consumer thread that fetches committed data only and starts every assignment at the group's committed offsets."""

    ownership: Ownership
    offsets: ConfluentConsumer
    topic_ids: TopicIdLookup
    on_failure: Callable[[BaseException], None]
    credentials: CredentialsSource | None = None
    """User and password for connections that are opened now; None: always those of the start."""
    _held: frozenset[PartitionId] = frozenset()
    _slow: frozenset[PartitionId] = frozenset()

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        # Faust sets these only in its exactly-once mode, or never.
        consumer._isolation_level = "read_committed"
        # Exactly one assignor: aiokafka 0.14 sends one join per assignor (its pull request 1168), which doubles every
        # rebalance, and members that start together may trigger rebalances for minutes.
        consumer._partition_assignment_strategy = (TenantAssignor,)
        if self.credentials is not None and (given := self.credentials()) is not None:
            _set_credentials(consumer, given.username, given.password)
            credentials_watch.add(self, self.credentials, given)
        return consumer

    async def on_thread_stop(self) -> None:
        credentials_watch.remove(self)
        await super().on_thread_stop()

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Open the next connections with these. Called from any thread. Raises RuntimeError after the end."""
        if self._consumer is not None:
            self.thread_loop.call_soon_threadsafe(_set_credentials, self._consumer, username, password)

    async def _fetch_records(
        self, consumer: Any, active_partitions: Any, timeout: float | None = None, max_records: int | None = None
    ) -> Any:
        consumer._fetcher.held, consumer._fetcher.slow = self._held, self._slow
        records = await super()._fetch_records(consumer, active_partitions, timeout=timeout, max_records=max_records)
        # Seeks run on this thread too, and nothing was awaited since the records were drained: they belong to the
        # present epoch, however late the event loop sees them.
        return Poll(self.ownership.epoch, records)

    def hold(self, held: frozenset[PartitionId], slow: frozenset[PartitionId]) -> None:
        """See ``RequestStream.hold``. Called on the event loop's thread; the sets are replaced, never mutated."""
        released = self._held - held
        self._held, self._slow = held, slow
        consumer = self._consumer
        if consumer is not None and consumer._fetcher is not None:
            consumer._fetcher.held, consumer._fetcher.slow = held, slow
            if released:
                self.thread_loop.call_soon_threadsafe(consumer._fetcher.wake)

    async def seek_to_committed(self) -> Mapping[Any, int]:
        return dict(await self.call_thread(self._seek_or_fail))

    async def _seek_or_fail(self) -> Mapping[Any, int]:
        try:
            return await self._seek_to_committed()
        except Exception as error:
            # Faust would continue from an arbitrary position: end the process instead.
            self.on_failure(error)
            raise

    async def _seek_to_committed(self) -> Mapping[Any, int]:
        consumer = self._ensure_consumer()
        if consumer._subscription.reassignment_in_progress:
            return {}  # the assignment is about to be revoked; the next join seeks again
        membership, revocations = self.membership(), self.ownership.revocations
        assigned = {PartitionId(tp.topic, tp.partition): tp for tp in consumer.assignment()}
        missing = [partition for partition in assigned if partition not in set(self.ownership.partitions())]
        ask = partial(resume_points, self.offsets, missing, _SEEK_TIMEOUT_S, self.topic_ids)
        found = await asyncio.get_running_loop().run_in_executor(None, ask)
        points = {partition: resume.committed for partition, resume in found.items()}
        if self.membership().generation != membership.generation or not self.ownership.assign(
            points,
            membership,
            topic_ids=topic_ids_of(found),
            stale=stale_partitions(found),
            unless_revoked_since=revocations,
        ):
            return {}  # another rebalance has begun; its own seek follows
        for partition, resume in found.items():
            # A group without a commit here starts at this position, whichever record is delivered first.
            self.ownership.advance(partition, resume.position)
        positions = self.ownership.resume_points()
        for partition, tp in assigned.items():
            if partition in positions:
                consumer.seek(tp, positions[partition])
        # From now on a position overtaken by retention is an error that ends the process, never a silent reset.
        consumer._fetcher._default_reset_strategy = OffsetResetStrategy.NONE
        log.info("assigned", partitions=len(assigned), generation=membership.generation)
        return {tp: positions[partition] for partition, tp in assigned.items() if partition in positions}

    def allow_reset(self) -> None:
        """Allow an automatic offset reset between a revocation and the seek after the next join."""
        consumer = self._consumer
        if consumer is not None and consumer._fetcher is not None:
            consumer._fetcher._default_reset_strategy = OffsetResetStrategy.EARLIEST

    def membership(self) -> Membership:
        """This consumer's membership as the coordinator client knows it; a generation of -1 means no member."""
        coordinator = self._ensure_consumer()._coordinator
        generation, member_id = int(coordinator.generation), str(coordinator.member_id)
        return Membership(generation, member_id, group_metadata(self.app.conf.id, generation, member_id))
