"""Admission and fairness on the real broker: floods, weights, dedicated pools, no consumers, backfill, policies."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from time import monotonic

import pytest
from confluent_kafka import Message

from fairlane import names
from fairlane.clock import now_ms
from fairlane.outcomes import Code, Decision, Degradation, Outcome, Priority, Task
from fairlane.records import AuditEvent, InferenceReply, InferenceRequest, Retrieval, TenantSpec, WorkItem
from fairlane_server.control.publisher import ControlTopic
from stream_processors.dispatcher.scheduling.fair_queue import DEFAULT_QUANTUM_TOKENS, service_gap_bound
from tests.kit.deployment import model_per_task
from tests.kit.log_reader import Replies
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.waiting import eventually, until_ms

pytestmark = [pytest.mark.full, pytest.mark.broker]

SLOW = {"SIMULATED_DECODE_TOKENS_PER_S": "400", "MAX_BATCH_SIZE": "8"}
"""100 requests for 4 tokens each a second. 16 of them are in flight at most."""

FASTER = {"SIMULATED_DECODE_TOKENS_PER_S": "1200", "MAX_BATCH_SIZE": "8"}

COST_TOKENS = 14
"""Of a request: 6 tokens of prompt, 4 of output."""

RETRY_MS = range(100, 300_001)


@pytest.fixture(scope="module")
def pipeline(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """Tenants a and b on a shared pool, and one with a pool of its own, which serves one of the models."""
    folder, unique = tmp_path_factory.mktemp("admission"), unique_name()
    own_pool = f"{unique}-own"
    words, vectors, _ = model_per_task(unique, f"{unique}-pool")
    models = (replace(words, dedicated_pools=(own_pool,)), vectors)
    tenants = ("a", "b", TenantSpec("own", pool=own_pool))
    with Pipeline(broker, folder, unique, tenants=tenants, models=models) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def replies(pipeline: Pipeline) -> Replies:
    return pipeline.replies()


class Deployment:
    """One dispatcher, and one consumer of the shared pool or none; started anew when a test wants other settings."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._settings: object = None

    def run(self, *, consumer: Mapping[str, str] | None = SLOW, **dispatcher: str) -> ServiceProcess:
        """Run with these settings. Returns the dispatcher."""
        pipeline, wanted = self._pipeline, (consumer, dispatcher)
        processes = list(pipeline.processes.values())
        if self._settings != wanted or not all(process.alive for process in processes):
            for process in processes:
                if process.alive:
                    process.stop()
            self._settings = wanted
            started = [pipeline.dispatcher(1, dispatcher)]
            if consumer is not None:
                started.append(pipeline.consumer(1, consumer))
            for process in started:
                process.wait_ready()
            pipeline.wait_all_own()
        return pipeline.processes["dispatcher-1"]


@pytest.fixture(scope="module")
def deployment(pipeline: Pipeline) -> Deployment:
    return Deployment(pipeline)


def many(pipeline: Pipeline, count: int, **fields: object) -> list[InferenceRequest]:
    return [pipeline.request(**fields) for _ in range(count)]  # type: ignore[arg-type]  # fields of a request


def ids(*groups: list[InferenceRequest]) -> list[str]:
    return [request.request_id for requests in groups for request in requests]


def measured(pipeline: Pipeline, replies: Replies, dispatcher: ServiceProcess) -> None:
    """Serve something, so that the pool's rate is known."""
    warming = many(pipeline, 16)
    pipeline.publish("a", *warming)
    replies.wait(ids(warming))
    eventually(
        lambda: dispatcher.metric("fairlane_pool_cost_tokens_per_s", pool=pipeline.models[0].pool) > 0,
        what="a measured rate",
    )


def outcomes(answers: Mapping[str, InferenceReply]) -> Counter[str]:
    return Counter(reply.code or reply.outcome for reply in answers.values())


@pytest.mark.alone
def test_a_flood_is_shed_and_hurts_nobody_else(deployment: Deployment, pipeline: Pipeline, replies: Replies) -> None:
    dispatcher = deployment.run(MAX_QUEUE_SIZE="200")
    measured(pipeline, replies, dispatcher)
    floods: list[list[InferenceRequest]] = []
    victims: list[list[InferenceRequest]] = []
    for _ in range(3):
        floods += [many(pipeline, 400), many(pipeline, 100, timeout_ms=400)]
        victims.append(many(pipeline, 10))
        pipeline.publish("a", *floods[-2], *floods[-1])
        pipeline.publish("b", *victims[-1])
    assert outcomes(replies.wait(ids(*victims))) == {Outcome.OK: 30}

    answers = replies.wait(ids(*floods))
    shed = [reply for reply in answers.values() if reply.outcome == Outcome.REJECTED]
    # Without a bound it were the 300 that are in a hurry; with it, all but 200 and those served while the flood came.
    assert len(shed) > 500
    assert {reply.code for reply in shed} <= {Code.OVERLOADED, Code.DEADLINE_UNMEETABLE}
    assert all(reply.retry_after_ms in RETRY_MS and reply.message for reply in shed)
    # Spread, so that they do not all come back at once; the shortest advice leaves some 50 values.
    assert len({reply.retry_after_ms for reply in shed}) > 40
    assert outcomes(answers)[Outcome.OK] > 50
    assert set(outcomes(answers)) <= {Outcome.OK, Outcome.EXPIRED, Code.OVERLOADED, Code.DEADLINE_UNMEETABLE}


MOST_TRIES = 3
"""What waits is told as if it drained steadily; it does so in batches, one of which may be under way when the time is
there. Nor does a pool drain that its machine keeps waiting: a refusal counts if a batch was done since the last one."""

MOST_REFUSALS = 100
BATCH_ITEMS = 8


def let_in_when_told(pipeline: Pipeline, request: InferenceRequest, at_ms: int) -> int:
    """Send it again at the time that it was told, and again at the next one, until it is served. Returns how often it
    was sent, without those times before which nobody else had been served."""
    everybody = pipeline.replies("a", from_beginning=False)
    tries, served = 1, 0
    for _ in range(MOST_REFUSALS):
        replies = pipeline.replies("a", from_beginning=False)
        until_ms(at_ms)
        pipeline.publish("a", request)
        reply = replies.wait([request.request_id])[request.request_id]
        if reply.outcome == Outcome.OK:
            return tries
        assert reply.code == Code.OVERLOADED
        assert reply.retry_after_ms is not None
        at_ms = now_ms() + reply.retry_after_ms
        everybody.read_to_end()
        now_served = sum(reply.outcome == Outcome.OK for found in everybody.by_id.values() for reply in found)
        if now_served >= served + BATCH_ITEMS:
            tries, served = tries + 1, now_served
    raise AssertionError(f"refused {MOST_REFUSALS} times")


@pytest.mark.alone
def test_who_was_shed_may_try_again_when_told(deployment: Deployment, pipeline: Pipeline, replies: Replies) -> None:
    """Under the same ids, as soon as they were told that they would be let in if nobody else came."""
    dispatcher = deployment.run(MAX_QUEUE_SIZE="200")
    measured(pipeline, replies, dispatcher)
    answers = pipeline.replies("a", from_beginning=False)
    read = dispatcher.metric("fairlane_requests_read_total")
    flood, last = many(pipeline, 400), pipeline.request(model="no-such-model")
    pipeline.publish("a", *flood)
    # Counted when their batch is decided. Within a batch, what is invalid is answered before what is shed.
    eventually(
        lambda: dispatcher.metric("fairlane_requests_read_total") >= read + len(flood),
        what="the decisions about the flood",
    )
    pipeline.publish("a", last)
    answers.wait([last.request_id])

    told: list[tuple[int, str]] = []
    refused_at_ms = 0
    for record in answers.reader.records:
        reply = pipeline.codec.decode_as(InferenceReply, record.value())
        if reply.code == Code.OVERLOADED:
            assert reply.retry_after_ms is not None
            refused_at_ms = max(refused_at_ms, record.timestamp()[1])
            told.append((record.timestamp()[1] + reply.retry_after_ms, reply.request_id))
    assert len(told) > 100
    by_id = {request.request_id: request for request in flood}
    first = sorted((at_ms, request_id) for at_ms, request_id in told if at_ms > refused_at_ms)[:3]
    for at_ms, request_id in first:
        assert let_in_when_told(pipeline, by_id[request_id], at_ms) <= MOST_TRIES
    accepted = by_id.keys() - {request_id for _, request_id in told}
    assert outcomes(replies.wait(accepted)) == {Outcome.OK: len(accepted)}


@pytest.mark.alone
def test_weights_change_without_a_restart(deployment: Deployment, pipeline: Pipeline, replies: Replies) -> None:
    dispatcher = deployment.run(consumer=FASTER)
    measured(pipeline, replies, dispatcher)
    pid = dispatcher.pid
    backlog = {"a": many(pipeline, 1_000), "b": many(pipeline, 1_200)}
    order = pipeline.reader(*(names.replies_topic(pipeline.tenant(tenant)) for tenant in backlog), from_beginning=False)

    def served(since_ms: int, count: int) -> tuple[Counter[str], int]:
        """Who the next so many replies went to, and until when. The reader gets one topic's after the other's: their
        times tell."""

        def later() -> list[Message]:
            return [record for record in order.records if record.timestamp()[1] > since_ms]

        order.wait(lambda: len(later()) >= count)
        order.read_to_end()
        records = sorted(later(), key=lambda record: record.timestamp()[1])[:count]
        tenants = (str(record.topic()).removeprefix(f"replies.{pipeline.unique}-") for record in records)
        return Counter(tenants), records[-1].timestamp()[1]

    for tenant, requests in backlog.items():
        pipeline.publish(tenant, *requests)
    gap = service_gap_bound(DEFAULT_QUANTUM_TOKENS, COST_TOKENS, 1, 1) / COST_TOKENS
    since_ms, alone = 0, True
    while alone:
        found, since_ms = served(since_ms, 50)
        alone = not found["b"]
    equal, _ = served(since_ms, 300)
    assert abs(equal["a"] - equal["b"]) <= gap

    control = ControlTopic(pipeline.settings, pipeline.codec, names.CONTROL_TENANTS, TenantSpec, kind="tenant")
    spec = pipeline.tenants[pipeline.tenant("b")]
    control.publish([replace(spec, weight=4.0)])
    try:
        # What was in flight, and what went out before the change was read.
        _, since_ms = served(now_ms(), 250)
        weighted, _ = served(since_ms, 400)
        assert abs(weighted["a"] - weighted["b"] / 4) <= gap
    finally:
        control.publish([spec])
    assert dispatcher.pid == pid
    assert outcomes(replies.wait(ids(*backlog.values()))) == {Outcome.OK: 2_200}


def test_a_dedicated_pool_serves_its_tenant_alone(deployment: Deployment, pipeline: Pipeline, replies: Replies) -> None:
    own_pool = f"{pipeline.unique}-own"
    deployment.run()
    pipeline.consumer(1, pool=own_pool).wait_ready()
    owned = {names.priority_topic(own_pool, priority) for priority in Priority}
    group = pipeline.pool_group(own_pool)
    eventually(
        lambda: (
            {name: {topic for topic, _ in places} for name, places in pipeline.assignments(group).items()}
            == {f"consumer-{own_pool}-1": owned}
        ),
        what="the topics of the pool, and no others",
    )
    own_work = pipeline.reader(*owned, from_beginning=False)
    shared_work = pipeline.reader(
        *(names.priority_topic(pipeline.models[0].pool, priority) for priority in Priority), from_beginning=False
    )
    flood = many(pipeline, 300)
    mine = [request for priority in Priority for request in many(pipeline, 5, priority=str(priority))]
    not_there = pipeline.request(Task.EMBED)
    pipeline.publish("a", *flood)
    pipeline.publish("own", *mine, not_there)
    answers = replies.wait(ids(mine))
    assert outcomes(answers) == {Outcome.OK: 15}
    last_ms = max(reply.timings.engine_finished_at_ms or 0 for reply in answers.values())
    refusal = replies.wait([not_there.request_id])[not_there.request_id]
    assert (refusal.code, refusal.field) == (Code.UNKNOWN_MODEL, "model")
    theirs = replies.wait(ids(flood))
    assert outcomes(theirs) == {Outcome.OK: 300}
    assert last_ms < max(reply.timings.engine_finished_at_ms or 0 for reply in theirs.values())

    for reader, tenant, count in ((own_work, "own", 15), (shared_work, "a", 300)):
        reader.read_to_end()
        items = [pipeline.codec.decode_as(WorkItem, record.value()) for record in reader.records]
        assert Counter(item.tenant for item in items) == {pipeline.tenant(tenant): count}
    pipeline.processes.pop(f"consumer-{own_pool}-1").stop()


@pytest.mark.alone
def test_without_consumers_short_deadlines_are_refused_and_the_rest_waits(
    deployment: Deployment, pipeline: Pipeline, replies: Replies
) -> None:
    dispatcher = deployment.run()
    measured(pipeline, replies, dispatcher)
    pool = pipeline.models[0].pool
    assert pipeline.processes[f"consumer-{pool}-1"].stop() == 0
    eventually(lambda: dispatcher.metric("fairlane_pool_consumers", pool=pool) == 0, what="the loss of the pool")
    short, patient = many(pipeline, 20, timeout_ms=3_000), many(pipeline, 20)
    pipeline.publish("a", *patient, *short)
    refused = replies.wait(ids(short)).values()
    # At once: those whose time is over are told that they have expired.
    assert {reply.code for reply in refused} == {Code.DEADLINE_UNMEETABLE}
    assert all((reply.retry_after_ms or 0) >= 8_000 for reply in refused)
    assert not replies.by_id.keys() & set(ids(patient))
    eventually(lambda: dispatcher.metric("fairlane_waiting_requests", pool=pool) == 20, what="what waits")
    pipeline.consumer(1, SLOW).wait_ready()
    assert outcomes(replies.wait(ids(patient))) == {Outcome.OK: 20}


def decisions_of(pipeline: Pipeline, events: list[AuditEvent], request_id: str) -> list[AuditEvent]:
    return [event for event in events if event.request_id == request_id]


@pytest.mark.alone
def test_under_pressure_requests_are_degraded_and_say_so(
    deployment: Deployment, pipeline: Pipeline, replies: Replies
) -> None:
    """400 requests take 4 s of the 6 s they have; from half of that on they give up passages."""
    audit = pipeline.reader(names.LEDGER_AUDIT, from_beginning=False)
    dispatcher = deployment.run()
    measured(pipeline, replies, dispatcher)
    requests = many(pipeline, 400, timeout_ms=6_000, retrieval=Retrieval("docs", 8))
    # Not as a: its ladder still stands where the test before left it.
    pipeline.publish("b", *requests)
    answers = replies.wait(ids(requests))
    served = [reply for reply in answers.values() if reply.outcome == Outcome.OK]
    degraded = [reply for reply in served if Degradation.FEWER_PASSAGES in reply.degradations]
    assert len(served) > len(degraded) > 0
    assert all(reply.degradations[0] == Degradation.FEWER_PASSAGES for reply in degraded)
    # There is no Postgres here, which costs the others their passages as well.
    calm = [reply for reply in served if reply not in degraded]
    assert {reply.degradations for reply in calm} == {(Degradation.NO_RETRIEVAL,)}
    assert dispatcher.metric("fairlane_degradations_total", step=Degradation.FEWER_PASSAGES) >= len(degraded)
    audit.read_to_end()
    story = decisions_of(pipeline, pipeline.decoded(audit, AuditEvent), degraded[0].request_id)
    assert [event.decision for event in story] == [Decision.ACCEPTED, Decision.DEGRADED, Decision.DISPATCHED]
    assert story[1].inputs["steps"].startswith(Degradation.FEWER_PASSAGES)


def test_backfill_waits_and_is_served(deployment: Deployment, pipeline: Pipeline, replies: Replies) -> None:
    """Nobody serves at first: what is held is bounded, and the rest stays in Kafka."""
    dispatcher = deployment.run(consumer=None, MAX_QUEUE_SIZE="100")
    pool = pipeline.models[0].pool
    requests = many(pipeline, 4_000)
    topic = names.backfill_topic(pipeline.tenant("a"))
    pipeline.write(topic, [(one.request_id.encode(), pipeline.codec.encode(one)) for one in requests])
    eventually(lambda: dispatcher.metric("fairlane_backfill_paused_tenants") >= 1, what="the pause")
    held = dispatcher.metric("fairlane_waiting_requests", pool=pool)
    online = many(pipeline, 5)
    pipeline.publish("b", *online)
    pipeline.consumer(1, {}).wait_ready()

    def all_served() -> bool:
        nonlocal held
        held = max(held, dispatcher.metric("fairlane_waiting_requests", pool=pool))
        replies.read_to_end()
        return set(ids(requests)) <= replies.by_id.keys()

    eventually(all_served, what="the replies to the backfill")
    assert outcomes(replies.exactly_once(ids(requests))) == {Outcome.OK: 4_000}
    assert outcomes(replies.wait(ids(online))) == {Outcome.OK: 5}
    assert 0 < held < 3_500
    eventually(lambda: dispatcher.metric("fairlane_backfill_paused_tenants") == 0, what="the end of the pause")


@pytest.mark.alone
def test_backfill_beyond_its_quota_waits_in_kafka(deployment: Deployment, pipeline: Pipeline, replies: Replies) -> None:
    """None is refused; it is read no faster than the quota allows, beyond what one fetch brought."""
    dispatcher = deployment.run(consumer={})
    control = ControlTopic(pipeline.settings, pipeline.codec, names.CONTROL_TENANTS, TenantSpec, kind="tenant")
    spec = pipeline.tenants[pipeline.tenant("b")]
    control.publish([replace(spec, requests_per_s=200.0, burst_requests=20)])

    def quota_is_known() -> bool:
        probes = many(pipeline, 60)
        pipeline.publish("b", *probes)
        return Code.QUOTA_EXCEEDED in outcomes(replies.wait(ids(probes)))

    try:
        eventually(quota_is_known, what="the quota")
        requests = many(pipeline, 2_000)
        topic, begun = names.backfill_topic(spec.tenant), monotonic()
        pipeline.write(topic, [(one.request_id.encode(), pipeline.codec.encode(one)) for one in requests])
        eventually(lambda: dispatcher.metric("fairlane_backfill_paused_tenants") == 1, what="the pause")
        assert outcomes(replies.wait(ids(requests))) == {Outcome.OK: 2_000}
        eventually(lambda: dispatcher.metric("fairlane_backfill_paused_tenants") == 0, what="what is owed to be paid")
        took_s = monotonic() - begun
        assert took_s > 9, "2,000 requests are 10 s of the quota, however they were fetched"
    finally:
        control.publish([spec])


@pytest.mark.parametrize("policy", ["drr", "vtc", "fifo"])
def test_every_policy_serves(deployment: Deployment, pipeline: Pipeline, replies: Replies, policy: str) -> None:
    audit = pipeline.reader(names.LEDGER_AUDIT, from_beginning=False)
    deployment.run(consumer={}, FAIRNESS_POLICY=policy)
    requests = [request for priority in Priority for request in many(pipeline, 20, priority=str(priority))]
    for tenant, part in (("a", requests[::2]), ("b", requests[1::2])):
        pipeline.publish(tenant, *part)
    assert outcomes(replies.wait(ids(requests))) == {Outcome.OK: 60}
    audit.read_to_end()
    events = pipeline.decoded(audit, AuditEvent)
    for request in requests:
        story = decisions_of(pipeline, events, request.request_id)
        # Whose turn it is at once has one event that tells of both.
        straight, waited = [Decision.DISPATCHED], [Decision.ACCEPTED, Decision.DISPATCHED]
        assert [event.decision for event in story] in (straight, waited)
        assert {"predicted_wait_ms", "rank_at_most", "own_share"} <= story[0].inputs.keys()
        assert {"waited_ms", "window_tokens", "share", "partition"} <= story[-1].inputs.keys()
        assert "watermark" not in str(story)
