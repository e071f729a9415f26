"""A member is stopped with work in its hands and wakes after its group moved on: what it holds is not committed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults.promise import examine, unsettled
from benchmarks.faults.rig import Place, members
from fairlane import names
from fairlane.outcomes import Outcome, Priority
from fairlane.records import InferenceRequest, Parameters
from tests.kit.log_reader import LogReader
from tests.kit.pipeline import Pipeline
from tests.kit.processes import ServiceProcess
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

TENANTS = ("a", "b", "c")
_TIMEOUT_MS = 600_000
_HOLD_TIMEOUT_S = 30.0
_MOVE_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 90.0
_WAKE_UP_EVENTS = ("transaction_aborted", "transactions_stopped", "dropped_revoked_work", "revoked", "consumer_failed")

Say = Callable[[str], None]


def test_a_paused_consumer_that_wakes_commits_nothing(broker: str, unique: str, tmp_path: Path, say: Say) -> None:
    """Stopped while its engine runs a batch: no transaction is open, and only the group's fence stands in its way."""
    env = {"MAX_BATCH_SIZE": "4", "SIMULATED_DECODE_TOKENS_PER_S": "64"}  # half a second a batch

    def holds_work(consumer: ServiceProcess) -> bool:
        return consumer.metric("fairlane_prefetched_items") >= 4

    pause_consumer(broker, unique, tmp_path, say, env, 20, holds_work)


@pytest.mark.long
def test_a_consumer_paused_in_a_transaction_commits_nothing(broker: str, unique: str, tmp_path: Path, say: Say) -> None:
    """One record a transaction: one is nearly always open, and what the engine has finished waits for its turn."""
    env = {"MAX_TRANSACTION_RECORDS": "1", "MAX_BATCH_SIZE": "16"}

    def holds_work(consumer: ServiceProcess) -> bool:
        finished = consumer.metric("fairlane_replies_total")
        uncommitted = finished - consumer.metric("fairlane_transaction_records_sum")
        return uncommitted >= 16 and consumer.metric("fairlane_prefetched_items") >= 16

    pause_consumer(broker, unique, tmp_path, say, env, 200, holds_work)


def test_a_paused_dispatcher_that_wakes_commits_nothing(broker: str, unique: str, tmp_path: Path, say: Say) -> None:
    # One record a transaction: what was read waits in memory until its turn comes.
    env = {"MAX_TRANSACTION_RECORDS": "1", "DISPATCHER_SESSION_TIMEOUT_MS": "3000"}
    with Pipeline(broker, tmp_path, unique, tenants=TENANTS, env=env) as pipeline:
        pipeline.start(dispatchers=2, consumers=1)
        sleeper, other = (pipeline.processes[f"dispatcher-{number}"] for number in (1, 2))
        topics = [names.requests_topic(tenant) for tenant in pipeline.tenants]
        topics += [names.backfill_topic(tenant) for tenant in pipeline.tenants]
        requests = publish(pipeline, 200)

        def holds_work() -> bool:
            read = sleeper.metric("fairlane_requests_read_total")
            return read - sleeper.metric("fairlane_transaction_records_sum") >= 50

        eventually(holds_work, _HOLD_TIMEOUT_S, "requests in the memory of a dispatcher")
        check_paused(pipeline, pipeline.dispatcher_group, topics, sleeper, other, requests, say)


def pause_consumer(
    broker: str,
    unique: str,
    folder: Path,
    say: Say,
    env: dict[str, str],
    per_tenant: int,
    holds_work: Callable[[ServiceProcess], bool],
) -> None:
    """Stop one of two consumers, that run with ``env``, once it holds work."""
    with Pipeline(broker, folder, unique, tenants=TENANTS) as pipeline:
        sleeper, other = pipeline.consumer(1, env), pipeline.consumer(2, env)
        for process in (pipeline.dispatcher(), sleeper, other):
            process.wait_ready()
        pipeline.wait_all_own()
        work = [names.priority_topic(pipeline.pool, priority) for priority in Priority]
        requests = publish(pipeline, per_tenant)
        eventually(lambda: holds_work(sleeper), _HOLD_TIMEOUT_S, f"work in the hands of {sleeper.name}")
        check_paused(pipeline, pipeline.pool_group(), work, sleeper, other, requests, say)


def publish(pipeline: Pipeline, per_tenant: int) -> list[InferenceRequest]:
    """Requests of every tenant and priority."""
    published = []
    for name in TENANTS:
        requests = [
            pipeline.request(
                parameters=Parameters(max_tokens=8),
                priority=str(list(Priority)[number % len(Priority)]),
                timeout_ms=_TIMEOUT_MS,
            )
            for number in range(per_tenant)
        ]
        pipeline.publish(name, *requests)
        published += requests
    return published


def check_paused(
    pipeline: Pipeline,
    group: str,
    topics: list[str],
    sleeper: ServiceProcess,
    other: ServiceProcess,
    requests: list[InferenceRequest],
    say: Say,
) -> None:
    """Stop ``sleeper``, let ``other`` do everything, wake ``sleeper``: one reply to each, and it works again."""
    owned = pipeline.assignments(group)
    assert owned[sleeper.name], owned
    assert owned[other.name], owned
    sleeper.pause()
    pid = sleeper.pid
    try:
        reader = pipeline.reader(*topics)
        held = left_undone(pipeline, group, reader, owned[sleeper.name])
        assert held, f"{sleeper.name} was stopped with nothing in its hands"
        everything = {place for partitions in owned.values() for place in partitions}

        def moved_on() -> bool:
            here = members(pipeline.admin, group)
            return [member.name for member in here] == [other.name] and here[0].partitions == everything

        eventually(moved_on, _MOVE_TIMEOUT_S, f"all partitions with {other.name}")
        replies = pipeline.replies()
        replies.wait((request.request_id for request in requests), _ANSWER_TIMEOUT_S)
        say(f"{sleeper.name} slept on {held} undone records of its partitions, {other.name} did them")
    finally:
        sleeper.resume()

    def is_back() -> bool:
        if not sleeper.alive:
            say(f"{sleeper.name} ended with {sleeper.exit_status}: {wake_up_events(sleeper)}")
            assert sleeper.exit_status == 1, sleeper.last_words()
            sleeper.start()  # as its supervisor would
        here = members(pipeline.admin, group)
        return sorted(member.name for member in here) == sorted((sleeper.name, other.name)) and all(
            member.partitions for member in here
        )

    eventually(is_back, _MOVE_TIMEOUT_S, f"{sleeper.name} as a member with partitions")
    if sleeper.pid == pid:
        say(f"{sleeper.name} went on: {wake_up_events(sleeper)}")
    more = publish(pipeline, 4)
    replies.wait((request.request_id for request in more), _ANSWER_TIMEOUT_S)
    expected = {request.request_id: str(Outcome.OK) for request in requests + more}
    findings = examine(pipeline.deployment, expected, postgres_dsn=None, timeout_s=0)
    assert findings.problems == []


def left_undone(pipeline: Pipeline, group: str, reader: LogReader, places: set[Place]) -> int:
    """How many of the records that the reader finds in these partitions the group has not settled."""
    reader.poll()
    reader.read_to_end()
    return sum(partition in places for partition, _offset in unsettled(pipeline.settings, group, reader.records))


def wake_up_events(process: ServiceProcess) -> str:
    """What a woken process said about it, by event."""
    counts = {event: len(process.events(event)) for event in _WAKE_UP_EVENTS}
    reasons = {str(entry.get("reason")) for entry in process.events("transaction_aborted")}
    return ", ".join(f"{event} {count}" for event, count in counts.items() if count) + f" {sorted(reasons)}"
