"""A broken candidate changes no primary: every request is answered once and as fast as before. Every copy ends once,
whatever is killed meanwhile."""

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from time import monotonic

import pytest

from deploy.local.services import Service
from fairlane.names import DEAD_LETTER_WORK
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply, TenantSpec
from fairlane_server.evaluation.copies import CopyEnd, end_of
from tests.kit.broken_candidate_engine import CRASHES, FAILS, HANGS
from tests.kit.deployment import default_model
from tests.kit.pipeline import Pipeline
from tests.kit.processes import ServiceProcess
from tests.kit.shadow_kit import Copies, start_shadow, stop_shadow
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(300)]

PATIENCE_S = 90.0
TENANTS = ("a", "b")
SOON = {
    "DISPATCHER_SESSION_TIMEOUT_MS": "3000",
    "ENGINE_HANG_TIMEOUT_S": "3",
    # A batch takes some time, as those of real models do.
    "SIMULATED_BATCH_MS": "20",
}
MOST_SLOWDOWN = 3.0
LEAST_SLOWDOWN_S = 0.25
"""By so much the slowest of twenty requests may be slower on a machine that is busy with everything else."""


class Traffic:
    """Some requests a second of each tenant, each with the time when its reply was read, until it is stopped."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.sent: dict[str, list[str]] = {tenant: [] for tenant in TENANTS}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _send(self) -> None:
        while not self._stop.wait(0.05):
            for tenant in TENANTS:
                request = self._pipeline.request(timeout_ms=120_000)
                self._pipeline.publish(tenant, request)
                self.sent[tenant].append(request.request_id)


@pytest.fixture
def pipeline(broker: str, tmp_path: Path, unique: str) -> Iterator[Pipeline]:
    champion = default_model(unique, f"{unique}-pool")
    models = (champion, *(replace(champion, version=version) for version in (CRASHES, FAILS, HANGS)))
    tenants = [TenantSpec(tenant, evaluation="allowed") for tenant in TENANTS]
    with Pipeline(broker, tmp_path, unique, tenants=tenants, models=models, env=SOON) as made:
        made.name_versions()
        yield made


def consumer(pipeline: Pipeline, number: int) -> ServiceProcess:
    arguments = ("-m", "tests.kit.broken_candidate_consumer", "--pool", pipeline.pool)
    return pipeline.launch(Service(f"consumer-{pipeline.pool}-{number}", arguments, {}))


def for_s(seconds: float) -> None:
    """Let the traffic go on for so long."""
    until = monotonic() + seconds
    eventually(lambda: monotonic() > until, seconds + 5, "the time of some traffic")


def answers(pipeline: Pipeline, traffic: Traffic) -> list[InferenceReply]:
    """The one reply to each request that was sent."""
    found: list[InferenceReply] = []
    for tenant in TENANTS:
        replies = pipeline.replies(tenant)
        replies.wait(traffic.sent[tenant], PATIENCE_S)
        replies.read_to_end()
        assert replies.counts.keys() >= set(traffic.sent[tenant])
        found += replies.exactly_once(traffic.sent[tenant]).values()
    return found


def slowest_s(replies: Sequence[InferenceReply]) -> float:
    """The 95th percentile of the time from the append of a request to the end of its run."""
    spans = [
        (one.timings.engine_finished_at_ms or 0) - (one.timings.submitted_at_ms or 0)
        for one in replies
        if one.timings.engine_finished_at_ms is not None
    ]
    return quantiles(spans, n=20)[-1] / 1_000


@pytest.mark.parametrize("candidate", [CRASHES, FAILS, HANGS])
def test_a_broken_candidate_changes_no_primary(pipeline: Pipeline, candidate: str) -> None:
    pipeline.dispatcher(1).wait_ready()
    consumer(pipeline, 1).wait_ready()
    pipeline.wait_all_own()
    letters = pipeline.reader(DEAD_LETTER_WORK, from_beginning=False)
    with Traffic(pipeline) as before:
        for_s(5)
    usual_s = slowest_s(answers(pipeline, before))

    shadow = start_shadow(pipeline, candidate, max_age_ms=20_000)
    copies = Copies(pipeline, shadow.run)
    with Traffic(pipeline) as meanwhile:
        for_s(12)
    replies = answers(pipeline, meanwhile)
    stop_shadow(pipeline)
    ends = copies.wait_all_ended(PATIENCE_S)

    assert {one.outcome for one in replies} == {Outcome.OK}
    assert {one.model_version for one in replies} == {"1"}
    assert not any(one.degradations for one in replies)
    assert slowest_s(replies) <= max(MOST_SLOWDOWN * usual_s, usual_s + LEAST_SLOWDOWN_S)
    assert ends, "something was copied"
    assert {end_of(one) for one in ends.values()} <= {CopyEnd.FAILED, CopyEnd.DROPPED}
    letters.read_to_end()
    assert not pipeline.dead_letters(letters), "the requests of tenants are in no other place"
    assert pipeline.processes[f"consumer-{pipeline.pool}-1"].alive


def test_every_copy_ends_once_though_dispatchers_and_consumers_are_killed(pipeline: Pipeline, seed: int) -> None:
    dice = random.Random(seed)
    for number in (1, 2):
        pipeline.dispatcher(number)
        consumer(pipeline, number)
    for process in pipeline.processes.values():
        process.wait_ready()
    pipeline.wait_all_own()
    with Traffic(pipeline) as before:
        for_s(3)
    answers(pipeline, before)

    shadow = start_shadow(pipeline, dice.choice((CRASHES, FAILS)), max_age_ms=30_000)
    copies = Copies(pipeline, shadow.run)
    with Traffic(pipeline) as traffic:
        for _ in range(2):
            for_s(dice.uniform(1.0, 4.0))
            pipeline.processes[f"dispatcher-{dice.choice((1, 2))}"].kill()
            for_s(dice.uniform(0.0, 2.0))
            pipeline.processes[f"consumer-{pipeline.pool}-{dice.choice((1, 2))}"].kill()
            for number in (1, 2):
                if not pipeline.processes[f"dispatcher-{number}"].alive:
                    pipeline.dispatcher(number).wait_ready()
                if not pipeline.processes[f"consumer-{pipeline.pool}-{number}"].alive:
                    consumer(pipeline, number).wait_ready()
        for_s(2)
    replies = answers(pipeline, traffic)
    stop_shadow(pipeline)
    ends = copies.wait_all_ended(PATIENCE_S)
    assert {one.outcome for one in replies} == {Outcome.OK}
    assert ends
    assert {one.tenant for one in replies} == {pipeline.tenant(tenant) for tenant in TENANTS}
