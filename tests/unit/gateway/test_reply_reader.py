"""The reader of replies, where retention runs past it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from fairlane.codec import Codec, SchemaNotLoadedError
from fairlane.names import GATEWAY_REPLIES
from fairlane.records import InferenceReply, TenantSpec
from fairlane.schema_files import committed_schemas, default_codec
from fairlane.schema_registry import RegistryError
from fairlane.settings import Settings
from producers.gateway.pipeline import reply_reader
from producers.gateway.pipeline.reply_reader import ReplyReader
from tests.kit.waiting import eventually_async

END = 40


@dataclass
class Kafka:
    """A consumer of two partitions, and what the broker says of them."""

    messages: "SimpleQueue[object]" = field(default_factory=SimpleQueue)
    seeks: list[tuple[int, int]] = field(default_factory=list)
    ends_fail: int = 0
    on_assign: Callable[..., None] | None = None
    on_revoke: Callable[..., None] | None = None
    unassigned: list[int] = field(default_factory=list)

    def list_topics(self, topic: str, timeout: float) -> Any:
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions={0: None, 1: None})})

    def subscribe(self, topics: list[str], *, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        self.on_revoke = on_revoke
        partitions = [TopicPartition(topics[0], number) for number in range(2)]
        self.messages.put(lambda: on_assign(self, partitions))

    def poll(self, timeout: float) -> Any:
        try:
            there = self.messages.get(timeout=timeout)
        except Empty:
            return None
        if callable(there):
            there()
            return None
        return there

    def consume(self, most: int, timeout: float) -> list[Any]:
        return []

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]:
        if self.ends_fail:
            self.ends_fail -= 1
            raise KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
        return 0, END

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Nothing to do."""

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        self.unassigned += [partition.partition for partition in partitions]

    def seek(self, partition: TopicPartition) -> None:
        self.seeks.append((partition.partition, partition.offset))

    def close(self) -> None:
        """Nothing to close."""

    def run_past(self, partition: int) -> None:
        """Retention removes what this partition's reader would have read next."""
        error = KafkaError(KafkaError._AUTO_OFFSET_RESET)
        self.messages.put(SimpleNamespace(error=lambda: error, partition=lambda: partition))

    def answer(self, partition: int, reply: InferenceReply) -> None:
        self.put(partition, default_codec().encode(reply))

    def put(self, partition: int, value: bytes) -> None:
        self.messages.put(
            SimpleNamespace(
                error=lambda: None,
                topic=lambda: GATEWAY_REPLIES,
                partition=lambda: partition,
                offset=lambda: END,
                value=lambda: value,
            )
        )

    def revoke(self, *partitions: int) -> None:
        gone = [TopicPartition(GATEWAY_REPLIES, number) for number in partitions]
        revoke = self.on_revoke
        assert revoke is not None
        self.messages.put(lambda: revoke(self, gone))


@dataclass
class Sink:
    """What it was told, in order."""

    told: list[tuple[str, frozenset[int]]] = field(default_factory=list)
    came: list[str] = field(default_factory=list)

    def owned(self, partitions: frozenset[int], partition_count: int) -> None:
        self.told.append(("owned", partitions))

    def lost(self, partitions: frozenset[int]) -> None:
        self.told.append(("lost", partitions))

    def settle(self, replies: list[InferenceReply]) -> None:
        self.came += [reply.request_id for reply in replies]


BOTH = ("owned", frozenset({0, 1}))


@dataclass
class Bench:
    kafka: Kafka = field(default_factory=Kafka)
    sink: Sink = field(default_factory=Sink)
    failures: list[BaseException] = field(default_factory=list)
    codec: Codec = field(default_factory=default_codec)
    seen: list[InferenceReply] = field(default_factory=list)

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        async def within() -> None:
            reader = ReplyReader(Settings(), self.codec, self.sink, self.seen.extend, self.failures.append)  # type: ignore[arg-type]  # a double
            reader.start()
            try:
                await eventually_async(lambda: self.sink.told[-1:] == [BOTH], what="both partitions")
                self.sink.told.clear()
                await test()
            finally:
                await reader.close()
            assert not self.failures

        asyncio.run(within())


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench()
    monkeypatch.setattr(reply_reader, "_POSITION_TIMEOUT_S", 0.0)
    monkeypatch.setattr(reply_reader, "SkippingConsumer", lambda *_args: bench.kafka)
    return bench


@pytest.mark.parametrize("failures", [0, 2], ids=["at once", "when the broker answers again"])
def test_a_partition_that_retention_ran_past_is_owned_again_from_its_end(bench: Bench, failures: int) -> None:
    async def test() -> None:
        bench.kafka.ends_fail = failures
        bench.kafka.run_past(1)
        await eventually_async(lambda: bench.sink.told[-1:] == [BOTH], what="the partition")
        assert bench.sink.told == [("lost", frozenset({1})), BOTH]
        assert bench.kafka.seeks == [(1, END)]
        bench.kafka.answer(1, InferenceReply("r-1", "acme", "ok"))
        await eventually_async(lambda: bench.sink.came == ["r-1"], what="a reply")

    bench.run(test)


def test_a_partition_that_moves_on_meanwhile_is_not_owned_again(bench: Bench) -> None:
    async def test() -> None:
        bench.kafka.ends_fail = 1_000_000
        bench.kafka.run_past(1)
        bench.kafka.revoke(1)
        await eventually_async(lambda: bench.kafka.unassigned == [1], what="the partition's end")
        bench.kafka.ends_fail = 0
        bench.kafka.answer(0, InferenceReply("r-1", "acme", "ok"))
        await eventually_async(lambda: bench.sink.came == ["r-1"], what="a reply")
        assert bench.sink.told[-1] == ("owned", frozenset({0}))
        assert not bench.kafka.seeks

    bench.run(test)


def test_what_is_no_reply_is_passed_over(bench: Bench) -> None:
    async def test() -> None:
        for value in (b"", b"rubbish", b"\0\xff\xff\xff\xff", default_codec().encode(TenantSpec("acme"))):
            bench.kafka.put(0, value)
        bench.kafka.answer(0, InferenceReply("r-1", "acme", "ok"))
        await eventually_async(lambda: bench.sink.came == ["r-1"], what="a reply")

    bench.run(test)


class AwayFor(Codec):
    """While ``names`` are there, the schemas of these replies are out of reach."""

    def __init__(self, *names: str) -> None:
        super().__init__(committed_schemas())
        self.names = set(names)

    def decode_any(self, record_types: Any, data: bytes | None, *, may_ask: bool = True) -> Any:
        record: Any = super().decode_any(record_types, data, may_ask=may_ask)
        if record.request_id in self.names:
            raise SchemaNotLoadedError(0)
        return record

    def refresh(self) -> None:
        if self.names:
            raise RegistryError("no answer")


def test_a_reply_comes_when_the_schema_registry_is_back(bench: Bench) -> None:
    codec = bench.codec = AwayFor("r-1")

    async def test() -> None:
        late = InferenceReply("r-1", "acme", "ok")
        bench.kafka.answer(0, late)
        await eventually_async(bench.kafka.messages.empty, what="the record to be read")
        codec.names.clear()
        await eventually_async(lambda: bench.sink.came == ["r-1"], what="what was held back")
        assert bench.seen == [late]
        bench.kafka.answer(1, InferenceReply("r-2", "acme", "ok"))
        await eventually_async(lambda: bench.sink.came == ["r-1", "r-2"], what="a reply")

    bench.run(test)
