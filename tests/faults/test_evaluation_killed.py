"""A continuous evaluation run whose process is killed at random moments: it goes on, and is stored once."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from fairlane import names
from fairlane.clock import now_ms
from fairlane.records import UsageEvent
from fairlane_server.evaluation.evaluation_set import read_evaluation_set
from fairlane_server.evaluation.run_store import EvaluationRuns
from fairlane_server.evaluation.schedule_store import EvaluationSchedules
from fairlane_server.evaluation.schedules import EvaluationSchedule
from fairlane_server.evaluation.set_store import EvaluationSets
from tests.kit.pipeline import Pipeline
from tests.kit.recorder_kit import Tables
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(280)]

EXAMPLES = 300
KILLS = 4
PATIENCE_S = 90.0
SLOW = {"SIMULATED_BATCH_MS": "150", "MAX_BATCH_SIZE": "4"}
"""The run takes some ten seconds: there is time to be killed in."""
SHORT_LEASE = "import fairlane_server.evaluation.run_store as store; store.LEASE_MS = 5_000; "
COMMAND = "from fairlane_server.cli import main; main(['evaluation', 'due', '--tenant', '{tenant}', '--json'])"


@pytest.fixture
def pipeline(broker: str, tmp_path: Path, unique: str, redis_url: str, migrated: PostgresServer) -> Iterator[Pipeline]:
    # Dispatchers read the place of a reply to a repeated id in Postgres.
    env = {"POSTGRES_DSN": migrated.dispatcher_dsn}
    with Pipeline(broker, tmp_path, unique, tenants=("a",), redis_url=redis_url, env=env) as made:
        made.start()
        made.processes[f"consumer-{made.pool}-1"].kill()
        made.consumer(2, SLOW).wait_ready()
        made.recorder(postgres_dsn=migrated.recorder_dsn).wait_ready()
        made.wait_all_own()
        yield made


def due(pipeline: Pipeline, migrated: PostgresServer) -> "subprocess.Popen[str]":
    """The command that cron runs."""
    code = SHORT_LEASE + COMMAND.format(tenant=pipeline.tenant("a"))
    env = {**os.environ, **pipeline.env, "POSTGRES_DSN": migrated.operator_dsn}
    return subprocess.Popen(
        (sys.executable, "-c", code), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def kill_amid(process: "subprocess.Popen[str]", runs: EvaluationRuns, most: int, after_s: float) -> None:
    """SIGKILL a process so long after it has stored so many scores; it may have ended, as nothing was due."""

    def has_come_far() -> bool:
        return process.poll() is not None or sum(run.stored for run in runs.list()) >= most

    eventually(has_come_far, PATIENCE_S, "some scores")
    moment = monotonic() + after_s
    eventually(lambda: monotonic() > moment, what="the moment of the kill")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def test_a_killed_continuous_run_goes_on_and_is_stored_once(
    pipeline: Pipeline, migrated: PostgresServer, seed: int
) -> None:
    dice, tenant, model = random.Random(seed), pipeline.tenant("a"), pipeline.models[0].model
    rows = ({"id": f"e{number}", "input": {"prompt": f"p {number}"}, "expected": ".+"} for number in range(EXAMPLES))
    with EvaluationSets(migrated.operator_dsn, tenant) as sets:
        sets.add("holdout", read_evaluation_set(json.dumps(row).encode() for row in rows), "a test")
    with EvaluationSchedules(migrated.operator_dsn, tenant) as schedules:
        parameters = {"max_tokens": 4, "priority": "low"}
        schedules.set(EvaluationSchedule(model, "holdout", "regex", parameters, None, 24.0, created_at_ms=now_ms()))
        eventually(lambda: schedules.state(model).versions == ("1",), PATIENCE_S, "the recorded route")
    usage = pipeline.reader(names.LEDGER_USAGE, from_beginning=False)
    with EvaluationRuns(migrated.operator_dsn, tenant) as runs:
        for kill in range(KILLS):
            most = EXAMPLES * (kill + 1) // (KILLS + 1)
            kill_amid(due(pipeline, migrated), runs, most, dice.uniform(0.0, 1.0))

        def has_ended() -> bool:
            # While the lease of the killed one lasts, there is nothing for this one to do.
            last = due(pipeline, migrated)
            _, complaint = last.communicate(timeout=PATIENCE_S)
            assert last.returncode == 0, complaint
            return runs.list()[0].state == "finished"

        eventually(has_ended, PATIENCE_S, "the end of the run")
        (run,) = runs.list()
        assert run.result is not None
        assert (run.stored, run.result.scored, run.result.mean) == (EXAMPLES, EXAMPLES, 1.0)
        assert run.result.versions == {"1": EXAMPLES}
        # And it is not due again.
        again = due(pipeline, migrated)
        out, complaint = again.communicate(timeout=PATIENCE_S)
        assert (again.returncode, json.loads(out)) == (0, {"runs": [], "comparison": None}), complaint
        assert len(runs.list()) == 1
    asked = Tables(migrated).rows("SELECT request_id FROM evaluation_scores WHERE run_id = %s", run.run_id)
    usage.read_to_end()
    ran = Counter(event.request_id for event in pipeline.decoded(usage, UsageEvent))
    assert ran == Counter(request_id for (request_id,) in asked), "each example was run once, whoever asked it"
