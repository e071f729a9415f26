"""A rollback while those that decide it and carry it out are killed: one record, nothing refused, nothing twice."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from deploy.local.services import Service
from fairlane.clock import now_ms
from fairlane.outcomes import Outcome
from fairlane.records import ModelRoute
from fairlane.rollout_records import RolloutGuards
from fairlane_server.control.route_change import change_route
from fairlane_server.models.changes import Author
from fairlane_server.models.rollout_arms import CANDIDATE_ARM
from fairlane_server.rollouts.changes import RolloutPlan, with_rollout
from tests.kit.deployment import default_model
from tests.kit.pipeline import Pipeline
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer
from tests.kit.steady_traffic import SteadyTraffic
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(300)]

PATIENCE_S = 60.0
IN_EFFECT_S = 5.0
"""A rollback is in effect on every dispatcher within this time."""
TENANTS = ("a", "b")
SOON = {"DISPATCHER_SESSION_TIMEOUT_MS": "3000"}
"""A killed dispatcher is replaced sooner."""
SLOW = {"SIMULATED_BATCH_MS": "600"}
"""The candidate's engine is, whatever else is."""


@pytest.fixture
def pipeline(
    broker: str,
    tmp_path: Path,
    unique: str,
    migrated: PostgresServer,
) -> Iterator[Pipeline]:
    champion = default_model(unique, f"{unique}-pool")
    # In a pool of its own, whose engines are slow.
    candidate = replace(champion, version="2", pool=f"{unique}-slow")
    with Pipeline(broker, tmp_path, unique, tenants=TENANTS, models=(champion, candidate), env=SOON) as made:
        yield made


def admin(pipeline: Pipeline, dsn: str, number: int) -> ServiceProcess:
    """A process that judges rollouts."""
    name = f"admin-{number}"
    env = {"POSTGRES_DSN": dsn, "ADMIN_PORT": str(pipeline.free_port(f"{name}-api"))}
    return pipeline.launch(Service(name, ("-m", "producers.admin"), env))


def test_a_bad_candidate_is_taken_back_though_everybody_is_killed_in_that_moment(
    pipeline: Pipeline, migrated: PostgresServer, seed: int
) -> None:
    dice = random.Random(seed)
    old, new = pipeline.models
    pipeline.control_models.publish([ModelRoute(old.model, 1, {"champion": "1", "candidate": "2"}, {})])
    pipeline.start(dispatchers=2, consumers=1)
    pipeline.consumer(2, SLOW, pool=new.pool).wait_ready()
    pipeline.recorder(postgres_dsn=migrated.recorder_dsn).wait_ready()
    for number in (1, 2):
        admin(pipeline, migrated.admin_dsn, number).wait_ready()
    pipeline.wait_all_own()
    plan = RolloutPlan("2", steps=(50.0, 100.0), least_step_ms=0, guards=RolloutGuards(least_requests=20))

    def route() -> ModelRoute:
        record = pipeline.control_models.read()[old.model]
        assert isinstance(record, ModelRoute)
        return record

    with SteadyTraffic(pipeline, TENANTS) as traffic:
        change_route(
            *(pipeline.settings, pipeline.codec, old.model),
            lambda published: with_rollout(published, old.model, plan, Author("a test", now_ms())),
        )
        # Two judge it. One is killed at any moment, perhaps as it decides, and comes back to what the other did.
        killed_at = monotonic() + dice.uniform(0.5, 5.0)
        eventually(lambda: monotonic() > killed_at, what="the moment of the kill")
        pipeline.processes["admin-1"].kill()
        admin(pipeline, migrated.admin_dsn, 1)
        eventually(lambda: route().stopped == ("2",), PATIENCE_S, "the rollback")
        published_at = monotonic()
        # The other is killed while it reports what it did, and a dispatcher while it carries that out.
        pipeline.processes["admin-2"].kill()
        pipeline.processes["dispatcher-1"].kill()
        pipeline.dispatcher(1).wait_ready()
        admin(pipeline, migrated.admin_dsn, 2).wait_ready()
        eventually(lambda: monotonic() > published_at + 2 * IN_EFFECT_S, 3 * IN_EFFECT_S, "some traffic after it")
    replies = traffic.replies(PATIENCE_S)
    sent_at = {**traffic.sent["a"], **traffic.sent["b"]}

    assert {reply.outcome for reply in replies.values()} == {Outcome.OK}, "nothing is refused"
    of_candidate = [one for one in replies.values() if one.model_version == "2"]
    assert {one.arm for one in of_candidate} == {CANDIDATE_ARM}
    assert [one for one in of_candidate if sent_at[one.request_id] > published_at + IN_EFFECT_S] == []
    final = route()
    assert final.rollout is not None
    assert (final.rollout.status, final.revision, final.changed_by) == ("rolled_back", 3, "rollout controller")
