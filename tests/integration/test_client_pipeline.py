"""The client against the services: traces, tries again, and a tenant's service with its dead letters."""

from collections.abc import Iterator

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fairlane import headers, names
from fairlane.client import Client, RetryPolicy
from fairlane.client.retry_policies import HandlerRetries
from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply, TenantSpec
from tests.kit.pipeline import Pipeline, header, unique_name

pytestmark = pytest.mark.broker

WAIT_S = 60
SECRET = "key-of-somebody"
AT_ONCE = HandlerRetries(tries=2, first_wait_ms=1)


@pytest.fixture(scope="module")
def pipeline(broker: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """Tenant a has services, tenant b one request in ten seconds."""
    tenants = (
        TenantSpec("a", services=("billing", "letters")),
        TenantSpec("b", requests_per_s=0.1, burst_requests=1),
    )
    folder = tmp_path_factory.mktemp("client")
    with Pipeline(broker, folder, unique_name(), tenants=tenants, redis_url=redis_url) as pipeline:
        pipeline.start()
        yield pipeline


def client_of(pipeline: Pipeline, tenant: str, service: str | None = None) -> Client:
    servers = pipeline.settings.kafka_bootstrap_servers
    return Client(tenant=pipeline.tenant(tenant), bootstrap_servers=servers, service=service)


def test_one_trace_from_the_submit_to_the_handler_of_its_reply(pipeline: Pipeline) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    topic = names.replies_topic(pipeline.tenant("a"), "billing")
    records = pipeline.reader(topic, from_beginning=False)
    booked: list[str] = []

    def book(reply: InferenceReply) -> None:
        with tracer.start_as_current_span("book"):
            booked.append(reply.request_id)
        if len(booked) == 2:
            service.stop()

    with client_of(pipeline, "a") as client:
        carried = context.attach(baggage.set_baggage("key", SECRET))
        try:
            with tracer.start_as_current_span("ask") as asked:
                answered = client.submit(model=pipeline.model_for("generate"), prompt="hello", reply_to=topic)
                refused = client.submit(model="nobody-has-this", prompt="hello", reply_to=topic)
        finally:
            context.detach(carried)
        service = client.serve_replies("billing", book, service="billing", idle_timeout_ms=WAIT_S * 1_000)
        service.run()
    provider.shutdown()

    assert sorted(booked) == sorted([answered.request_id, refused.request_id])
    parent = asked.get_span_context()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    books = [span for span in exporter.get_finished_spans() if span.name == "book"]
    assert len(books) == 2
    for span in (*books, spans["ask"]):
        assert span.context is not None
        assert span.context.trace_id == parent.trace_id
    assert [span.parent.span_id for span in books if span.parent is not None] == [parent.span_id] * 2

    records.wait(lambda: len(records.records) == 2)
    by_id = {record.key(): record for record in records.records}
    for handle, outcome in ((answered, Outcome.OK), (refused, Outcome.REJECTED)):
        record = by_id[handle.request_id.encode()]
        reply = pipeline.codec.decode_as(InferenceReply, record.value())
        assert reply.outcome == outcome
        assert reply.source is not None
        expected = f"00-{trace.format_trace_id(parent.trace_id)}-{trace.format_span_id(parent.span_id)}"
        assert header(record, headers.TRACE_PARENT) == f"{expected}-{parent.trace_flags:02x}"
        assert header(record, headers.CE_ID) == f"{reply.source.topic}-0@{reply.source.offset}"
        assert header(record, headers.CE_SOURCE) == f"/fairlane/tenants/{pipeline.tenant('a')}"
        assert header(record, headers.CE_TYPE) == "fairlane.InferenceReply"
        assert (header(record, headers.CE_SPEC_VERSION), header(record, headers.CONTENT_TYPE)) == (
            "1.0",
            "application/avro",
        )
        assert SECRET not in repr(record.headers())


def test_what_is_refused_for_now_is_tried_again_under_its_id_and_answered(pipeline: Pipeline) -> None:
    replies = pipeline.replies("b", from_beginning=False)
    model = pipeline.model_for("generate")
    with client_of(pipeline, "b") as client:
        patient = RetryPolicy(tries=30, within_ms=WAIT_S * 1_000)
        handles = [client.submit(model=model, prompt="hello", max_tokens=1, retries=patient) for _ in range(2)]
        assert [handle.result(WAIT_S).outcome for handle in handles] == [Outcome.OK] * 2
        assert client.stats.retried >= 1
        # And who does not want that is told when to come again.
        burst = [client.submit(model=model, prompt="hello", max_tokens=1) for _ in range(20)]
        refusals = [reply for handle in burst if (reply := handle.reply(WAIT_S)).outcome == Outcome.REJECTED]
        assert {reply.code for reply in refusals} == {Code.QUOTA_EXCEEDED}
        assert all(reply.retry_after_ms for reply in refusals)
    replies.read_to_end()
    found = [pipeline.codec.decode_as(InferenceReply, record.value()) for record in replies.reader.records]
    for handle in handles:
        own = [reply.outcome for reply in found if reply.request_id == handle.request_id]
        assert own[-1] == Outcome.OK
        assert set(own[:-1]) <= {Outcome.REJECTED}


def test_what_a_service_cannot_take_is_among_its_tenants_dead_letters(pipeline: Pipeline) -> None:
    model = pipeline.model_for("generate")
    handled: list[str] = []
    with client_of(pipeline, "a") as client:
        topic = names.replies_topic(client.tenant, "letters")
        ids = [client.submit(model=model, prompt="hello", reply_to=topic).request_id for _ in range(3)]

        def handle(reply: InferenceReply) -> None:
            handled.append(reply.request_id)
            if len(handled) == len(ids) + 1:  # one of them twice
                service.stop()
            if reply.request_id == ids[1]:
                raise LookupError(SECRET)

        service = client.serve_replies(
            "letters", handle, retries=AT_ONCE, service="letters", idle_timeout_ms=WAIT_S * 1_000
        )
        service.run()
        assert sorted(handled) == sorted([*ids, ids[1]])

        with client.replies("look", dead_letters=True, idle_timeout_ms=WAIT_S * 1_000) as letters:
            letter = next(letters)
            assert letter.request_id == ids[1]
            letters.ack()
    reader = pipeline.reader(names.dead_letter_replies_topic(pipeline.tenant("a")))
    reader.wait(lambda: len(reader.records) == 1)
    (record,) = reader.records
    assert header(record, headers.DLT_EXCEPTION_MESSAGE) == "LookupError at each of 2 tries"
    assert header(record, headers.DLT_ORIGINAL_TOPIC) == topic
    assert SECRET not in repr(record.headers())
