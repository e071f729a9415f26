"""Consumers that are killed while they change versions: nothing is lost, refused or answered twice."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from fairlane.outcomes import Outcome
from fairlane.records import ModelRoute
from tests.kit.pipeline import Pipeline
from tests.kit.steady_traffic import SteadyTraffic
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(300)]

PATIENCE_S = 60.0
CHANGES = 3
CHANGE_S = 4.0
"""About the time that both consumers take to change; a kill comes at any moment of it."""


@pytest.fixture
def pipeline(broker: str, tmp_path: Path, unique: str) -> Iterator[Pipeline]:
    with Pipeline(broker, tmp_path, unique, tenants=("a",)) as made:
        yield made


def test_consumers_killed_while_they_change_versions_lose_nothing(
    pipeline: Pipeline, seed: int, say: Callable[[str], None]
) -> None:
    """Two consumers with room for one version each. In every update one of them is killed, and comes back."""
    dice = random.Random(seed)
    say(f"seed {seed}")
    (first,) = pipeline.models
    held = pipeline.consumer(9).wait_ready().metric("fairlane_engine_memory_bytes", model=first.model, kind="main")
    pipeline.processes[f"consumer-{first.pool}-9"].stop()
    env = {"ENGINE_MEMORY_MAX_BYTES": str(round(1.5 * held)), "LOAD_MEMORY_RESERVE_BYTES": "0"}
    pipeline.start(consumers=2, env=env)
    names = {number: f"consumer-{first.pool}-{number}" for number in (1, 2)}

    def all_serve(version: str) -> bool:
        events = [pipeline.processes[name].events("engine_ready") for name in names.values()]
        return all(one and one[-1]["version"] == version for one in events)

    with SteadyTraffic(pipeline, ["a"]) as traffic:
        for change in range(2, 2 + CHANGES):
            new, before = replace(first, version=str(change)), str(change - 1)
            route = ModelRoute(first.model, change, {"champion": new.version}, {"champion": before})
            pipeline.control_models.publish([new, route])
            struck_at = monotonic() + dice.uniform(0.0, CHANGE_S)
            eventually(lambda at=struck_at: monotonic() > at, what="the moment of the kill")  # type: ignore[misc]  # bound now
            number = dice.choice((1, 2))
            events = pipeline.processes[names[number]].events("version_unloading")
            say(f"version {change}: consumer {number} is killed after {len(events)} exchanges")
            pipeline.processes[names[number]].kill()
            pipeline.consumer(number, env).wait_ready()
            eventually(lambda version=new.version: all_serve(version), PATIENCE_S, "the new version")  # type: ignore[misc]  # bound now
    answered = traffic.replies(PATIENCE_S)
    ends = {(reply.outcome, reply.code, reply.message) for reply in answered.values()}
    assert {outcome for outcome, *_ in ends} == {Outcome.OK}, ends
    last = max(answered, key=traffic.sent["a"].__getitem__)
    assert answered[last].model_version == str(1 + CHANGES)
