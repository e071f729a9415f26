"""Faust as a consumer that is fenced and never commits, trap by trap, on the real broker."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from fairlane.kafka_config import idempotent_producer, read_committed_consumer, transactional_producer
from fairlane.ownership import Membership, Ownership, PartitionId
from fairlane.settings import Settings
from inference_consumers.group import parse_group_metadata
from stream_processors.dispatcher.reading.fenced_thread import group_metadata
from tests.kit.stream_member import StreamMember, create_topics, joined, stays
from tests.kit.waiting import eventually_async, eventually_awaited

pytestmark = pytest.mark.broker

GROUP_SUFFIX = ".dispatcher"


@dataclass(frozen=True, slots=True)
class Ground:
    """A topic with one partition, a group of its own, and how to look at both."""

    settings: Settings
    topic: str

    @property
    def group(self) -> str:
        return self.settings.group_prefix + GROUP_SUFFIX

    def slot(self, number: int) -> Settings:
        return self.settings.model_copy(update={"instance_id": f"{self.settings.group_prefix}-{number}"})

    def write(self, count: int, topic: str | None = None) -> None:
        producer = Producer(idempotent_producer(self.settings))
        for number in range(count):
            producer.produce(topic or self.topic, b"%d" % number)
        assert producer.flush(10) == 0

    def committed(self, topic: str | None = None) -> TopicPartition:
        consumer = Consumer(read_committed_consumer(self.settings, self.group))
        try:
            (found,) = consumer.committed([TopicPartition(topic or self.topic, 0)], timeout=10)
        finally:
            consumer.close()
        return found

    def end(self) -> int:
        consumer = Consumer(read_committed_consumer(self.settings, self.group))
        try:
            return consumer.get_watermark_offsets(TopicPartition(self.topic, 0), timeout=10)[1]
        finally:
            consumer.close()

    def send_offset(self, metadata: object, offset: int) -> Producer:
        """Put an offset for this group into a transaction and leave it open."""
        producer = Producer(transactional_producer(self.settings, f"{self.settings.group_prefix}-sender", 10_000))
        producer.init_transactions(10)
        producer.begin_transaction()
        producer.send_offsets_to_transaction([TopicPartition(self.topic, 0, offset)], metadata, 10)
        return producer


@pytest.fixture
def ground(broker: str, unique: str) -> Ground:
    settings = Settings(kafka_bootstrap_servers=broker, group_prefix=unique, instance_id=f"{unique}-1")
    create_topics(settings, f"{unique}.one")
    return Ground(settings, f"{unique}.one")


def membership_of(member: StreamMember) -> Membership:
    membership = member.ownership.membership
    assert membership is not None
    return membership


def test_a_commit_is_fenced_by_generation_and_member(ground: Ground) -> None:
    async def run() -> None:
        async with joined(ground.settings, [ground.topic]) as member:
            membership = membership_of(member)
            generation, member_id = membership.generation, membership.member_id
            for stale, code in (
                (group_metadata(ground.group, generation - 1, member_id), KafkaError.ILLEGAL_GENERATION),
                (group_metadata(ground.group, generation, "somebody-else"), KafkaError.UNKNOWN_MEMBER_ID),
            ):
                with pytest.raises(KafkaException) as refused:
                    await asyncio.to_thread(ground.send_offset, stale, 3)
                assert refused.value.args[0].code() == code
            assert ground.committed().offset < 0

            producer = await asyncio.to_thread(ground.send_offset, membership.group_metadata, 3)
            producer.commit_transaction(10)
            assert ground.committed().offset == 3

    # A generation of 1 has no predecessor that the broker would know.
    asyncio.run(run())


def test_the_broker_accepts_nobody_so_we_never_commit_as_nobody(ground: Ground) -> None:
    """Why Membership.may_commit exists: generation -1 passes unfenced."""
    nobody = Membership(-1, "", group_metadata(ground.group, -1, ""))
    producer = ground.send_offset(nobody.group_metadata, 3)
    producer.commit_transaction(10)
    assert ground.committed().offset == 3

    ownership, partition = Ownership(), PartitionId(ground.topic, 0)
    ownership.assign({partition: None}, nobody)
    claim = ownership.deliver(partition, 0)
    assert claim is not None
    assert ownership.plan([claim], 1_000) is None
    ownership.refresh(nobody)
    assert ownership.plan([claim], 1_000) is None


def test_our_group_metadata_is_librdkafkas_own(ground: Ground) -> None:
    consumer = Consumer(read_committed_consumer(ground.settings, ground.group) | {"auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([ground.topic])
        while not consumer.assignment():
            consumer.poll(0.1)
        theirs = bytes(consumer.consumer_group_metadata())
        generation, member_id = parse_group_metadata(theirs)
        assert (generation, member_id) == (1, consumer.memberid())
        assert group_metadata(ground.group, generation, member_id) == theirs
    finally:
        consumer.close()
    with pytest.raises(ValueError, match="unknown group metadata format"):
        parse_group_metadata(b"CGMDv3:" + theirs[7:])


def test_faust_commits_nothing_by_itself(ground: Ground) -> None:
    async def run() -> None:
        ground.write(10)
        member = StreamMember(ground.settings)
        member.stream._app.conf.broker_commit_interval = 0.05
        await member.stream.start([ground.topic])
        try:
            await eventually_async(lambda: len(member.delivered) == 10)
            await stays(lambda: len(member.delivered) == 10, 0.3)
        finally:
            await member.stream.stop()

    asyncio.run(run())
    assert ground.committed().offset < 0


def test_only_committed_records_are_read(ground: Ground) -> None:
    producer = Producer(transactional_producer(ground.settings, f"{ground.settings.group_prefix}-up", 10_000))
    producer.init_transactions(10)
    for end in (producer.abort_transaction, producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        producer.produce(ground.topic, b"x")
        producer.flush(10)
        end(10)
    producer.begin_transaction()
    producer.produce(ground.topic, b"x")
    producer.flush(10)

    async def run() -> None:
        async with joined(ground.settings, [ground.topic]) as member:
            await eventually_async(lambda: member.delivered)
            await stays(lambda: member.offsets == [2])

    asyncio.run(run())
    producer.abort_transaction(10)


@pytest.mark.parametrize("commits", [True, False], ids=["committed", "aborted"])
def test_an_assignment_waits_for_a_transaction_that_is_still_open(ground: Ground, commits: bool) -> None:
    """A predecessor's offsets are pending: whoever starts before them does work twice, whoever skips them loses it."""

    async def run() -> list[int]:
        ground.write(10)
        async with joined(ground.settings, [ground.topic]) as predecessor:
            await eventually_async(lambda: len(predecessor.delivered) == 10)
            metadata = membership_of(predecessor).group_metadata
            pending = await asyncio.to_thread(ground.send_offset, metadata, 6)
        async with joined(ground.slot(2), [ground.topic], wait=False) as successor:
            await eventually_async(lambda: successor.assigned, what="the group's assignment")
            await stays(lambda: not successor.delivered and not successor.ownership.partitions())
            await asyncio.to_thread(pending.commit_transaction if commits else pending.abort_transaction, 10)
            await eventually_async(lambda: successor.offsets[-1:] == [9])
            return successor.offsets

    assert asyncio.run(run()) == list(range(6 if commits else 0, 10))


def test_done_offsets_are_skipped_after_a_restart(ground: Ground) -> None:
    done = {0, 1, 3, 7}

    async def run() -> list[int]:
        ground.write(10)
        async with joined(ground.settings, [ground.topic]) as member:
            await eventually_async(lambda: len(member.delivered) == 10)
            await asyncio.to_thread(member.settle, [claim for claim in member.delivered if claim.offset in done])
        assert ground.committed().offset == 2
        async with joined(ground.slot(2), [ground.topic]) as member:
            await eventually_async(lambda: member.offsets[-1:] == [9])
            return member.offsets

    assert asyncio.run(run()) == sorted(set(range(10)) - done)


def test_a_rebalance_voids_what_was_delivered_before(ground: Ground) -> None:
    """Epoch by epoch: a claim of the old assignment is not committed in the new one, although the broker would."""

    async def run() -> None:
        ground.write(5)
        async with joined(ground.slot(1), [ground.topic]) as first:
            await eventually_async(lambda: len(first.delivered) == 5)
            old, generation = first.current, membership_of(first).generation
            assert len(old) == 5
            async with joined(ground.slot(2), [ground.topic], wait=False):
                await eventually_async(lambda: first.revocations == 2, what="a revocation")
            await eventually_async(lambda: len(first.delivered) == 10, what="the same records again")
            assert not any(first.ownership.is_current(claim) for claim in old)
            assert membership_of(first).generation > generation
            await asyncio.to_thread(first.settle, old)
            assert ground.committed().offset < 0

            async def committed() -> bool:
                # The second member may leave only now, and its rebalance voids what is being settled.
                await asyncio.to_thread(first.settle, first.current)
                return ground.committed().offset == 5

            await eventually_awaited(committed, what="a commit of the new assignment")

    asyncio.run(run())


def test_a_paused_partition_stays_paused_over_a_rebalance(ground: Ground) -> None:
    """Faust resumes everything when partitions are assigned anew."""
    other = f"{ground.topic}-other"
    create_topics(ground.settings, other)

    async def run() -> None:
        ground.write(20)
        async with joined(ground.settings, [ground.topic], max_span=10) as member:

            def newest() -> int:
                return max(
                    (claim.offset for claim in member.current if claim.partition.topic == ground.topic), default=0
                )

            async def paused() -> None:
                """A fetch that was under way brings its records still; then nothing comes."""
                await eventually_async(member.ownership.paused, what="the pause")
                for _ in range(3):
                    before = newest()
                    ground.write(1)
                    with suppress(AssertionError):
                        await stays(lambda: newest() == before)  # noqa: B023 - waited for in this round
                        return
                pytest.fail("the partition is read in spite of its pause")

            await paused()
            await member.stream.subscribe([ground.topic, other])
            await eventually_async(lambda: len(member.ownership.partitions()) == 2, what="the other topic")
            await paused()
            ground.write(1, other)
            await eventually_async(
                lambda: member.delivered[-1].partition.topic == other, what="the other topic's record"
            )

            end = ground.end()
            while ground.committed().offset < end:
                await eventually_async(lambda: member.current, what="the records behind the pause")
                await asyncio.to_thread(member.settle, member.current)

    asyncio.run(run())


def test_a_pause_loses_nothing_that_was_fetched_already(ground: Ground) -> None:
    """Faust forgets fetched records of a partition that is paused before they were handed on; the next record would
    then make them look done."""
    count = 4_000

    async def run() -> list[int]:
        ground.write(count)
        async with joined(ground.settings, [ground.topic], max_span=10) as member:
            while ground.committed().offset < count:
                await eventually_async(lambda: member.current, what="the records behind the pause")
                await asyncio.to_thread(member.settle, member.current)
            return member.offsets

    assert asyncio.run(run()) == list(range(count))
