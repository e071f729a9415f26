"""A real MLflow server in an environment of its own (``make mlflow``), and what fills it.

    with mlflow_server(folder) as server:
        server.register("digits", {"model.json": b"{}"})

``SKIP_MLFLOW=1`` skips the tests marked with ``needs_mlflow``; without it, a missing environment fails them.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest

from deploy.local.layout import PROJECT_ROOT
from deploy.local.ports import PortClaims
from tests.kit.waiting import eventually

needs_mlflow = pytest.mark.skipif(os.environ.get("SKIP_MLFLOW") == "1", reason="SKIP_MLFLOW=1: it is not tested")

ENVIRONMENT = PROJECT_ROOT / ".venv-mlflow"
LOG_DIGITS = Path(__file__).with_name("mlflow_log_digits.py")
_START_S = 120.0
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class MlflowRig:
    """A running server.

    Attributes:
        url: its address.
        folder: where its files are; artifacts below ``artifacts``.
    """

    url: str
    folder: Path

    def call(self, path: str, **body: Any) -> dict[str, Any]:
        """POST to its API."""
        answer = httpx.post(f"{self.url}/api/2.0/mlflow/{path}", json=body, timeout=_TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def register(self, name: str, files: Mapping[str, bytes], metrics: Mapping[str, float] | None = None) -> str:
        """A new version of a registered model, made by a run with these files. Returns its number."""
        made = httpx.post(
            f"{self.url}/api/2.0/mlflow/registered-models/create", json={"name": name}, timeout=_TIMEOUT_S
        )
        assert made.status_code == 200 or "RESOURCE_ALREADY_EXISTS" in made.text, made.text
        run = self.call("runs/create", experiment_id="0")["run"]["info"]
        for metric, value in (metrics or {}).items():
            self.call("runs/log-metric", run_id=run["run_id"], key=metric, value=value, timestamp=1, step=0)
        source = f"{run['artifact_uri']}/model"
        for path, content in files.items():
            self.upload(source, path, content)
        version = self.call("model-versions/create", name=name, source=source, run_id=run["run_id"])
        return str(version["model_version"]["version"])

    def set_alias(self, name: str, alias: str, version: str) -> None:
        self.call("registered-models/alias", name=name, alias=alias, version=version)

    def upload(self, source: str, path: str, content: bytes) -> None:
        """Write one file of an artifact, as MLflow's client does."""
        place = quote(f"{urlsplit(source).path.strip('/')}/{path}")
        url = f"{self.url}/api/2.0/mlflow-artifacts/artifacts/{place}"
        answer = httpx.put(url, content=content, timeout=_TIMEOUT_S)
        assert answer.status_code == 200, answer.text

    def folder_of(self, name: str, version: str) -> Path:
        """The folder of a version's files on the server's disk."""
        query = {"name": name, "version": version}
        answer = httpx.get(
            f"{self.url}/api/2.0/mlflow/model-versions/get-download-uri", params=query, timeout=_TIMEOUT_S
        )
        place: str = answer.json()["artifact_uri"]
        return self.folder / "artifacts" / urlsplit(place).path.strip("/")

    def log_digits(self, name: str, model: Path, accuracy: float) -> str:
        """Log and register a model with MLflow's own client. Returns its number."""
        command = (str(ENVIRONMENT / "bin" / "python"), str(LOG_DIGITS), self.url, name, str(model), str(accuracy))
        done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowRig]:
    """An empty one; its files and its output are in the folder."""
    program = ENVIRONMENT / "bin" / "mlflow"
    assert program.exists(), f"{ENVIRONMENT} is missing: run `make mlflow`, or set SKIP_MLFLOW=1"
    folder.mkdir(parents=True, exist_ok=True)
    with closing(PortClaims()) as ports, (folder / "mlflow.out").open("wb") as output:
        port = ports.take("mlflow")
        arguments = ("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1", "--host", "127.0.0.1")
        process = subprocess.Popen(
            (
                str(program),
                "server",
                *arguments,
                "--port",
                str(port),
                "--artifacts-destination",
                str(folder / "artifacts"),
            ),
            cwd=folder,
            env=_environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            try:
                eventually(lambda: _answers(process, url), timeout_s=_START_S, what="MLflow")
            except AssertionError as error:
                error.add_note((folder / "mlflow.out").read_text(errors="replace")[-2_000:])
                raise
            yield MlflowRig(url, folder)
        finally:
            # Its workers are in its group, and have nothing to lose.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_TIMEOUT_S)


def _environment() -> dict[str, str]:
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "GIT_PYTHON_REFRESH": "quiet"}
    path = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**{name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}, **quiet, "PATH": path}


def _answers(process: "subprocess.Popen[bytes]", url: str) -> bool:
    assert process.poll() is None, f"MLflow ended with status {process.returncode}"
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False
