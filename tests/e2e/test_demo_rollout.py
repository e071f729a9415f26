"""The demo of rollouts, as `make demo-rollout` runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.layout import PROJECT_ROOT
from tests.kit.local_stack import user_environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(420)]

ENDS = [("3", "rolled_back"), ("2", "promoted"), ("int8", "promoted")]


def test_the_worse_version_goes_back_and_the_one_as_good_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        (sys.executable, "-m", "deploy.demo_rollout", "--json", "--data-dir", str(tmp_path)),
        cwd=PROJECT_ROOT,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert [(one["candidate"], one["status"]) for one in shown["rollouts"]] == ENDS
    assert all(shown["findings"].values())
    assert not any(one["refused"] for one in shown["rollouts"])
