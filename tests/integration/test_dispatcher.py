"""Dispatcher processes on the real broker: rebalances under load, new tenants, bounded memory, draining."""

import subprocess
import sys
from collections.abc import Iterator
from time import monotonic

import pytest
from confluent_kafka import Consumer, TopicPartition

from deploy.local import probes
from deploy.local.layout import PROJECT_ROOT
from fairlane import headers, names
from fairlane.kafka import read_committed_consumer
from fairlane.outcomes import Outcome, Priority
from fairlane.records import InferenceReply, TenantSpec, WorkItem
from tests.integration.deployment import write_tenants
from tests.integration.log_reader import Replies
from tests.integration.pipeline import Pipeline, header, unique_name
from tests.waiting import eventually

pytestmark = pytest.mark.broker

REBALANCE_S = 5.0
NEW_TENANT_S = 5.0


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
        name: sum(pipeline.unique in topic for topic, _partition in partitions) for name, partitions in found.items()
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
    eventually(lambda: owners(pipeline) == {"dispatcher-1": 4, "dispatcher-2": 4}, REBALANCE_S, "the rebalance")
    load.publish(200)
    started = monotonic()
    assert second.stop() == 0
    eventually(lambda: owners(pipeline) == {"dispatcher-1": 8}, REBALANCE_S, "the partitions of the one that left")
    assert monotonic() - started < 2 * REBALANCE_S
    load.publish(5)


def test_a_new_tenant_is_served_within_seconds(pipeline: Pipeline) -> None:
    file = pipeline.folder / "one-more.yaml"
    spec = TenantSpec(tenant=pipeline.tenant("newcomer"))
    write_tenants(file, [spec])
    pid = pipeline.processes["dispatcher-1"].pid
    command = (sys.executable, "-m", "fairlane.cli", "tenants", "apply", "--tenants-file", str(file))
    servers = ("--bootstrap-servers", pipeline.settings.kafka_bootstrap_servers)
    subprocess.run((*command, *servers), cwd=PROJECT_ROOT, check=True, timeout=30, capture_output=True)
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
    assert monotonic() - started < 10
    pipeline.dispatcher(1).wait_ready()


@pytest.mark.parametrize("bound", ["MAX_QUEUE_SIZE", "MAX_UNDONE_SPAN"])
def test_a_small_bound_slows_and_stops_nothing(pipeline: Pipeline, load: Load, bound: str) -> None:
    """Records held in memory, or undone ones of a partition: beyond the bound reading waits, and then goes on."""
    if pipeline.processes["dispatcher-1"].alive:
        pipeline.processes["dispatcher-1"].stop()
    load.publish(100)
    bounded = pipeline.dispatcher(1, {bound: "10"}).wait_ready()
    for _ in range(5):
        load.publish(20)
    eventually(lambda: undispatched(pipeline) == 0, 30, "the end of the backlog")
    assert bounded.stop() == 0
