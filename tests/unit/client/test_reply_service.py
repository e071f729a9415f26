"""A service's handler: how often it is called, what is done, and where replies go that it cannot take."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from prometheus_client import REGISTRY

import fairlane
from fairlane import headers
from fairlane.client import Client
from fairlane.client.aio import AsyncReplyStream
from fairlane.client.group_member import GroupMember
from fairlane.client.reply_service import (
    AsyncReplyService,
    DeadLetter,
    ReplyLetters,
    ReplyService,
    UndecodableReplyError,
)
from fairlane.client.retry_policies import HandlerRetries
from fairlane.errors import Unavailable
from fairlane.records import InferenceReply, Output
from fairlane.schema_files import default_codec
from tests.kit.client_fakes import FakeConsumer, FakeMember, FakeProducer, reply_message

WAIT_S = 20
TOPIC = "replies.acme.billing"
LETTERS = "dead-letter.replies.acme"
AT_ONCE = HandlerRetries(tries=3, first_wait_ms=0)
SECRET = "what the model said"
BROKEN = b"no reply at all"
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class FakeLetterProducer(FakeProducer):
    """A producer whose topic is there."""

    def __init__(self) -> None:
        super().__init__()
        self.acknowledge_at_once = True
        self.metadata = FakeConsumer()

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        return self.metadata.list_topics(topic, timeout)


class Kit:
    """A service of either kind over one member, and what it did. ``fails`` says how often each id's handler raises."""

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async
        self.consumer = FakeMember()
        self.producer = FakeLetterProducer()
        self.letters: ReplyLetters | None = ReplyLetters(self.producer, "acme", "group")
        self.member = GroupMember(
            self.consumer,
            TOPIC,
            default_codec(),
            from_beginning=True,
            on_undecodable=None,
            idle_timeout_s=0.05,
            start_timeout_s=0.2,
        )
        self.retries = AT_ONCE
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        self.given_up: list[DeadLetter] = []
        self.callback: Callable[[DeadLetter], None] | None = None
        self.stop: Callable[[], None] = lambda: None
        self.stop_after: int | None = None

    def push(self, *ids: str) -> None:
        for offset, request_id in enumerate(ids):
            reply = InferenceReply(request_id, "acme", "ok", model="m", output=Output(text=SECRET))
            given = [("traceparent", TRACE), ("baggage", b"key=secret")]
            self.consumer.push(reply_message(reply, TOPIC, offset, [*given]))

    def push_one_that_is_broken(self) -> None:
        """`a`, what is no reply under the key `b`, and `c`."""
        self.push("a")
        broken = reply_message(InferenceReply("b", "acme", "ok"), TOPIC, 1, [("traceparent", TRACE)])
        broken.set_value(BROKEN)
        self.consumer.push(broken, reply_message(InferenceReply("c", "acme", "ok"), TOPIC, 2))

    def handle(self, reply: InferenceReply) -> None:
        self.calls.append(reply.request_id)
        if len(self.calls) == self.stop_after:
            self.stop()
        if self.fails.get(reply.request_id, 0) > 0:
            self.fails[reply.request_id] -= 1
            raise LookupError(SECRET)

    async def handle_async(self, reply: InferenceReply) -> None:
        self.handle(reply)

    async def callback_async(self, letter: DeadLetter) -> None:
        assert self.callback is not None
        self.callback(letter)

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


def timed() -> tuple[float, float]:
    """How many calls of the handler, and the seconds of all."""
    name, topic = "fairlane_reply_handler_seconds", {"topic": TOPIC}
    count, seconds = (REGISTRY.get_sample_value(f"{name}_{of}", topic) or 0.0 for of in ("count", "sum"))
    return count, seconds


def test_each_reply_is_handled_in_its_order_and_committed(kit: Kit) -> None:
    before = served("handled")
    kit.push("a", "b", "c")
    kit.run()
    assert kit.calls == ["a", "b", "c"]
    assert (kit.committed, kit.consumer.closed, kit.producer.sent) == (3, True, [])
    assert served("handled") == before + 3


def test_a_handler_that_fails_is_called_again_and_those_behind_wait(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    before, (calls, seconds) = failures(), timed()
    kit.fails = {"a": 2}
    kit.push("a", "b")
    kit.run()
    assert kit.calls == ["a", "a", "a", "b"]
    assert (kit.committed, kit.producer.sent) == (2, [])
    assert failures() == before + 2
    assert timed()[0] == calls + len(kit.calls), "each call is timed, those that raised too"
    assert timed()[1] > seconds
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
    before = served("dead_letter")
    kit.callback = kit.given_up.append
    kit.fails = {"a": 99}
    kit.push("a", "b")
    kit.run()
    (letter,) = kit.given_up
    assert letter.reply is not None
    assert (letter.reply.request_id, type(letter.error)) == ("a", LookupError)
    assert (letter.record.topic, letter.record.offset, letter.record.key) == (TOPIC, 0, b"a")
    assert letter.record.value == default_codec().encode(letter.reply)
    assert SECRET not in repr(letter)
    assert (kit.calls[-1], kit.committed, kit.producer.sent) == ("b", 2, [])
    assert served("dead_letter") == before + 1


def test_a_reply_that_cannot_be_kept_anywhere_is_not_done(kit: Kit) -> None:
    kit.fails = {"b": 99}
    kit.producer.refuse_with = KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "not yours"))
    kit.push("a", "b", "c")
    with pytest.raises(Unavailable, match="not yours"):
        kit.run()
    assert (kit.calls[-1], kit.committed, kit.consumer.closed) == ("b", 1, True)


def test_a_callback_that_fails_ends_the_service_and_the_reply_is_not_done(kit: Kit) -> None:
    def callback(_letter: DeadLetter) -> None:
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


def test_a_record_that_is_no_reply_is_kept_too(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    before, calls = served("dead_letter"), timed()[0]
    kit.push_one_that_is_broken()
    kit.run()
    (letter,) = kit.producer.sent
    assert (letter.topic, letter.key, letter.value) == (LETTERS, b"b", BROKEN)
    found = dict(letter.headers)
    assert found[headers.DLT_EXCEPTION_CLASS] == b"fairlane.client.reply_service.UndecodableReplyError"
    assert (found[headers.DLT_ORIGINAL_OFFSET], found[headers.TRACE_PARENT]) == (b"1", TRACE)
    assert (kit.calls, kit.committed) == (["a", "c"], 3)
    assert served("dead_letter") == before + 1
    assert timed()[0] == calls + 2, "no handler was given it"
    assert f"reply_undecodable topic={TOPIC} partition=0 offset=1 problem=bad_magic" in caplog.text


def test_a_callback_takes_what_is_no_reply(kit: Kit) -> None:
    before = served("dead_letter")
    kit.callback = kit.given_up.append
    kit.push_one_that_is_broken()
    kit.run()
    (letter,) = kit.given_up
    assert (letter.reply, letter.record.key, letter.record.value) == (None, b"b", BROKEN)
    assert (letter.record.topic, letter.record.partition, letter.record.offset) == (TOPIC, 0, 1)
    assert isinstance(letter.error, UndecodableReplyError)
    assert "bad_magic" in str(letter.error)
    assert (kit.calls, kit.committed, kit.producer.sent) == (["a", "c"], 3, [])
    assert served("dead_letter") == before + 1


def test_what_is_no_reply_and_is_kept_nowhere_is_not_done(kit: Kit) -> None:
    before = served("dead_letter")
    kit.producer.refuse_with = KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "not yours"))
    kit.push_one_that_is_broken()
    with pytest.raises(Unavailable, match="not yours"):
        kit.run()
    assert (kit.calls, kit.committed, served("dead_letter")) == (["a"], 1, before)


def test_a_callback_that_fails_on_what_is_no_reply_leaves_it_undone(kit: Kit) -> None:
    def callback(_letter: DeadLetter) -> None:
        raise OSError("disk full")

    kit.callback = callback
    kit.push_one_that_is_broken()
    with pytest.raises(OSError, match="disk full"):
        kit.run()
    assert (kit.calls, kit.committed) == (["a"], 1)


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
        ({"on_error": print}, r"^on_error: to a service, what is no reply is a dead letter"),
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


async def handle_nothing(_reply: InferenceReply) -> None: ...


async def take_nothing(_letter: DeadLetter) -> None: ...


def test_a_service_needs_no_client_of_the_callers() -> None:
    made = (
        fairlane.replies("group", print, tenant="acme", service="billing", bootstrap_servers="127.0.0.1:1"),
        fairlane.async_replies("group", handle_nothing, tenant="acme", topic=TOPIC, bootstrap_servers="127.0.0.1:1"),
    )
    assert [type(service) for service in made] == [ReplyService, AsyncReplyService]
    assert {(service.topic, service.dead_letter_topic) for service in made} == {(TOPIC, LETTERS)}
    own = (
        fairlane.replies("group", print, tenant="acme", on_dead_letter=print),
        fairlane.async_replies("group", handle_nothing, tenant="acme", on_dead_letter=take_nothing),
    )
    assert {(service.topic, service.dead_letter_topic) for service in own} == {("replies.acme", None)}


def test_a_service_without_a_client_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"^tenant: "):
        fairlane.replies("group", print, tenant="Not A Name")
    with pytest.raises(ValueError, match=r"^retries: waits of "):
        fairlane.replies("group", print, tenant="acme", retries=HandlerRetries(tries=9), max_processing_ms=10_000)
