"""The demo as a newcomer runs it: real parts, real models, its own process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.layout import PROJECT_ROOT

pytestmark = pytest.mark.full

TIMEOUT_S = 240


@pytest.mark.model
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_demo_answers_everything_exactly_once(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "deploy.models.prepare"], cwd=PROJECT_ROOT, check=True, timeout=TIMEOUT_S)

    finished = subprocess.run(
        [sys.executable, "-m", "deploy.demo", "--json", "--data-dir", str(tmp_path / "demo")],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )

    assert finished.returncode == 0, finished.stderr[-4_000:]
    result = json.loads(finished.stdout)
    assert result["ok"]
    assert result["requests"] >= 60
    assert result["findings"]["unanswered"] == []
    assert result["findings"]["answered_twice"] == []
    assert result["findings"]["without_row"] == []
    assert result["findings"]["rows_that_differ"] == []
    # Kafka and Postgres are secured without being told to, as a tenant finds it.
    assert result["protection"] == {"foreign_topics_refused": True, "postgres_encrypted": True}
    assert {(row["tenant"], row["task"]) for row in result["rows"]} == {
        (tenant, task) for tenant in ("acme", "globex", "initech") for task in ("generate", "embed", "rank", "classify")
    }
    # What stands in the handbook alone is answered from it, and by nobody without it.
    assert all(one["passages"] for one in result["documents"])
    assert sum(one["right"] for one in result["documents"]) >= len(result["documents"]) / 2
    # The models are real: nine of ten answers are right, and work that arrived together ran together.
    assert result["right"] >= 0.9 * result["requests"]
    assert max(row["largest_batch"] for row in result["rows"]) > 1
    assert all(row["completion_tokens"] > 0 for row in result["rows"] if row["task"] == "generate")
