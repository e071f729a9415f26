"""Real model servers in environments of their own: vLLM and KServe."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest

from deploy.local.ports import PortClaims
from tests.kit.waiting import eventually

PROJECT = Path(__file__).parents[2]
VLLM_PYTHON = PROJECT / ".venv-vllm/bin/python"
KSERVE_PYTHON = PROJECT / ".venv-kserve/bin/python"
START_S = 240.0

needs_vllm = pytest.mark.skipif(os.environ.get("SKIP_VLLM") == "1", reason="SKIP_VLLM=1: vLLM is not tested")
needs_kserve = pytest.mark.skipif(os.environ.get("SKIP_KSERVE") == "1", reason="SKIP_KSERVE=1: it is not tested")


@contextlib.contextmanager
def vllm_server(model: Path, served_name: str, context_tokens: int, log_file: Path) -> Iterator[str]:
    """vLLM's server with OpenAI's interface; yields its URL."""
    _check_installed(VLLM_PYTHON, "make vllm", "SKIP_VLLM")
    options = ("--enforce-eager", "--dtype", "float32", "--max-model-len", str(context_tokens), "--max-num-seqs", "8")
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    with contextlib.closing(PortClaims()) as ports:
        port = str(ports.take("vllm"))
        module = ("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", port)
        command = (str(VLLM_PYTHON), *module, "--model", str(model), "--served-model-name", served_name, *options)
        with _running(command, variables, log_file, f"http://127.0.0.1:{port}", "/health") as url:
            yield url


@contextlib.contextmanager
def kserve_server(centroids: Path, log_file: Path) -> Iterator[str]:
    """KServe with the models of ``tests/kit/kserve_server.py``; yields its URL."""
    _check_installed(KSERVE_PYTHON, "make kserve", "SKIP_KSERVE")
    with contextlib.closing(PortClaims()) as ports:
        port = str(ports.take("kserve"))
        command = (str(KSERVE_PYTHON), str(Path(__file__).with_name("kserve_server.py")), port, str(centroids))
        with _running(command, {}, log_file, f"http://127.0.0.1:{port}", "/v2/health/ready") as url:
            yield url


def _check_installed(python: Path, target: str, variable: str) -> None:
    if not python.exists():
        pytest.fail(f"{python.relative_to(PROJECT)} is missing: run `{target}`, or set {variable}=1")


@contextlib.contextmanager
def _running(
    command: Sequence[str], variables: Mapping[str, str], log_file: Path, url: str, ready_path: str
) -> Iterator[str]:
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=PROJECT,
            env={**os.environ, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def is_ready() -> bool:
        assert process.poll() is None, log_file.read_text(errors="replace")[-4_000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url + ready_path, timeout=5.0, trust_env=False).status_code == httpx.codes.OK
        return False

    try:
        eventually(is_ready, START_S, f"{url} is ready")
        yield url
    finally:
        # With the processes that it started: vLLM's scheduler is one.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
