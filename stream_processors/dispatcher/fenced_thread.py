"""The Kafka consumer inside Faust, made fit to be fenced: what it reads, where it starts, and as whom it may commit."""

import asyncio
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aiokafka.consumer.fetcher import OffsetResetStrategy
from confluent_kafka import Consumer as ConfluentConsumer
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread

from fairlane.committed import AskTopicIds, ids_of, resume_points, stale_in
from fairlane.logs import get_logger
from fairlane.ownership import Membership, Ownership, PartitionId
from stream_processors.dispatcher.assignor import TenantAssignor

log = get_logger(__name__)

_FETCH_MAX_WAIT_MS = 200
# Well below the 40 s after which Faust would go on reading without the seek.
_SEEK_TIMEOUT_S = 20.0
_NO_STATIC_INSTANCE = b"\x01"


def group_metadata(group: str, generation: int, member_id: str) -> bytes:
    """What librdkafka's ``consumer_group_metadata()`` would be for this member of a classic group (its format v2)."""
    return (
        b"CGMDv2:"
        + struct.pack("<i", generation)
        + group.encode()
        + b"\0"
        + member_id.encode()
        + b"\0"
        + _NO_STATIC_INSTANCE
    )


class FencedThread(AIOKafkaConsumerThread):  # type: ignore[misc]  # Faust has no types
    """The consumer thread: fetches committed data only and starts every assignment where the group really left off."""

    ownership: Ownership
    offsets: ConfluentConsumer
    topic_ids: AskTopicIds
    on_failure: Callable[[BaseException], None]

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        # Faust sets these only in its own exactly-once mode, or not at all.
        consumer._isolation_level = "read_committed"
        consumer._fetch_max_wait_ms = _FETCH_MAX_WAIT_MS
        # One alone: aiokafka 0.14 sends a join for each of several (its pull request 1168), so that every rebalance is
        # two, and members that start at the same time may call one another back for minutes.
        consumer._partition_assignment_strategy = (TenantAssignor,)
        return consumer

    async def _fetch_records(self, *args: Any, **kwargs: Any) -> Any:
        records = await super()._fetch_records(*args, **kwargs)
        # Seeks run on this thread too and nothing is awaited since the records were drained: they belong to the present
        # epoch, however late the other thread gets to see them. Kafka itself does not use the checksum any more.
        epoch = self.ownership.epoch
        for batch in records.values():
            for record in batch:
                record.checksum = epoch
        return records

    async def seek_to_committed(self) -> Mapping[Any, int]:
        return dict(await self.call_thread(self._seek_or_fail))

    async def _seek_or_fail(self) -> Mapping[Any, int]:
        try:
            return await self._seek_to_committed()
        except Exception as error:
            # Faust would go on reading from wherever it is: the process must end instead.
            self.on_failure(error)
            raise

    async def _seek_to_committed(self) -> Mapping[Any, int]:
        consumer = self._ensure_consumer()
        if consumer._subscription.reassignment_in_progress:
            return {}  # what is assigned is about to be taken away; the join that follows seeks again
        membership, revocations = self.membership(), self.ownership.revocations
        assigned = {PartitionId(tp.topic, tp.partition): tp for tp in consumer.assignment()}
        missing = [partition for partition in assigned if partition not in set(self.ownership.partitions())]
        ask = partial(resume_points, self.offsets, missing, _SEEK_TIMEOUT_S, self.topic_ids)
        found = await asyncio.get_running_loop().run_in_executor(None, ask)
        points = {partition: resume.committed for partition, resume in found.items()}
        if self.membership().generation != membership.generation or not self.ownership.assign(
            points, membership, topic_ids=ids_of(found), stale=stale_in(found), unless_revoked_since=revocations
        ):
            return {}  # another rebalance began meanwhile; its own seek follows
        for partition, resume in found.items():
            # A group that never committed here begins at this position, whatever is handed on first.
            self.ownership.advance(partition, resume.position)
        positions = self.ownership.resume_points()
        for partition, tp in assigned.items():
            if partition in positions:
                consumer.seek(tp, positions[partition])
        # From here on a position that retention overtook is an error that ends the process, never a silent reset.
        consumer._fetcher._default_reset_strategy = OffsetResetStrategy.NONE
        log.info("assigned", partitions=len(assigned), generation=membership.generation)
        return {tp: positions[partition] for partition, tp in assigned.items() if partition in positions}

    def allow_reset(self) -> None:
        """Between a revocation and the seek that follows the next join, aiokafka starts wherever it likes."""
        consumer = self._consumer
        if consumer is not None and consumer._fetcher is not None:
            consumer._fetcher._default_reset_strategy = OffsetResetStrategy.EARLIEST

    def membership(self) -> Membership:
        """Who the coordinator says this consumer is now; a generation of -1 is nobody."""
        coordinator = self._ensure_consumer()._coordinator
        generation, member_id = int(coordinator.generation), str(coordinator.member_id)
        return Membership(generation, member_id, group_metadata(self.app.conf.id, generation, member_id))
