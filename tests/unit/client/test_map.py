"""Many requests with their replies, without a broker."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing

import pytest
from confluent_kafka import KafkaError

from fairlane.client import AsyncClient, Client
from fairlane.client.base import SubmitItem
from fairlane.client.handle import BaseHandle
from fairlane.client.publisher import OpenHandles, RequestPublisher
from fairlane.errors import FairlaneError, PublishFailed, Timeout
from fairlane.records import CancelRequest, InferenceReply, InferenceRequest
from fairlane.schema_files import default_codec
from tests.kit.client_fakes import MODEL_FIELDS, FakeConnector, reply_message
from tests.kit.waiting import eventually, eventually_async

WAIT_S = 20


def items(count: int | None = None, taken: list[int] | None = None) -> Iterator[SubmitItem]:
    for index in itertools.count() if count is None else range(count):
        if taken is not None:
            taken.append(index)
        yield {"model": "m", "prompt": str(index)}


def sent(kafka: FakeConnector) -> list[InferenceRequest | CancelRequest]:
    producer = kafka.made_producer
    return [default_codec().decode_any((InferenceRequest, CancelRequest), one.value) for one in producer.sent]


def cancelled(kafka: FakeConnector) -> set[str]:
    return {record.request_id for record in sent(kafka) if isinstance(record, CancelRequest)}


def prompt_of(item: SubmitItem) -> str | None:
    assert isinstance(item, dict)
    return item["prompt"]


def answer(kafka: FakeConnector, index: int, outcome: str = "ok") -> None:
    request_id = sent(kafka)[index].request_id
    kafka.made_consumer.push(reply_message(InferenceReply(request_id, "acme", outcome, message=str(index))))


def answer_all(kafka: FakeConnector) -> None:
    """What is published is answered at once."""
    produce = kafka.made_producer.produce

    def answered(topic: str, value: bytes, key: bytes, **rest: object) -> None:
        produce(topic, value, key, **rest)  # type: ignore[arg-type]  # passed on as it came
        kafka.made_consumer.push(reply_message(InferenceReply(key.decode(), "acme", "ok")))

    kafka.made_producer.produce = answered  # type: ignore[method-assign]  # as above


def test_each_item_comes_with_its_reply_in_order_whatever_its_outcome(client: Client, kafka: FakeConnector) -> None:
    pairs = client.map(items(3), timeout=WAIT_S)
    client.start()
    results: list[tuple[str | None, str | None, str]] = []

    def later() -> None:
        for index, outcome in ((2, "ok"), (0, "failed"), (1, "rejected")):
            answer(kafka, index, outcome)

    kafka.made_producer.acknowledge_at_once = True
    first = _first_after(pairs, kafka, 3, later)
    for item, reply in itertools.chain([first], pairs):
        results.append((prompt_of(item), reply.message, reply.outcome))
    assert results == [("0", "0", "failed"), ("1", "1", "rejected"), ("2", "2", "ok")]
    assert client.stats.in_flight == 0


def test_unordered_they_come_as_they_are_answered(client: Client, kafka: FakeConnector) -> None:
    pairs = client.map(items(3), ordered=False, timeout=WAIT_S)
    first = _first_after(pairs, kafka, 3, lambda: answer(kafka, 2))
    assert prompt_of(first[0]) == "2"
    answer(kafka, 0)
    assert prompt_of(next(pairs)[0]) == "0"
    answer(kafka, 1)
    assert [prompt_of(item) for item, _ in pairs] == ["1"]


def _first_after(
    pairs: Iterator[tuple[SubmitItem, InferenceReply]], kafka: FakeConnector, count: int, then: Callable[[], None]
) -> tuple[SubmitItem, InferenceReply]:
    """The first pair, whose wait begins before ``then`` is called."""

    def act() -> None:
        eventually(lambda: len(kafka.made_producer.sent) == count, WAIT_S)
        then()

    thread = threading.Thread(target=act)
    thread.start()
    try:
        return next(pairs)
    finally:
        thread.join(WAIT_S)


@pytest.mark.parametrize("ordered", [True, False])
def test_an_endless_iterable_takes_bounded_memory(client: Client, kafka: FakeConnector, ordered: bool) -> None:
    answer_all(kafka)
    taken: list[int] = []
    pairs = client.map(items(taken=taken), ordered=ordered, ahead=5, timeout=WAIT_S)
    for count, _ in enumerate(itertools.islice(pairs, 50), start=1):
        assert len(taken) <= count + 5
        assert client.stats.in_flight <= 5


def test_never_more_ahead_than_the_client_may_have_in_flight(kafka: FakeConnector) -> None:
    answer_all(kafka)
    with Client("acme", connector=kafka, max_in_flight=2, close_timeout_ms=0) as client:
        taken: list[int] = []
        next(client.map(items(taken=taken), timeout=WAIT_S))
        assert len(taken) <= 3


def test_what_is_left_is_cancelled(client: Client, kafka: FakeConnector) -> None:
    pairs = client.map(items(3), timeout=WAIT_S)
    _first_after(pairs, kafka, 3, lambda: answer(kafka, 0))
    del pairs
    left = {record.request_id for record in sent(kafka)[1:3]}
    eventually(lambda: cancelled(kafka) == left, WAIT_S)


def test_who_waits_too_long_is_told_and_the_rest_is_cancelled(client: Client, kafka: FakeConnector) -> None:
    for ordered, count in ((True, 2), (False, 4)):
        with pytest.raises(Timeout):
            next(client.map(items(2), ordered=ordered, timeout=0.01))
        eventually(lambda count=count: len(cancelled(kafka)) == count, WAIT_S)  # type: ignore[misc]  # bound at once


def test_closing_the_client_cancels_what_was_left_a_moment_ago(kafka: FakeConnector) -> None:
    with Client("acme", connector=kafka, close_timeout_ms=0) as client, pytest.raises(Timeout):
        next(client.map(items(2), timeout=0.01))
    assert len(cancelled(kafka)) == 2


def test_closing_the_client_waits_for_a_cancellation_that_its_thread_has_begun(
    kafka: FakeConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()
    cancel, end = RequestPublisher.cancel, OpenHandles.end

    def slow_cancel(publisher: RequestPublisher, handle: BaseHandle) -> None:
        begun.set()
        # Long enough for whoever closes the client to overtake it, if nothing keeps them from that.
        ended.wait(0.3)
        cancel(publisher, handle)

    def told_end(handles: OpenHandles, error: FairlaneError) -> None:
        end(handles, error)
        ended.set()

    monkeypatch.setattr(RequestPublisher, "cancel", slow_cancel)
    monkeypatch.setattr(OpenHandles, "end", told_end)
    with Client("acme", connector=kafka, close_timeout_ms=0) as client:
        with pytest.raises(Timeout):
            next(client.map(items(1), timeout=0.01))
        assert begun.wait(WAIT_S)
    assert len(cancelled(kafka)) == 1


def test_what_is_left_is_cancelled_once_the_producer_has_room_again(client: Client, kafka: FakeConnector) -> None:
    pairs = client.map(items(3), timeout=WAIT_S)
    _first_after(pairs, kafka, 3, lambda: answer(kafka, 0))
    producer, refused = kafka.made_producer, threading.Event()
    produce = producer.produce

    def full(*_arguments: object, **_rest: object) -> None:
        refused.set()
        raise BufferError

    producer.produce = full  # type: ignore[method-assign]  # what a producer does whose queue is full
    del pairs
    assert refused.wait(WAIT_S)
    assert not cancelled(kafka)
    producer.produce = produce  # type: ignore[method-assign]  # and there is room again
    left = {record.request_id for record in sent(kafka)[1:3]}
    eventually(lambda: cancelled(kafka) == left, WAIT_S)


def test_an_error_says_which_item(client: Client, kafka: FakeConnector) -> None:
    with pytest.raises(ValueError, match=r"^prompt: ") as mistake:
        list(client.map([MODEL_FIELDS, {"model": "m", "prompt": ""}]))
    assert mistake.value.__notes__ == ["item 1"]


def test_an_error_of_the_broker_says_which_item(client: Client, kafka: FakeConnector) -> None:
    pairs = client.map([MODEL_FIELDS], timeout=WAIT_S)
    with pytest.raises(PublishFailed) as lost:
        _first_after(
            pairs,
            kafka,
            1,
            lambda: kafka.made_producer.refuse(KafkaError.TOPIC_AUTHORIZATION_FAILED),
        )
    assert lost.value.__notes__ == ["item 0"]
    with pytest.raises(ValueError, match=r"^ahead: 0 is below 1"):
        client.map([], ahead=0)


@pytest.mark.parametrize("ordered", [True, False])
def test_the_client_for_asyncio_maps_both_kinds_of_iterables(kafka: FakeConnector, ordered: bool) -> None:
    answer_all(kafka)

    async def source() -> AsyncIterator[SubmitItem]:
        for item in items(20):
            yield item

    async def main() -> None:
        async with AsyncClient("acme", connector=kafka, close_timeout_ms=0) as client:
            for given in (items(20), source()):
                pairs = client.map(given, ordered=ordered, ahead=3, timeout=WAIT_S)
                found = [prompt_of(item) async for item, _ in pairs]
                assert sorted(map(int, filter(None, found))) == list(range(20))
                assert not ordered or found == [str(index) for index in range(20)]
            assert client.stats.in_flight == 0

    asyncio.run(main())


def test_what_is_left_is_cancelled_with_asyncio_too(kafka: FakeConnector) -> None:
    async def main() -> None:
        async with AsyncClient("acme", connector=kafka, close_timeout_ms=0) as client:
            pairs = client.map(items(3), ordered=False, timeout=WAIT_S)
            async with aclosing(pairs):
                first = asyncio.ensure_future(anext(pairs))
                await eventually_async(lambda: len(kafka.made_producer.sent) == 3, WAIT_S)
                answer(kafka, 1)
                assert prompt_of((await first)[0]) == "1"
            assert sum(isinstance(record, CancelRequest) for record in sent(kafka)) == 2
            with pytest.raises(Timeout):
                await anext(client.map(items(1), timeout=0.01))

    asyncio.run(main())
