"""An export of labels that is stopped or killed in the middle leaves nothing under the names of its files."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlane_server.labelling.queue import LabelQueue
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from tests.kit.label_kit import LabelBench
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.broker, pytest.mark.full]

WAITING = """
SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE NOT granted AND application_name = 'fairlane-labels' AND datname = current_database()
"""


@pytest.fixture
def bench(migrated: PostgresServer) -> Iterator[LabelBench]:
    """An item on whose label two agreed."""
    made = LabelBench(migrated)
    made.allow("acme")
    made.answered(1)
    made.rated(1)
    made.collector.look()
    with LabelQueue(migrated.operator_dsn, "acme") as queue:
        for reviewer in ("anna", "ben"):
            task = queue.lease(reviewer)
            assert task is not None
            queue.submit(reviewer, task.request_id, "good")
    yield made
    made.close()


@pytest.mark.parametrize(("number", "left"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, 2)])
def test_an_export_that_is_stopped_leaves_no_file_under_its_name(
    bench: LabelBench, tmp_path: Path, number: signal.Signals, left: int
) -> None:
    command = [sys.executable, "-m", "fairlane_server.cli", "labels", "export", "--tenant", "acme", "--format", "chat"]
    environment = os.environ | {"POSTGRES_DSN": bench.server.operator_dsn}
    with connect(bench.server.owner_dsn, "tests") as owner:
        with owner.transaction():
            act_for(owner, ALL_TENANTS)
            owner.execute("LOCK TABLE label_items IN ACCESS EXCLUSIVE MODE")
            process = subprocess.Popen([*command, "--out", str(tmp_path / "train.jsonl")], env=environment)
            try:
                eventually(lambda: bench.tables.rows(WAITING) == [(1,)], what="an export under way")
            except BaseException:
                process.kill()
                raise
            process.send_signal(number)
        assert process.wait(PATIENCE_S) != 0
    # Killed, it could remove nothing: what is left are drafts that no name of the export names.
    assert len([*tmp_path.iterdir()]) == left
    assert not [one.name for one in tmp_path.iterdir() if not one.name.startswith(".")]
