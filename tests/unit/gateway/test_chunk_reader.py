"""The reader of chunks: what retention runs past, what cannot be read, and what nobody has time for."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, KafkaError, KafkaException, TopicPartition

from fairlane.records import ReplyChunk
from fairlane.schema_files import default_codec
from producers.gateway.pipeline import chunk_reader
from producers.gateway.pipeline.chunk_reader import Chunk, ChunkReader
from producers.gateway.pipeline.reader_thread import MOST_BATCHES
from tests.kit.waiting import eventually, eventually_async

TOPIC = "chunks.acme"
END = 40


@dataclass
class Kafka:
    """A consumer of topics with one partition each."""

    messages: "SimpleQueue[object]" = field(default_factory=SimpleQueue)
    seeks: list[tuple[str, int, int]] = field(default_factory=list)
    seeks_fail: int = 0
    unassigns_fail: bool = False
    read: int = 0
    assigned: list[str] = field(default_factory=list)

    def list_topics(self, topic: str, timeout: float) -> Any:
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions={0: None})})

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]:
        return 0, END

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        self.assigned += [partition.topic for partition in partitions]

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        if self.unassigns_fail:
            raise KafkaException(KafkaError(KafkaError._STATE))
        for partition in partitions:
            self.assigned.remove(partition.topic)

    def seek(self, partition: TopicPartition) -> None:
        if self.seeks_fail:
            self.seeks_fail -= 1
            raise KafkaException(KafkaError(KafkaError._STATE))
        self.seeks.append((partition.topic, partition.partition, partition.offset))

    def poll(self, timeout: float) -> Any:
        try:
            message = self.messages.get(timeout=timeout)
        except Empty:
            return None
        self.read += 1
        return message

    def consume(self, most: int, timeout: float) -> list[Any]:
        return []

    def close(self) -> None:
        """Nothing to close."""

    def run_past(self) -> None:
        """Retention removes what would have been read next."""
        error = KafkaError(KafkaError._AUTO_OFFSET_RESET)
        self.messages.put(
            SimpleNamespace(error=lambda: error, topic=lambda: TOPIC, partition=lambda: 0, key=lambda: b"")
        )

    def put(self, value: bytes, key: bytes = b"r-1") -> None:
        self.messages.put(
            SimpleNamespace(
                error=lambda: None,
                topic=lambda: TOPIC,
                partition=lambda: 0,
                offset=lambda: END,
                key=lambda: key,
                value=lambda: value,
            )
        )

    def say(self, seq: int) -> None:
        self.put(default_codec().encode(ReplyChunk("r-1", "acme", 1, 1, seq, f"{seq} ")))


@dataclass
class Bench:
    kafka: Kafka = field(default_factory=Kafka)
    came: list[Chunk] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    most_ahead: int = 0
    """Records that were read and not delivered."""

    def _come(self, chunks: list[Chunk]) -> None:
        self.most_ahead = max(self.most_ahead, self.kafka.read - len(self.came))
        self.came += chunks

    def run(self, test: Callable[[ChunkReader], Awaitable[None]]) -> None:
        async def within() -> None:
            reader = ChunkReader(
                lambda: self.kafka,  # type: ignore[arg-type, return-value]  # the part that is used
                default_codec(),
                lambda request_id: request_id == "r-1",
                self._come,
                self.failures.append,
            )
            reader.start()
            try:
                assert await reader.follow("acme")
                await eventually_async(lambda: self.kafka.assigned == [TOPIC], what="the topic")
                await test(reader)
            finally:
                await reader.close()
            assert not self.failures

        asyncio.run(within())

    @property
    def seqs(self) -> list[int]:
        assert all(tenant == "acme" for tenant, _ in self.came)
        return [chunk.seq for _, chunk in self.came]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(chunk_reader, "_AGAIN_S", 0.0)
    return Bench()


@pytest.mark.parametrize("failures", [0, 3], ids=["at once", "when the client can"])
def test_where_retention_ran_past_reading_goes_on_at_the_end(bench: Bench, failures: int) -> None:
    async def test(_reader: ChunkReader) -> None:
        bench.kafka.seeks_fail = failures
        bench.kafka.run_past()
        await eventually_async(lambda: bench.kafka.seeks, what="the end")
        assert bench.kafka.seeks == [(TOPIC, 0, OFFSET_END)]
        bench.kafka.say(0)
        await eventually_async(lambda: bench.seqs == [0], what="a chunk")

    bench.run(test)


def test_a_topic_that_cannot_be_left_ends_nothing(bench: Bench) -> None:
    async def test(reader: ChunkReader) -> None:
        bench.kafka.unassigns_fail = True
        reader.leave("acme")
        reader._drop_idle(float("inf"))
        assert await reader.follow("globex")
        await eventually_async(lambda: bench.kafka.assigned == [TOPIC, "chunks.globex"], what="the next topic")

    bench.run(test)


def test_what_retention_ran_past_is_nothing_to_a_topic_that_was_left(bench: Bench) -> None:
    async def test(reader: ChunkReader) -> None:
        assert await reader.follow("globex")
        reader.leave("acme")
        reader._drop_idle(float("inf"))
        await eventually_async(lambda: bench.kafka.assigned == ["chunks.globex"], what="the end of the topic")
        bench.kafka.run_past()
        bench.kafka.run_past()
        # When the second is read, the first was dealt with.
        await eventually_async(lambda: bench.kafka.read == 2, what="what retention left")
        assert bench.kafka.seeks == []

    bench.run(test)


def test_what_is_no_chunk_is_passed_over(bench: Bench) -> None:
    async def test(_reader: ChunkReader) -> None:
        for value in (b"", b"\x00", b"\x00\xff\xff\xff\xff", b"rubbish"):
            bench.kafka.put(value)
        bench.kafka.say(0)
        await eventually_async(lambda: bench.seqs == [0], what="a chunk")

    bench.run(test)


def test_what_nobody_has_time_for_waits_in_kafka(bench: Bench) -> None:
    """The event loop stands still; the reader reads no more than a few batches meanwhile."""

    async def test(_reader: ChunkReader) -> None:
        for seq in range(50):
            bench.kafka.say(seq)
        # One batch more is read, and waits for room.
        eventually(lambda: bench.kafka.read > MOST_BATCHES, what="a full reader")
        await eventually_async(lambda: bench.seqs == list(range(50)), what="all chunks")
        assert bench.most_ahead == MOST_BATCHES + 1

    bench.run(test)
