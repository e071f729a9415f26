"""A model is updated under traffic, and taken back: nothing is refused, and every answer says its version."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply, ModelRoute
from tests.kit.deployment import write_models
from tests.kit.log_reader import Replies
from tests.kit.pipeline import Pipeline, unique_name
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


def test_an_update_with_memory_for_one_version_at_a_time_refuses_nothing(pipeline: Pipeline) -> None:
    (old,) = pipeline.models
    new = replace(old, version="2")
    pipeline.start()
    traffic = Traffic(pipeline)
    assert traffic.burst() == {"1"}

    route = ModelRoute(old.model, 1, {"champion": "2"}, {"champion": "1"})
    pipeline.control_models.publish([new, route])
    assert traffic.burst() == {"1"}, "nobody has loaded the new version"

    write_models(pipeline.folder / "models.yaml", [new])
    pipeline.consumer(2).wait_ready()
    pipeline.wait_all_own()
    eventually(lambda: traffic.burst() == {"2"}, PATIENCE_S, "the new version")

    pipeline.processes[f"consumer-{old.pool}-1"].stop()
    for _ in range(4):
        assert traffic.burst() == {"2"}
    assert {reply.arm for reply in traffic.all_answered().values()} == {"champion"}


def test_what_waits_for_a_stopped_version_is_answered_by_the_one_before(pipeline: Pipeline) -> None:
    (old,) = pipeline.models
    new = replace(old, version="2")
    write_models(pipeline.folder / "models.yaml", [old, new])
    route = ModelRoute(old.model, 1, {"champion": "2"}, {})
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
    write_models(pipeline.folder / "models.yaml", [one, two])
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
