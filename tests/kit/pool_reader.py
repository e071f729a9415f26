"""A transactional reader of a pool, as a consumer is one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from confluent_kafka import Consumer, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from fairlane.committed import ResumePoint, resume_points
from fairlane.kafka_config import connection, idempotent_producer, read_committed_consumer
from fairlane.kafka_config import transactional_producer as transactional
from fairlane.names import priority_topic
from fairlane.outcomes import Priority
from fairlane.ownership import Claim, Ownership, PartitionId
from fairlane.settings import Settings
from fairlane_server.kafka.transactions import OutputRecord, Settlement, TransactionLoop
from inference_consumers.group import PoolMember
from tests.kit.log_reader import LogReader

TRANSACTION_TIMEOUT_MS = 10_000


JOIN_TIMEOUT_S = 60.0


@dataclass
class Worker:
    """One process of the pool, as far as Kafka sees it: a member of the group and a transaction loop."""

    member: PoolMember
    ownership: Ownership
    loop: TransactionLoop
    out: str
    fatal: list[Exception]
    claims: dict[tuple[PartitionId, int], Claim] = field(default_factory=dict)
    values: list[bytes] = field(default_factory=list)
    """Of every record that was delivered to it."""

    def poll(self) -> None:
        for claim, message in self.member.poll(0.05):
            assert isinstance(message, Message), "nothing is damaged here"
            self.claims[claim.partition, claim.offset] = claim
            self.values.append(message.value() or b"")

    def settlement(self, partition: PartitionId, offset: int, topic: str | None = None) -> Settlement:
        """Its output holds the record's coordinate."""
        value = f"{partition.topic}-{partition.partition}@{offset}".encode()
        return Settlement(self.claims[partition, offset], (OutputRecord(topic or self.out, None, value),))

    def settle(self, partition: PartitionId, offsets: Iterable[int]) -> None:
        self.loop.submit_many([self.settlement(partition, offset) for offset in offsets])
        assert self.loop.drain(60)

    def settle_silently(self, partition: PartitionId, offsets: Iterable[int]) -> None:
        """Without any output."""
        self.loop.submit_many([Settlement(self.claims[partition, offset]) for offset in offsets])
        assert self.loop.drain(60)

    def offsets(self, partition: PartitionId) -> list[int]:
        return sorted(offset for of, offset in self.claims if of == partition)

    def crash(self) -> None:
        """It leaves nothing behind but what it committed: closing the member commits nothing either."""
        self.loop.stop()
        self.member.close()


class Pool:
    """The topics of one pool, its group and an output topic, on the broker and under names of their own."""

    def __init__(self, broker: str, unique: str, partitions: int = 1) -> None:
        self.settings = Settings(kafka_bootstrap_servers=broker, group_prefix=unique, instance_id="first")
        self.name = unique
        self.group = f"{unique}.pool.{unique}"
        self.out, self.small = f"{unique}-out", f"{unique}-small"
        self.work = priority_topic(unique, Priority.HIGH)
        self.partition = PartitionId(self.work, 0)
        self.admin = AdminClient(connection(self.settings))
        topics = [NewTopic(priority_topic(unique, priority), partitions, 1) for priority in Priority]
        topics += [NewTopic(self.out, 1, 1), NewTopic(self.small, 1, 1, config={"max.message.bytes": "2000"})]
        for created in self.admin.create_topics(topics).values():
            created.result(20)
        self.workers: list[Worker] = []

    def worker(self, slot: str = "first", **options: Any) -> Worker:
        """A process that asks to join. Two with the same slot cannot live at once."""
        ownership = Ownership()
        settings = self.settings.model_copy(update={"instance_id": slot})
        fatal: list[Exception] = []
        loop = TransactionLoop(self.producers(slot), ownership, on_fatal=fatal.append, **options)
        loop.start()
        member = PoolMember(settings, self.name, ownership, lambda: None)
        member.join()
        made = Worker(member, ownership, loop, self.out, fatal)
        self.workers.append(made)
        return made

    def producer(self, slot: str) -> Producer:
        return Producer(transactional(self.settings, f"{self.name}.{slot}", TRANSACTION_TIMEOUT_MS))

    def producers(self, slot: str) -> tuple[Producer, Producer]:
        """Both producers of a loop; the first is ``producer``."""
        return self.producer(slot), self.producer(f"{slot}-2")

    def write(self, *values: str, partition: int = 0) -> None:
        producer = Producer(idempotent_producer(self.settings))
        for value in values:
            producer.produce(self.work, value=value.encode(), partition=partition)
        assert producer.flush(20) == 0

    def resume(self) -> ResumePoint:
        """Where a successor would go on."""
        consumer = Consumer(read_committed_consumer(self.settings, self.group))
        try:
            return resume_points(consumer, [self.partition], 20)[self.partition]
        finally:
            consumer.close()

    def outputs(self, topic: str | None = None) -> list[str]:
        """What a ``read_committed`` reader finds in the output topic, sorted."""
        reader = LogReader(self.settings, [topic or self.out])
        try:
            reader.read_to_end()
            return sorted((record.value() or b"").decode() for record in reader.records)
        finally:
            reader.close()

    def expected(self, offsets: Iterable[int], partition: int = 0) -> list[str]:
        return sorted(f"{self.work}-{partition}@{offset}" for offset in offsets)

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Poll for all members until the condition is true."""
        deadline = monotonic() + timeout_s
        while not condition():
            assert monotonic() < deadline, f"{what} did not come about within {timeout_s:g} s"
            for worker in self.workers:
                worker.poll()

    def crash(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.crash()
