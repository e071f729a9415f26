"""Whatever happens to requests, and in whatever order: each ends once, and the room it took comes back."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from hypothesis import example, given
from hypothesis import strategies as st

from fairlane.client.connector import KafkaHeaders
from fairlane.client.handle import Handle
from fairlane.client.publisher import EncodedRequest, OpenHandles, RequestPublisher
from fairlane.client.requests import build_request, new_request_id
from fairlane.client.retry_policies import NO_RETRIES, RetryPolicy
from fairlane.client.window import Window
from fairlane.codec import Codec
from fairlane.errors import Backpressure, ClientClosed, PublishFailed
from fairlane.records import CancelRequest, InferenceReply, InferenceRequest
from fairlane.schema_files import default_codec
from tests.kit.client_fakes import DeliveryReport

REPLIES = "replies.acme"
SIZE = 100
IDS = tuple(new_request_id() for _ in range(3))


class FakeProducer(Producer):
    """Keeps the reports of what was produced, for the test to call in any order."""

    def __init__(self) -> None:
        self.reports: list[DeliveryReport] = []
        self.values: list[bytes] = []
        self.fails_before: BaseException | None = None
        self.fails_after: BaseException | None = None

    def produce(  # type: ignore[override]  # as the client calls it
        self, topic: str, value: bytes, key: bytes, *, headers: KafkaHeaders, on_delivery: DeliveryReport
    ) -> None:
        if self.fails_before is not None:
            raise self.fails_before
        self.reports.append(on_delivery)
        self.values.append(value)
        if self.fails_after is not None:
            raise self.fails_after

    def poll(self, timeout: float = -1) -> int:
        return 0

    def flush(self, timeout: float = -1) -> int:
        return len(self.reports)

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        """Nothing is queued."""

    def report(self, which: int, code: int | None) -> None:
        if self.reports:
            report = self.reports.pop(which % len(self.reports))
            report(None if code is None else KafkaError(code), Message(topic="requests.acme", partition=0, offset=1))


class HookedCodec(Codec):
    """Calls a function before it encodes a request."""

    def __init__(self) -> None:
        self._codec = default_codec()
        self.before_request: Callable[[], object] = int

    def encode(self, record: object) -> bytes:
        if isinstance(record, InferenceRequest):
            self.before_request()
        return self._codec.encode(record)


class Bench:
    def __init__(self) -> None:
        self.now_ms = 0
        self.codec = HookedCodec()
        self.window = Window(1_000, 1_000_000)
        self.table = OpenHandles(REPLIES, self.window, lambda: self.now_ms, lambda: 0.5)
        self.producer = FakeProducer()
        self.publisher = RequestPublisher(
            self.producer, self.codec, "acme", self.table, self.window, lambda: self.now_ms
        )
        self.handles: list[Handle] = []

    def submit(self, which: int) -> None:
        """Any of three ids, with and without tries, answered here or elsewhere."""
        policy = RetryPolicy(tries=3) if which % 2 else NO_RETRIES
        reply_to = f"{REPLIES}.other" if which % 5 == 0 else REPLIES
        request = build_request(model="m", prompt="p", request_id=IDS[which % 3], timeout_ms=20_000)
        assert self.window.try_acquire(SIZE)
        self.handles.append(self.publisher.publish(EncodedRequest(request, reply_to, b"x" * SIZE, []), policy, Handle))

    def step(self, what: str, which: int) -> None:
        match what:
            case "submit":
                self.submit(which)
            case "acknowledged":
                self.producer.report(which, None)
            case "lost":
                self.producer.report(which, KafkaError._MSG_TIMED_OUT)
            case "denied":
                self.producer.report(which, KafkaError.TOPIC_AUTHORIZATION_FAILED)
            case "refused":
                self.reply(IDS[which % 3], "rejected")
            case "answered":
                self.reply(IDS[which % 3], "ok")
            case "cancel":
                if self.handles:
                    self.publisher.cancel(self.handles[which % len(self.handles)])
            case "time":
                self.now_ms += which * 20
                before, alive = len(self.producer.reports), sum(not handle.over for handle in self.handles)
                self.publisher.work(0)
                assert len(self.producer.reports) - before <= alive

    def reply(self, request_id: str, outcome: str) -> None:
        retry_after_ms = 10 if outcome == "rejected" else None
        self.table.settle(InferenceReply(request_id, "acme", outcome, retry_after_ms=retry_after_ms), self.now_ms)


STEPS = st.tuples(
    st.sampled_from(["submit", "acknowledged", "lost", "denied", "refused", "answered", "cancel", "time"]),
    st.integers(0, 60),
)


@given(st.lists(STEPS, max_size=40), st.booleans())
@example(steps=[("submit", 0), ("submit", 0), ("submit", 21), ("refused", 0), ("lost", 2)], closed=False)
def test_every_request_ends_once_and_gives_back_its_room(steps: Sequence[tuple[str, int]], closed: bool) -> None:
    bench = Bench()
    ended: Counter[int] = Counter()
    for what, which in steps:
        known = len(bench.handles)
        bench.step(what, which)
        for handle in bench.handles[known:]:
            handle.replied.when_done(partial(ended.update, [id(handle)]))
        assert bench.window.in_flight >= 0
        assert bench.window.buffered_bytes >= 0
    if closed:
        bench.publisher.close_retries()
        while bench.producer.reports:
            bench.producer.report(0, KafkaError._PURGE_QUEUE)
        bench.table.fail_all(ClientClosed("closed"))
    else:
        while bench.producer.reports:
            bench.producer.report(0, None)
        for request_id in IDS:
            bench.reply(request_id, "ok")
    assert len(bench.table) == 0
    assert (bench.window.in_flight, bench.window.buffered_bytes) == (0, 0)
    for handle in bench.handles:
        assert handle.done()
        assert ended[id(handle)] == 1
    assert closed or all(handle.acknowledged.done for handle in bench.handles)
    bench.now_ms += 6_000
    bench.publisher.work(0)
    assert bench.producer.reports == [], "what has ended is not published again"


def bytes_held(bench: Bench) -> tuple[int, int]:
    return bench.window.in_flight, bench.window.buffered_bytes


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), KeyboardInterrupt(), BufferError(), KafkaException(KafkaError(1))]
)
def test_what_the_producer_does_not_take_takes_no_room(which: int, error: BaseException) -> None:
    bench = Bench()
    bench.producer.fails_before = error
    with pytest.raises((RuntimeError, KeyboardInterrupt, Backpressure, PublishFailed)):
        bench.submit(which)
    assert bytes_held(bench) == (0, 0)
    assert len(bench.table) == 0


@pytest.mark.parametrize("which", [2, 1])
def test_the_room_of_a_submit_that_is_interrupted_comes_back_once(which: int) -> None:
    """Ctrl-C as the producer has taken it: its report still comes."""
    bench = Bench()
    bench.producer.fails_after = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench.submit(which)
    bench.producer.fails_after = None
    bench.producer.report(0, KafkaError._MSG_TIMED_OUT)
    assert bytes_held(bench) == (0, 0)
    bench.now_ms += 6_000
    bench.publisher.work(0)
    assert bench.producer.reports == [], "nobody waits for it, so it is not tried again"


@pytest.mark.parametrize(("what", "cancelled_in_log"), [("refused", False), ("lost", True)])
def test_a_cancel_amid_the_second_publications_is_kept(what: str, cancelled_in_log: bool) -> None:
    bench = Bench()
    for which in (1, 3):
        bench.submit(which)
    for which in (1, 3):
        bench.step(what, which if what == "refused" else 0)
    (first, second), published = bench.handles, len(bench.producer.values)
    bench.now_ms += 5_000
    # The first is published while the second, due as well, is cancelled.
    bench.codec.before_request = lambda: bench.publisher.cancel(second)
    bench.publisher.work(0)
    records = [
        default_codec().decode_any((InferenceRequest, CancelRequest), value)
        for value in bench.producer.values[published:]
    ]
    requests = [record.request_id for record in records if isinstance(record, InferenceRequest)]
    assert requests == [first.request_id]
    cancelled = [record.request_id for record in records if isinstance(record, CancelRequest)]
    assert cancelled == ([second.request_id] if cancelled_in_log else [])
    assert second.done()
    assert not first.done()


def test_a_cancel_that_finds_no_room_leaves_the_request_waiting_for_its_try() -> None:
    bench = Bench()
    bench.submit(1)
    bench.step("lost", 0)
    bench.producer.fails_before = BufferError()
    with pytest.raises(Backpressure):
        bench.publisher.cancel(bench.handles[0])
    bench.producer.fails_before = None
    bench.now_ms += 5_000
    bench.publisher.work(0)
    assert len(bench.producer.values) == 2
