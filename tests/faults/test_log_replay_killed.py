"""A replay of the log while those that carry it out are killed: every request once on each arm, nothing to tenants."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

from deploy.local.services import Service
from fairlane import names
from fairlane.clock import now_ms
from fairlane.records import InferenceReply, InferenceRequest, TenantSpec
from fairlane_server.evaluation.copies import EvaluationArm
from fairlane_server.log_replay.plan import ENDED, LogReplayPlan, LogReplayState
from fairlane_server.log_replay.selection import is_sampled
from fairlane_server.log_replay.store import LogReplay, LogReplays
from fairlane_server.log_replay.verdict import ReplayVerdict
from tests.kit.deployment import default_model
from tests.kit.log_replay_kit import ReplayBench
from tests.kit.pipeline import Pipeline
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(400)]

PATIENCE_S = 120.0
ALLOWED, DENIED = ("a", "b"), "c"
REQUESTS = 250
"""Of each tenant."""
SAMPLE = 0.6
KILLS = 7
SOON = {"DISPATCHER_SESSION_TIMEOUT_MS": "3000"}
"""A killed dispatcher is replaced sooner."""


@pytest.fixture
def pipeline(broker: str, tmp_path: Path, unique: str, migrated: PostgresServer) -> Iterator[Pipeline]:
    assert migrated.admin_dsn, "the database is dropped behind the processes that use it"
    tenants: tuple[str | TenantSpec, ...] = (*(TenantSpec(name, evaluation="allowed") for name in ALLOWED), DENIED)
    old = default_model(unique, f"{unique}-pool")
    models = (old, replace(old, version="2"))
    with Pipeline(broker, tmp_path, unique, tenants=tenants, models=models, env=SOON) as made:
        made.name_versions()
        yield made


def admin(pipeline: Pipeline, dsn: str, number: int) -> ServiceProcess:
    """A process that carries out replays."""
    name = f"admin-{number}"
    env = {"POSTGRES_DSN": dsn, "ADMIN_PORT": str(pipeline.free_port(f"{name}-api"))}
    return pipeline.launch(Service(name, ("-m", "producers.admin"), env))


def test_a_replay_is_exact_though_its_runner_and_dispatchers_are_killed(
    pipeline: Pipeline, migrated: PostgresServer, seed: int
) -> None:
    dice = random.Random(seed)
    pipeline.start(dispatchers=2, consumers=1)
    pipeline.recorder(postgres_dsn=migrated.recorder_dsn).wait_ready()
    sent = {tenant: [pipeline.request() for _ in range(REQUESTS)] for tenant in (*ALLOWED, DENIED)}
    for tenant, requests in sent.items():
        pipeline.publish(tenant, *requests)
        pipeline.replies(tenant).wait([one.request_id for one in requests], PATIENCE_S)
    bench = ReplayBench(pipeline, migrated)
    everything = REQUESTS * len(sent)
    eventually(lambda: recorded(bench) == (everything, everything), PATIENCE_S, "the rows of all requests")
    for number in (1, 2):
        admin(pipeline, migrated.admin_dsn, number).wait_ready()
    plan = LogReplayPlan(bench.model, "2", None, 0, now_ms() + 1, sample=SAMPLE, most_outstanding=30)
    with LogReplays(migrated.operator_dsn) as replays:
        made = replays.create(plan, "1", "a test", now_ms())
    killed = strike(bench, made, dice)
    eventually(lambda: bench.replay(made).state in ENDED, PATIENCE_S, "the end of the replay")

    ended = bench.replay(made)
    assert ended.state is LogReplayState.FINISHED, ended.trouble
    assert killed >= 3, "it was under way when they were killed"
    due = {
        (arm, pipeline.tenant(tenant), one.request_id)
        for tenant in ALLOWED
        for one in sent[tenant]
        if is_sampled(pipeline.tenant(tenant), one.request_id, SAMPLE)
        for arm in EvaluationArm
    }
    assert len(due) > REQUESTS
    assert bench.copied_requests(made) == dict.fromkeys(due, 1), "each is copied once"
    assert replies_of(bench, made) == dict.fromkeys(due, 1), "and has one reply"
    rows = bench.execute(
        "SELECT arm, tenant, request_id, replies_seen, ended FROM evaluation_results WHERE run = %s", made.replay
    )
    assert {(arm, tenant, request) for arm, tenant, request, *_ in rows} == due
    assert {(seen, how) for *_, seen, how in rows} == {(1, "completed")}
    counts = ended.progress.counts
    assert counts.read == everything, "though it was read by several processes"
    assert (counts.copied, counts.unanswered, counts.repeated, counts.gone) == (len(due) // 2, 0, 0, 0)
    assert counts.sampled == counts.copied + counts.denied
    assert ended.report is not None
    assert ended.report["verdict"] in (ReplayVerdict.SAME, ReplayVerdict.UNDECIDED)
    # Nothing of it reached a tenant: neither a topic nor a table of theirs.
    for tenant, requests in sent.items():
        log = pipeline.replies(tenant)
        log.wait([one.request_id for one in requests], PATIENCE_S)
        log.exactly_once([one.request_id for one in requests])
        assert of_tenant(pipeline, tenant, requests)
    assert recorded(bench) == (everything, everything)


def strike(bench: ReplayBench, made: LogReplay, dice: random.Random) -> int:
    """Kill runners and dispatchers at random moments while the replay is under way. Returns how many were killed."""
    pipeline, killed = bench.pipeline, 0
    for number in range(KILLS):
        eventually(partial(_is_past, monotonic() + dice.uniform(0.3, 2.5)), what="the moment of the kill")
        if bench.replay(made).state in ENDED:
            break
        killed += 1
        if number % 3 == 2:
            which = dice.choice((1, 2))
            pipeline.processes[f"dispatcher-{which}"].kill()
            pipeline.dispatcher(which)
            continue
        which = dice.choice((1, 2))
        pipeline.processes[f"admin-{which}"].kill()
        admin(pipeline, bench.database.admin_dsn, which)
    return killed


def _is_past(at_s: float) -> bool:
    return monotonic() > at_s


def recorded(bench: ReplayBench) -> tuple[int, int]:
    """Results and usage of the tenants' own requests."""
    tenants = list(bench.pipeline.tenants)
    ((results,),) = bench.execute("SELECT count(*) FROM results WHERE tenant = ANY(%s)", tenants)
    ((usage,),) = bench.execute("SELECT count(*) FROM usage WHERE tenant = ANY(%s)", tenants)
    return results, usage


def replies_of(bench: ReplayBench, made: LogReplay) -> Counter[tuple[str, str, str]]:
    """How many replies the copies of each request have."""
    reader = bench.pipeline.reader(names.EVALUATION_REPLIES)
    reader.read_to_end()
    found = [bench.pipeline.codec.decode_as(InferenceReply, one.value()) for one in reader.records]
    marks = [one.evaluation for one in found if one.evaluation is not None and one.evaluation.run == made.replay]
    return Counter((mark.arm, mark.tenant, mark.request_id) for mark in marks)


def of_tenant(pipeline: Pipeline, tenant: str, requests: list[InferenceRequest]) -> bool:
    """Whether the tenant's reply topic holds replies to its own requests alone."""
    reader = pipeline.reader(names.replies_topic(pipeline.tenant(tenant)))
    reader.read_to_end()
    found = [pipeline.codec.decode_as(InferenceReply, one.value()) for one in reader.records]
    return {one.request_id for one in found} == {one.request_id for one in requests}
