"""The processes of all checks of a consumer, and that of post-processing: each is started by configuration, or when it
is first asked."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping

from fairlane.outcomes import GuardrailCheck
from fairlane.settings import Settings
from inference_consumers.engine_process.host import without_settings
from inference_consumers.guardrails.decision import Answers, CheckFailure
from inference_consumers.guardrails.examination import CheckCall
from inference_consumers.guardrails.process.host import UNAVAILABLE, CheckHost, CheckLimits


class CheckProcesses:
    """Hosts by the names of their checks."""

    def __init__(self, hosts: Mapping[str, CheckHost]) -> None:
        self._hosts = hosts

    def start(self, names: Iterable[str]) -> None:
        """Start these now."""
        for name in names:
            self._hosts[name].start()

    def submit(
        self, tenant: str, call: CheckCall, within_ms: int, done: Callable[[Answers | CheckFailure], None]
    ) -> CheckFailure | None:
        """See ``CheckHost.submit``."""
        host = self._hosts.get(call.check)
        return UNAVAILABLE if host is None else host.submit(tenant, call, within_ms, done)

    def close(self, timeout_s: float) -> None:
        """End all processes."""
        for host in self._hosts.values():
            host.close(timeout_s)


def check_processes(settings: Settings, on_fatal: Callable[[Exception], None]) -> CheckProcesses:
    """A host for every check; none has a process yet. They get none of the settings: no address, user or password."""
    environment, folder = without_settings(os.environ), settings.models_dir
    limits = CheckLimits(
        question_ms=settings.guardrail_timeout_ms,
        wait_ms=settings.guardrail_timeout_ms,
        memory_bytes=settings.guardrail_memory_bytes,
    )
    hosts = {
        str(check): CheckHost(check, sys.executable, environment, folder, on_fatal, limits) for check in GuardrailCheck
    }
    return CheckProcesses(hosts)
