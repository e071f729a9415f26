"""A model is updated under traffic, and taken back: nothing is refused, and every answer says its version."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import psutil
import pytest

from deploy.local.services import Service
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply, ModelRoute
from fairlane_server.models.routes import version_key
from tests.kit.deployment import default_model
from tests.kit.log_reader import Replies
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

BURST = 5
PATIENCE_S = 60.0
SLOW = {"SIMULATED_DECODE_TOKENS_PER_S": "20", "MAX_BATCH_SIZE": "1"}
"""A request of 4 tokens takes a fifth of a second."""


@pytest.fixture
def pipeline(broker: str, tmp_path: Path) -> Iterator[Pipeline]:
    with Pipeline(broker, tmp_path, unique_name(), tenants=("a",)) as pipeline:
        yield pipeline


class Traffic:
    """Bursts of requests, and their answers."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._replies: Replies = pipeline.replies("a")
        self.sent: list[str] = []

    def send(self, count: int = BURST) -> list[str]:
        requests = [self._pipeline.request(timeout_ms=60_000) for _ in range(count)]
        self._pipeline.publish("a", *requests)
        ids = [request.request_id for request in requests]
        self.sent += ids
        return ids

    def versions(self, ids: list[str]) -> set[str | None]:
        """The versions that answered these, once all are answered."""
        return {reply.model_version for reply in self._replies.wait(ids).values()}

    def burst(self) -> set[str | None]:
        return self.versions(self.send())

    def all_answered(self) -> dict[str, InferenceReply]:
        """Every reply, each the only one of its request and none a refusal."""
        self._replies.wait(self.sent)
        replies = self._replies.exactly_once(self.sent)
        assert {reply.outcome for reply in replies.values()} == {Outcome.OK}
        return replies


def test_a_new_champion_is_loaded_beside_the_old_one_which_goes_when_nobody_needs_it(pipeline: Pipeline) -> None:
    """Without a restart, and without a request that is refused."""
    (old,) = pipeline.models
    new = replace(old, version="2")
    pipeline.start(consumers=2, env={"PREVIOUS_VERSION_KEEP_S": "1"})
    traffic = Traffic(pipeline)
    assert traffic.burst() == {"1"}

    pipeline.control_models.publish([new, ModelRoute(old.model, 1, {"champion": "2"}, {"champion": "1"})])
    eventually(lambda: traffic.burst() == {"2"}, PATIENCE_S, "the new version")
    consumers = [pipeline.processes[f"consumer-{old.pool}-{number}"] for number in (1, 2)]
    eventually(
        lambda: all(consumer.events("version_unloaded") for consumer in consumers), PATIENCE_S, "the old one gone"
    )
    for consumer in consumers:
        assert [entry["version"] for entry in consumer.events("engine_ready")] == ["1", "2"]
        assert len(engines_of(consumer)) == 1, "its process is gone, and its memory with it"
    for _ in range(4):
        assert traffic.burst() == {"2"}
    assert {reply.arm for reply in traffic.all_answered().values()} == {"champion"}


@pytest.mark.full
@pytest.mark.parametrize("consumers", [1, 2])
def test_without_room_for_both_consumers_change_one_after_another(pipeline: Pipeline, consumers: int) -> None:
    """What comes while a lone consumer has neither version waits, and is answered."""
    (old,) = pipeline.models
    new = replace(old, version="2")
    held = pipeline.consumer(9).wait_ready().metric("fairlane_engine_memory_bytes", model=old.model, kind="main")
    pipeline.processes[f"consumer-{old.pool}-9"].stop()
    room_for_one = {"ENGINE_MEMORY_MAX_BYTES": str(round(1.5 * held)), "LOAD_MEMORY_RESERVE_BYTES": "0"}
    pipeline.start(consumers=consumers, env=room_for_one)
    traffic = Traffic(pipeline)
    assert traffic.burst() == {"1"}

    pipeline.control_models.publish([new, ModelRoute(old.model, 1, {"champion": "2"}, {"champion": "1"})])
    running = [pipeline.processes[f"consumer-{old.pool}-{number + 1}"] for number in range(consumers)]

    def all_changed() -> bool:
        traffic.send(1)
        return all(consumer.events("engine_ready")[-1]["version"] == "2" for consumer in running)

    eventually(all_changed, PATIENCE_S, "the new version everywhere")
    assert traffic.burst() == {"2"}
    assert {reply.outcome for reply in traffic.all_answered().values()} == {Outcome.OK}
    changes = []
    for consumer in running:
        (unloading,), (_, loaded) = consumer.events("version_unloading"), consumer.events("engine_ready")
        assert unloading["in_favour_of"] == f"{old.model}/2"
        assert len(engines_of(consumer)) == 1
        changes.append((unloading["timestamp"], loaded["timestamp"]))
    changes.sort()
    assert all(before[1] <= after[0] for before, after in pairwise(changes)), "one at a time"


@pytest.mark.full
def test_a_version_that_fails_its_smoke_set_gets_no_traffic_until_another_record_of_it_passes(
    broker: str, tmp_path: Path
) -> None:
    unique = unique_name()
    old = default_model(unique, f"{unique}-pool")
    for name, least_mean in (("words-2", 0.5), ("words-2-again", 0.0)):
        (tmp_path / "models" / name).mkdir(parents=True)
        head = {"smoke": {"scorer": "exact", "least_mean": least_mean, "max_tokens": 4}}
        example = {"id": "one", "input": {"prompt": "hello"}, "expected": "what no simulated engine says"}
        (tmp_path / "models" / name / "smoke.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(example)}\n")
    new = replace(old, version="2", path="words-2")
    with Pipeline(broker, tmp_path, unique, tenants=("a",)) as pipeline:
        # The engine that the model names, and no other in its place: that one would not be asked.
        env = {"MODELS_DIR": str(tmp_path / "models")}
        consumer = pipeline.launch(Service("consumer-1", ("-m", "inference_consumers", "--pool", old.pool), env))
        pipeline.dispatcher().wait_ready()
        consumer.wait_ready()
        pipeline.wait_all_own()
        traffic = Traffic(pipeline)
        route = ModelRoute(old.model, 1, {"champion": "2"}, {"champion": "1"})
        pipeline.control_models.publish([new, route])
        eventually(lambda: consumer.events("engine_unusable"), PATIENCE_S, "the smoke set")
        (failed,) = consumer.events("engine_unusable")
        assert failed["reason"].endswith("smoke.jsonl: mean score 0 of 1 examples is below 0.5")
        assert traffic.burst() == {"1"}
        eventually(lambda: consumer.metric("fairlane_versions_missing", state="failed") == 1, what="what is missing")
        said = [row for row in status(pipeline) if row["pool"] == old.pool]
        assert [(row["version"], row["consumer"], row["state"]) for row in said] == [
            (f"{old.model}/1", "consumer-1", "loaded"),
            (f"{old.model}/2", "consumer-1", "failed"),
        ]
        assert said[1]["reason"].endswith("is below 0.5")

        pipeline.control_models.publish([replace(new, path="words-2-again")])
        eventually(lambda: traffic.burst() == {"2"}, PATIENCE_S, "the new version")
        assert {reply.outcome for reply in traffic.all_answered().values()} == {Outcome.OK}


@pytest.mark.full
def test_a_pool_without_a_published_version_waits_for_one(pipeline: Pipeline) -> None:
    (old,) = pipeline.models
    pipeline.control_models.publish((), withdrawn=[version_key(old.model, old.version), old.model])
    consumer = pipeline.consumer()
    eventually(lambda: consumer.events("nothing_to_serve"), PATIENCE_S, "the reason in the log")
    assert [entry["pool"] for entry in consumer.events("nothing_to_serve")] == [old.pool]

    def says_why() -> bool:
        status, body = consumer.get("/health/ready")
        return status == 503 and f"no version of a model of the pool {old.pool} is published" in body

    eventually(says_why, PATIENCE_S, "the reason where readiness is asked for")
    pipeline.apply()
    consumer.wait_ready()


def status(pipeline: Pipeline) -> list[dict[str, str]]:
    """What `fairlane models status` says."""
    command = (sys.executable, "-m", "fairlane_server.cli", "models", "status", "--json")
    done = subprocess.run(command, env={**os.environ, **pipeline.env}, check=True, capture_output=True, text=True)
    rows: list[dict[str, str]] = json.loads(done.stdout)
    return rows


def engines_of(consumer: ServiceProcess) -> list[psutil.Process]:
    """The processes of its engines."""
    return [
        one for one in psutil.Process(consumer.pid).children() if "inference_consumers.engine_process" in one.cmdline()
    ]


def test_what_waits_for_a_stopped_version_is_answered_by_the_one_before(pipeline: Pipeline) -> None:
    (old,) = pipeline.models
    new = replace(old, version="2")
    route = ModelRoute(old.model, 1, {"champion": "2", "before": "1"}, {})
    pipeline.control_models.publish([old, new, route])
    pipeline.start(env=SLOW)
    traffic = Traffic(pipeline)
    ids = traffic.send(40)
    assert traffic.versions(ids[:1]) == {"2"}

    stopped = replace(route, revision=2, aliases={"champion": "1"}, previous={"champion": "2"}, stopped=("2",))
    pipeline.control_models.publish([stopped])
    answered = traffic.all_answered()
    in_order = [answered[request_id].model_version for request_id in ids]
    changed_at = in_order.index("1")
    assert set(islice(in_order, changed_at, None)) == {"1"}
    assert changed_at < 20, "most of them waited when it was stopped"


def test_a_request_may_name_a_version(pipeline: Pipeline) -> None:
    (one,) = pipeline.models
    two = replace(one, version="2")
    pipeline.control_models.publish([one, two, ModelRoute(one.model, 1, {"champion": "1", "tried": "2"}, {})])
    pipeline.start()
    asked = {
        "champion": pipeline.request(),
        "version": pipeline.request(model=f"{one.model}/2"),
        "tried": pipeline.request(model=f"{one.model}@tried"),
        "none": pipeline.request(model=f"{one.model}/3"),
    }
    pipeline.publish("a", *asked.values())
    found = pipeline.replies("a").wait([request.request_id for request in asked.values()])
    replies = {name: found[request.request_id] for name, request in asked.items()}
    assert {name: (reply.model, reply.model_version, reply.arm) for name, reply in replies.items()} == {
        "champion": (one.model, "1", "champion"),
        "version": (one.model, "2", "version"),
        "tried": (one.model, "2", "tried"),
        "none": (one.model, None, None),
    }
    assert (replies["none"].code, replies["none"].field) == ("unknown_model", "model")
