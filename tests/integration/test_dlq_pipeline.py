"""Poison, its dead letter, its replay and the new reply, through real processes; `fairlane dlq` is one of them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.local.layout import PROJECT_ROOT
from deploy.local.services import Service
from fairlane import headers, names
from fairlane.outcomes import Code, Decision, Outcome
from fairlane.records import AuditEvent, WorkItem
from fairlane_server.postgres.request_timeline import History, tell
from tests.kit.pipeline import Pipeline, header
from tests.kit.processes import ServiceProcess
from tests.kit.troubled_engine import POISON

pytestmark = [pytest.mark.full, pytest.mark.broker]

PATIENCE_MS = 120_000


@pytest.fixture
def pipeline(broker: str, tmp_path: Path, unique: str) -> Iterator[Pipeline]:
    with Pipeline(broker, tmp_path, unique, tenants=("a",)) as pipeline:
        yield pipeline


def troubled(pipeline: Pipeline) -> ServiceProcess:
    arguments = ("-m", "tests.kit.troubled_consumer", "--pool", pipeline.pool)
    return pipeline.launch(Service(f"consumer-{pipeline.pool}-2", arguments, {}))


def dlq(pipeline: Pipeline, *arguments: str) -> list[dict[str, Any]]:
    """What the command printed, by line."""
    ran = subprocess.run(
        (sys.executable, "-m", "fairlane_server.cli", "dlq", *arguments, "--tenant", pipeline.tenant("a"), "--json"),
        cwd=PROJECT_ROOT,
        env=dict(os.environ) | pipeline.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    assert POISON not in ran.stdout
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_poison_is_replayed_and_its_first_reply_stands(pipeline: Pipeline) -> None:
    replies, letters = pipeline.replies(), pipeline.reader(names.DEAD_LETTER_WORK, from_beginning=False)
    audit = pipeline.reader(names.LEDGER_AUDIT, from_beginning=False)
    pipeline.dispatcher().wait_ready()
    pipeline.wait_all_own()
    breaking = troubled(pipeline).wait_ready()
    request = pipeline.request(prompt=POISON, timeout_ms=PATIENCE_MS, metadata={"kept": "yes"})
    pipeline.publish("a", request)
    first = replies.wait([request.request_id], 60)[request.request_id]
    assert (first.outcome, first.code, first.replay_of) == (Outcome.FAILED, Code.POISON, None)

    # The engine is as it was, so the replay dies as well, and leaves a letter of its own.
    done, _ = dlq(pipeline, "replay", "--topic", "work")
    assert done["replay_of"] == request.request_id
    second_id = done["request_id"]
    second = replies.wait([second_id], 60)[second_id]
    assert (second.outcome, second.code, second.replay_of) == (Outcome.FAILED, Code.POISON, request.request_id)
    assert breaking.stop() == 0

    pipeline.consumer().wait_ready()
    pipeline.wait_all_own()
    done, last = dlq(pipeline, "replay", "--topic", "work")
    assert last["summary"] == {"replayed": 1, "skipped": 0, "failed": 0, "replayed_before": 1, "left": 0}
    assert done["replay_of"] == request.request_id, "the first of all"
    third_id = done["request_id"]
    third = replies.wait([third_id], 60)[third_id]
    assert (third.outcome, third.replay_of) == (Outcome.OK, request.request_id)
    (last,) = dlq(pipeline, "replay", "--topic", "work")
    assert (last["summary"]["replayed"], last["summary"]["replayed_before"]) == (0, 2)
    replies.read_to_end()
    ids = [request.request_id, second_id, third_id]
    assert replies.exactly_once(ids)[request.request_id] == first
    assert replies.by_id.keys() == set(ids)

    letters.read_to_end()
    buried = pipeline.dead_letters(letters)
    works = [pipeline.codec.decode_as(WorkItem, letter.value()) for letter in buried]
    assert [work.request.request_id for work in works] == ids[:2]
    assert works[1].request.metadata == request.metadata
    assert {header(letter, headers.DLT_ORIGINAL_CONSUMER_GROUP) for letter in buried} == {pipeline.pool_group()}
    assert {header(letter, headers.TENANT) for letter in buried} == {pipeline.tenant("a")}
    assert POISON not in repr([letter.headers() for letter in letters.records])

    audit.read_to_end()
    told = [event for event in pipeline.decoded(audit, AuditEvent) if event.request_id in ids]
    assert POISON not in repr(told)
    for request_id, expected in zip(ids, (["replayed_as"], ["replay_of", "replayed_as"], ["replay_of"]), strict=True):
        decisions = tuple(event for event in told if event.request_id == request_id)
        (place,) = tell(History(decisions))
        replays = [event for event in place.events if event.event == Decision.REPLAYED]
        assert [{"replay_of", "replayed_as"} & event.details.keys() for event in replays] == [
            {name} for name in expected
        ]
        assert place.state == Decision.DISPATCHED
