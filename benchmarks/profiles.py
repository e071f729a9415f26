"""profiles: outcomes of calls to one gateway under four shapes of load.

``python -m producers.replay profile all`` against a pool of one simulated engine of a declared speed: what is shed,
degraded or late is decided by that speed and not by the machine, as long as gateway, dispatcher and users have the
processor time they need. The table of docs/replay.md is its output.
"""

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.cluster import Cluster, cluster
from benchmarks.http_services import HttpService, gateway
from benchmarks.result import Figure, Result
from benchmarks.simulated_pool import SimulatedPool, dispatchers

NAME = "profiles"
HOW = "one run of each profile"
AIM_BASELINE_FAILURES = 0.0
TENANT = "acme"
KEY_VARIABLE = "FAIRLANE_API_KEY"
ENGINE = SimulatedPool(cost_tokens_per_s=10_000.0, consumers=1, max_batch_size=16)
SERVICES = (*dispatchers("drr"), *ENGINE.services())
OPTIONS: tuple[str, ...] = ("--timeout", "20")
_TIMEOUT_S = 1_200.0


def run() -> Result:
    """All profiles, one after the other, through one gateway."""
    with (
        cluster(SERVICES, parts=("kafka", "redis", "postgres"), tenants=(TENANT,)) as running,
        gateway(running, TENANT) as service,
    ):
        found = _profiles(running, service)
    of = {
        f"{name}_{figure}": value
        for name, report in found.items()
        for figure, value in _figures(report["total"]).items()
    }
    figures = [
        Figure("failure rate of baseline", of["baseline_failed"], "share", "at most", AIM_BASELINE_FAILURES),
        Figure("shed of baseline", of["baseline_shed"], "share", "at most", 0.0),
    ]
    for name in found:
        figures += [
            Figure(f"{name}: calls", of[f"{name}_per_s"], "calls/s"),
            Figure(f"{name}: p50", of[f"{name}_p50_ms"], "ms"),
            Figure(f"{name}: p99", of[f"{name}_p99_ms"], "ms"),
            Figure(f"{name}: failed", of[f"{name}_failed"], "share"),
            Figure(f"{name}: shed", of[f"{name}_shed"], "share"),
            Figure(f"{name}: degraded", of[f"{name}_degraded"], "share"),
        ]
    return Result(NAME, tuple(figures), (of,))


def _profiles(running: Cluster, service: HttpService) -> dict[str, Any]:
    """Reports by profile; prints their table to stderr. Raises RuntimeError with the command's standard error."""
    table = running.folder / "profiles.md"
    command = ("-m", "producers.replay", "profile", "all", "--url", service.url, "--json", *OPTIONS)
    done = subprocess.run(
        [sys.executable, *command, "--write", str(table)],
        env={**os.environ, KEY_VARIABLE: service.headers["Authorization"].removeprefix("Bearer ")},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the profiles were not run: {done.stderr[-500:]}")
    sys.stderr.write(table.read_text(encoding="utf-8"))
    reports: dict[str, Any] = json.loads(done.stdout)
    return reports


def _figures(total: dict[str, Any]) -> dict[str, float]:
    calls = max(1, total["calls"])
    return {
        "per_s": total["calls_per_s"],
        "p50_ms": total["latency_ms"]["p50"] or 0.0,
        "p99_ms": total["latency_ms"]["p99"] or 0.0,
        "failed": total["failure_rate"],
        "shed": total["shed"] / calls,
        "degraded": total["degraded"] / calls,
    }
