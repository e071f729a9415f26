"""In flight as the log says it, on the real broker: nothing leaks, whoever restarts."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewPartitions, NewTopic
from prometheus_client import REGISTRY

from deploy.local.stack import LocalStack
from fairlane import names
from fairlane.clock import now_ms
from fairlane.kafka_config import idempotent_producer
from fairlane.outcomes import Health, Priority
from fairlane.records import CapacityReport, DispatchReport
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.admission_rule import CapacityState
from fairlane_server.kafka.feeds import FeedUnavailableError
from fairlane_server.processes.restarts import RestartPolicy
from stream_processors.dispatcher.feedback.work_feed import WorkFeed
from stream_processors.dispatcher.feedback.work_records import (
    AgedCapacityReport,
    FeedEvent,
    PartitionRecreated,
    PartitionsKnown,
    UsageRead,
    WorkSeen,
)
from stream_processors.dispatcher.scheduling.capacity import CapacityBoard
from stream_processors.dispatcher.scheduling.in_flight import ANY_PARTITION, Reserved, WorkId
from tests.kit.pipeline import Pipeline
from tests.kit.waiting import eventually
from tests.kit.work_log import COST, Follower, WorkLog, following

pytestmark = pytest.mark.broker


@pytest.fixture
def pipeline(broker: str, unique: str, tmp_path: Path) -> Iterator[Pipeline]:
    with Pipeline(broker, tmp_path, unique, tenants=("a",)) as made:
        yield made


@pytest.fixture
def log(pipeline: Pipeline) -> Iterator[WorkLog]:
    made = WorkLog(pipeline)
    yield made
    made.close()
    # A producer lives until it is collected, and would miss its broker aloud.
    del made
    gc.collect()


def is_counted(follower: Follower, log: WorkLog, items: int, timeout_s: float = 60.0) -> None:
    eventually(lambda: follower.tokens(log.pool) == COST * items, timeout_s, f"{items} in flight")


def reserved(log: WorkLog) -> Reserved:
    return Reserved(log.pool, Priority.NORMAL, 0, log.tenant, "", COST, COST // 2, "model")


def test_work_counts_from_its_reservation_to_its_settlement(log: WorkLog) -> None:
    with following(log) as follower:
        source = log.next_source()
        follower.in_flight.reserve(source, reserved(log))
        (work,) = log.dispatch(sources=[source])
        eventually(lambda: follower.seen(WorkSeen))
        assert follower.tokens(log.pool) == COST
        assert follower.in_flight.own_tokens(log.pool) == COST
        log.settle([work])
        is_counted(follower, log, 0)
        eventually(lambda: follower.settled, what="the settlement")
        (settled,) = follower.settled
        assert settled.own == reserved(log)
        assert settled.usage is not None
        assert settled.usage.tenant == log.tenant


def test_every_class_and_partition_is_followed(log: WorkLog) -> None:
    with following(log) as follower:
        works = [
            work
            for priority in Priority
            for partition in range(4)
            for work in log.dispatch(2, partition=partition, priority=priority)
        ]
        is_counted(follower, log, 24)
        assert {follower.in_flight.choose_partition(log.topic(Priority.HIGH)) for _ in range(4)} == {0, 1, 2, 3}
        log.settle(works)
        is_counted(follower, log, 0)


def test_what_was_aborted_is_not_in_flight(log: WorkLog) -> None:
    with following(log) as follower:
        log.dispatch(5, commit=False)
        log.dispatch(1)
        is_counted(follower, log, 1)
        assert len(follower.seen(WorkSeen)) == 1


def test_work_of_another_dispatcher_is_in_flight_but_not_our_own(log: WorkLog) -> None:
    with following(log, instance_id="another") as follower:
        log.dispatch(3)
        is_counted(follower, log, 3)
        assert follower.in_flight.own_tokens(log.pool) == 0


def test_a_dispatcher_that_starts_finds_exactly_what_is_undone(log: WorkLog) -> None:
    """It begins at the group's offset and passes over what the group did beyond it."""
    works = log.dispatch(20) + log.dispatch(5, partition=1)
    log.settle(work for work in works[:20] if work.offset % 3 or work.offset == 0)
    left = [work for work in works if work.partition == 1 or (work.offset % 3 == 0 and work.offset)]
    with following(log) as follower:
        assert follower.tokens(log.pool) == COST * len(left), "known when the start is done"
        log.settle(left)
        is_counted(follower, log, 0)


def test_what_was_settled_while_nobody_read_does_not_come_back(log: WorkLog) -> None:
    works = log.dispatch(10)
    with following(log) as follower:
        is_counted(follower, log, 10)
    log.settle(works[::2])
    with following(log) as follower:
        assert follower.tokens(log.pool) == COST * 5
        log.settle(works[1::2])
        is_counted(follower, log, 0)
    with following(log) as follower:
        assert follower.tokens(log.pool) == 0


def test_what_the_group_committed_without_a_bill_is_dropped_within_seconds(log: WorkLog) -> None:
    """Work that no consumer could read is a dead letter: nobody knows what it cost."""
    with following(log) as follower:
        works = log.dispatch(10)
        is_counted(follower, log, 10)
        log.settle(works[3:7], billed=False)
        is_counted(follower, log, 6, timeout_s=10)
        log.settle([*works[:3], *works[7:]], billed=False)
        is_counted(follower, log, 0, timeout_s=10)


def test_a_bill_without_a_commit_is_enough(log: WorkLog) -> None:
    with following(log) as follower:
        works = log.dispatch(10)
        is_counted(follower, log, 10)
        log.settle(works, committed=False)
        is_counted(follower, log, 0)


def test_a_pool_that_no_topic_can_be_named_after_stops_nothing(log: WorkLog) -> None:
    with following(log, lambda: ["gpu a", log.pool, "x" * 300]) as follower:
        works = log.dispatch(2)
        is_counted(follower, log, 2)
        log.settle(works)
        is_counted(follower, log, 0)


def test_own_heartbeats_tell_how_far_our_clock_is_ahead(
    pipeline: Pipeline, log: WorkLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so a report that is fresh is taken for no older than it is."""
    ahead_ms = 31_000
    monkeypatch.setattr("stream_processors.dispatcher.feedback.work_feed.now_ms", lambda: now_ms() + ahead_ms)
    with following(log) as follower:
        own = DispatchReport(log.settings.instance_id, 1, now_ms() + ahead_ms, draining=False)
        pipeline.write(names.CONTROL_DISPATCH, [(b"own", pipeline.codec.encode(own))])
        eventually(lambda: own in follower.seen(DispatchReport))

        def skew_s() -> float:
            return REGISTRY.get_sample_value("fairlane_clock_skew_seconds") or 0.0

        eventually(lambda: skew_s() > 29, what="the skew")
        assert skew_s() <= 31
        report = CapacityReport("one", log.pool, ("m",), Health.HEALTHY, False, 1.0, 1.0, 8, 100, 0.5, 1, 10, 1, 500.0)
        pipeline.write(names.CONTROL_CAPACITY, [(b"k", pipeline.codec.encode(report))])
        eventually(lambda: [one for one in follower.seen(AgedCapacityReport) if one.report == report])
        assert follower.seen(AgedCapacityReport)[-1].age_ms < ahead_ms / 2


def test_a_pool_that_comes_later_is_followed(pipeline: Pipeline, log: WorkLog) -> None:
    later = WorkLog(pipeline, f"{pipeline.unique}-later")
    pools = [log.pool]
    try:
        with following(log, lambda: pools) as follower:
            pools.append(later.pool)
            assert follower.in_flight.choose_partition(later.topic()) == ANY_PARTITION
            made = [NewTopic(later.topic(priority), 2, 1) for priority in Priority]
            for created in pipeline.admin.create_topics(made).values():
                created.result(10)
            works = later.dispatch(4)
            later.settle(works[:1])
            is_counted(follower, later, 3)
            assert follower.in_flight.choose_partition(later.topic()) == 1
            later.settle(works)
            is_counted(follower, later, 0)
    finally:
        later.close()


def test_partitions_that_are_added_are_followed(
    pipeline: Pipeline, log: WorkLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_processors.dispatcher.feedback.work_feed._LOOK_AT_ALL_TOPICS_EVERY_S", 0.5)
    with following(log) as follower:
        pipeline.admin.create_partitions([NewPartitions(log.topic(), 5)])[log.topic()].result(10)
        eventually(lambda: PartitionsKnown(log.topic(), 5) in follower.seen(PartitionsKnown), what="the fifth")
        works = log.dispatch(2, partition=4)
        is_counted(follower, log, 2)
        log.settle(works)
        is_counted(follower, log, 0)


def test_a_topic_that_was_made_anew_is_read_from_its_beginning(
    pipeline: Pipeline, log: WorkLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_processors.dispatcher.feedback.work_feed._LOOK_AT_ALL_TOPICS_EVERY_S", 0.5)
    with following(log) as follower:
        log.dispatch(50)
        is_counted(follower, log, 50)
        pipeline.admin.delete_topics([log.topic()])[log.topic()].result(10)

        def created() -> bool:
            made = pipeline.admin.create_topics([NewTopic(log.topic(), 4, 1)])[log.topic()]
            return made.exception(10) is None

        eventually(created, what="the topic")
        log.sources.clear()
        again = WorkLog(pipeline)
        works = again.dispatch(3)
        eventually(lambda: follower.seen(PartitionRecreated), 20, "its discovery")
        is_counted(follower, log, 3, timeout_s=20)
        again.settle(works, committed=False)
        is_counted(follower, log, 0)
        again.close()


def test_heartbeats_come_too_those_of_the_last_seconds_included(pipeline: Pipeline, log: WorkLog) -> None:
    def capacity(name: str) -> tuple[bytes, bytes]:
        report = CapacityReport(
            name, log.pool, ("m",), Health.HEALTHY, False, 1.0, 1.0, 8, 100, 0.5, 1, 10, now_ms(), 3.0
        )
        return name.encode(), pipeline.codec.encode(report)

    dispatch = DispatchReport(f"{pipeline.unique}-d", 1, 2, draining=True)
    names_seen = [f"{pipeline.unique}-before", f"{pipeline.unique}-after"]
    pipeline.write(names.CONTROL_CAPACITY, [capacity(names_seen[0])])
    with following(log) as follower:

        def instances() -> list[str]:
            heard = [one.report for one in follower.seen(AgedCapacityReport)]
            return [report.instance_id for report in heard if report.pool == log.pool]

        assert instances() == names_seen[:1]
        pipeline.write(names.CONTROL_CAPACITY, [capacity(names_seen[1])])
        pipeline.write(names.CONTROL_DISPATCH, [(b"d", pipeline.codec.encode(dispatch))])
        eventually(lambda: instances() == names_seen)
        eventually(lambda: dispatch in follower.seen(DispatchReport))


def test_a_pool_that_was_lost_before_the_start_is_known_as_lost(
    pipeline: Pipeline, log: WorkLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its consumers fell silent four minutes ago; what they could do is what is expected back."""
    reports = [
        CapacityReport(name, log.pool, ("m",), Health.HEALTHY, False, 1.0, 1.0, 8, 100, 0.5, 1, 10, 1, 500.0)
        for name in ("one", "two")
    ]
    at_ms = now_ms()
    pipeline.write(names.CONTROL_CAPACITY, [(b"k", pipeline.codec.encode(report)) for report in reports])
    written_ms = now_ms()
    monkeypatch.setattr("stream_processors.dispatcher.feedback.work_feed.now_ms", lambda: now_ms() + 240_000)
    board = CapacityBoard()
    with following(log) as follower:
        for heard in follower.seen(AgedCapacityReport):
            board.report(heard.report, 1_000_000 - heard.age_ms)
            assert heard.age_ms >= 0
        known = board.pool(log.pool, 1_000_000)
    assert (known.state, known.last_cost_tokens_per_s) == (CapacityState.LOST, 1_000.0)
    assert 240_000 + follower.started_ms - written_ms <= known.lost_for_ms <= 240_000 + now_ms() - at_ms


def test_it_starts_though_heartbeats_never_pause(pipeline: Pipeline, log: WorkLog) -> None:
    """The broker shows the end of a log only to a reader who finds nothing there: with many consumers, to none."""
    report = CapacityReport("busy", log.pool, ("m",), Health.HEALTHY, False, 1.0, 1.0, 8, 100, 0.5, 1, 10, now_ms())
    value = pipeline.codec.encode(report)
    began, stopping = threading.Event(), threading.Event()

    def write() -> None:
        producer = Producer(idempotent_producer(pipeline.settings))
        for _ in range(4_000):
            if stopping.wait(0.01):
                break
            producer.produce(names.CONTROL_CAPACITY, value, b"busy", on_delivery=lambda *_: began.set())
            producer.poll(0)
        producer.flush(10)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert began.wait(20)
        with following(log) as follower:
            assert {one.report.instance_id for one in follower.seen(AgedCapacityReport)} >= {"busy"}
            known = len(follower.seen(AgedCapacityReport))
            eventually(lambda: len(follower.seen(AgedCapacityReport)) > known + 10, what="those that come after")
            assert follower.seen(AgedCapacityReport)[-1].age_ms == 0
    finally:
        stopping.set()
        writer.join()


def test_what_cannot_be_read_is_passed_over(pipeline: Pipeline, log: WorkLog) -> None:
    with following(log) as follower:
        pipeline.write(log.topic(), [(b"no", b"headers")])
        pipeline.write(log.topic(), [(b"k", b"v")], [("fairlane-cost-tokens", b"many")])
        for topic in (names.LEDGER_USAGE, names.CONTROL_CAPACITY):
            pipeline.write(topic, [(b"k", b"no record")])
        elsewhere = log.usage(WorkId("elsewhere", 0, 0))
        pipeline.write(names.LEDGER_USAGE, [(b"k", pipeline.codec.encode(elsewhere))])
        works = log.dispatch(2, partition=1)
        is_counted(follower, log, 2)
        log.settle(works)
        is_counted(follower, log, 0)
        read = [one for usage in follower.seen(UsageRead) for one in usage.records]
        assert [one.event is None for one in read].count(True) == 1, "the place of unreadable usage is passed on"


def test_a_listener_that_breaks_is_reported(log: WorkLog) -> None:
    armed = False

    def on_events(_events: object) -> None:
        if armed:
            raise RuntimeError("broken")

    failures: list[Exception] = []
    feed = WorkFeed(log.settings, log.pipeline.codec, lambda: [log.pool], on_events)
    feed.on_failure(failures.append)
    feed.start(20)
    armed = True
    log.dispatch(1)
    eventually(lambda: failures)
    feed.stop()
    assert str(failures[0]) == "broken"


def test_without_a_broker_the_start_fails_in_time() -> None:
    settings = Settings(kafka_bootstrap_servers="127.0.0.1:1")
    events: list[FeedEvent] = []
    feed = WorkFeed(settings, default_codec(), list, events.extend)
    with pytest.raises(FeedUnavailableError, match="not read to its end"):
        feed.start(0.5)
    assert not events


def test_real_consumers_that_are_killed_leave_nothing_in_flight(pipeline: Pipeline, log: WorkLog) -> None:
    """And so do dispatchers that start in the middle of it."""
    env = {"SIMULATED_DECODE_TOKENS_PER_S": "200", "MAX_BATCH_SIZE": "4"}
    replies = pipeline.replies("a")

    def answered() -> int:
        replies.reader.poll(0.05)
        return len(replies.reader.records)

    pipeline.consumer(1, env).wait_ready()
    with following(log) as first:
        works = [work for partition in range(4) for work in log.dispatch(15, partition=partition)]
        eventually(lambda: len(first.seen(WorkSeen)) == len(works), what="all work")
        eventually(lambda: answered() >= 10, 30, "some answers")
        pipeline.processes[f"consumer-{log.pool}-1"].kill()
        at_kill = len(first.settled)
        pipeline.consumer(1, env)
        with following(log) as second:
            eventually(lambda: second.tokens(log.pool) == first.tokens(log.pool), what="both counting alike")
            assert 0 < second.tokens(log.pool) <= COST * (len(works) - at_kill)
            eventually(lambda: answered() >= len(works), 60, "all answers")
            for follower in (first, second):
                is_counted(follower, log, 0)
        assert len(first.settled) == len(works), "each settled once"
    with following(log) as third:
        assert third.tokens(log.pool) == 0


def test_it_survives_a_broker_that_is_killed(unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every kind of its requests is under way when the broker goes.
    monkeypatch.setattr("stream_processors.dispatcher.feedback.work_feed._LOOK_AT_ALL_TOPICS_EVERY_S", 0.0)
    monkeypatch.setattr("stream_processors.dispatcher.feedback.pool_offsets._EVERY_S", 0.05)
    node = LocalStack(data_dir=tmp_path / "kafka", parts=("kafka",), environ={}, policy=RestartPolicy(window_s=3.0))
    with (
        node,
        Pipeline(node.endpoints.kafka_bootstrap_servers, tmp_path, unique, tenants=("a",)) as pipeline,
    ):
        log = WorkLog(pipeline)
        with following(log) as follower:
            works = log.dispatch(10)
            is_counted(follower, log, 10)
            killed = node.supervisor.kill("kafka")
            eventually(lambda: follower.feed.age_s > 1.5, 20, "a sign of the outage")
            node.supervisor.wait_ready("kafka", 60, other_than_pid=killed)
            log.close()
            log = WorkLog(pipeline)
            log.sources.update(dict.fromkeys(works, log.next_source()))
            log.settle(works)
            is_counted(follower, log, 0, timeout_s=30)
            works = log.dispatch(3, partition=1)
            is_counted(follower, log, 3, timeout_s=30)
            log.settle(works)
            is_counted(follower, log, 0)
            eventually(lambda: follower.feed.age_s < 2, what="a fresh view")
            assert (REGISTRY.get_sample_value("fairlane_work_feed_age_seconds") or 0) < 60
        log.close()
        del log
        gc.collect()
