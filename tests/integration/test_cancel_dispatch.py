"""Cancels on the real broker, as far as a dispatcher carries them out: what waits is answered once, the rest is told.

No consumer runs: what a first one would begin with is dispatched and stays in flight, and everything else waits.
"""

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, TopicPartition

from fairlane import names
from fairlane.clock import now_ms
from fairlane.kafka_config import read_committed_consumer
from fairlane.outcomes import Decision, Outcome
from fairlane.records import AuditEvent, Cancellation, CancelRequest, InferenceRequest, TenantSpec
from inference_consumers.cancellations import CancellationFeed, Cancellations
from tests.kit.log_reader import LogReader, Replies
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.waiting import eventually, until_ms

pytestmark = [pytest.mark.full, pytest.mark.broker]

DISPATCHED_AT_FIRST = 64


@pytest.fixture(scope="module")
def pipeline(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("cancels")
    tenants = ("a", "b", TenantSpec("limited", requests_per_s=0.001, burst_requests=1))
    with Pipeline(broker, folder, unique_name(), tenants=tenants) as pipeline:
        pipeline.start(consumers=0)
        yield pipeline


@pytest.fixture(scope="module")
def replies(pipeline: Pipeline) -> Replies:
    return pipeline.replies()


@pytest.fixture(scope="module")
def dispatched(pipeline: Pipeline) -> list[InferenceRequest]:
    """Requests of tenant a that fill the window."""
    requests = [pipeline.request() for _ in range(DISPATCHED_AT_FIRST)]
    work = pipeline.reader(names.priority_topic(pipeline.pool, "normal"))
    pipeline.publish("a", *requests)
    work.wait(lambda: len(work.records) == DISPATCHED_AT_FIRST, what="the work of the first requests")
    return requests


@pytest.fixture
def work(pipeline: Pipeline, dispatched: list[InferenceRequest]) -> LogReader:
    """What is dispatched from now on: nothing may be."""
    topics = [names.priority_topic(pipeline.pool, name) for name in ("high", "normal", "low")]
    return pipeline.reader(*topics, from_beginning=False)


def waiting(pipeline: Pipeline) -> float:
    return pipeline.processes["dispatcher-1"].metric("fairlane_waiting_requests", pool=pipeline.pool)


def send_and_wait(pipeline: Pipeline, tenant: str, *requests: InferenceRequest, topic: str | None = None) -> None:
    """Publish them and wait until they wait, and nothing else does."""
    eventually(lambda: waiting(pipeline) == 0, what="the empty queue")
    topic = topic or names.requests_topic(pipeline.tenant(tenant))
    pipeline.write(topic, [(one.request_id.encode(), pipeline.codec.encode(one)) for one in requests])
    eventually(lambda: waiting(pipeline) == len(requests), what="the requests to wait")


def cancel(pipeline: Pipeline, tenant: str, *requests: InferenceRequest, topic: str | None = None) -> None:
    topic = topic or names.requests_topic(pipeline.tenant(tenant))
    cancels = [CancelRequest(one.request_id) for one in requests]
    pipeline.write(topic, [(one.request_id.encode(), pipeline.codec.encode(one)) for one in cancels])


def all_committed(pipeline: Pipeline) -> bool:
    """Whether the dispatchers' group is done with everything on the tenants' topics but what waits."""
    consumer = Consumer(read_committed_consumer(pipeline.settings, pipeline.dispatcher_group))
    topics = [name(tenant) for tenant in pipeline.tenants for name in (names.requests_topic, names.backfill_topic)]
    try:
        found = consumer.committed([TopicPartition(topic, 0) for topic in topics], timeout=10)
        return all(place.offset in (consumer.get_watermark_offsets(place, timeout=10)[1], -1001) for place in found)
    finally:
        consumer.close()


def audits(pipeline: Pipeline, reader: LogReader, request: InferenceRequest) -> list[AuditEvent]:
    found = pipeline.decoded(reader, AuditEvent)
    return [event for event in found if event.request_id == request.request_id]


def told(pipeline: Pipeline, reader: LogReader) -> list[Cancellation]:
    """What the consumers are told of this pipeline's tenants."""
    found = (pipeline.codec.decode_as(Cancellation, record.value()) for record in reader.records)
    return [one for one in found if one.tenant in pipeline.tenants]


def test_what_waits_is_answered_once_and_never_dispatched(
    pipeline: Pipeline, replies: Replies, work: LogReader
) -> None:
    ledger = pipeline.reader(names.LEDGER_AUDIT, from_beginning=False)
    cancellations = pipeline.reader(names.CONTROL_CANCELLATIONS, from_beginning=False)
    requests = [pipeline.request() for _ in range(20)]
    send_and_wait(pipeline, "a", *requests)
    cancel(pipeline, "a", *requests, *requests)
    answers = replies.wait(one.request_id for one in requests)
    assert {(reply.outcome, reply.code) for reply in answers.values()} == {(Outcome.CANCELLED, None)}
    assert all(reply.timings.dispatched_at_ms is None for reply in answers.values())
    eventually(lambda: waiting(pipeline) == 0, what="the empty queue")
    eventually(lambda: all_committed(pipeline), what="the commit of requests and cancels")
    work.read_to_end()
    assert not work.records
    replies.read_to_end()
    replies.exactly_once(one.request_id for one in requests)
    ledger.read_to_end()
    assert {audits(pipeline, ledger, one)[-1].decision for one in requests} == {Decision.CANCELLED}
    cancellations.read_to_end()
    assert {one.request_id for one in told(pipeline, cancellations)} == {one.request_id for one in requests}, (
        "the second cancels found nothing"
    )


def test_what_was_dispatched_is_told_to_the_consumers(
    pipeline: Pipeline, replies: Replies, dispatched: list[InferenceRequest]
) -> None:
    cancellations = pipeline.reader(names.CONTROL_CANCELLATIONS, from_beginning=False)
    unknown = pipeline.request()
    cancel(pipeline, "a", dispatched[0], unknown)
    cancellations.wait(lambda: len(told(pipeline, cancellations)) == 2, what="word to the consumers")
    for one, record, request in zip(
        told(pipeline, cancellations), cancellations.records, (dispatched[0], unknown), strict=True
    ):
        assert (one.request_id, one.tenant) == (request.request_id, pipeline.tenant("a"))
        assert one.dispatcher_id == "dispatcher-1"
        assert record.key() == request.request_id.encode()
    replies.read_to_end()
    assert dispatched[0].request_id not in replies.by_id, "a consumer answers it"


def test_a_consumer_knows_what_was_cancelled_before_it_came_and_hears_of_the_rest(
    pipeline: Pipeline, dispatched: list[InferenceRequest]
) -> None:
    cancellations = pipeline.reader(names.CONTROL_CANCELLATIONS, from_beginning=False)
    before, after, tenant = dispatched[1], dispatched[2], pipeline.tenant("a")
    cancel(pipeline, "a", before)
    cancellations.wait(lambda: told(pipeline, cancellations), what="word to the consumers")
    known, heard = Cancellations(), set[str]()
    feed = CancellationFeed(
        pipeline.settings, pipeline.codec, known, lambda _, request_id: heard.add(request_id), now_ms
    )
    feed.start()
    try:
        assert known.is_cancelled(tenant, before.request_id)
        assert before.request_id in heard
        assert not known.is_cancelled(tenant, after.request_id)
        (one,) = told(pipeline, cancellations)
        assert known.is_cancelled(tenant, before.request_id, one.requested_at_ms)
        assert not known.is_cancelled(tenant, before.request_id, one.requested_at_ms + 1)
        cancel(pipeline, "a", after)
        eventually(lambda: after.request_id in heard, what="word of the cancel")
        assert known.is_cancelled(tenant, after.request_id)
    finally:
        feed.stop()


def test_nobody_cancels_for_another_tenant(pipeline: Pipeline, replies: Replies, work: LogReader) -> None:
    cancellations = pipeline.reader(names.CONTROL_CANCELLATIONS, from_beginning=False)
    ledger = pipeline.reader(names.LEDGER_AUDIT, from_beginning=False)
    request, last = pipeline.request(), pipeline.request()
    send_and_wait(pipeline, "a", request)
    cancel(pipeline, "b", request)
    named = CancelRequest(request.request_id, pipeline.tenant("a"))
    topic = names.requests_topic(pipeline.tenant("b"))
    pipeline.write(topic, [(b"k", pipeline.codec.encode(named))])
    cancel(pipeline, "b", last)
    cancellations.wait(lambda: len(told(pipeline, cancellations)) == 2, what="word to the consumers")
    assert {one.tenant for one in told(pipeline, cancellations)} == {pipeline.tenant("b")}
    ledger.wait(lambda: len(audits(pipeline, ledger, request)) == 2, what="the audit")
    refused = audits(pipeline, ledger, request)[-1]
    assert (refused.tenant, refused.decision, refused.code) == (
        pipeline.tenant("b"),
        Decision.CANCEL_REFUSED,
        "forbidden",
    )
    assert waiting(pipeline) == 1
    replies.read_to_end()
    assert request.request_id not in replies.by_id
    cancel(pipeline, "a", request)
    assert replies.wait([request.request_id])[request.request_id].outcome == Outcome.CANCELLED
    work.read_to_end()
    assert not work.records


def test_backfill_is_cancelled_and_quotas_are_given_back(pipeline: Pipeline, replies: Replies, work: LogReader) -> None:
    topic = names.backfill_topic(pipeline.tenant("b"))
    backfill = pipeline.request()
    send_and_wait(pipeline, "b", backfill, topic=topic)
    cancel(pipeline, "b", backfill, topic=topic)
    assert replies.wait([backfill.request_id])[backfill.request_id].outcome == Outcome.CANCELLED
    for _ in range(3):
        request = pipeline.request()
        send_and_wait(pipeline, "limited", request)
        cancel(pipeline, "limited", request)
        assert replies.wait([request.request_id])[request.request_id].outcome == Outcome.CANCELLED
    work.read_to_end()
    assert not work.records


def test_no_kill_leaves_a_request_alive_whose_cancel_is_done(
    pipeline: Pipeline, replies: Replies, work: LogReader
) -> None:
    """Every record in a transaction of its own, and the dispatcher killed among them."""
    if pipeline.processes["dispatcher-1"].alive:
        assert pipeline.processes["dispatcher-1"].stop() == 0
    pipeline.dispatcher(1, {"MAX_TRANSACTION_RECORDS": "1"}).wait_ready()
    pipeline.wait_all_own()
    requests = [pipeline.request(timeout_ms=600_000) for _ in range(200)]
    send_and_wait(pipeline, "a", *requests)
    replies.read_to_end()
    reader, before = replies.reader, len(replies.reader.records)
    cancel(pipeline, "a", *requests)
    # Seen at once, each reply would show the same moment between two commits.
    for answered, after_ms in ((20, 3), (60, 5), (110, 7)):
        reader.wait(lambda: len(reader.records) >= before + answered, 60, "some of the replies")  # noqa: B023 - called here
        until_ms(now_ms() + after_ms)
        pipeline.processes["dispatcher-1"].kill()
        replies.read_to_end()
        assert len(reader.records) < before + len(requests), "killed among them"
        pipeline.dispatcher(1, {"MAX_TRANSACTION_RECORDS": "1"}).wait_ready()
    answers = replies.wait((one.request_id for one in requests), 60)
    assert {reply.outcome for reply in answers.values()} == {Outcome.CANCELLED}
    eventually(lambda: waiting(pipeline) == 0, what="the empty queue")
    eventually(lambda: all_committed(pipeline), 30, what="the commit of requests and cancels")
    replies.read_to_end()
    replies.exactly_once(one.request_id for one in requests)
    work.read_to_end()
    assert not work.records
