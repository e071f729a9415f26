"""Whatever is killed, paused or ended at random moments: exactly one committed reply per request. The longest run of it
is ``python -m benchmarks exactly-once``."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import exactly_once
from benchmarks.faults.plan import KILL, Fault, FaultTarget, long_plan
from benchmarks.faults.promise import examine
from benchmarks.faults.traffic import CampaignLoad, Traffic, carry_out
from tests.kit.pipeline import Pipeline
from tests.kit.rig import CONSUMERS, DISPATCHERS, RECORDER, Rig
from tests.kit.stack import PostgresServer

pytestmark = pytest.mark.broker

TENANTS = ("a", "b", "c")
_RECORD_TIMEOUT_S = 60.0

Say = Callable[[str], None]


def test_every_request_is_answered_once_whatever_is_killed(
    broker: str, database: PostgresServer, redis_url: str, unique: str, tmp_path: Path, seed: int, say: Say
) -> None:
    """One kill of each kind, soon after one another."""
    dice = random.Random(seed)
    say(f"seed {seed}")
    plan = [
        Fault(KILL, FaultTarget.RECORDER, (RECORDER,)),
        Fault(KILL, FaultTarget.DISPATCHER, (dice.choice(DISPATCHERS),)),
        Fault(KILL, FaultTarget.CONSUMER, (dice.choice(CONSUMERS),)),
    ]
    load = CampaignLoad(requests=300, per_s=40, burst=60, max_delay_s=0.5)
    env = {
        "SIMULATED_DECODE_TOKENS_PER_S": "350",
        "MAX_BATCH_SIZE": "8",
        # As short as the broker allows: a killed dispatcher is replaced sooner.
        "DISPATCHER_SESSION_TIMEOUT_MS": "3000",
    }
    with (
        Pipeline(broker, tmp_path, unique, tenants=TENANTS, redis_url=redis_url) as pipeline,
        Rig(pipeline, tmp_path / "stack", database, redis_url, env=env) as rig,
        Traffic(pipeline.deployment, seed, load.per_s) as traffic,
    ):
        outstanding = carry_out(rig, traffic, plan, load, dice, say)
        findings = examine(
            pipeline.deployment, traffic.expected, postgres_dsn=database.operator_dsn, timeout_s=_RECORD_TIMEOUT_S
        )
        by_themselves = rig.ended_by_themselves
    say(f"{findings.requests} requests, {findings.lost} lost, {findings.twice} twice; {by_themselves} further exits")
    assert findings.problems == []
    # A fenced service ends by itself; one that does so again and again is broken, whatever the log says in the end.
    assert by_themselves <= len(outstanding)
    assert sum(map(bool, outstanding)) * 2 >= len(outstanding), outstanding


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_nothing_is_lost_or_doubled_by_many_faults() -> None:
    """2,000 requests, every kind of fault, alone and in pairs, and a restart of the broker."""
    load = CampaignLoad(requests=2_000, per_s=15, burst=80, max_delay_s=1.0)

    result = exactly_once.run(lambda dice, cast: long_plan(dice, cast, faults=15), load)

    assert result.met, result.figures
