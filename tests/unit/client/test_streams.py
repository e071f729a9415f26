"""Streams of text without a broker."""

import gc
import threading

import pytest
from confluent_kafka import KafkaError, TopicPartition

from fairlane.client import Client, TextDelta, TextStream, new_request_id, text_stream
from fairlane.errors import Cancelled, ClientClosed, PublishFailed, Rejected, Timeout, Unavailable
from fairlane.records import InferenceRequest, ReplyChunk
from fairlane.schema_files import default_codec
from tests.kit.client_fakes import FakeConnector, chunk_message, error_message, no_broker
from tests.kit.stream_replies import answer, cancelled, chunk
from tests.kit.waiting import eventually

WAIT_S = 10


def stream(client: Client, timeout: float | None = WAIT_S) -> TextStream:
    return client.stream(model="m", prompt="hello", timeout=timeout)


def test_chunks_are_read_from_their_end_before_the_request_is_published(
    client: Client, kafka: FakeConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(model="m", prompt="p")
    assert kafka.chunk_readers == 0, "nobody streams"
    published_when_assigned: list[int] = []
    assign = kafka.chunks.incremental_assign

    def watched(partitions: list[TopicPartition]) -> None:
        published_when_assigned.append(len(kafka.made_producer.sent))
        assign(partitions)

    monkeypatch.setattr(kafka.chunks, "incremental_assign", watched)
    streams = [stream(client) for _ in range(2)]
    assert published_when_assigned == [1]
    assert [(start.topic, start.offset) for start in kafka.chunks.assigned] == [("chunks.acme", 5)]
    assert kafka.chunk_readers == 1
    assert len(streams) == 2


def test_the_request_asks_for_its_text_as_it_comes(client: Client, kafka: FakeConnector) -> None:
    made = client.stream(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
    request = default_codec().decode_as(InferenceRequest, kafka.made_producer.sent[0].value)
    assert request.parameters.stream
    assert (request.request_id, request.parameters.max_tokens) == (made.request_id, 3)


def test_text_comes_as_it_is_made_and_the_reply_ends_it(client: Client, kafka: FakeConnector) -> None:
    made = stream(client)
    seen = []
    for seq, text in enumerate(["Par", "is"]):
        chunk(kafka, made.request_id, seq, text)
        seen.append(next(made))
        assert made.text == "Paris"[: 3 + 2 * seq]
    answer(kafka, made.request_id, "Paris.")
    seen += list(made)
    assert seen == [TextDelta("Par"), TextDelta("is"), TextDelta(".")]
    assert made.text == "Paris."
    assert made.reply().outcome == "ok"
    with pytest.raises(StopIteration):
        next(made)
    assert client._core.chunks._answers == {}
    made.close()
    assert cancelled(kafka) == []


def test_a_stream_that_is_printed_reads_well(client: Client, kafka: FakeConnector) -> None:
    made = stream(client)
    chunk(kafka, made.request_id, 0, "Lond")
    printed = str(next(made))
    chunk(kafka, made.request_id, 0, "Par", attempt=2)
    delta = next(made)
    assert delta == TextDelta("Par", restarted=True, attempt=2)
    answer(kafka, made.request_id, "Paris")
    printed += "".join(str(one) for one in [delta, *made])
    assert printed == "Lond\n[started again]\nParis"


def test_streams_get_the_chunks_of_their_own_request(client: Client, kafka: FakeConnector) -> None:
    first, second = stream(client), stream(client)
    other = chunk_message(ReplyChunk("another", "acme", 1, 1, 0, "x"))
    other.set_value(b"\xff")  # would be counted if it were decoded
    kafka.chunks.push(other)
    chunk(kafka, second.request_id, 0, "two")
    chunk(kafka, first.request_id, 0, "one")
    assert [str(next(first)), str(next(second))] == ["one", "two"]


def test_streams_of_the_same_request_get_the_same_text(client: Client, kafka: FakeConnector) -> None:
    first = stream(client)
    second = client.stream(model="m", prompt="hello", request_id=first.request_id, timeout=WAIT_S)
    chunk(kafka, first.request_id, 0, "a")
    assert next(first) == next(second) == TextDelta("a")
    first.close()
    chunk(kafka, first.request_id, 1, "b")
    assert next(second) == TextDelta("b")
    answer(kafka, first.request_id, "ab")
    assert list(second) == []


def test_a_failure_is_the_error_of_the_handle_after_the_text(client: Client, kafka: FakeConnector) -> None:
    made = stream(client)
    chunk(kafka, made.request_id, 0, "Par")
    eventually(lambda: client._core.chunks._answers[made.request_id][0]._text._pending)
    answer(kafka, made.request_id, None, "rejected")
    assert made.reply(WAIT_S).outcome == "rejected"
    assert next(made) == TextDelta("Par")
    for _ in range(2):
        with pytest.raises(Rejected):
            next(made)


def test_a_request_that_is_not_published_ends_its_stream(client: Client, kafka: FakeConnector) -> None:
    made = stream(client)
    kafka.made_producer.refuse(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(PublishFailed):
        next(made)
    made.close()
    assert cancelled(kafka) == []


def test_a_submit_that_fails_leaves_nothing_behind(client: Client, kafka: FakeConnector) -> None:
    with pytest.raises(ValueError, match=r"^prompt: "):
        client.stream(model="m", prompt="")
    kafka.made_producer.refuse_with = BufferError()
    with pytest.raises(Exception, match="queue is full"):
        stream(client)
    assert client._core.chunks._answers == {}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("task", {"model": "m", "task": "embed", "texts": ["a"]}),
        ("reply_to", {"model": "m", "prompt": "p", "reply_to": "replies.acme.billing"}),
    ],
)
def test_what_cannot_stream_is_refused_before_anything_is_sent(
    client: Client, kafka: FakeConnector, field: str, fields: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: "):
        client.stream(**fields)  # type: ignore[arg-type]  # the mistakes under test
    assert kafka.made_consumer.steps == []


def test_no_text_in_time_is_a_timeout_and_the_stream_goes_on(client: Client, kafka: FakeConnector) -> None:
    made = stream(client, timeout=0.01)
    for _ in range(2):
        with pytest.raises(Timeout, match=made.request_id):
            next(made)
    answer(kafka, made.request_id, "Paris")
    made.reply(WAIT_S)
    assert list(made) == [TextDelta("Paris")]
    assert cancelled(kafka) == []


def test_chunks_that_cannot_be_read_make_the_answer_one_piece(
    client: Client, kafka: FakeConnector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka.chunks.partitions = None
    for _ in range(2):
        made = stream(client)
        answer(kafka, made.request_id, "Paris")
        assert list(made) == [TextDelta("Paris")]
    assert "chunks_not_read topic=chunks.acme" in caplog.text
    assert kafka.chunk_readers == 1, "not tried again at once"
    kafka.chunks.partitions = 1
    client._core.chunks._not_before = 0.0
    made = stream(client)
    chunk(kafka, made.request_id, 0, "Par")
    assert next(made) == TextDelta("Par")


def test_a_broker_that_does_not_answer_for_chunks_holds_nothing_up(
    client: Client, kafka: FakeConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_stream, "_START_TIMEOUT_S", 0.1)
    kafka.chunks.partitions = no_broker()
    made = stream(client)
    answer(kafka, made.request_id, "Paris")
    assert list(made) == [TextDelta("Paris")]


def test_a_reader_of_chunks_that_dies_fails_nothing_and_is_replaced(
    client: Client, kafka: FakeConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_stream, "_START_AGAIN_S", 0.0)
    made = stream(client)
    chunk(kafka, made.request_id, 0, "Par")
    assert next(made) == TextDelta("Par")
    kafka.chunks.push(error_message(KafkaError._FATAL, fatal=True))
    eventually(lambda: not client._core.chunks.running)
    eventually(lambda: kafka.chunks.closed)
    answer(kafka, made.request_id, "Paris")
    assert list(made) == [TextDelta("is")]
    made = stream(client)
    assert kafka.chunk_readers == 2
    chunk(kafka, made.request_id, 0, "Rome")
    assert next(made) == TextDelta("Rome")


def test_closing_a_stream_cancels_its_request(client: Client, kafka: FakeConnector) -> None:
    with stream(client) as made:
        chunk(kafka, made.request_id, 0, "Par")
        assert next(made) == TextDelta("Par")
    assert cancelled(kafka) == [made.request_id]
    made.close()
    assert list(made) == []
    assert cancelled(kafka) == [made.request_id]
    assert client._core.chunks._answers == {}
    answer(kafka, made.request_id, None, "cancelled")
    assert made.reply(WAIT_S).outcome == "cancelled"
    assert made.text == "Par"


def test_a_loop_that_is_left_cancels_the_request(client: Client, kafka: FakeConnector) -> None:
    request_id = new_request_id()

    def send_a_chunk() -> None:
        eventually(lambda: request_id in client._core.chunks._answers)
        chunk(kafka, request_id, 0, "Par")

    sender = threading.Thread(target=send_a_chunk)
    sender.start()
    for delta in client.stream(model="m", prompt="p", request_id=request_id, timeout=WAIT_S):
        assert delta == TextDelta("Par")
        break
    sender.join(WAIT_S)
    eventually(lambda: cancelled(kafka) == [request_id])
    assert client._core.chunks._answers == {}


def test_a_stream_that_is_dropped_while_locks_are_held_waits_for_none(client: Client, kafka: FakeConnector) -> None:
    made = stream(client)
    core = client._core
    assert core._publisher is not None
    with core.handles._lock, core._publisher._promise_lock, core.chunks._lock:
        del made
        gc.collect()
    eventually(lambda: len(cancelled(kafka)) == 1)


def test_closing_a_stream_ends_an_iteration_in_another_thread(client: Client) -> None:
    made = stream(client, timeout=None)
    ended: list[object] = []
    thread = threading.Thread(target=lambda: ended.append(list(made)))
    thread.start()
    made.close()
    thread.join(WAIT_S)
    assert ended == [[]]


def test_a_cancellation_that_fails_is_logged_and_disturbs_nobody_who_leaves(
    client: Client, kafka: FakeConnector, caplog: pytest.LogCaptureFixture
) -> None:
    made = stream(client)
    kafka.made_producer.refuse_with = BufferError()
    made.close()
    assert f"cancel_not_published request_id={made.request_id}" in caplog.text


def test_a_cancelled_reply_is_an_error_of_the_iteration(client: Client, kafka: FakeConnector) -> None:
    made = stream(client)
    answer(kafka, made.request_id, None, "cancelled")
    with pytest.raises(Cancelled):
        list(made)


def test_closing_the_client_cancels_what_streams_are_open(client: Client, kafka: FakeConnector) -> None:
    held, dropped = stream(client), stream(client)
    handle = client.submit(model="m", prompt="p")
    ids = {held.request_id, dropped.request_id}
    del dropped
    client.close()
    assert set(cancelled(kafka)) == ids
    assert handle.request_id not in cancelled(kafka)
    kafka.made_producer.acknowledge(0)
    with pytest.raises((ClientClosed, PublishFailed)):
        next(held)
    with pytest.raises(ClientClosed):
        stream(client)
    assert kafka.chunks.closed


def test_a_client_that_died_ends_its_streams(client: Client, kafka: FakeConnector) -> None:
    made = stream(client)
    kafka.made_consumer.push(error_message(KafkaError._FATAL, fatal=True))
    with pytest.raises(Unavailable):
        next(made)
