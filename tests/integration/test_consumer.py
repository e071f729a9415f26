"""Inference consumers on the real broker: assignment, micro-batches, deadlines, poison, draining, both protocols."""

from collections.abc import Iterator
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from deploy.local.services import Service
from fairlane import headers, names
from fairlane.outcomes import Code, Outcome, Priority
from fairlane.records import SourceCoordinate, UsageEvent, WorkItem
from tests.kit.deployment import default_model, model_per_task
from tests.kit.log_reader import LogReader, Replies
from tests.kit.pipeline import Pipeline, header, unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.troubled_engine import POISON
from tests.kit.waiting import eventually
from tests.kit.work_items import work_item, write_work

pytestmark = pytest.mark.broker

SLOW = {"SIMULATED_DECODE_TOKENS_PER_S": "10000"}
"""A full batch of 32 requests for 4 tokens each takes 13 ms."""


@pytest.fixture(scope="module")
def pipeline(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """A dispatcher, and two pools that have no consumer yet."""
    folder, unique = tmp_path_factory.mktemp("consumer"), unique_name()
    classic = replace(default_model(unique, f"{unique}-classic"), model=f"{unique}-classic")
    models = (*model_per_task(unique, f"{unique}-pool"), classic)
    with Pipeline(broker, folder, unique, models=models) as pipeline:
        pipeline.dispatcher().wait_ready()
        pipeline.wait_all_own()
        yield pipeline


@pytest.fixture(scope="module")
def replies(pipeline: Pipeline) -> Replies:
    return pipeline.replies()


@pytest.fixture(scope="module")
def usage(pipeline: Pipeline) -> LogReader:
    return pipeline.reader(names.LEDGER_USAGE, from_beginning=False)


@pytest.fixture(scope="module")
def letters(pipeline: Pipeline) -> LogReader:
    return pipeline.reader(names.DEAD_LETTER_WORK, from_beginning=False)


def usage_of(pipeline: Pipeline, usage: LogReader, request_id: str) -> UsageEvent:
    """The one usage event of a request."""

    def found() -> list[UsageEvent]:
        return [event for event in pipeline.decoded(usage, UsageEvent) if event.request_id == request_id]

    usage.wait(found, what="a usage event")
    usage.read_to_end()
    (event,) = found()
    return event


def publish(pipeline: Pipeline, count: int, **fields: Any) -> list[str]:
    """So many requests over all classes. Returns their ids."""
    requests = [
        replace(pipeline.request(**fields), priority=str(tuple(Priority)[number % 3])) for number in range(count)
    ]
    pipeline.publish("a", *requests)
    return [request.request_id for request in requests]


def troubled(pipeline: Pipeline, env: dict[str, str] | None = None) -> ServiceProcess:
    arguments = ("-m", "tests.kit.troubled_consumer", "--pool", pipeline.models[0].pool)
    return pipeline.launch(Service("consumer-troubled", arguments, env or {}))


def test_each_of_three_members_serves_all_classes_and_a_rolling_stop_loses_nothing(
    pipeline: Pipeline, replies: Replies, usage: LogReader
) -> None:
    members = [pipeline.consumer(number, SLOW) for number in (1, 2, 3)]
    for member in members:
        member.wait_ready()
    pool = pipeline.models[0].pool
    topics = {names.priority_topic(pool, priority) for priority in Priority}

    def balanced() -> bool:
        owned = pipeline.assignments(pipeline.pool_group()).values()
        return len(owned) == 3 and all({topic for topic, _ in partitions} == topics for partitions in owned)

    eventually(balanced, 15, "partitions of every class for every member")

    request_ids = publish(pipeline, 900)
    for member in members[:2]:
        request_ids += publish(pipeline, 300)
        assert member.stop() == 0
    answers = replies.wait(request_ids, 30)
    assert {reply.outcome for reply in answers.values()} == {Outcome.OK}
    sizes = [reply.batch_size for reply in answers.values()]
    assert max(sizes) == 32
    assert sum(sizes) / len(sizes) > 8

    assert members[2].stop() == 0
    replies.read_to_end()
    replies.exactly_once(request_ids)
    usage.read_to_end()
    events = [event for event in pipeline.decoded(usage, UsageEvent) if event.request_id in answers]
    assert len(events) == len({event.work for event in events}) == len(request_ids)


def test_a_lone_request_waits_for_no_batch(pipeline: Pipeline, replies: Replies) -> None:
    pipeline.consumer(1, {"BATCH_TIMEOUT_MS": "100"}).wait_ready()
    pipeline.wait_all_own()
    waits_ms = []
    for _ in range(5):
        (request_id,) = publish(pipeline, 1)
        reply = replies.wait([request_id])[request_id]
        assert reply.batch_size == 1
        waits_ms.append((reply.timings.engine_started_at_ms or 0) - (reply.timings.received_at_ms or 0))
    assert 0 <= min(waits_ms) < 50
    assert pipeline.processes[f"consumer-{pipeline.models[0].pool}-1"].stop() == 0


def test_what_is_late_is_answered_expired_and_costs_nothing(
    pipeline: Pipeline, replies: Replies, usage: LogReader
) -> None:
    slow = {"SIMULATED_DECODE_TOKENS_PER_S": "8", "MAX_BATCH_SIZE": "1"}
    consumer = pipeline.consumer(1, slow).wait_ready()
    pipeline.wait_all_own()
    # Written to the consumer itself: a dispatcher refuses what it sees coming.
    running = work_item(pipeline)
    write_work(pipeline, running)  # half a second
    eventually(lambda: consumer.metric("fairlane_running_items") == 1, what="the first at the engine")
    waiting = [work_item(pipeline, deadline_ms=200) for _ in range(3)]
    write_work(pipeline, *waiting)
    first, late = running.request.request_id, [one.request.request_id for one in waiting]
    answers = replies.wait([first, *late])
    assert [answers[request_id].outcome for request_id in (first, *late)] == [Outcome.OK, *[Outcome.EXPIRED] * 3]
    for request_id in late:
        reply = answers[request_id]
        assert reply.output is None
        assert "deadline" in (reply.message or "")
        event = usage_of(pipeline, usage, request_id)
        assert (event.outcome, event.engine_ms, event.completion_tokens) == (Outcome.EXPIRED, 0, 0)
    assert consumer.stop() == 0


def test_an_item_the_engine_fails_on_fails_alone(
    pipeline: Pipeline, replies: Replies, usage: LogReader, letters: LogReader
) -> None:
    poison = pipeline.request(prompt=f"please: {POISON}")
    harmless = "x" * len(f"please: {POISON}")  # of one length, so that they make one batch
    before, after = [[pipeline.request(prompt=harmless) for _ in range(15)] for _ in range(2)]
    pipeline.publish("a", *before, poison, *after)  # and before there is a consumer
    consumer = troubled(pipeline).wait_ready()

    answers = replies.wait([request.request_id for request in (*before, poison, *after)])
    reply = answers.pop(poison.request_id)
    assert (reply.outcome, reply.code) == (Outcome.FAILED, Code.POISON)
    assert {other.outcome for other in answers.values()} == {Outcome.OK}
    assert (reply.batch_size, reply.attempts > 1) == (1, True)

    event = usage_of(pipeline, usage, poison.request_id)
    assert (event.outcome, event.code) == (Outcome.FAILED, Code.POISON)
    letters.wait(lambda: pipeline.dead_letters(letters))
    letters.read_to_end()
    (letter,) = pipeline.dead_letters(letters)
    assert pipeline.codec.decode_as(WorkItem, letter.value()).request == poison
    assert letter.key() == poison.request_id.encode()
    assert header(letter, headers.DLT_ORIGINAL_TOPIC) == event.work.topic
    assert int(header(letter, headers.DLT_ORIGINAL_OFFSET)) == event.work.offset
    assert "RuntimeError" in header(letter, headers.DLT_EXCEPTION_MESSAGE)
    assert POISON not in repr(letter.headers())
    assert POISON not in consumer.log()
    assert consumer.events("engine_failed")


def test_work_that_cannot_be_read_or_served_holds_up_nothing(
    pipeline: Pipeline, replies: Replies, letters: LogReader
) -> None:
    """On the topic that only dispatchers write, all the same."""
    topic = names.priority_topic(pipeline.models[0].pool, Priority.NORMAL)
    item = work_item(pipeline, model_version="2")
    values: list[tuple[bytes | None, bytes | None]] = [
        (b"k1", b"\x93no record"),
        (b"k2", b""),
        (b"k3", None),
        (None, pipeline.codec.encode(pipeline.request())),
    ]
    bad = pipeline.write(topic, values)
    write_work(pipeline, item)
    (after,) = publish(pipeline, 1)

    answers = replies.wait([item.request.request_id, after])
    assert answers[after].outcome == Outcome.OK
    other_version = answers[item.request.request_id]
    # It went back and was routed again.
    assert (other_version.outcome, other_version.model_version) == (Outcome.OK, "1")

    def buried() -> dict[SourceCoordinate, tuple[bytes | None, bytes | None]]:
        return {
            SourceCoordinate(topic, int(header(letter, headers.DLT_ORIGINAL_PARTITION)), int(offset)): (
                letter.key(),
                letter.value(),
            )
            for letter in pipeline.dead_letters(letters)
            if (offset := header(letter, headers.DLT_ORIGINAL_OFFSET))
        }

    letters.wait(lambda: set(bad) <= buried().keys(), what="a dead letter each")
    assert [buried()[source] for source in bad] == [(key, value or b"") for key, value in values]
    assert pipeline.processes["consumer-troubled"].stop() == 0


def test_the_classic_protocol_serves_as_well(pipeline: Pipeline, replies: Replies) -> None:
    pool, model = pipeline.models[-1].pool, pipeline.models[-1].model
    env = {"CONSUMER_GROUP_PROTOCOL": "classic", **SLOW}
    members = [pipeline.consumer(number, env, pool=pool) for number in (1, 2)]
    for member in members:
        member.wait_ready()
    eventually(
        lambda: sorted(map(len, pipeline.assignments(pipeline.pool_group(pool)).values())) == [6, 6],
        what="half of the partitions for each",
    )
    request_ids = publish(pipeline, 300, model=model)
    assert members[0].stop() == 0
    request_ids += publish(pipeline, 100, model=model)
    started = monotonic()
    answers = replies.wait(request_ids)
    # The classic group misses for 45 s who does not leave it.
    assert monotonic() - started < 40
    assert {reply.outcome for reply in answers.values()} == {Outcome.OK}
    replies.read_to_end()
    replies.exactly_once(request_ids)
    assert members[1].stop() == 0
