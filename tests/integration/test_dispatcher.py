"""Dispatcher processes on the real broker: rebalances under load, new tenants, bounded memory, draining."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic

import pytest
from confluent_kafka import Consumer, TopicPartition

from deploy.local import probes
from deploy.local.layout import PROJECT_ROOT
from deploy.local.services import Service
from fairlane import headers, names
from fairlane.clock import now_ms
from fairlane.kafka_config import read_committed_consumer
from fairlane.outcomes import Code, Outcome, Priority
from fairlane.records import InferenceReply, ModelVersion, SourceCoordinate, TenantSpec, WorkItem
from tests.kit.deployment import write_tenants
from tests.kit.log_reader import Replies
from tests.kit.pipeline import Pipeline, header, unique_name
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

SESSION_S = 6.0
"""So long the group misses a dispatcher that did not leave it, by default."""
NEW_TENANT_S = 20.0
"""Without a notice it would be found when Kafka's metadata are read anew, after minutes."""


@pytest.fixture(scope="module")
def pipeline(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("dispatcher")
    with Pipeline(broker, folder, unique_name(), tenants=("a", "b", "c", "d")) as pipeline:
        pipeline.start()
        yield pipeline


@pytest.fixture(scope="module")
def replies(pipeline: Pipeline) -> Replies:
    return pipeline.replies()


@pytest.fixture
def load(pipeline: Pipeline, replies: Replies) -> Iterator["Load"]:
    """Requests of all tenants; in the end each is answered, once."""
    load = Load(pipeline, replies)
    yield load
    assert {reply.outcome for reply in load.answers().values()} <= {Outcome.OK}
    replies.read_to_end()
    replies.exactly_once(load.request_ids)


class Load:
    """Publishes, and remembers what was published."""

    def __init__(self, pipeline: Pipeline, replies: Replies) -> None:
        self._pipeline = pipeline
        self._replies = replies
        self.request_ids: list[str] = []

    def publish(self, count: int) -> None:
        """So many requests of every tenant."""
        for tenant in ("a", "b", "c", "d"):
            requests = [self._pipeline.request() for _ in range(count)]
            self.request_ids += [request.request_id for request in requests]
            self._pipeline.publish(tenant, *requests)

    def answers(self) -> dict[str, InferenceReply]:
        """Wait for the replies to everything so far."""
        return self._replies.wait(self.request_ids, 30)


def owners(pipeline: Pipeline) -> dict[str, int]:
    """How many of our partitions each dispatcher owns."""
    found = pipeline.assignments(pipeline.dispatcher_group)
    counts = {
        name: sum(pipeline.unique in topic and not names.is_returned(topic) for topic, _partition in partitions)
        for name, partitions in found.items()
    }
    return {name: count for name, count in counts.items() if count}


def undispatched(pipeline: Pipeline) -> int:
    """Records of the tenants' topics that the group has not committed."""
    consumer = Consumer(read_committed_consumer(pipeline.settings, pipeline.dispatcher_group))
    topics = [TopicPartition(names.requests_topic(tenant), 0) for tenant in pipeline.tenants]
    try:
        committed = consumer.committed(topics, timeout=10)
        ends = [consumer.get_watermark_offsets(topic, timeout=10)[1] for topic in topics]
    finally:
        consumer.close()
    return sum(end - max(0, found.offset) for end, found in zip(ends, committed, strict=True))


def test_each_class_has_its_topic_and_the_work_carries_its_origin(pipeline: Pipeline, replies: Replies) -> None:
    model = pipeline.models[0]
    topics = {priority: names.priority_topic(model.pool, priority) for priority in Priority}
    reader = pipeline.reader(*topics.values(), from_beginning=False)
    requests = {priority: pipeline.request(priority=str(priority)) for priority in Priority}
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    written = {
        priority: pipeline.write(
            names.requests_topic(pipeline.tenant("a")),
            [(request.request_id.encode(), pipeline.codec.encode(request))],
            [(headers.TRACE_PARENT, trace.encode()), ("other", b"x")],
        )[0]
        for priority, request in requests.items()
    }
    replies.wait(request.request_id for request in requests.values())
    reader.wait(lambda: len(reader.records) == len(requests))

    for record in reader.records:
        item = pipeline.codec.decode_as(WorkItem, record.value())
        priority = Priority(item.priority_class)
        assert record.topic() == topics[priority]
        assert (item.request, item.source) == (requests[priority], written[priority])
        assert item.tenant == pipeline.tenant("a")
        assert (header(record, headers.TRACE_PARENT), header(record, "other")) == (trace, "")
        assert int(header(record, headers.COST_TOKENS)) == item.cost_tokens
        assert header(record, headers.SOURCE_TOPIC) == item.source.topic
        assert int(header(record, headers.SOURCE_OFFSET)) == item.source.offset


def test_at_idle_everything_is_committed(pipeline: Pipeline, load: Load) -> None:
    load.publish(5)
    eventually(lambda: undispatched(pipeline) == 0, what="the commit of every offset")


def test_a_second_dispatcher_joins_and_leaves_under_load(pipeline: Pipeline, load: Load) -> None:
    """Topics of one partition: the assignor must not give partition 0 of them all to one member."""
    load.publish(200)
    second = pipeline.dispatcher(2)
    while probes.http_ok(second.url("/health/ready")) is not None:
        load.publish(2)
        load.answers()
    eventually(lambda: owners(pipeline) == {"dispatcher-1": 4, "dispatcher-2": 4}, what="the rebalance")
    load.publish(200)
    assert second.stop() == 0
    eventually(lambda: "dispatcher-2" not in owners(pipeline), SESSION_S - 0.5, "the group without the one that left")
    eventually(lambda: owners(pipeline) == {"dispatcher-1": 8}, what="the partitions of the one that left")
    load.publish(5)


def test_a_new_tenant_is_served_within_seconds(pipeline: Pipeline) -> None:
    file = pipeline.folder / "one-more.yaml"
    spec = TenantSpec(tenant=pipeline.tenant("newcomer"))
    write_tenants(file, [spec])
    pid = pipeline.processes["dispatcher-1"].pid
    command = (
        sys.executable,
        "-m",
        "fairlane_server.cli",
        "tenants",
        "apply",
        "--no-audit",
        "--tenants-file",
        str(file),
    )
    servers = ("--bootstrap-servers", pipeline.settings.kafka_bootstrap_servers)
    env = {**os.environ, "ALLOW_OPEN_KAFKA": "true"}
    subprocess.run((*command, *servers), cwd=PROJECT_ROOT, env=env, check=True, timeout=30, capture_output=True)
    pipeline.tenants[spec.tenant] = spec  # taken back with the others

    replies = pipeline.replies("newcomer")
    request = pipeline.request()
    pipeline.publish("newcomer", request)
    replies.wait([request.request_id], NEW_TENANT_S)
    assert pipeline.processes["dispatcher-1"].pid == pid


def test_a_drain_finishes_what_it_began(pipeline: Pipeline, load: Load) -> None:
    dispatcher = pipeline.processes["dispatcher-1"]
    load.publish(300)
    started = monotonic()
    assert dispatcher.stop() == 0
    assert monotonic() - started < 25
    pipeline.dispatcher(1).wait_ready()


def test_a_small_span_slows_and_stops_nothing(pipeline: Pipeline, load: Load) -> None:
    """Undone records of a partition: beyond the bound reading waits, and then goes on."""
    if pipeline.processes["dispatcher-1"].alive:
        pipeline.processes["dispatcher-1"].stop()
    load.publish(100)
    bounded = pipeline.dispatcher(1, {"MAX_UNDONE_SPAN": "10"}).wait_ready()
    for _ in range(5):
        load.publish(20)
    eventually(lambda: undispatched(pipeline) == 0, what="the end of the backlog")
    assert bounded.stop() == 0


def test_what_a_withdrawn_tenant_or_pool_left_is_answered_after_a_restart(pipeline: Pipeline, replies: Replies) -> None:
    if not pipeline.processes["dispatcher-1"].alive:
        pipeline.dispatcher(1).wait_ready()
    before = dict(pipeline.tenants)
    gone, tenant, pool = pipeline.tenant("d"), pipeline.tenant("c"), f"{pipeline.unique}-own"
    pipeline.tenants[tenant] = replace(before[tenant], pool=pool)
    pipeline.apply()
    returned = names.returned_topic(pool)
    eventually(lambda: committed(pipeline, returned) == 0, what="the new pool's topic being read")
    assert pipeline.processes["dispatcher-1"].stop() == 0

    pipeline.tenants[tenant] = before[tenant]
    del pipeline.tenants[gone]
    pipeline.apply()
    late, refused = handed_back(pipeline, tenant, pool), pipeline.request()
    pipeline.write(returned, [(late.request.request_id.encode(), pipeline.codec.encode(late))])
    pipeline.publish("d", refused)
    try:
        pipeline.dispatcher(1).wait_ready()
        answers = replies.wait([late.request.request_id, refused.request_id], 30)
    finally:
        pipeline.tenants.update(before)
    assert answers[refused.request_id].code == Code.FORBIDDEN
    assert answers[late.request.request_id].outcome == Outcome.EXPIRED


def test_it_starts_and_serves_beside_names_that_no_topic_can_have(pipeline: Pipeline, replies: Replies) -> None:
    pipeline.apply()
    if pipeline.processes["dispatcher-1"].alive:
        assert pipeline.processes["dispatcher-1"].stop() == 0
    model = replace(pipeline.models[0], model=f"{pipeline.unique}-bad", pool="gpu a")
    spec = TenantSpec(pipeline.tenant("bad"), pool="x" * 300)
    bad: list[tuple[str, str, ModelVersion | TenantSpec]] = [
        (names.CONTROL_MODELS, model.model, model),
        (names.CONTROL_TENANTS, spec.tenant, spec),
    ]
    for topic, key, record in bad:
        pipeline.write(topic, [(key.encode(), pipeline.codec.encode(record))])
    try:
        pipeline.dispatcher(1).wait_ready()
        request = pipeline.request()
        pipeline.publish("a", request)
        assert replies.wait([request.request_id], 30)[request.request_id].outcome == Outcome.OK
    finally:
        for topic, key, _record in bad:
            pipeline.write(topic, [(key.encode(), None)])


def committed(pipeline: Pipeline, topic: str) -> int:
    """Where the dispatchers' group is in the topic's only partition; negative when nowhere."""
    consumer = Consumer(read_committed_consumer(pipeline.settings, pipeline.dispatcher_group))
    try:
        return consumer.committed([TopicPartition(topic, 0)], timeout=10)[0].offset
    finally:
        consumer.close()


def handed_back(pipeline: Pipeline, tenant: str, pool: str) -> WorkItem:
    """Work of the pool whose deadline has passed."""
    at_ms = now_ms() - 60_000
    return WorkItem(
        request=pipeline.request(),
        tenant=tenant,
        pool=pool,
        model_version="1",
        priority_class=Priority.NORMAL,
        cost_tokens=10,
        submitted_at_ms=at_ms,
        admitted_at_ms=at_ms,
        dispatched_at_ms=at_ms,
        deadline_at_ms=at_ms + 1_000,
        reply_topic=names.replies_topic(tenant),
        dispatcher_id="dispatcher-1",
        source=SourceCoordinate(names.requests_topic(tenant), 0, 10_000),
        handed_back=1,
    )


def test_several_tenants_are_not_served_on_a_kafka_that_is_open_to_all(pipeline: Pipeline) -> None:
    servers = pipeline.settings.kafka_bootstrap_servers
    is_open = {"KAFKA_BOOTSTRAP_SERVERS": servers, "KAFKA_SECURITY_PROTOCOL": "PLAINTEXT", "ALLOW_OPEN_KAFKA": "false"}
    refused = pipeline.dispatcher(9, is_open)
    assert refused.wait_ended(30) == 1
    [event] = refused.events("dispatcher_failed")
    assert str(event["error"]).startswith("KAFKA_SECURITY_PROTOCOL is PLAINTEXT, so Kafka asks for no password")
    assert "dispatcher-9" not in owners(pipeline)


def test_one_whose_first_join_never_ends_ends_itself(pipeline: Pipeline) -> None:
    """Its supervisor starts it again, which is the cure."""
    stuck = pipeline.launch(Service("dispatcher-stuck", ("-m", "tests.kit.stuck_dispatcher"), {}))
    assert stuck.wait_ended(30) == 1
    [event] = stuck.events("dispatcher_failed")
    assert event["error"] == "did not join its group within 1 s"
