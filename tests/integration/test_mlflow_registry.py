"""A real MLflow server as a source of artifacts and as a registry that is followed."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pydantic import SecretStr

from deploy.local.services import Service
from fairlane.outcomes import Outcome, Task
from fairlane.records import ModelMetric, ModelRoute, ModelVersion
from fairlane_server.artifacts.digest import ArtifactError, digest_of_folder
from fairlane_server.artifacts.mlflow import MlflowServer, MlflowSource
from fairlane_server.artifacts.registration import fetch_artifact
from fairlane_server.artifacts.s3 import S3Source
from fairlane_server.artifacts.source import ArtifactUnavailableError
from fairlane_server.artifacts.store import ArtifactStore
from tests.kit.artifact_kit import FILES, contents, never_stop, store_of
from tests.kit.artifact_source_suite import ArtifactSourceSuite
from tests.kit.command_kit import Run, command_runner, write_deployment
from tests.kit.engine_kit import MODELS_DIR
from tests.kit.mlflow_server import MlflowRig, mlflow_server, needs_mlflow
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(300), needs_mlflow]

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowRig]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as rig:
        yield rig


@pytest.fixture
def source(server: MlflowRig) -> MlflowSource:
    return MlflowSource(MlflowServer(server.url), S3Source())


@pytest.fixture
def store(tmp_path: Path, source: MlflowSource) -> ArtifactStore:
    return store_of(tmp_path / "cache", {"models:/": lambda: source})


class MlflowShelf:
    """Versions of one registered model."""

    beginning = "models:/"

    def __init__(self, server: MlflowRig, source: MlflowSource) -> None:
        self._server = server
        self.source = source
        self._name = f"shelf {uuid4().hex}"

    def put(self, files: dict[str, bytes]) -> str:
        return f"models:/{self._name}/{self._server.register(self._name, files)}"

    def replace(self, reference: str, files: dict[str, bytes]) -> None:
        folder = self._server.folder_of(self._name, reference.rpartition("/")[2])
        shutil.rmtree(folder)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)

    def missing(self) -> str:
        return f"models:/{self._name}/99"


class TestMlflow(ArtifactSourceSuite):
    """Its model registry, with artifacts that the server serves."""

    @pytest.fixture
    def shelf(self, server: MlflowRig, source: MlflowSource) -> MlflowShelf:
        return MlflowShelf(server, source)


def test_an_alias_is_the_version_that_has_it_now(server: MlflowRig, source: MlflowSource, unique: str) -> None:
    first = server.register(unique, {"a": b"1"}, {"accuracy": 0.9, "loss": 0.1})
    second = server.register(unique, {"a": b"2"})
    server.set_alias(unique, "best", first)
    found = source.resolve(f"models:/{unique}@best")
    assert found.source == f"models:/{unique}/{first}"
    assert found.metrics == (ModelMetric("accuracy", 0.9), ModelMetric("loss", 0.1))
    server.set_alias(unique, "best", second)
    assert source.resolve(f"models:/{unique}@best").source == f"models:/{unique}/{second}"


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("models:/UNIQUE@none", "HTTP 4.*: (INVALID_PARAMETER_VALUE|RESOURCE_DOES_NOT_EXIST)"),
        ("models:/UNIQUE/7", "HTTP 404: RESOURCE_DOES_NOT_EXIST"),
        ("models:/no-such-model/1", "HTTP 404: RESOURCE_DOES_NOT_EXIST"),
        ("models:/UNIQUE/latest", "names no version"),
        ("models:/UNIQUE", "names no version"),
        ("models:/UNIQUE/01", "names no version"),
        ("models:/x' OR name='y/1", "names no version"),
    ],
)
def test_what_the_registry_has_not_is_said(
    server: MlflowRig, source: MlflowSource, unique: str, reference: str, reason: str
) -> None:
    server.register(unique, {"a": b"1"})
    with pytest.raises(ArtifactError, match=reason):
        source.resolve(reference.replace("UNIQUE", unique))


def test_a_server_that_is_away_may_be_asked_again() -> None:
    away = MlflowSource(MlflowServer("http://127.0.0.1:9", SecretStr("a token")), S3Source())
    with pytest.raises(ArtifactUnavailableError, match="MLflow does not answer") as caught:
        away.resolve("models:/digits/1")
    assert "a token" not in repr(caught.value)


@pytest.fixture(scope="module")
def logged(server: MlflowRig) -> str:
    """The name of a registered model: the small classifier, logged by MLflow's own client."""
    name = f"digits-{uuid4().hex}"
    assert server.log_digits(name, MODELS_DIR / "digits", 0.98) == "1"
    server.set_alias(name, "best", "1")
    return name


def digits(unique: str, source: str, **fields: Any) -> ModelVersion:
    return ModelVersion(
        f"{unique}-digits", "1", f"{unique}-pool", "torch-classifier", ("classify",), "artifacts/digits", 1, 0,
        source=source, **fields,
    )  # fmt: skip


def test_a_model_that_was_logged_is_described_by_its_folder(store: ArtifactStore, logged: str, unique: str) -> None:
    found = fetch_artifact(store, digits(unique, f"models:/{logged}@best"), never_stop)
    assert found.source == f"models:/{logged}/1"
    # One of the run, and one of the logged model.
    assert {ModelMetric("accuracy", 0.98), ModelMetric("recall", 0.5)} <= set(found.metrics)
    assert "torch==2.13.0" in found.description.requirements
    signature = json.loads(found.description.signature or "{}")
    assert [part[0]["name"] for part in (signature["inputs"], signature["outputs"])] == ["image", "scores"]
    cached = store.of_version(digits(unique, found.source, artifact_digest=found.digest), never_stop)
    assert contents(cached.path / "artifacts/digits") == contents(MODELS_DIR / "digits")


def test_a_consumer_fetches_the_files_of_its_version_and_answers(
    broker: str, tmp_path: Path, server: MlflowRig, store: ArtifactStore, logged: str
) -> None:
    unique = unique_name()
    found = fetch_artifact(store, digits(unique, f"models:/{logged}@best"), never_stop)
    good = digits(unique, found.source, artifact_digest=found.digest)
    replaced = replace(good, version="2", artifact_digest=f"sha256:{'0' * 64}")
    env = {"MODELS_DIR": str(tmp_path / "none"), "MODELS_CACHE_DIR": str(tmp_path / "consumer-cache")}
    env |= {"MLFLOW_TRACKING_URI": server.url, "ENGINE_THREADS": "1", "DEVICE": "cpu"}
    with Pipeline(broker, tmp_path / "pipeline", unique, tenants=("a",), models=[good, replaced]) as pipeline:
        pipeline.control_models.publish([ModelRoute(good.model, 1, {"champion": "1", "candidate": "2"}, {})])
        consumer = pipeline.launch(Service("consumer-mlflow", ("-m", "inference_consumers", "--pool", good.pool), env))
        pipeline.dispatcher().wait_ready()
        consumer.wait_ready(PATIENCE_S)
        (left_out,) = consumer.events("engine_unusable")
        assert left_out["version"] == "2"
        assert f"and was registered with {replaced.artifact_digest}" in left_out["reason"]
        pipeline.wait_all_own()
        asked = pipeline.request(Task.CLASSIFY)
        pipeline.publish("a", asked)
        reply = pipeline.replies("a").wait([asked.request_id])[asked.request_id]
        assert (reply.outcome, reply.model_version) == (Outcome.OK, "1")


CONFIG = """\
models:
  - registered_model: REGISTERED
    model: MODEL
    version_prefix: r
    alias: candidate
    pool: generate
    engine: simulated
    tasks: [generate]
    path: .
    limits: {max_context_tokens: 128, max_output_tokens: 16}
"""


@pytest.fixture
def run(
    broker: str,
    tmp_path: Path,
    server: MlflowRig,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    write_deployment(tmp_path, unique)
    (tmp_path / "sync.yaml").write_text(CONFIG.replace("REGISTERED", unique).replace("MODEL", "tiny"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.setenv("MODELS_CACHE_DIR", str(tmp_path / "cache"))
    return command_runner(broker, "postgresql://unused", tmp_path, unique, monkeypatch, capsys)


def test_sync_registers_what_is_new_and_reports_what_has_changed(
    run: Run, server: MlflowRig, tmp_path: Path, unique: str
) -> None:
    sync = ("models", "sync", str(tmp_path / "sync.yaml"), "--once")
    run("models", "apply")
    for accuracy in (0.5, 0.7):
        server.register(unique, FILES | {"number": str(accuracy).encode()}, {"accuracy": accuracy})
    code, report, _ = run(*sync)
    assert (code, report["registered"]) == (0, ["tiny/r1", "tiny/r2"])
    assert report["aliases"] == {"tiny@champion": "1", "tiny@candidate": "r2"}
    listed = {one["version"]: one for one in run("models", "list")[1]["models"]}
    new = listed["r2"]
    assert new["source"] == f"models:/{unique}/2"
    assert new["artifact_digest"] == digest_of_folder(server.folder_of(unique, "2"))
    assert new["metrics"] == [{"name": "accuracy", "value": 0.7}]

    code, report, _ = run(*sync)
    assert (code, report["registered"], report["aliases"]) == (0, [], {})
    assert report["verified"] == ["tiny/r1", "tiny/r2"]

    (server.folder_of(unique, "1") / "number").write_bytes(b"0.9")
    code, report, complaint = run(*sync)
    assert (code, report["changed"], report["verified"]) == (1, ["tiny/r1"], ["tiny/r2"])
    assert "artifact_changed" in complaint
    assert {one["version"]: one for one in run("models", "list")[1]["models"]} == listed
    assert run(*sync, "--verify-every", "0")[0] == 0

    server.register(unique, {"number": b"1"})
    run("models", "alias", "tiny", "candidate", "1")
    assert run(*sync, "--verify-every", "0")[1]["aliases"] == {"tiny@champion": "1", "tiny@candidate": "r3"}


def test_sync_leaves_versions_of_others_alone(run: Run, server: MlflowRig, tmp_path: Path, unique: str) -> None:
    run("models", "apply")
    server.register(unique, FILES)
    config = (tmp_path / "sync.yaml").read_text().replace("    version_prefix: r\n", "")
    (tmp_path / "sync.yaml").write_text(config)
    code, report, _ = run("models", "sync", str(tmp_path / "sync.yaml"), "--once")
    assert (code, report["registered"], list(report["failed"])) == (1, [], ["tiny/1"])
    assert "set a version_prefix" in report["failed"]["tiny/1"]


def test_register_resolves_an_alias_once_and_for_all(run: Run, server: MlflowRig, tmp_path: Path, unique: str) -> None:
    run("models", "apply")
    server.register(unique, FILES, {"accuracy": 0.5})
    server.set_alias(unique, "best", "1")
    file = tmp_path / "new.yaml"
    source = f'version: "2"\n    source: "models:/{unique}@best"'
    text = (tmp_path / "models.yaml").read_text().replace("path: tiny", "path: .")
    file.write_text(text.replace('version: "1"', source))
    code, made, _ = run("models", "register", str(file))
    digest = digest_of_folder(server.folder_of(unique, "1"))
    assert (code, made) == (0, {"registered": ["tiny/2"], "artifact_digests": {"tiny/2": digest}})
    server.register(unique, {"other": b"x"})
    server.set_alias(unique, "best", "2")
    (registered,) = (one for one in run("models", "list")[1]["models"] if one["version"] == "2")
    assert (registered["source"], registered["artifact_digest"]) == (f"models:/{unique}/1", digest)
    code, _, complaint = run("models", "register", str(file))
    assert code == 1
    assert "version 2 of tiny is published with another artifact_digest" in complaint


def test_sync_follows_until_it_is_ended(broker: str, tmp_path: Path, server: MlflowRig, unique: str) -> None:
    """In a process of its own, in a pipeline whose control topic others read as well."""
    name = unique_name()
    server.register(unique, FILES)
    with Pipeline(broker, tmp_path / "pipeline", name, tenants=("a",)) as pipeline:
        config = CONFIG.replace("REGISTERED", unique).replace("MODEL", f"{name}-followed")
        (tmp_path / "sync.yaml").write_text(config)
        env = {"MLFLOW_TRACKING_URI": server.url, "MODELS_CACHE_DIR": str(tmp_path / "cache")}
        arguments = ("-m", "fairlane_server.cli", "models", "sync", str(tmp_path / "sync.yaml"), "--every", "1")
        syncer = pipeline.launch(Service("syncer", arguments, env))
        syncer.wait_ready(PATIENCE_S)

        def versions() -> set[str]:
            return {
                key.partition("/")[2] for key in pipeline.control_models.read() if key.startswith(f"{name}-followed/")
            }

        eventually(lambda: versions() == {"r1"}, PATIENCE_S, "the first version")
        server.register(unique, FILES | {"more": b"x"})
        eventually(lambda: versions() == {"r1", "r2"}, PATIENCE_S, "the second version")
        assert syncer.stop() == 0
