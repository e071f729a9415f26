"""What a pool's group takes from the members it has: no more than what moves, and nothing for a long batch."""

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupType

from deploy.local.services import Service
from fairlane import names
from fairlane.outcomes import Outcome
from fairlane.records import Parameters, UsageEvent
from tests.kit.hasty_consumer import POLL_INTERVAL_S
from tests.kit.pipeline import Pipeline
from tests.kit.processes import ServiceProcess
from tests.kit.waiting import eventually
from tests.kit.work_items import work_item, write_work

pytestmark = [pytest.mark.broker, pytest.mark.alone]

PATIENCE_MS = 600_000
PARTITIONS = 12
"""Of a pool: four of each priority."""

BATCH_ITEMS = 4
BATCH_TOKENS = 10
"""Of each of its items."""
LONG_BATCH_S = POLL_INTERVAL_S + 3

Owners = dict[str, set[tuple[str, int]]]


def settled(pipeline: Pipeline, *members: ServiceProcess) -> Owners:
    """Who owns what when the group has come to rest with these members."""
    found: list[Owners] = []

    def at_rest() -> bool:
        owners = pipeline.assignments(pipeline.pool_group())
        found.append(owners)
        owned = [place for places in owners.values() for place in places]
        return (
            owners.keys() == {member.name for member in members}
            and all(owners.values())
            and len(owned) == len(set(owned)) == PARTITIONS
            and all(_held(member) == len(owners[member.name]) for member in members)
        )

    eventually(at_rest, what=f"{PARTITIONS} partitions with {len(members)} members")
    return found[-1]


def test_a_restarted_member_takes_from_the_others_only_what_moves(broker: str, tmp_path: Path, unique: str) -> None:
    with Pipeline(broker, tmp_path, unique, tenants=("a",)) as pipeline:
        pipeline.start(consumers=3)
        members = [pipeline.processes[f"consumer-{pipeline.pool}-{number}"] for number in (1, 2, 3)]
        before = settled(pipeline, *members)
        # That one whose partitions are the last of the range: nothing else has to move when it leaves.
        *staying, restarted = sorted(members, key=lambda member: max(number for _, number in before[member.name]))
        group = pipeline.admin.describe_consumer_groups([pipeline.pool_group()], request_timeout=10)
        assert group[pipeline.pool_group()].result(10).type == ConsumerGroupType.CONSUMER
        seen = {member.name: len(_rebalances(member)) for member in staying}

        requests = [pipeline.request(timeout_ms=PATIENCE_MS) for _ in range(300)]
        pipeline.publish("a", *requests[:100])
        assert restarted.stop() == 0
        pipeline.publish("a", *requests[100:200])
        between = settled(pipeline, *staying)
        for member in staying:
            assert before[member.name] <= between[member.name]
            assert not _revoked(_rebalances(member)[seen[member.name] :])
        restarted.start().wait_ready()
        after = settled(pipeline, restarted, *staying)
        pipeline.publish("a", *requests[200:])

        # The group gives the new one any place in its range: what moves now is its choice.
        for member in staying:
            name = member.name
            events = _rebalances(member)[seen[name] :]
            moved = len(before[name] - between[name]) + len(between[name] - after[name])
            assert sum(event["partitions"] for event in _revoked(events)) == moved, events
            assert not any(event["lost"] for event in _revoked(events))

        # What stayed is still read where it was.
        replies = pipeline.replies("a")
        ids = [request.request_id for request in requests]
        answers = replies.wait(ids)
        assert {answer.outcome for answer in answers.values()} == {Outcome.OK}
        replies.read_to_end()
        replies.exactly_once(ids)


def test_a_batch_may_take_longer_than_a_member_may_be_silent(broker: str, tmp_path: Path, unique: str) -> None:
    env = {
        "MAX_BATCH_SIZE": str(BATCH_ITEMS),
        "SIMULATED_DECODE_TOKENS_PER_S": str(BATCH_ITEMS * BATCH_TOKENS / LONG_BATCH_S),
    }
    with Pipeline(broker, tmp_path, unique, tenants=("a",), env=env) as pipeline:
        usage, replies = pipeline.reader(names.LEDGER_USAGE, from_beginning=False), pipeline.replies("a")
        arguments = ("-m", "tests.kit.hasty_consumer", "--pool", pipeline.pool)
        requests = [pipeline.request(parameters=Parameters(max_tokens=BATCH_TOKENS)) for _ in range(BATCH_ITEMS)]
        items = [
            work_item(pipeline, request=request, offset=number, deadline_ms=PATIENCE_MS)
            for number, request in enumerate(requests)
        ]
        # Before there is a consumer, and where they are read together: they make one batch.
        write_work(pipeline, *items, key="one partition")
        consumer = pipeline.launch(Service(f"consumer-{pipeline.pool}-1", arguments, {})).wait_ready()

        ids = [request.request_id for request in requests]
        answers = replies.wait(ids, LONG_BATCH_S * 2 + 60)
        assert {answer.outcome for answer in answers.values()} == {Outcome.OK}
        took_ms = [
            (answer.timings.engine_finished_at_ms or 0) - (answer.timings.engine_started_at_ms or 0)
            for answer in answers.values()
        ]
        assert max(took_ms) > POLL_INTERVAL_S * 1_000
        assert consumer.events("revoked") == []
        assert len(settled(pipeline, consumer)[consumer.name]) == PARTITIONS
        replies.read_to_end()
        replies.exactly_once(ids)
        usage.read_to_end()
        assert sorted(event.request_id for event in pipeline.decoded(usage, UsageEvent)) == sorted(ids)


def _rebalances(member: ServiceProcess) -> list[dict[str, Any]]:
    """Since it was started, in order."""
    return sorted([*member.events("assigned"), *member.events("revoked")], key=lambda event: event["timestamp"])


def _revoked(rebalances: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in rebalances if event["event"] == "revoked"]


def _change(event: dict[str, Any]) -> int:
    """How many partitions it has more."""
    return len(event["partitions"]) if event["event"] == "assigned" else -int(event["partitions"])


def _held(member: ServiceProcess) -> int:
    """How many partitions a member says it has."""
    return sum(map(_change, _rebalances(member)))
