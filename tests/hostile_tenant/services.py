"""The services that the attack must not disturb: producers and committed offsets of real users, before and after it.

The transactions write to topics that no attacker may write: whoever may write the same topic can send a batch with the
producer id of another one, which Kafka does not check (docs/threat-model.md). The gateway must bear that.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from fairlane.kafka_config import connection, read_committed_consumer, transactional_producer
from fairlane.settings import Settings
from producers.gateway.pipeline.publisher import AsyncPublisher, producer_config
from producers.openai_api.errors import GatewayError
from tests.hostile_tenant.cluster import COMPROMISED_POOL, HONEST, PIPELINES, PLAIN, Cluster
from tests.hostile_tenant.oracle import GROUP_PREFIX
from tests.hostile_tenant.world import INSTANCES, JOB, Pipeline

_TIMEOUT_S = 30.0
_TRANSACTION_MS = 15 * 60 * 1_000
"""The longest that brokers allow: one transaction stays open during a round of the attack."""


@dataclass(slots=True)
class _Transaction:
    """One transactional producer of a service.

    Attributes:
        topic: where it writes.
        consumer: a reader of its group, whose offsets it commits; None where it commits none.
    """

    name: str
    producer: Producer
    topic: str
    consumer: Consumer | None = None
    source: str = ""
    has_begun: bool = False

    def open(self) -> None:
        if not self.has_begun:
            self.producer.init_transactions(_TIMEOUT_S)
            self.has_begun = True
        self.producer.begin_transaction()
        self.producer.produce(self.topic, b"honest", b"key")
        if self.producer.flush(_TIMEOUT_S):
            raise RuntimeError(f"{self.name}: {self.topic} takes no record")

    def commit(self) -> None:
        """Raises KafkaException when somebody else has taken its id, or ended its transaction."""
        if self.consumer is not None:
            places = [TopicPartition(self.source, 0, 1)]
            self.producer.send_offsets_to_transaction(places, self.consumer.consumer_group_metadata(), _TIMEOUT_S)
        self.producer.commit_transaction(_TIMEOUT_S)


@dataclass(slots=True)
class Services:
    """Of all pipelines of a cluster. Used in one event loop."""

    cluster: Cluster
    _transactions: list[_Transaction] = field(default_factory=list, init=False)
    _gateways: list[tuple[str, AsyncPublisher, Sequence[str]]] = field(default_factory=list, init=False)
    _died: list[str] = field(default_factory=list, init=False)

    async def start(self) -> None:
        """Commit an offset of each group, and make the producers. Raises KafkaException."""
        for pipeline in PIPELINES:
            self._transactions += self._transactional(pipeline)
            publisher = self._gateway(pipeline)
            publisher.start()
            topics = [f"{pipeline.prefix}requests.{tenant}" for tenant in pipeline.tenants]
            self._gateways.append((pipeline.user("gateway"), publisher, topics))
        await asyncio.to_thread(self._commit_offsets)

    async def open(self) -> None:
        """Begin a transaction at each producer, and publish at each gateway. Raises RuntimeError."""
        for transaction in self._transactions:
            await asyncio.to_thread(transaction.open)
        for what in await self._published():
            raise RuntimeError(what)

    async def commit(self) -> list[str]:
        """Commit them, and publish once more; what failed."""
        failed = []
        for transaction in self._transactions:
            try:
                await asyncio.to_thread(transaction.commit)
            except KafkaException as error:
                failed.append(f"{transaction.name} cannot commit: {error.args[0].str()}")
        return [*failed, *await self._published(), *self._died]

    async def close(self) -> None:
        """Also after a failure."""
        for transaction in self._transactions:
            if transaction.consumer is not None:
                await asyncio.to_thread(transaction.consumer.close)
        for _, publisher, _ in self._gateways:
            await publisher.close()
        self._transactions.clear()
        self._gateways.clear()

    async def _published(self) -> list[str]:
        """The topics that a gateway could not publish to. Also those of the attackers: a record there must not cost the
        gateway anything."""
        failed = []
        for name, publisher, topics in self._gateways:
            for topic in topics:
                try:
                    await publisher.publish(topic, str(uuid4()), b"honest", [])
                except GatewayError as error:
                    failed.append(f"{name} cannot publish to {topic}: {error.message}")
        return failed

    def _transactional(self, pipeline: Pipeline) -> Iterator[_Transaction]:
        own, honest = pipeline.prefix, f"{pipeline.prefix}{GROUP_PREFIX}"
        for kind in ("dispatcher", "dispatcher-2"):
            topic = f"{own}priority.fast.high"
            yield self._producer(pipeline.user("dispatcher"), f"{honest}.{kind}.{INSTANCES[0]}", topic)
        for pool in pipeline.pools:
            if pipeline is PLAIN and pool == COMPROMISED_POOL:
                continue
            user = pipeline.user("consumer", pool)
            for kind in ("consumer", "consumer-2"):
                one = self._producer(user, f"{honest}.{kind}.{pool}.{INSTANCES[0]}", f"{own}returned.{pool}")
                one.source = f"{own}priority.{pool}.high"
                one.consumer = Consumer(
                    read_committed_consumer(self.cluster.settings(user), f"{honest}.pool.{pool}") | {"log_level": 0}
                )
                yield one
        yield self._producer(pipeline.user("backfill"), f"{honest}.job.{JOB}", f"{own}backfill.{HONEST}")
        yield self._producer(pipeline.user("admin"), f"{honest}.log-replay.{JOB}", f"{own}evaluation.work")
        replay = f"{own}fairlane-dead-letter-replay.{HONEST}"
        yield self._producer(pipeline.user("replayer"), replay, f"{own}requests.{HONEST}")

    def _producer(self, user: str, transactional_id: str, topic: str) -> _Transaction:
        config = transactional_producer(self.cluster.settings(user), transactional_id, _TRANSACTION_MS)
        # The records of a round come within seconds, not within the time of its transaction.
        limits = {"delivery.timeout.ms": 30_000, "topic.metadata.propagation.max.ms": 10_000, "log_level": 0}
        return _Transaction(transactional_id, Producer(config | limits), topic)

    def _gateway(self, pipeline: Pipeline) -> AsyncPublisher:
        """The gateway's own, which publishes for all tenants."""
        name = pipeline.user("gateway")
        settings = Settings.model_validate(self.cluster.settings(name).model_dump() | {"instance_id": "gateway-1"})
        return AsyncPublisher(
            lambda on_error, is_idempotent: Producer(
                producer_config(settings, on_error, is_idempotent=is_idempotent) | {"log_level": 0}
            ),
            lambda error: self._died.append(f"{name}: its publisher has died: {error}"),
        )

    def _commit_offsets(self) -> None:
        for pipeline in PIPELINES:
            for user, group, topic in _readers(pipeline):
                admin = AdminClient(connection(self.cluster.settings(user)) | {"log_level": 0})
                place = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 7)])
                admin.alter_consumer_group_offsets([place], request_timeout=_TIMEOUT_S)[group].result(_TIMEOUT_S)


def _readers(pipeline: Pipeline) -> Iterator[tuple[str, str, str]]:
    """User, group and a topic of every group with offsets."""
    own, group = pipeline.prefix, f"{pipeline.prefix}{GROUP_PREFIX}"
    yield pipeline.user("dispatcher"), f"{group}.dispatcher", f"{own}requests.acme"
    yield pipeline.user("gateway"), f"{group}.gateway", f"{own}gateway.replies"
    yield pipeline.user("recorder"), f"{group}.recorder", f"{own}ledger.usage"
    yield pipeline.user("backfill"), f"{group}.job.{JOB}", f"{own}jobs.replies"
    yield pipeline.user("admin"), f"{group}.log-replay.{JOB}", f"{own}priority.fast.high"
    for pool in pipeline.pools:
        yield pipeline.user("consumer", pool), f"{group}.pool.{pool}", f"{own}priority.{pool}.high"
    for tenant in pipeline.tenants:
        yield pipeline.user("tenant", tenant), pipeline.tenant_group(tenant), f"{own}replies.{tenant}"
