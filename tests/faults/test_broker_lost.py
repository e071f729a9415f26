"""One of three Kafka brokers is killed under load and stays away: nothing lost, nothing twice, and service goes on."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import pytest

from benchmarks.faults.promise import examine
from benchmarks.faults.traffic import Traffic, longest_gap_s
from deploy.local.layout import PROJECT_ROOT
from deploy.local.stack import LocalStack
from deploy.local.status import read_status
from fairlane.names import consumer_transactional_ids, dispatcher_transactional_ids, requests_topic
from fairlane.outcomes import Outcome
from fairlane.records import TenantSpec
from fairlane_server.processes.restarts import RestartPolicy
from tests.kit.deployment import write_tenants
from tests.kit.duties import BROKERS, Duties, all_in_sync, badly_kept, duties
from tests.kit.pipeline import Pipeline
from tests.kit.rig import CONSUMERS, DISPATCHERS, Rig
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

TENANTS = ("a", "b", "c")
ENV = {
    "SIMULATED_DECODE_TOKENS_PER_S": "350",
    "MAX_BATCH_SIZE": "8",
    # As short as the broker allows: a dispatcher that lost its coordinator is back sooner.
    "DISPATCHER_SESSION_TIMEOUT_MS": "3000",
}
_MUCH_LATER_S = 3_600.0
"""A killed broker stays away until the test has seen enough."""
_TIMEOUT_S = 120.0
_LONGEST_GAP_S = 60.0
"""Another broker has taken over after some 6 s. A service whose transaction hangs on the lost one ends first, and comes
back (`TransactionLoop.hang_timeout_s`); now and then both consumers do."""

Say = Callable[[str], None]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Three brokers that all run; killed at the end, which takes an orderly one seconds."""
    stack = LocalStack(
        data_dir=tmp_path_factory.mktemp("cluster"),
        parts=("kafka",),
        brokers=len(BROKERS),
        environ={},
        policy=RestartPolicy(window_s=1.0, first_delay_s=_MUCH_LATER_S, max_delay_s=_MUCH_LATER_S),
    )
    with stack:
        yield stack
        stack.supervisor.request_stop(now=True)


@dataclass(frozen=True, slots=True)
class Loss:
    """One broker that was away.

    Attributes:
        outstanding: requests that were not answered when it died.
        pause_s: until the first request was served that was published after it died.
        served: requests that were both published and served while it was away.
        away_s: until it answered again.
        behind_s: from then until it had everything that was written meanwhile.
    """

    broker: str
    outstanding: int
    pause_s: float
    served: int
    away_s: float
    behind_s: float


class Trial:
    """Requests, and brokers that are lost while they are on their way."""

    def __init__(self, cluster: LocalStack, rig: Rig, traffic: Traffic, dice: random.Random, say: Say) -> None:
        self._cluster = cluster
        self._rig = rig
        self._traffic = traffic
        self._dice = dice
        self._say = say
        self._admin = rig.pipeline.admin
        self.losses: list[Loss] = []

    def duties(self) -> Duties:
        """Who does what now. Everybody is at work: the groups are settled and each service has a transactional id."""
        self._rig.wait_all_own(_TIMEOUT_S)
        pipeline = self._rig.pipeline
        prefix = pipeline.group_prefix
        transactional_ids = (
            *(one for name in DISPATCHERS for one in dispatcher_transactional_ids(prefix, name)),
            *(one for name in CONSUMERS for one in consumer_transactional_ids(prefix, pipeline.pool, name)),
        )
        groups = (pipeline.dispatcher_group, pipeline.pool_group())
        return duties(self._cluster, self._admin, groups, transactional_ids)

    def lose(self, broker: str, *, served: int, burst: int, meanwhile: Callable[[], None] | None = None) -> None:
        """Kill a broker while a burst is on its way, and let it come back when so many were served without it."""
        traffic = self._traffic
        traffic.burst(burst)
        sleep(self._dice.uniform(0.0, 0.5))  # a random moment: the kill is to hit any phase of the loops
        outstanding = traffic.outstanding
        pid = self._cluster.supervisor.kill(broker, signal.SIGKILL)
        killed_at = monotonic()

        def enough() -> bool:
            if traffic.asked - traffic.published < 10:
                traffic.trickle(10)
            return len(self._served_since(killed_at)) >= served

        eventually(enough, _TIMEOUT_S, f"{served} requests that were published and served without {broker}")
        pause_s = min(self._served_since(killed_at)) - killed_at
        if meanwhile is not None:
            meanwhile()
        assert self._cluster.supervisor.process(broker).pid is None
        assert not all_in_sync(self._admin)
        served = len(self._served_since(killed_at))
        self._cluster.supervisor.start_now(broker)
        self._cluster.supervisor.wait_ready(broker, _TIMEOUT_S, other_than_pid=pid)
        back_at = monotonic()
        eventually(lambda: all_in_sync(self._admin), _TIMEOUT_S, f"{broker} with all records")
        loss = Loss(broker, outstanding, pause_s, served, back_at - killed_at, monotonic() - back_at)
        self._say(
            f"SIGKILL {broker}: {outstanding} outstanding of {traffic.published}, the first new one served after "
            f"{pause_s:.1f} s, {served} of them while it was away for {loss.away_s:.1f} s, "
            f"everything on it {loss.behind_s:.1f} s later"
        )
        self.losses.append(loss)

    def finish(self, database: PostgresServer) -> None:
        """Wait until everything is answered, and hold the promise against it."""
        traffic = self._traffic
        traffic.wait_published(_TIMEOUT_S)
        traffic.wait_answered(_TIMEOUT_S)
        self._rig.wait_all_own(_TIMEOUT_S)
        findings = examine(self._rig.deployed, traffic.expected, postgres_dsn=database.operator_dsn, timeout_s=60)
        self._say(
            f"{findings.requests} requests, {len(self.losses)} brokers lost, {findings.lost} requests lost, "
            f"{findings.twice} twice; {self._rig.deaths} services ended and came back; "
            f"longest gap {self._longest_gap_s():.1f} s"
        )
        assert findings.problems == []
        assert all(loss.outstanding > 0 for loss in self.losses), self.losses
        assert self._longest_gap_s() < _LONGEST_GAP_S

    def _served_since(self, moment: float) -> list[float]:
        """When those requests were served that were published after this moment."""
        published, served = self._moments()
        return [at for request_id, at in served.items() if published[request_id] > moment]

    def _longest_gap_s(self) -> float:
        """The longest time in which requests that were to be served were outstanding and none was."""
        return longest_gap_s(*self._moments())

    def _moments(self) -> tuple[dict[str, float], dict[str, float]]:
        """When the requests that an engine has to serve were published and answered: refusals need no engine."""
        traffic = self._traffic
        # In this order: nothing is answered that was not published, nothing published that was not expected.
        replied, published, expected = traffic.replied_at.copy(), traffic.published_at.copy(), traffic.expected.copy()
        published = {request_id: at for request_id, at in published.items() if expected[request_id] == Outcome.OK}
        return published, {request_id: at for request_id, at in replied.items() if request_id in published}


def test_service_goes_on_while_one_of_three_brokers_is_away(
    cluster: LocalStack, database: PostgresServer, redis_url: str, unique: str, tmp_path: Path, seed: int, say: Say
) -> None:
    """The one that does most. Meanwhile its stack says so, and a new tenant's topics get three copies all the same."""
    say(f"seed {seed}")
    servers = cluster.endpoints.kafka_bootstrap_servers
    assert {
        part.name: (part.address, part.problem) for part in read_status(cluster.data_dir).parts if part.checked
    } == {name: (address, None) for name, address in zip(BROKERS.values(), servers.split(","), strict=True)}
    with (
        Pipeline(servers, tmp_path, unique, tenants=TENANTS, redis_url=redis_url) as pipeline,
        Rig(pipeline, tmp_path / "stack", database, redis_url, env=ENV) as rig,
        Traffic(pipeline.deployment, seed, per_s=10) as traffic,
    ):
        trial = Trial(cluster, rig, traffic, random.Random(seed), say)
        traffic.trickle(40)
        traffic.wait_replies(20, _TIMEOUT_S)
        found = trial.duties()
        broker = found.busiest
        say(f"{broker} {found.of(broker)}")
        assert found.leads[broker] > 0
        assert badly_kept(pipeline.admin) == set()

        def look() -> None:
            problems = {part.name: part.problem for part in read_status(cluster.data_dir).parts if part.checked}
            assert problems == {name: "backing off" if name == broker else None for name in BROKERS.values()}
            late = f"{unique}-late"
            apply_topics(pipeline, late)
            assert requests_topic(late) in pipeline.admin.list_topics(timeout=10).topics
            assert badly_kept(pipeline.admin) == set()

        trial.lose(broker, served=20, burst=40, meanwhile=look)
        trial.finish(database)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_nothing_is_lost_or_doubled_whichever_broker_is_lost(
    cluster: LocalStack, database: PostgresServer, redis_url: str, unique: str, tmp_path: Path, seed: int, say: Say
) -> None:
    """Six times the one that has a certain duty just then, in random order."""
    dice = random.Random(seed)
    say(f"seed {seed}")
    with (
        Pipeline(
            cluster.endpoints.kafka_bootstrap_servers, tmp_path, unique, tenants=TENANTS, redis_url=redis_url
        ) as pipeline,
        Rig(pipeline, tmp_path / "stack", database, redis_url, env=ENV) as rig,
        Traffic(pipeline.deployment, seed, per_s=15) as traffic,
    ):
        trial = Trial(cluster, rig, traffic, dice, say)
        prefix = pipeline.group_prefix
        chosen: dict[str, Callable[[Duties], str]] = {
            "the controller": lambda found: found.controller,
            "the dispatchers' coordinator": lambda found: found.coordinator[pipeline.dispatcher_group],
            "the consumers' coordinator": lambda found: found.coordinator[pipeline.pool_group()],
            "a dispatcher's transactions": lambda found: found.coordinator[f"{prefix}.dispatcher.{DISPATCHERS[0]}"],
            "a consumer's transactions": (
                lambda found: found.coordinator[f"{prefix}.consumer.{pipeline.pool}.{CONSUMERS[0]}"]
            ),
            "the leader of most": lambda found: max(found.leads, key=found.leads.__getitem__),
        }
        for why in dice.sample(sorted(chosen), len(chosen)):
            traffic.trickle(80)
            traffic.wait_replies(40, _TIMEOUT_S)
            found = trial.duties()
            broker = chosen[why](found)
            say(f"{why}: {broker} {found.of(broker)}")
            trial.lose(broker, served=80, burst=80)
        trial.finish(database)


def apply_topics(pipeline: Pipeline, tenant: str) -> None:
    """`fairlane topics apply` for one more tenant than the pipeline has."""
    tenants_file = pipeline.folder / "late-tenants.yaml"
    write_tenants(tenants_file, [*pipeline.tenants.values(), TenantSpec(tenant)])
    subprocess.run(
        (sys.executable, "-m", "fairlane_server.cli", "topics", "apply", "--json"),
        cwd=PROJECT_ROOT,
        env={**os.environ, **pipeline.env, "TENANTS_FILE": str(tenants_file)},
        timeout=60,
        check=True,
        capture_output=True,
    )
