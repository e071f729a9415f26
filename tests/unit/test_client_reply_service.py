"""A service's handler: how often it is called, what is done, and where replies go that it cannot take."""

import asyncio
import threading
from collections.abc import Callable
from typing import cast

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException
from prometheus_client import REGISTRY

from fairlane import headers
from fairlane.client import Client
from fairlane.client.aio import AsyncReplyStream
from fairlane.client.group_member import GroupMember
from fairlane.client.handler_retries import HandlerRetries
from fairlane.client.reply_letters import ReplyLetters
from fairlane.client.reply_service import AsyncReplyService, ReplyService
from fairlane.errors import Unavailable
from fairlane.records import InferenceReply, Output
from fairlane.schema_files import default_codec
from tests.unit.client_fakes import FakeConsumer, FakeMember, FakeProducer, reply_message

WAIT_S = 20
TOPIC = "replies.acme.billing"
LETTERS = "dead-letter.replies.acme"
AT_ONCE = HandlerRetries(tries=3, first_wait_ms=0)
SECRET = "what the model said"
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class FakeLetterProducer(FakeProducer):
    """A producer whose topic is there."""

    def __init__(self) -> None:
        super().__init__()
        self.acknowledge_at_once = True
        self.metadata = FakeConsumer()
        self.list_topics = self.metadata.list_topics


class Kit:
    """A service of either kind over one member, and what it did. ``fails`` says how often each id's handler raises."""

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async
        self.consumer = FakeMember()
        self.producer = FakeLetterProducer()
        self.letters: ReplyLetters | None = ReplyLetters(self.producer, "acme", "group")
        self.member = GroupMember(
            cast("Consumer", self.consumer),
            TOPIC,
            default_codec(),
            from_beginning=True,
            on_undecodable=self.letters.undecodable,
            idle_timeout_s=0.05,
            start_timeout_s=0.2,
        )
        self.retries = AT_ONCE
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        self.given_up: list[tuple[str, str]] = []
        self.callback: Callable[[InferenceReply, Exception], None] | None = None
        self.stop: Callable[[], None] = lambda: None
        self.stop_after: int | None = None

    def push(self, *ids: str) -> None:
        for offset, request_id in enumerate(ids):
            reply = InferenceReply(request_id, "acme", "ok", model="m", output=Output(text=SECRET))
            given = [("traceparent", TRACE), ("baggage", b"key=secret")]
            self.consumer.push(reply_message(reply, TOPIC, offset, [*given]))

    def handle(self, reply: InferenceReply) -> None:
        self.calls.append(reply.request_id)
        if len(self.calls) == self.stop_after:
            self.stop()
        if self.fails.get(reply.request_id, 0) > 0:
            self.fails[reply.request_id] -= 1
            raise LookupError(SECRET)

    async def handle_async(self, reply: InferenceReply) -> None:
        self.handle(reply)

    async def callback_async(self, reply: InferenceReply, error: Exception) -> None:
        assert self.callback is not None
        self.callback(reply, error)

    def run(self) -> None:
        letters = None if self.callback is not None else self.letters
        if not self.is_async:
            service = ReplyService(self.member, self.handle, self.retries, letters, self.callback, 0.2)
            self.stop = service.stop
            service.run()
            return

        async def main() -> None:
            stream = AsyncReplyStream(self.member)
            callback = None if self.callback is None else self.callback_async
            service = AsyncReplyService(self.member, stream, self.handle_async, self.retries, letters, callback, 0.2)
            self.stop = service.stop
            await service.run()

        asyncio.run(main())

    @property
    def committed(self) -> int:
        """The first offset that is not done."""
        return self.consumer.commits[-1][0][1]


@pytest.fixture(params=[False, True], ids=["threads", "asyncio"])
def kit(request: pytest.FixtureRequest) -> Kit:
    return Kit(request.param)


def served(result: str) -> float:
    return REGISTRY.get_sample_value("fairlane_replies_served_total", {"topic": TOPIC, "result": result}) or 0.0


def failures() -> float:
    return REGISTRY.get_sample_value("fairlane_reply_handler_failures_total", {"topic": TOPIC}) or 0.0


def test_each_reply_is_handled_in_its_order_and_committed(kit: Kit) -> None:
    before = served("handled")
    kit.push("a", "b", "c")
    kit.run()
    assert kit.calls == ["a", "b", "c"]
    assert (kit.committed, kit.consumer.closed, kit.producer.sent) == (3, True, [])
    assert served("handled") == before + 3


def test_a_handler_that_fails_is_called_again_and_those_behind_wait(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    before = failures()
    kit.fails = {"a": 2}
    kit.push("a", "b")
    kit.run()
    assert kit.calls == ["a", "a", "a", "b"]
    assert (kit.committed, kit.producer.sent) == (2, [])
    assert failures() == before + 2
    assert "error=LookupError failures=2" in caplog.text
    assert SECRET not in caplog.text


def test_a_reply_that_is_never_taken_is_kept_as_it_came_and_the_next_is_served(kit: Kit) -> None:
    before = served("dead_letter")
    kit.fails = {"a": 99}
    kit.push("a", "b")
    kit.run()
    assert kit.calls == ["a", "a", "a", "b"]
    (letter,) = kit.producer.sent
    assert (letter.topic, letter.key) == (LETTERS, b"a")
    assert default_codec().decode_as(InferenceReply, letter.value).request_id == "a"
    found = dict(letter.headers)
    assert found[headers.DLT_ORIGINAL_TOPIC] == TOPIC.encode()
    assert found[headers.DLT_ORIGINAL_OFFSET] == b"0"
    assert found[headers.DLT_ORIGINAL_CONSUMER_GROUP] == b"group"
    assert found[headers.DLT_EXCEPTION_MESSAGE] == b"LookupError at each of 3 tries"
    assert (found[headers.TENANT], found[headers.MODEL]) == (b"acme", b"m")
    assert found[headers.TRACE_PARENT] == TRACE
    assert SECRET not in repr(letter.headers), "an error may quote a reply"
    assert kit.committed == 2
    assert served("dead_letter") == before + 1


def test_a_callback_may_take_it_instead(kit: Kit) -> None:
    kit.callback = lambda reply, error: kit.given_up.append((reply.request_id, type(error).__name__))
    kit.fails = {"a": 99}
    kit.push("a", "b")
    kit.run()
    assert kit.given_up == [("a", "LookupError")]
    assert (kit.calls[-1], kit.committed, kit.producer.sent) == ("b", 2, [])


def test_a_reply_that_cannot_be_kept_anywhere_is_not_done(kit: Kit) -> None:
    kit.fails = {"b": 99}
    kit.producer.refuse_with = KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "not yours"))
    kit.push("a", "b", "c")
    with pytest.raises(Unavailable, match="not yours"):
        kit.run()
    assert (kit.calls[-1], kit.committed, kit.consumer.closed) == ("b", 1, True)


def test_a_callback_that_fails_ends_the_service_and_the_reply_is_not_done(kit: Kit) -> None:
    def callback(_reply: InferenceReply, _error: Exception) -> None:
        raise OSError("disk full")

    kit.callback = callback
    kit.fails = {"b": 99}
    kit.push("a", "b", "c")
    with pytest.raises(OSError, match="disk full"):
        kit.run()
    assert (kit.calls[-1], kit.committed) == ("b", 1)


def test_without_the_topic_nothing_is_served(kit: Kit) -> None:
    kit.producer.metadata.partitions = None
    kit.push("a")
    with pytest.raises(Unavailable, match=rf"{LETTERS} does not exist"):
        kit.run()
    assert (kit.calls, kit.consumer.closed) == ([], True)


def test_a_record_that_is_no_reply_is_kept_too(kit: Kit) -> None:
    kit.consumer.push(reply_message(InferenceReply("a", "acme", "ok"), TOPIC, 0))
    broken = reply_message(InferenceReply("b", "acme", "ok"), TOPIC, 1)
    broken.set_value(b"no reply at all")
    kit.consumer.push(broken)
    kit.run()
    (letter,) = kit.producer.sent
    assert (letter.topic, letter.key, letter.value) == (LETTERS, b"b", b"no reply at all")
    assert (kit.calls, kit.committed) == (["a"], 2)


def test_stopping_lets_the_reply_in_work_end(kit: Kit) -> None:
    kit.stop_after = 2
    kit.push("a", "b", "c")
    kit.run()
    assert (kit.calls, kit.committed, kit.consumer.closed) == (["a", "b"], 2, True)


def test_stopping_leaves_further_tries_to_the_next_service(kit: Kit) -> None:
    kit.retries = HandlerRetries(tries=3, first_wait_ms=60_000, longest_wait_ms=60_000)
    kit.fails, kit.stop_after = {"b": 99}, 2
    kit.push("a", "b", "c")
    kit.run()
    assert (kit.calls, kit.committed, kit.producer.sent) == (["a", "b"], 1, [])


def test_a_task_that_is_cancelled_leaves_its_reply_undone() -> None:
    kit = Kit(is_async=True)
    kit.push("a")
    began = threading.Event()

    async def main() -> None:
        entered = asyncio.Event()

        async def handle(_reply: InferenceReply) -> None:
            entered.set()
            began.set()
            await asyncio.Event().wait()

        stream = AsyncReplyStream(kit.member)
        service = AsyncReplyService(kit.member, stream, handle, AT_ONCE, kit.letters, None, 0.2)
        task = asyncio.create_task(service.run())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert began.is_set()
    assert (kit.committed, kit.consumer.closed) == (0, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dead_letters": True}, r"^dead_letters: a service would read again what it puts there"),
        ({"max_processing_ms": 10_000, "retries": HandlerRetries(tries=9)}, r"^retries: waits of "),
        ({"topic": "replies.globex"}, r"^topic: 'replies.globex' is no reply topic of 'acme'"),
        ({"topic": TOPIC, "service": "billing"}, r"^topic: give one of"),
    ],
)
def test_a_wrong_option_is_a_mistake(options: dict[str, object], message: str) -> None:
    with Client("acme", bootstrap_servers="127.0.0.1:1") as client, pytest.raises(ValueError, match=message):
        client.serve_replies("group", print, **options)  # type: ignore[arg-type]  # any mapping


def test_a_service_tells_which_topics_it_uses() -> None:
    with Client("acme", bootstrap_servers="127.0.0.1:1") as client:
        service = client.serve_replies("group", print, service="billing")
        assert (service.topic, service.dead_letter_topic) == (TOPIC, LETTERS)
        other = client.serve_replies("group", print, on_dead_letter=print)
        assert (other.topic, other.dead_letter_topic) == ("replies.acme", None)
        assert client.replies("group", dead_letters=True).topic == LETTERS
