"""One tenant's unknown schema ids, and a registry that is away, cost nobody else anything."""

import json
import threading
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic

import pytest

from benchmarks.processes import peak_bytes
from fairlane import names
from fairlane.codec import DecodeProblem
from fairlane.outcomes import Outcome
from fairlane.schema_files import committed_schemas
from fairlane.schema_registry import subject_of
from tests.contract.registry_double import RegistryDouble, running_registry
from tests.kit.hostile_kit import assert_undisturbed, calm_p99_s, fill, neighbour, requests_topic, under, warm
from tests.kit.pipeline import Pipeline, header
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.broker, pytest.mark.alone]

FLOOD_PER_S = 2_000
FLOOD_S = 5
AWAY = (503, {"error_code": 503, "message": "away"})


@pytest.fixture
def registry() -> Iterator[RegistryDouble]:
    with running_registry() as double:
        fill(double)
        yield double


@pytest.fixture
def pipeline(broker: str, tmp_path: Path, unique: str, registry: RegistryDouble) -> Iterator[Pipeline]:
    env = {"SCHEMA_REGISTRY_URL": registry.url}
    with Pipeline(broker, tmp_path, unique, tenants=("hostile", "other", "third"), env=env) as pipeline:
        pipeline.start()
        warm(pipeline, "hostile", "other")
        yield pipeline


def _is_past(at: float) -> bool:
    return monotonic() >= at


def register_newer(registry: RegistryDouble) -> int:
    """Another spelling of the request's schema, as a newer client would register it; returns its id."""
    newer = json.loads(json.dumps(committed_schemas().writer("InferenceRequest")[1]))
    newer["doc"] = f"as of {monotonic()}"
    return registry.add(subject_of("InferenceRequest"), json.dumps(newer))


def test_unknown_ids_at_2000_a_second_delay_nobody_and_hammer_no_registry(
    pipeline: Pipeline, registry: RegistryDouble
) -> None:
    dispatcher = pipeline.processes["dispatcher-1"]
    pid, calm_s = dispatcher.pid, calm_p99_s(pipeline, "other")
    letters = pipeline.reader(names.DEAD_LETTER_REQUESTS, from_beginning=False)
    good, ids = pipeline.codec.encode(pipeline.request()), count(100_000)
    before = peak_bytes(dispatcher.pid)
    registry.requests.clear()
    began = monotonic()
    with neighbour(pipeline, "other").sending() as beside:
        for second in range(FLOOD_S):
            eventually(partial(_is_past, began + second), 30.0, "the next second")
            records = [(None, under(next(ids), good)) for _ in range(FLOOD_PER_S)]
            pipeline.write(requests_topic(pipeline, "hostile"), records)
        # It waits behind its own tenant's flood, which is read at MAX_INVALID_RECORDS_PER_S at most.
        last = pipeline.request(timeout_ms=240_000)
        pipeline.write(
            requests_topic(pipeline, "hostile"),
            [(None, under(register_newer(registry), pipeline.codec.encode(last)))],
        )
        # What is honest is found behind all of it, although its id was registered a moment ago.
        reply = pipeline.replies("hostile").wait([last.request_id], 240.0)[last.request_id]
    took_s = monotonic() - began
    assert reply.outcome == Outcome.OK
    letters.read_to_end()
    found = pipeline.dead_letters(letters)
    assert len(found) == FLOOD_PER_S * FLOOD_S
    assert {header(one, "kafka_dlt-exception-message").split(":")[0] for one in found} == {
        DecodeProblem.UNKNOWN_SCHEMA_ID
    }
    per_look_up = len(committed_schemas().record_names)
    assert len(registry.requests) <= (took_s + 2) * per_look_up + 1
    assert_undisturbed(beside, calm_s)
    assert peak_bytes(dispatcher.pid) - before < 100 * 2**20
    assert dispatcher.pid == pid
    assert dispatcher.alive


def test_while_the_registry_is_away_the_partition_with_the_unknown_id_waits_alone(
    pipeline: Pipeline, registry: RegistryDouble
) -> None:
    dispatcher, topic = pipeline.processes["dispatcher-1"], requests_topic(pipeline, "hostile")
    pid, calm_s = dispatcher.pid, calm_p99_s(pipeline, "other")
    registry.answer_with = AWAY
    behind = [pipeline.request() for _ in range(20)]
    first = pipeline.request()
    replies = pipeline.replies()
    (place,) = pipeline.write(topic, [(None, under(register_newer(registry), pipeline.codec.encode(first)))])
    pipeline.publish("hostile", *behind)
    failed = "fairlane_schema_lookups_total"
    with neighbour(pipeline, "other").sending() as beside:
        eventually(lambda: dispatcher.metric(failed, outcome="failed") >= 3, 60.0, "look-ups that failed")
        third = [pipeline.request() for _ in range(50)]
        pipeline.publish("third", *third)
        replies.wait([request.request_id for request in third])
        assert dispatcher.metric("fairlane_schema_waiting_records") >= 1
    replies.read_to_end()
    assert not {first.request_id, *(request.request_id for request in behind)} & replies.by_id.keys()
    assert_undisturbed(beside, calm_s)
    assert (dispatcher.pid, dispatcher.get("/health/ready")[0]) == (pid, 200)

    registry.answer_with = None
    found = replies.wait([first.request_id, *(request.request_id for request in behind)])
    assert {reply.outcome for reply in found.values()} == {Outcome.OK}
    assert found[first.request_id].source == place
    eventually(lambda: dispatcher.metric("fairlane_schema_waiting_records") == 0, what="nothing that waits")


def test_a_registry_that_hangs_holds_up_no_end(pipeline: Pipeline, registry: RegistryDouble) -> None:
    """It takes the request and never answers: others go on, and the process ends in time and reads it again."""
    dispatcher, hold, calm_s = pipeline.processes["dispatcher-1"], threading.Event(), calm_p99_s(pipeline, "other")
    registry.hold = hold
    try:
        first = pipeline.request()
        value = under(register_newer(registry), pipeline.codec.encode(first))
        pipeline.write(requests_topic(pipeline, "hostile"), [(None, value)])
        eventually(lambda: dispatcher.metric("fairlane_schema_waiting_records") == 1, what="a record that waits")
        with neighbour(pipeline, "other").sending() as beside:
            beside.wait_replies(40)
        assert_undisturbed(beside, calm_s)
        assert dispatcher.stop(15.0) == 0
    finally:
        registry.hold = None
        hold.set()
    pipeline.dispatcher().wait_ready()
    reply = pipeline.replies("hostile").wait([first.request_id])[first.request_id]
    assert reply.outcome == Outcome.OK


def test_a_recursive_schema_of_our_own_name_nests_nothing(pipeline: Pipeline, registry: RegistryDouble) -> None:
    """fastavro would follow it until the process is out of stack."""
    recursive = {
        "type": "record",
        "name": "fairlane.InferenceRequest",
        "fields": [{"name": "request_id", "type": ["null", "fairlane.InferenceRequest"], "default": None}],
    }
    endless = {
        "type": "record",
        "name": "fairlane.InferenceRequest",
        "fields": [{"name": "request_id", "type": {"type": "array", "items": "null"}, "default": []}],
    }
    dispatcher = pipeline.processes["dispatcher-1"]
    pid, letters = dispatcher.pid, pipeline.reader(names.DEAD_LETTER_REQUESTS, from_beginning=False)
    own = subject_of("InferenceRequest")
    hostile = [
        (None, under(registry.add(own, json.dumps(recursive)), bytes(5) + b"\x02" * 100_000)),
        (None, under(registry.add(own, json.dumps(endless)), bytes(5) + b"\xfe" * 8 + b"\x7f")),
        (None, under(registry.add("somebody-elses", json.dumps({**endless, "doc": "x"})), bytes(20))),
    ]
    places = pipeline.write(requests_topic(pipeline, "hostile"), hostile)
    wanted = {place.offset for place in places}

    def buried() -> bool:
        found = pipeline.dead_letters(letters)
        return {int(header(one, "kafka_dlt-original-offset")) for one in found} == wanted

    letters.wait(buried, what="dead letters")
    last = pipeline.request()
    pipeline.publish("hostile", last)
    assert pipeline.replies("hostile").wait([last.request_id])[last.request_id].outcome == Outcome.OK
    assert dispatcher.pid == pid
