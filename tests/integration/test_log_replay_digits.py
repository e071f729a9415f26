"""A replay of digit classifications on the whole pipeline: a version with the same weights, and one that is worse."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.demo_rollout.versions import BAD, CHAMPION, Versions, make_versions
from deploy.local.services import Service
from deploy.models.digits_data import SIZE, load_split
from fairlane.clock import now_ms
from fairlane.outcomes import Task
from fairlane.records import ModelVersion, RequestInput, TenantSpec
from fairlane_server.log_replay.plan import ENDED, LogReplayPlan, LogReplayState
from fairlane_server.log_replay.store import LogReplay, LogReplays
from fairlane_server.log_replay.verdict import ReplayVerdict
from tests.kit.log_replay_kit import ReplayBench
from tests.kit.pipeline import Pipeline
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(400)]

PATIENCE_S = 150.0
REQUESTS = 560
EQUAL = "2"
FOLDERS = {CHAMPION: "digits", EQUAL: "digits-equal", BAD: "digits-bad"}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """The champion, one with its weights, and one that was trained for two epochs."""
    made = make_versions(tmp_path_factory.mktemp("digits"))
    equal = made.models_dir / FOLDERS[EQUAL]
    equal.symlink_to((made.models_dir / FOLDERS[CHAMPION]).resolve())
    return made


@pytest.fixture
def pipeline(
    broker: str, tmp_path: Path, unique: str, versions: Versions, migrated: PostgresServer
) -> Iterator[Pipeline]:
    assert migrated.admin_dsn, "the database is dropped behind the processes that use it"
    champion = ModelVersion(
        f"{unique}-digits",
        CHAMPION,
        f"{unique}-pool",
        "torch-classifier",
        (str(Task.CLASSIFY),),
        FOLDERS[CHAMPION],
        1,
        1,
    )
    models = [replace(champion, version=version, path=path) for version, path in FOLDERS.items()]
    tenants = (TenantSpec("a", evaluation="allowed"),)
    with Pipeline(
        broker, tmp_path, unique, tenants=tenants, models=models, env={"MODELS_DIR": str(versions.models_dir)}
    ) as made:
        made.name_versions()
        yield made


def test_equal_weights_are_the_same_and_worse_ones_are_different(
    pipeline: Pipeline, migrated: PostgresServer, versions: Versions
) -> None:
    pool = pipeline.pool
    started = [
        pipeline.dispatcher(),
        pipeline.launch(Service(f"consumer-{pool}-1", ("-m", "inference_consumers", "--pool", pool), {})),
        pipeline.recorder(postgres_dsn=migrated.recorder_dsn),
    ]
    for process in started:
        process.wait_ready()
    pipeline.wait_all_own()
    images = [image.tobytes() for image in load_split().test_images[:REQUESTS]]
    assert {len(image) for image in images} == {SIZE * SIZE}
    requests = [pipeline.request(Task.CLASSIFY, input=RequestInput(image=image)) for image in images]
    pipeline.publish("a", *requests)
    pipeline.replies("a").wait([one.request_id for one in requests], PATIENCE_S)
    bench = ReplayBench(pipeline, migrated)
    tenant = pipeline.tenant("a")
    recorded = "SELECT count(*) FROM results JOIN usage USING (tenant, request_id) WHERE tenant = %s"
    eventually(lambda: bench.execute(recorded, tenant) == [(len(requests),)], PATIENCE_S, "the rows of all requests")
    env = {"POSTGRES_DSN": migrated.admin_dsn, "ADMIN_PORT": str(pipeline.free_port("admin-api"))}
    pipeline.launch(Service("admin-1", ("-m", "producers.admin"), env)).wait_ready()

    def replayed(candidate: str) -> LogReplay:
        plan = LogReplayPlan(bench.model, candidate, None, 0, now_ms() + 1, sample=1.0, most_outstanding=400)
        with LogReplays(migrated.operator_dsn) as replays:
            made = replays.create(plan, CHAMPION, "a test", now_ms())
        eventually(lambda: bench.replay(made).state in ENDED, PATIENCE_S, "the end of the replay")
        return bench.replay(made)

    equal, worse = replayed(EQUAL), replayed(BAD)

    assert (equal.state, worse.state) == (LogReplayState.FINISHED, LogReplayState.FINISHED)
    assert equal.report is not None
    assert worse.report is not None
    assert equal.report["verdict"] == ReplayVerdict.SAME, equal.report
    assert worse.report["verdict"] == ReplayVerdict.DIFFERENT, worse.report
    (task,) = worse.report["tasks"]
    assert task["pairs"] == len(requests)
    assert task["equal"]["champion"] == 1.0, "the classifier gives the same labels again"
    # It is right as often as it was in its training, and of the images that it gets wrong most were right before.
    lost = versions.accuracies[CHAMPION] - versions.accuracies[BAD]
    assert 1 - task["equal"]["candidate"] >= lost / 2
