"""The client SDK on a real broker, with a small transactional service behind it."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from string import ascii_letters

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from fairlane.client import AsyncClient, Client
from fairlane.client.group_member import UndecodableReply
from fairlane.codec import DecodeProblem
from fairlane.errors import (
    Cancelled,
    ClientClosed,
    Expired,
    Failed,
    FairlaneError,
    PublishFailed,
    Rejected,
    Timeout,
    Unavailable,
    Unsuccessful,
)
from fairlane.kafka_config import idempotent_producer, read_committed_consumer, transactional_producer
from fairlane.names import replies_topic, requests_topic
from fairlane.record_bounds import MAX_REQUEST_BYTES, MAX_REQUEST_VALUE_BYTES
from fairlane.records import InferenceReply, InferenceRequest, Output
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

WAIT_S = 20
ANSWERS = {
    "ok": {"outcome": "ok"},
    "rejected": {"outcome": "rejected", "code": "overloaded", "retry_after_ms": 250, "message": "try later"},
    "invalid": {"outcome": "rejected", "code": "invalid", "field": "max_tokens", "message": "must be positive"},
    "expired": {"outcome": "expired"},
    "cancelled": {"outcome": "cancelled"},
    "failed": {"outcome": "failed", "code": "engine_error", "message": "out of memory"},
}
SILENT = "silent"
ABORTED = "aborted"
ABORTED_THEN_OK = "aborted-then-ok"


def create_topics(servers: str, *names: str, config: dict[str, str] | None = None) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    topics = [NewTopic(name, num_partitions=1, replication_factor=1, config=config or {}) for name in names]
    for future in admin.create_topics(topics, request_timeout=WAIT_S).values():
        future.result(WAIT_S)


@dataclass
class Service:
    """Answers a tenant's requests in transactions, in the way their model names; stands for the whole pipeline."""

    servers: str
    tenant: str
    seen: list[InferenceRequest] = field(default_factory=list)
    error: Exception | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        settings = KafkaSettings(kafka_bootstrap_servers=self.servers)
        consumer = Consumer(
            read_committed_consumer(settings, f"{self.tenant}-service") | {"auto.offset.reset": "earliest"}
        )
        producer = Producer(transactional_producer(settings, f"{self.tenant}-service", 10_000))
        producer.init_transactions(WAIT_S)
        consumer.subscribe([requests_topic(self.tenant)])
        try:
            while not self._stopping.is_set():
                first = consumer.poll(0.05)
                if first is not None:
                    self._answer([first, *consumer.consume(500, 0)], producer)
        except Exception as error:  # noqa: BLE001 - looked at by the fixture when the test is over
            self.error = error
        finally:
            consumer.close()

    def _answer(self, messages: list[Message], producer: Producer) -> None:
        requests = [
            default_codec().decode_as(InferenceRequest, message.value())
            for message in messages
            if message.error() is None
        ]
        self.seen += requests
        aborted = [request for request in requests if request.model in (ABORTED, ABORTED_THEN_OK)]
        if aborted:
            producer.begin_transaction()
            for request in aborted:
                self._produce(producer, request, "failed")
            producer.flush(WAIT_S)  # the records are in the log before they are aborted
            producer.abort_transaction(WAIT_S)
        answered = [request for request in requests if request.model in (*ANSWERS, ABORTED_THEN_OK)]
        if answered:
            producer.begin_transaction()
            for request in answered:
                self._produce(producer, request, "ok" if request.model == ABORTED_THEN_OK else request.model)
            producer.commit_transaction(WAIT_S)

    def _produce(self, producer: Producer, request: InferenceRequest, answer: str) -> None:
        reply = InferenceReply(
            request_id=request.request_id,
            tenant=self.tenant,
            output=Output(text=request.input.prompt) if answer == "ok" else None,
            **ANSWERS[answer],  # type: ignore[arg-type]  # strings and one number, by the names of the fields
        )
        topic = request.reply_to or replies_topic(self.tenant)
        producer.produce(topic, default_codec().encode(reply), request.request_id)

    def stop(self) -> None:
        self._stopping.set()


@pytest.fixture
def tenant(broker: str, unique: str) -> str:
    """A tenant with its topics, and one of a service named billing."""
    create_topics(broker, requests_topic(unique), replies_topic(unique), replies_topic(unique, "billing"))
    return unique


@pytest.fixture
def service(broker: str, tenant: str) -> Iterator[Service]:
    """What answers the tenant."""
    made = Service(broker, tenant)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert made.error is None


@pytest.fixture
def client(broker: str, tenant: str) -> Iterator[Client]:
    with Client(tenant, broker, close_timeout_ms=5_000) as made:
        yield made


@contextmanager
def takes_at_most(seconds: float) -> Iterator[None]:
    before = time.monotonic()
    yield
    assert time.monotonic() - before < seconds


def raw_records(servers: str, topic: str, *values: bytes) -> None:
    producer = Producer(idempotent_producer(KafkaSettings(kafka_bootstrap_servers=servers)))
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(WAIT_S) == 0


def test_a_request_is_published_answered_and_timed(client: Client, service: Service) -> None:
    handle = client.submit(model="ok", prompt="hello", timeout_ms=5_000, metadata={"from": "a test"})
    where = handle.published(WAIT_S)
    assert where is not None
    assert (where.topic, where.partition, where.offset) == (requests_topic(client.tenant), 0, 0)
    reply = handle.result(WAIT_S)
    assert (reply.request_id, reply.output) == (handle.request_id, Output(text="hello"))
    assert [request.metadata for request in service.seen] == [{"from": "a test"}]
    assert handle.published_at_ms is not None
    assert handle.received_at_ms is not None
    assert 0 <= handle.published_at_ms - handle.submitted_at_ms < 10_000
    assert 0 <= handle.received_at_ms - handle.submitted_at_ms < 10_000
    assert client.flush(WAIT_S) == 0


def test_every_outcome_is_its_typed_error(client: Client, service: Service) -> None:
    def error_for(model: str) -> Unsuccessful:
        handle = client.submit(model=model, prompt="hello")
        with pytest.raises(Unsuccessful) as caught:
            handle.result(WAIT_S)
        assert handle.reply() == caught.value.reply
        return caught.value

    rejected = error_for("rejected")
    assert isinstance(rejected, Rejected)
    assert (rejected.code, rejected.retry_after_ms, rejected.message) == ("overloaded", 250, "try later")
    invalid = error_for("invalid")
    assert isinstance(invalid, Rejected)
    assert (invalid.code, invalid.field, invalid.retry_after_ms) == ("invalid", "max_tokens", None)
    failed = error_for("failed")
    assert isinstance(failed, Failed)
    assert failed.code == "engine_error"
    assert isinstance(error_for("expired"), Expired)
    assert isinstance(error_for("cancelled"), Cancelled)


def test_a_reply_of_an_aborted_transaction_reaches_nobody(client: Client, service: Service) -> None:
    never = client.submit(model=ABORTED, prompt="never")
    twice = client.submit(model=ABORTED_THEN_OK, prompt="twice")
    after = client.submit(model="ok", prompt="after")
    assert twice.result(WAIT_S).outcome == "ok"
    assert after.result(WAIT_S).outcome == "ok"
    assert not never.done()
    with pytest.raises(Timeout):
        never.result(0.2)


def test_closing_fails_open_handles_with_everything_published(broker: str, tenant: str, service: Service) -> None:
    client = Client(tenant, broker)
    handles = [client.submit(model=SILENT, prompt="p") for _ in range(100)]
    with takes_at_most(5):
        client.close()
    for handle in handles:
        assert handle.published(0) is not None
        with pytest.raises(ClientClosed):
            handle.result(0)
    eventually(lambda: len(service.seen) == 100, what="every request in the log")


def test_thousands_pass_a_small_window_in_bounded_memory(broker: str, tenant: str, service: Service) -> None:
    count, most = 5_000, 0
    answered: set[str] = set()
    with Client(tenant, broker, max_in_flight=100) as client:
        open_handles = []
        for handle in client.submit_many({"model": "ok", "prompt": str(number)} for number in range(count)):
            most = max(most, client.stats.in_flight, len(client._core.handles))
            open_handles.append(handle)
            if len(open_handles) == 200:
                answered |= {done.result(WAIT_S).request_id for done in open_handles}
                open_handles.clear()
        answered |= {done.result(WAIT_S).request_id for done in open_handles}
        assert client.flush(WAIT_S) == 0  # a reply may be here before the acknowledgement
        stats = client.stats
    assert len(answered) == count
    assert most <= 100
    assert (stats.submitted, stats.published, stats.answered, stats.in_flight) == (count, count, count, 0)
    assert (stats.publish_failed, stats.ignored_replies, stats.undecodable_replies) == (0, 0, 0)


def test_threads_share_a_client(client: Client, service: Service) -> None:
    answered: list[str | None] = []

    def work(name: str) -> None:
        for number in range(50):
            reply = client.submit(model="ok", prompt=f"{name}-{number}").result(WAIT_S)
            answered.append(reply.output.text if reply.output else None)

    threads = [threading.Thread(target=work, args=(str(name),)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(map(str, answered)) == sorted(f"{name}-{number}" for name in range(4) for number in range(50))


def test_tasks_share_an_async_client(broker: str, tenant: str, service: Service) -> None:
    async def ask(client: AsyncClient, number: int) -> str | None:
        reply = await (await client.submit(model="ok", prompt=str(number)))
        return reply.output.text if reply.output else None

    async def run() -> None:
        async with AsyncClient(tenant, broker, max_in_flight=50) as client:
            answers = await asyncio.gather(*(ask(client, number) for number in range(500)))
            assert answers == [str(number) for number in range(500)]
            with pytest.raises(Rejected):
                await (await client.submit(model="rejected", prompt="p"))
            silent = await client.submit(model=SILENT, prompt="p")
            with pytest.raises(Timeout):
                await silent.result(0.05)
            assert await silent.published(WAIT_S) is not None
            assert await client.flush(WAIT_S) == 0
        with pytest.raises(ClientClosed):
            await silent

    asyncio.run(run())


def test_a_missing_request_topic_fails_the_handle_quickly(broker: str, unique: str) -> None:
    create_topics(broker, replies_topic(unique))
    with takes_at_most(8), Client(unique, broker) as client:
        handle = client.submit(model="ok", prompt="secret")
        with pytest.raises(PublishFailed, match=f"{requests_topic(unique)}: .*[Uu]nknown topic") as caught:
            handle.result(WAIT_S)
        assert "secret" not in str(caught.value)
        assert not caught.value.uncertain
        with pytest.raises(PublishFailed, match=requests_topic(unique)):
            client.submit(model="ok", prompt="secret").result(WAIT_S)
        assert client.stats.in_flight == 0


def test_a_missing_reply_topic_is_said_before_anything_is_published(broker: str, unique: str) -> None:
    create_topics(broker, requests_topic(unique))
    with (
        takes_at_most(8),
        Client(unique, broker) as client,
        pytest.raises(Unavailable, match=rf"{replies_topic(unique)} does not exist"),
    ):
        client.submit(model="ok", prompt="p")
    assert client.stats.submitted == 0


def test_no_broker_is_said_with_the_reason() -> None:
    with (
        takes_at_most(8),
        Client("acme", "127.0.0.1:1", start_timeout_ms=500) as client,
        pytest.raises(Unavailable, match="Connection refused"),
    ):
        client.submit(model="ok", prompt="p")


def test_a_request_too_large_for_the_topic_fails_its_handle_and_no_other(broker: str, unique: str) -> None:
    create_topics(broker, requests_topic(unique), config={"max.message.bytes": "2000"})
    create_topics(broker, replies_topic(unique))
    with Client(unique, broker) as client:
        large = client.submit(model="ok", prompt="x" * 10_000)
        with pytest.raises(PublishFailed, match="too large"):
            large.published(WAIT_S)
        assert client.submit(model="ok", prompt="x").published(WAIT_S) is not None
        with pytest.raises(ValueError, match=r"^input: "):
            client.submit(model="ok", prompt="x" * 5_000_000)


def test_the_largest_request_fits_its_topic_uncompressed(broker: str, unique: str) -> None:
    create_topics(broker, requests_topic(unique), config={"max.message.bytes": str(MAX_REQUEST_BYTES)})
    create_topics(broker, replies_topic(unique))
    prompt = "".join(Random(7).choices(ascii_letters, k=MAX_REQUEST_VALUE_BYTES - 1_000))
    with Client(unique, broker) as client:
        assert client.submit(model="ok", prompt=prompt).published(WAIT_S) is not None


def test_what_is_no_reply_disturbs_no_reply(broker: str, client: Client, service: Service) -> None:
    silent = client.submit(model=SILENT, prompt="p")
    silent.published(WAIT_S)
    reply = default_codec().encode(InferenceReply(silent.request_id, client.tenant, "ok"))
    raw_records(broker, client.reply_topic, b"\xff\x00\xff", b"\x00\x00\x00\x00\x00", reply[:-1], reply + b"\x00")
    assert client.submit(model="ok", prompt="p").result(WAIT_S).outcome == "ok"
    eventually(lambda: client.stats.undecodable_replies == 4)
    assert not silent.done()
    raw_records(broker, client.reply_topic, reply)
    assert silent.result(WAIT_S).outcome == "ok"


def test_replies_in_a_partition_added_later_arrive(broker: str, client: Client, tenant: str) -> None:
    handle = client.submit(model=SILENT, prompt="p")
    handle.published(WAIT_S)
    admin = AdminClient({"bootstrap.servers": broker})
    for future in admin.create_partitions([NewPartitions(client.reply_topic, 3)], request_timeout=WAIT_S).values():
        future.result(WAIT_S)
    producer = Producer(idempotent_producer(KafkaSettings(kafka_bootstrap_servers=broker)))
    eventually(lambda: len(producer.list_topics(client.reply_topic, WAIT_S).topics[client.reply_topic].partitions) == 3)
    reply = InferenceReply(handle.request_id, tenant, "ok", replayed=True)
    refused: list[KafkaError] = []
    producer.produce(
        client.reply_topic,
        default_codec().encode(reply),
        handle.request_id,
        partition=2,
        on_delivery=lambda error, _: refused.append(error) if error else None,
    )
    assert (producer.flush(WAIT_S), refused) == (0, [])
    assert handle.result(WAIT_S) == reply


def ask_for_billing(client: Client, service: Service, prompts: range) -> None:
    """Have these prompts answered on the topic of billing, and wait until they are."""
    already = len(service.seen)
    topic = replies_topic(client.tenant, "billing")
    fields = ({"model": "ok", "prompt": str(prompt), "reply_to": topic} for prompt in prompts)
    for handle in list(client.submit_many(fields)):  # type: ignore[arg-type]  # a plain dict
        assert handle.published(WAIT_S) is not None
    eventually(lambda: len(service.seen) == already + len(prompts))


def prompts_of(replies: Iterator[InferenceReply]) -> list[int]:
    return [int(reply.output.text) for reply in replies if reply.output and reply.output.text]


def test_a_group_goes_on_where_it_left_off(broker: str, client: Client, service: Service) -> None:
    ask_for_billing(client, service, range(20))
    with client.replies("billing", service="billing") as replies:
        assert prompts_of(next(replies) for _ in range(5)) == [0, 1, 2, 3, 4]  # 4 is still in work
    with client.replies("billing", service="billing") as replies:
        assert prompts_of(next(replies) for _ in range(3)) == [4, 5, 6]
        replies.ack()
        replies.ack()
    for reply in client.replies("billing", service="billing"):
        assert prompts_of(iter([reply])) == [7]
        break  # dropping the stream closes it: 7 is still in work
    ask_for_billing(client, service, range(20, 25))
    with client.replies("billing", service="billing", idle_timeout_ms=1_000) as replies:
        assert prompts_of(replies) == list(range(7, 25))
    with client.replies("billing", service="billing", idle_timeout_ms=500) as replies:
        assert prompts_of(replies) == []


def test_a_new_group_may_start_at_the_end_and_keeps_that_start(broker: str, client: Client, service: Service) -> None:
    ask_for_billing(client, service, range(3))
    first = client.replies("audit", service="billing", from_beginning=False, idle_timeout_ms=300)
    assert prompts_of(first) == []
    first.close()
    ask_for_billing(client, service, range(3, 6))
    with client.replies("audit", service="billing", from_beginning=False, idle_timeout_ms=1_000) as second:
        assert prompts_of(second) == [3, 4, 5]


def test_a_stream_skips_and_reports_what_is_no_reply(broker: str, client: Client, service: Service) -> None:
    topic = replies_topic(client.tenant, "billing")
    ask_for_billing(client, service, range(1))
    raw_records(broker, topic, b"\xff\xff")
    ask_for_billing(client, service, range(1, 2))
    reported: list[UndecodableReply] = []
    with client.replies("g1", service="billing", on_error=reported.append) as replies:
        assert prompts_of(next(replies) for _ in range(2)) == [0, 1]
        assert replies.undecodable == 1
    assert [(bad.topic, bad.problem, bad.value) for bad in reported] == [(topic, DecodeProblem.BAD_MAGIC, b"\xff\xff")]

    def refuse(bad: UndecodableReply) -> None:
        raise LookupError(str(bad.problem))

    for _ in range(2):  # a record that its handler refused is met again
        with client.replies("g2", service="billing", on_error=refuse) as replies, pytest.raises(LookupError):
            list(replies)
    with client.replies("g2", service="billing") as replies:
        assert prompts_of(iter([next(replies)])) == [1]


def test_closing_ends_an_iteration_in_another_thread(client: Client) -> None:
    replies = client.replies("g", service="billing")
    ended: list[object] = []

    def iterate() -> None:
        try:
            ended.append(list(replies))
        except FairlaneError as error:
            ended.append(error)

    thread = threading.Thread(target=iterate)
    thread.start()
    eventually(lambda: replies._member._owned or ended, WAIT_S)
    with takes_at_most(5):
        client.close()
    thread.join(WAIT_S)
    assert ended == [[]]
    with pytest.raises(StopIteration):
        next(replies)


def test_members_of_a_group_share_the_partitions_and_lose_nothing(
    broker: str, client: Client, service: Service
) -> None:
    topic = replies_topic(client.tenant, "billing")
    admin = AdminClient({"bootstrap.servers": broker})
    for future in admin.create_partitions([NewPartitions(topic, 4)], request_timeout=WAIT_S).values():
        future.result(WAIT_S)
    seen: list[list[int]] = [[], []]
    streams = [client.replies("shared", service="billing") for _ in seen]

    def read(index: int) -> None:
        for reply in streams[index]:
            seen[index] += prompts_of(iter([reply]))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    threads[0].start()
    ask_for_billing(client, service, range(100))
    eventually(lambda: len(seen[0]) > 10, WAIT_S)
    threads[1].start()
    eventually(lambda: all(len(stream._member._owned) == 2 for stream in streams), WAIT_S, "both own partitions")
    ask_for_billing(client, service, range(100, 300))
    eventually(lambda: set(seen[0]) | set(seen[1]) == set(range(300)), WAIT_S, "every reply seen")
    assert seen[1]
    assert sum(map(len, seen)) == 300, "an orderly change of owners repeats nothing"
    for stream, thread in zip(streams, threads, strict=True):
        stream.close()
        thread.join(WAIT_S)


def test_an_async_stream_loses_nothing_when_a_wait_is_cancelled(
    broker: str, tenant: str, client: Client, service: Service
) -> None:
    async def run() -> None:
        async with AsyncClient(tenant, broker) as other:
            async with other.replies("billing", service="billing") as replies:
                with suppress(TimeoutError):
                    await asyncio.wait_for(anext(replies), 0.2)
                await asyncio.to_thread(ask_for_billing, client, service, range(10))
                first = [await anext(replies) for _ in range(4)]
                await replies.ack()
                assert replies.topic == replies_topic(tenant, "billing")
            rest = []
            async with other.replies("billing", service="billing", idle_timeout_ms=1_000) as replies:
                rest = [reply async for reply in replies]
        assert prompts_of(iter([*first, *rest])) == list(range(10))

    asyncio.run(run())


def test_a_group_on_a_missing_topic_says_so(client: Client) -> None:
    with takes_at_most(8), client.replies("g", service="nobody") as replies, pytest.raises(Unavailable, match="nobody"):
        next(replies)
