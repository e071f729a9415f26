"""A pipeline whose services a supervisor runs: what a test kills comes back, as in a deployment.

Two dispatchers, two consumers of one pool and the recorder. Before a kill the broker must say that all four that share
work own partitions; otherwise nobody takes over and the kill proves little.
"""

import signal
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from deploy.local.lifecycle import ProcessView, State
from deploy.local.restarts import RestartPolicy
from deploy.local.services import Service, Step
from deploy.local.stack import LocalStack
from fairlane.names import backfill_topic, priority_topic, requests_topic
from fairlane.outcomes import Priority
from tests.faults.groups import Member, Place, members
from tests.integration.pipeline import Pipeline
from tests.stack import PostgresServer
from tests.waiting import eventually

DISPATCHERS = ("dispatcher-1", "dispatcher-2")
CONSUMERS = ("consumer-1", "consumer-2")
RECORDER = "recorder-1"
ALL_SERVICES = (*DISPATCHERS, *CONSUMERS, RECORDER)

# What is killed every few seconds must not look like a crash loop, and a crash loop must not look like kills: between
# two kills of the same service lie about six seconds, between two deaths in a loop at most three.
RESTARTS = RestartPolicy(max_deaths=8, window_s=30.0, max_delay_s=1.0)


class Rig:
    """Runs the services of ``pipeline`` while its context is open; their logs are below ``folder``."""

    def __init__(
        self,
        pipeline: Pipeline,
        folder: Path,
        database: PostgresServer,
        redis_url: str,
        *,
        env: Mapping[str, str],
    ) -> None:
        self.pipeline = pipeline
        self.kills = 0
        shared = {**pipeline.env, **env}
        consume = ("-m", "inference_consumers", "--pool", pipeline.pool, "--engine", "simulated")
        self._stack = LocalStack(
            data_dir=folder,
            # Nothing of these is started: they are looked up in ``environ``.
            parts=("kafka", "postgres", "redis"),
            setup=(Step("setup-tables", ("-m", "fairlane.cli", "db", "upgrade"), after=(), as_owner=True),),
            services=(
                *(Service(name, ("-m", "stream_processors.dispatcher"), shared) for name in DISPATCHERS),
                *(Service(name, consume, shared) for name in CONSUMERS),
                Service(RECORDER, ("-m", "stream_processors.recorder"), shared),
            ),
            environ={
                "KAFKA_BOOTSTRAP_SERVERS": pipeline.settings.kafka_bootstrap_servers,
                "POSTGRES_DSN": database.dsn,
                "POSTGRES_OWNER_DSN": database.owner_dsn,
                "REDIS_URL": redis_url,
            },
            policy=RESTARTS,
        )
        self._groups: dict[str, tuple[tuple[str, ...], set[Place]]] = {
            pipeline.dispatcher_group: (DISPATCHERS, _request_partitions(pipeline)),
            pipeline.pool_group(): (CONSUMERS, _work_partitions(pipeline)),
        }
        self._members: dict[str, Member] = {}
        self._dead: set[str] = set()
        self._dead_pids: set[int | None] = {None}

    def __enter__(self) -> Self:
        """Start everything and wait until each service that shares work owns partitions."""
        self._stack.start()
        try:
            assert self.deaths == 0, f"{self.deaths} services died before anything was killed"
            self.wait_all_own(60)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """SIGKILL everything: what a clean end looks like is tested elsewhere."""
        self._stack.supervisor.request_stop(now=True)
        self._stack.stop()

    def all_own(self) -> bool:
        """Whether both dispatchers and both consumers, as they run now, share all partitions of their groups.

        By the broker's word; a dead member still counts there until its session times out, and is told apart by its id.
        """
        found: dict[str, Member] = {}
        for group, (names, partitions) in self._groups.items():
            here = members(self.pipeline.admin, group)
            if sorted(member.name for member in here) != sorted(names):
                return False
            if any(not member.partitions or member.member_id in self._dead for member in here):
                return False
            if not partitions <= {place for member in here for place in member.partitions}:
                return False
            found |= {member.name: member for member in here}
        self._members = found
        return True

    def wait_all_own(self, timeout_s: float) -> None:
        """Wait until all of it runs and ``all_own``."""

        def settled() -> bool:
            failure = self._stack.supervisor.failure
            assert failure is None, failure
            # The supervisor may not have seen a death yet.
            return all(self._is_up(view) for view in self._stack.supervisor.processes()) and self.all_own()

        eventually(settled, timeout_s, "every service ready and partitions for each of both groups")

    def kill(self, *names: str) -> None:
        """SIGKILL these at once. ``all_own`` must have been true just before."""
        assert self.all_own(), f"not everybody owns partitions before the kill of {names}"
        for name in names:
            self._dead_pids.add(self._stack.supervisor.kill(name, signal.SIGKILL))
            self.kills += 1
            if name in self._members:
                self._dead.add(self._members[name].member_id)

    def _is_up(self, view: ProcessView) -> bool:
        return view.state is State.DONE or (view.state is State.READY and view.pid not in self._dead_pids)

    @property
    def deaths(self) -> int:
        """How often services ended without being asked to, the kills included."""
        return sum(view.deaths for view in self._stack.supervisor.processes())


def _request_partitions(pipeline: Pipeline) -> set[Place]:
    return {(topic, 0) for tenant in pipeline.tenants for topic in (requests_topic(tenant), backfill_topic(tenant))}


def _work_partitions(pipeline: Pipeline) -> set[Place]:
    topics = [priority_topic(pipeline.pool, priority) for priority in Priority]
    metadata = pipeline.admin.list_topics(timeout=10).topics
    return {(topic, partition) for topic in topics for partition in metadata[topic].partitions}
