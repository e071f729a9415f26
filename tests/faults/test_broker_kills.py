"""Kafka itself is killed in the middle of the work and starts again on its data: nothing lost, nothing twice."""

import random
import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest

from benchmarks.faults.promise import examine
from benchmarks.faults.traffic import Traffic
from deploy.local.stack import LocalStack
from fairlane_server.processes.restarts import RestartPolicy
from tests.kit.pipeline import Pipeline
from tests.kit.rig import Rig
from tests.kit.stack import PostgresServer

KILLS = 3
_REQUESTS = 600
_TIMEOUT_S = 180.0

Say = Callable[[str], None]


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(900)
def test_nothing_is_lost_or_doubled_when_kafka_is_killed(
    database: PostgresServer, redis_url: str, unique: str, tmp_path: Path, seed: int, say: Say
) -> None:
    """A broker of its own: killing the one of the test run would disturb nobody else's test only by luck."""
    dice = random.Random(seed)
    say(f"seed {seed}")
    env = {"SIMULATED_DECODE_TOKENS_PER_S": "350", "MAX_BATCH_SIZE": "8"}
    node = LocalStack(data_dir=tmp_path / "kafka", parts=("kafka",), environ={}, policy=RestartPolicy(window_s=3.0))
    with (
        node,
        Pipeline(
            node.endpoints.kafka_bootstrap_servers, tmp_path, unique, tenants=("a", "b", "c"), redis_url=redis_url
        ) as pipeline,
        Rig(pipeline, tmp_path / "stack", database, redis_url, env=env) as rig,
        Traffic(pipeline.deployment, seed, per_s=15) as traffic,
    ):
        share = _REQUESTS // KILLS
        hits = 0
        for number in range(1, KILLS + 1):
            traffic.trickle(share - 80)
            rig.wait_all_own(_TIMEOUT_S)
            # The groups of before the kill are on disk: only replies show that everybody works again.
            traffic.wait_replies(40, _TIMEOUT_S)
            traffic.burst(80)
            sleep(dice.uniform(0.0, 1.5))  # a random moment: the kill is to hit any phase of the loops
            killed = node.supervisor.kill("kafka", signal.SIGKILL)
            killed_at = monotonic()
            hits += traffic.outstanding > 0
            say(f"{number}/{KILLS}  SIGKILL kafka: {traffic.outstanding} outstanding of {traffic.published}")
            node.supervisor.wait_ready("kafka", _TIMEOUT_S, other_than_pid=killed)
            say(f"      kafka answers again after {monotonic() - killed_at:.1f} s")
        traffic.wait_published(_TIMEOUT_S)
        traffic.wait_answered(_TIMEOUT_S)
        rig.wait_all_own(_TIMEOUT_S)
        findings = examine(pipeline.deployment, traffic.expected, postgres_dsn=database.operator_dsn, timeout_s=60)
        say(
            f"{findings.requests} requests, {KILLS} kills of kafka, {findings.lost} lost, {findings.twice} twice; "
            f"{rig.deaths} services ended and came back; longest gap {traffic.longest_gap_s():.1f} s"
        )
        assert findings.problems == []
        assert hits == KILLS
