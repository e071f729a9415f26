"""Dispatchers, consumers and the recorder are killed at random moments: exactly one committed reply per request."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import pytest

from tests.faults.promise import Findings, examine
from tests.faults.rig import ALL_SERVICES, CONSUMERS, DISPATCHERS, RECORDER, Rig
from tests.faults.traffic import Traffic
from tests.integration.pipeline import Pipeline
from tests.stack import PostgresServer

pytestmark = pytest.mark.broker

TENANTS = ("a", "b", "c")
_OWN_TIMEOUT_S = 90.0
_ANSWER_TIMEOUT_S = 180.0
_RECORD_TIMEOUT_S = 60.0

Say = Callable[[str], None]
Victims = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """How a run publishes: between two kills a part at a pace, and a burst just before each kill."""

    requests: int
    per_s: float
    burst: int
    max_delay_s: float


@dataclass(frozen=True, slots=True)
class Kill:
    """One blow and how many requests were outstanding then."""

    victims: Victims
    outstanding: int


@contextmanager
def running(
    broker: str,
    database: PostgresServer,
    redis_url: str,
    unique: str,
    folder: Path,
    env: dict[str, str],
) -> Iterator[Rig]:
    """Three tenants, one pool, and all services under a supervisor."""
    with (
        Pipeline(broker, folder, unique, tenants=TENANTS, redis_url=redis_url) as pipeline,
        Rig(pipeline, folder / "stack", database, redis_url, env=env) as rig,
    ):
        yield rig


def long_plan(dice: random.Random) -> list[Victims]:
    """Everybody alone, three more alone, every kind of pair: 16 kills in 12 blows, in random order."""
    alone: list[Victims] = [(name,) for name in ALL_SERVICES]
    alone += [(dice.choice(ALL_SERVICES),) for _ in range(3)]
    together: list[Victims] = [
        DISPATCHERS,
        CONSUMERS,
        (dice.choice(DISPATCHERS), dice.choice(CONSUMERS)),
        (dice.choice(DISPATCHERS + CONSUMERS), RECORDER),
    ]
    return dice.sample(alone + together, len(alone) + len(together))


def run(rig: Rig, traffic: Traffic, plan: Sequence[Victims], load: Load, dice: random.Random, say: Say) -> list[Kill]:
    """Publish and kill until the plan is carried out and everything is published and answered."""
    share = load.requests // len(plan)
    kills = []
    for number, victims in enumerate(plan, 1):
        traffic.trickle(share - load.burst)
        waited_from = monotonic()
        rig.wait_all_own(_OWN_TIMEOUT_S)
        waited_s = monotonic() - waited_from
        traffic.burst(load.burst)
        # A random moment, so that the kill hits any phase of the loops; nothing is waited for.
        sleep(dice.uniform(0.0, load.max_delay_s))
        rig.wait_all_own(_OWN_TIMEOUT_S)
        rig.kill(*victims)
        kills.append(Kill(victims, traffic.outstanding))
        say(
            f"{number:2}/{len(plan)}  SIGKILL {' and '.join(victims)}: {kills[-1].outstanding} outstanding of "
            f"{traffic.published} (partitions for all after {waited_s:.1f} s)"
        )
    traffic.trickle(load.requests - share * len(plan))
    traffic.wait_published(load.requests, _ANSWER_TIMEOUT_S)
    traffic.wait_answered(_ANSWER_TIMEOUT_S)
    say(f"all {traffic.published} are answered, longest gap {traffic.longest_gap_s():.1f} s")
    return kills


def verify(rig: Rig, traffic: Traffic, database: PostgresServer, kills: Sequence[Kill], say: Say) -> Findings:
    """Nothing was lost, nothing came twice, and the kills meant something."""
    findings = examine(rig.pipeline, traffic.expected, postgres_dsn=database.dsn, timeout_s=_RECORD_TIMEOUT_S)
    say(
        f"{findings.requests} requests, {rig.kills} kills, {findings.lost} lost, {findings.twice} twice; "
        f"{rig.deaths - rig.kills} further exits; longest gap {traffic.longest_gap_s():.1f} s"
    )
    assert findings.problems == []
    # A fenced service ends by itself; one that does so again and again is broken, whatever the log says in the end.
    assert rig.deaths - rig.kills <= rig.kills
    assert sum(kill.outstanding > 0 for kill in kills) * 2 >= len(kills), kills
    return findings


def test_every_request_is_answered_once_whatever_is_killed(
    broker: str, database: PostgresServer, redis_url: str, unique: str, tmp_path: Path, seed: int, say: Say
) -> None:
    """One kill of each kind, soon after one another."""
    dice = random.Random(seed)
    say(f"seed {seed}")
    plan = [(RECORDER,), (dice.choice(DISPATCHERS),), (dice.choice(CONSUMERS),)]
    load = Load(requests=300, per_s=40, burst=60, max_delay_s=0.5)
    env = {
        "SIMULATED_DECODE_TOKENS_PER_S": "350",
        "MAX_BATCH_SIZE": "8",
        # As short as the broker allows: a killed dispatcher is replaced sooner.
        "DISPATCHER_SESSION_TIMEOUT_MS": "3000",
    }
    with (
        running(broker, database, redis_url, unique, tmp_path, env) as rig,
        Traffic(rig.pipeline, seed, load.per_s) as traffic,
    ):
        kills = run(rig, traffic, plan, load, dice, say)
        verify(rig, traffic, database, kills, say)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_nothing_is_lost_or_doubled_by_many_kills(
    broker: str, database: PostgresServer, redis_url: str, unique: str, tmp_path: Path, seed: int, say: Say
) -> None:
    """2,000 requests, 16 kills in 12 blows, all services, alone and in pairs."""
    dice = random.Random(seed)
    say(f"seed {seed}")
    started = monotonic()
    load = Load(requests=2_000, per_s=12, burst=70, max_delay_s=1.5)
    # About 25 requests a second and consumer, embedding costs next to nothing: a burst outlasts the time to the kill.
    env = {"SIMULATED_DECODE_TOKENS_PER_S": "250", "MAX_BATCH_SIZE": "8"}
    with (
        running(broker, database, redis_url, unique, tmp_path, env) as rig,
        Traffic(rig.pipeline, seed, load.per_s) as traffic,
    ):
        kills = run(rig, traffic, long_plan(dice), load, dice, say)
        verify(rig, traffic, database, kills, say)
        assert rig.kills >= 10
    say(f"took {monotonic() - started:.0f} s")
