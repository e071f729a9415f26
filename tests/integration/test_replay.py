"""Load against the real thing: a trace through the SDK and through the gateway, users, and a run that is ended."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairlane.names import requests_topic
from tests.kit.gateway_kit import Served, serving
from tests.kit.stack import PostgresServer

pytestmark = pytest.mark.broker

_PATIENCE_S = 120.0
_CALLS = 12


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(broker, postgres, tmp_path_factory.mktemp("replay"), redis_url=redis_url, recorder=False) as served:
        yield served


@pytest.fixture
def trace(served: Served, tmp_path: Path) -> Path:
    """So many calls, twenty a second, in turn of both tenants, and one long after."""
    tenants = [served.pipeline.tenant(name) for name in "ab"]
    rows = [f"{number / 20},8,4,{tenants[number % 2]}\n" for number in range(_CALLS)]
    file = tmp_path / "trace.csv"
    file.write_text("".join(["arrived_at_s,prompt_tokens,output_tokens,tenant\n", *rows, f"3600,8,4,{tenants[0]}\n"]))
    return file


def command(served: Served, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """What to run, and its environment."""
    pipeline = served.pipeline
    keys = " ".join(f"{pipeline.tenant(name)}={key}" for name, key in served.keys.items())
    model = ("--model", pipeline.model_for("generate"), "--json")
    return [sys.executable, "-m", "producers.replay", *arguments, *model], {
        **os.environ,
        **pipeline.env,
        "FAIRLANE_API_KEY": keys,
    }


def replayed(served: Served, *arguments: str) -> dict[str, Any]:
    line, environment = command(served, *arguments)
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert not any(key in done.stdout + done.stderr for key in served.keys.values())
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("via", "stream"), [("sdk", True), ("gateway", False), ("gateway", True)])
def test_a_trace_is_played_and_told(served: Served, trace: Path, via: str, stream: bool) -> None:
    tenants = [served.pipeline.tenant(name) for name in "ab"]
    way: tuple[str, ...] = ("--via", "gateway", "--url", served.url())
    if via == "sdk":
        way = ("--via", "sdk", "--tenant", tenants[0], "--tenant", tenants[1])
    report = replayed(served, "play", str(trace), *way, "--seconds", "10", *(("--stream",) if stream else ()))
    total = report["total"]

    assert total["outcomes"] == {"ok": _CALLS}
    assert {tenant: one["calls"] for tenant, one in report["tenants"].items()} == dict.fromkeys(tenants, _CALLS // 2)
    assert 0 < total["latency_ms"]["p50"] <= total["latency_ms"]["p99"]
    assert (total["first_text_ms"]["p50"] is not None) == stream
    # The simulated engine answers with all that was asked for.
    assert total["output_tokens_per_s"] == pytest.approx(total["in_time"] * 4 / report["elapsed_s"], rel=0.01)
    assert report["elapsed_s"] >= (_CALLS - 1) / 20
    assert not report["interrupted"]


def test_a_profile_is_run_by_users_and_written_as_a_table(served: Served, tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    report = replayed(
        served, "profile", "baseline", "--url", served.url(), "--users", "3", "--seconds", "2", "--write", str(table)
    )

    assert set(report["baseline"]["total"]["outcomes"]) == {"ok"}
    assert report["baseline"]["total"]["calls"] >= 3
    lines = table.read_text().splitlines()
    assert lines[0].startswith("| scenario | users | RPS | p50 ms |")
    assert lines[2].startswith("| baseline | 3 | ")


def test_ctrl_c_ends_a_run_and_reports_what_there_is(served: Served, trace: Path) -> None:
    """The last call is due in an hour."""
    tenant = served.pipeline.tenant("a")
    line, environment = command(served, "play", str(trace), "--via", "sdk", "--tenant", tenant)
    written = served.pipeline.reader(requests_topic(tenant), from_beginning=False)
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            written.wait(lambda: len(written.records) >= _CALLS, _PATIENCE_S, "the calls before the last")
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=_PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, stderr
    report = json.loads(stdout)

    assert report["interrupted"]
    assert report["total"]["calls"] == _CALLS
    assert report["elapsed_s"] < 3_000
