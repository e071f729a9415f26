"""A real service process that a test starts, looks into, pauses, kills and starts again."""

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.local import probes
from deploy.local.services import HOST, Service
from deploy.local.supervisor import Instance, ProcessSpec
from tests.kit.waiting import eventually

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 40.0
_SETTINGS_PREFIXES = ("KAFKA_", "POSTGRES_", "REDIS_", "SCHEMA_REGISTRY_")


class ServiceProcess:
    """One service under a name that stays its INSTANCE_ID (and so its transactional.id) over restarts.

    The kernel kills the process when the *thread* that started it ends: start it from a thread that outlives it.
    """

    def __init__(self, service: Service, env: Mapping[str, str], metrics_port: int, log_file: Path) -> None:
        """Starts nothing; ``env`` is what every service of the pipeline gets, ``service.env`` goes over it."""
        inherited = tuple(name for name in os.environ if name.startswith(_SETTINGS_PREFIXES))
        self.name = service.name
        self.log_file = log_file
        self.metrics_port = metrics_port
        self._spec = ProcessSpec(
            name=service.name,
            argv=(sys.executable, *service.arguments),
            env={
                **env,
                "INSTANCE_ID": service.name,
                "METRICS_HOST": HOST,
                "METRICS_PORT": str(metrics_port),
                "PYTHONUNBUFFERED": "1",
                **service.env,
            },
            without_env=inherited,
        )
        self._instance: Instance | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def exit_status(self) -> int | None:
        """Its exit status once it ended (negative: the signal that ended it), None while it runs."""
        return self._running().collect()

    @property
    def alive(self) -> bool:
        return self._instance is not None and self.exit_status is None

    def start(self) -> "ServiceProcess":
        """Start it (again, once it ended). Returns at once; see ``wait_ready``."""
        assert not self.alive, f"{self.name} is running"
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        self._instance = Instance(self._spec, self.log_file, {})
        return self

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> "ServiceProcess":
        """Wait until its readiness check passes. Raises AssertionError, with the end of its log, if it does not."""

        def ready() -> bool:
            assert self.alive, f"{self.name} ended with {self.exit_status}:\n{self.last_words()}"
            return probes.http_ok(self.url("/health/ready")) is None

        try:
            eventually(ready, timeout_s, f"readiness of {self.name}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.last_words()}") from None
        return self

    def send(self, number: signal.Signals) -> None:
        self._running().send(number)

    def pause(self) -> None:
        """SIGSTOP."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._instance is not None:
            self._instance.kill()
            eventually(lambda: self.exit_status is not None, what=f"the end of {self.name}")

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM. Returns the exit status. Raises AssertionError if it does not end in time; it is killed then."""
        self._running().ask_to_stop(signal.SIGTERM)
        return self.wait_ended(timeout_s)

    def wait_ended(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Its exit status, when it ends by itself. Raises AssertionError if it does not in time; it is killed then."""
        try:
            eventually(lambda: self.exit_status is not None, timeout_s, f"the end of {self.name}")
        except AssertionError as error:
            self.kill()
            raise AssertionError(f"{error}\n{self.last_words()}") from None
        status = self.exit_status
        assert status is not None
        return status

    def url(self, path: str) -> str:
        return f"http://{HOST}:{self.metrics_port}{path}"

    def get(self, path: str, timeout_s: float = 5.0) -> tuple[int, str]:
        """Status and body of a GET on its health port."""
        try:
            with urllib.request.urlopen(self.url(path), timeout=timeout_s) as answer:  # noqa: S310 - our own address
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 when there are none."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.get("/metrics")[1])
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def log(self) -> str:
        """What it wrote since its last start."""
        with self.log_file.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def events(self, event: str) -> list[dict[str, Any]]:
        """Its log entries of this name since its last start."""
        parsed = (json.loads(line) for line in self.log().splitlines() if line.startswith("{") and line.endswith("}"))
        return [entry for entry in parsed if entry.get("event") == event]

    def last_words(self) -> str:
        """The end of its log."""
        return self.log()[-4_000:]

    def _running(self) -> Instance:
        assert self._instance is not None, f"{self.name} was never started"
        return self._instance
