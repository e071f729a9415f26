"""A registry that answers what it should not: bounded, checked, and our token goes nowhere else."""

import base64
import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from fairlane.settings import Settings
from fairlane_server.artifacts.digest import ArtifactError, ListedFile
from fairlane_server.artifacts.mlflow import MlflowServer, MlflowSource
from fairlane_server.artifacts.s3 import S3Source
from fairlane_server.artifacts.source import ArtifactUnavailableError, StoppedError, download
from tests.kit.artifact_kit import GIB
from tests.kit.stub_registry import ROOT, VERSION, StubRegistry

TOKEN = "the token of a test"


@pytest.fixture
def registry() -> Iterator[StubRegistry]:
    made = StubRegistry()
    yield made
    made.close()


@pytest.fixture
def source(registry: StubRegistry) -> MlflowSource:
    return MlflowSource(MlflowServer(registry.url, SecretStr(TOKEN)), S3Source())


def test_every_call_has_the_token_and_asks_for_plain_bytes(registry: StubRegistry, source: MlflowSource) -> None:
    artifact = source.resolve("models:/m@best")
    assert (artifact.source, artifact.location) == ("models:/m/3", ROOT)
    assert b"".join(source.blocks(artifact, artifact.files[0]))
    for _, _, headers in registry.seen:
        assert headers["Authorization"] == f"Bearer {TOKEN}"
        assert headers["Accept-Encoding"] == "identity"
    assert registry.seen[0][:2] == ("/api/2.0/mlflow/registered-models/alias", {"name": ["m"], "alias": ["best"]})
    assert registry.seen[-1][0] == "/api/2.0/mlflow-artifacts/artifacts/0/r/artifacts/model/a"


def test_a_token_in_a_file_is_read_again(
    registry: StubRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    (tmp_path / "token").write_text("first\n")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN_FILE", str(tmp_path / "token"))
    token = Settings().mlflow_tracking_token
    source = MlflowSource(MlflowServer(registry.url, token), S3Source())
    source.resolve("models:/m/3")
    (tmp_path / "token").write_text("second one\n")
    source.resolve("models:/m/3")
    assert {headers["Authorization"] for _, _, headers in registry.seen} == {"Bearer first", "Bearer second one"}


def test_a_user_and_a_password_go_with_every_call(registry: StubRegistry) -> None:
    source = MlflowSource(MlflowServer(registry.url, None, "user", SecretStr("word")), S3Source())
    source.resolve("models:/m/3")
    expected = f"Basic {base64.b64encode(b'user:word').decode()}"
    assert {headers["Authorization"] for _, _, headers in registry.seen} == {expected}


def test_figures_that_are_no_numbers_are_left_out(registry: StubRegistry, source: MlflowSource) -> None:
    metrics = [{"key": "good", "value": 0.5}, {"key": "nan", "value": float("nan")}, {"key": "text", "value": "1"}]
    metrics += [{"key": "a\nb", "value": 1.0}, {"value": 1.0}, {"key": "true", "value": None}]
    registry.answers["runs"] = {"run": {"data": {"metrics": metrics}}}
    assert [(one.name, one.value) for one in source.resolve("models:/m/3").metrics] == [("good", 0.5)]


def test_figures_of_the_logged_model_go_first_and_a_version_needs_none(
    registry: StubRegistry, source: MlflowSource
) -> None:
    registry.answers["get"] = {"model_version": {"version": "3", "run_id": "r", "source": "models:/m-12ab"}}
    registry.answers["runs"] = {"run": {"data": {"metrics": [{"key": "a", "value": 1}, {"key": "b", "value": 1}]}}}
    registry.answers["m-12ab"] = {"model": {"data": {"metrics": [{"key": "b", "value": 2}]}}}
    assert [(one.name, one.value) for one in source.resolve("models:/m/3").metrics] == [("a", 1.0), ("b", 2.0)]
    registry.answers |= {"runs": (404, b"", {}), "m-12ab": (403, b"", {})}
    assert source.resolve("models:/m/3").metrics == ()
    registry.answers["runs"] = (503, b"", {})
    with pytest.raises(ArtifactUnavailableError):
        source.resolve("models:/m/3")


@pytest.mark.parametrize(
    ("name", "answer", "reason"),
    [
        ("get", [], "is no JSON object"),
        ("get", (200, b"<html>", {}), "is no JSON object"),
        ("get", (200, b"[" * 100_000, {}), "is no JSON object"),
        ("get", (200, b"x" * ((4 << 20) + 1), {}), "has more than 4194304 bytes"),
        ("get", (200, gzip.compress(json.dumps(VERSION).encode()), {"Content-Encoding": "gzip"}), "is no JSON object"),
        ("get", {}, "names no version"),
        ("get", {"model_version": {"version": "1/../2"}}, "names no version"),
        ("get", (302, b"", {"Location": "http://127.0.0.1:9/"}), "HTTP 302"),
        ("get", (401, b"", {}), "MLFLOW_TRACKING_TOKEN or its user may not read it"),
        (
            "get",
            (404, b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "secret"}', {}),
            "404: RESOURCE_DOES_NOT_EXIST$",
        ),
        ("get", (404, b'{"error_code": "<script>"}', {}), "404$"),
        ("get-download-uri", {}, "knows no place of its files"),
        ("get-download-uri", {"artifact_uri": "file:///etc"}, "its files are at 'file'"),
        ("get-download-uri", {"artifact_uri": "/etc"}, "its files are at 'a path'"),
        ("get-download-uri", {"artifact_uri": "https://elsewhere/x"}, "its files are at 'https://elsewhere'"),
        ("get-download-uri", {"artifact_uri": "https://me:secret@host:8/x"}, "its files are at 'https://host:8'"),
        (
            "get-download-uri",
            {"artifact_uri": "mlflow-artifacts://elsewhere/x"},
            "its files are at 'mlflow-artifacts://",
        ),
        ("get-download-uri", {"artifact_uri": "mlflow-artifacts:/../../x"}, "is no path below the artifact"),
        ("artifacts", {"files": [{"path": "../x", "file_size": 1}]}, "is no path below the artifact"),
        ("artifacts", {"files": [{"path": "/x", "file_size": 1}]}, "is no path below the artifact"),
        ("artifacts", {"files": [{"path": "x", "is_dir": True}]}, "more than 1000 folders|is too long"),
        ("artifacts", {"files": [{"path": "x", "file_size": "many"}]}, "says no size of 'x'"),
        ("artifacts", {"files": [{"path": str(number)} for number in range(10_001)]}, "more than 10000 files"),
    ],
)
def test_a_wrong_answer_is_refused_with_the_reason(
    registry: StubRegistry, source: MlflowSource, name: str, answer: Any, reason: str
) -> None:
    registry.answers[name] = answer
    with pytest.raises(ArtifactError, match=reason) as caught:
        source.resolve("models:/m/3")
    assert not isinstance(caught.value, ArtifactUnavailableError)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_in_trouble_may_be_asked_again(registry: StubRegistry, source: MlflowSource, status: int) -> None:
    registry.answers["get"] = (status, b"", {})
    with pytest.raises(ArtifactUnavailableError, match=f"HTTP {status}"):
        source.resolve("models:/m/3")


def test_versions_come_in_the_order_of_their_numbers_from_all_pages(
    registry: StubRegistry, source: MlflowSource
) -> None:
    first = [{"name": "m", "version": "10", "status": "READY"}, {"name": "m", "version": "9", "status": "FAILED"}]
    last = [{"name": "m", "version": "2"}, {"name": "other", "version": "1"}, {"name": "m", "version": "x"}, "junk"]
    registry.answers["search"] = lambda query: (
        {"model_versions": last} if "page_token" in query else {"model_versions": first, "next_page_token": "more"}
    )
    assert [(one.version, one.is_ready) for one in source.versions("m")] == [("2", True), ("9", False), ("10", True)]
    assert registry.seen[0][1]["filter"] == ["name='m'"]


def test_a_list_without_end_is_left(registry: StubRegistry, source: MlflowSource) -> None:
    registry.answers["search"] = {"next_page_token": "more"}
    with pytest.raises(ArtifactError, match="more than 10000 versions"):
        source.versions("m")


@pytest.mark.parametrize("name", ["a/b", "a'b", "", "a:b"])
def test_names_that_no_registered_model_has_are_refused(source: MlflowSource, name: str) -> None:
    with pytest.raises(ArtifactError, match="cannot be the name"):
        source.versions(name)


def test_a_download_that_drips_hears_the_end_of_its_process(
    registry: StubRegistry, source: MlflowSource, tmp_path: Path
) -> None:
    registry.answers["a"] = (200, b"x" * 100_000, {})
    artifact = replace(source.resolve("models:/m/3"), files=(ListedFile("a", 100_000),))
    registry.drips.set()
    with pytest.raises(StoppedError):
        download(source, artifact, tmp_path, GIB, lambda _: (tmp_path / "a").exists())
    assert registry.seen[-1][0].endswith("/a")


def test_a_download_that_drips_does_not_take_for_ever(registry: StubRegistry) -> None:
    source = MlflowSource(MlflowServer(registry.url), S3Source(), patience_s=0.3)
    registry.answers["a"] = (200, b"x" * 100, {})
    artifact = replace(source.resolve("models:/m/3"), files=(ListedFile("a", 100),))
    registry.drips.set()
    with pytest.raises(ArtifactUnavailableError, match="did not end within 0 s"):
        list(source.blocks(artifact, artifact.files[0]))
    with pytest.raises(ArtifactUnavailableError, match="did not end within 0 s"):
        source.resolve("models:/m/3")


def test_no_proxy_of_the_environment_gets_the_token(
    registry: StubRegistry, source: MlflowSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert source.resolve("models:/m/3").source == "models:/m/3"
    assert registry.seen
