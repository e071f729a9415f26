"""Sends faults to the services of a supervisor, which restarts them as in a deployment.

Before a fault the broker must report partitions for every member that shares work, the victim included; otherwise no
other member takes over. An engine is struck while it works, by its consumer's metrics.
"""

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.error import URLError

import psutil
from confluent_kafka import ConsumerGroupState, KafkaException
from confluent_kafka.admin import AdminClient

from benchmarks.cluster import samples, wait_until, wait_while
from benchmarks.faults.plan import END, KILL, PAUSE, Cast, Fault, FaultTarget
from benchmarks.load import QUIET
from deploy.local.run_record import ProcessId, ProcessRecord, State, identify
from deploy.local.stack import LocalStack
from fairlane.codec import Codec
from fairlane.kafka_clients import KafkaAdmin
from fairlane.kafka_config import connection
from fairlane.names import (
    backfill_topic,
    dispatcher_group,
    pool_group,
    priority_topic,
    recorder_group,
    replies_topic,
    requests_topic,
    returned_topic,
)
from fairlane.outcomes import Priority, Task
from fairlane.records import ModelVersion
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings

_TIMEOUT_S = 10.0
_HTTP_TIMEOUT_S = 2.0
_ENGINE_MODULE = "inference_consumers.engine_process"

Place = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The pipeline of a fault run. All models are of one pool: one group must settle all work items."""

    settings: KafkaSettings
    tenants: tuple[str, ...]
    models: tuple[ModelVersion, ...]
    group_prefix: str
    codec: Codec = field(default_factory=default_codec)

    @property
    def pool(self) -> str:
        """Raises ValueError when there are more."""
        (pool,) = {model.pool for model in self.models}
        return pool

    @property
    def dispatcher_group(self) -> str:
        """The group that settles requests."""
        return dispatcher_group(self.group_prefix)

    @property
    def work_group(self) -> str:
        """The group that settles work items."""
        return pool_group(self.group_prefix, self.pool)

    @property
    def source_topics(self) -> list[str]:
        """Topics that its dispatchers read: requests, offline requests, and work handed back by consumers."""
        return [
            *(requests_topic(tenant) for tenant in self.tenants),
            *(backfill_topic(tenant) for tenant in self.tenants),
            returned_topic(self.pool),
        ]

    def model_for(self, task: str) -> ModelVersion:
        """The first that does this task."""
        return next(model for model in self.models if task in model.tasks)


@dataclass(frozen=True, slots=True)
class DescribedMember:
    """One member; ``name`` is its INSTANCE_ID, ``member_id`` is another after every restart."""

    name: str
    member_id: str
    partitions: frozenset[Place]


def members(admin: AdminClient, group: str) -> list[DescribedMember]:
    """The members of a stable group. Empty while it is rebalancing or the broker does not know it or does not answer.

    A member that was killed or stopped is included, with its partitions, until its session times out.
    """
    return _settled_members(admin, group) or []


def _settled_members(admin: AdminClient, group: str) -> list[DescribedMember] | None:
    """None while the group is rebalancing or the broker does not answer."""
    try:
        described = admin.describe_consumer_groups([group], request_timeout=_TIMEOUT_S)[group].result(_TIMEOUT_S)
    except KafkaException:
        return None
    if described.state not in (ConsumerGroupState.STABLE, ConsumerGroupState.EMPTY):
        return None
    return [
        DescribedMember(
            member.client_id,
            member.member_id,
            frozenset(
                (partition.topic, partition.partition)
                for partition in (member.assignment.topic_partitions if member.assignment else ())
            ),
        )
        for member in described.members
    ]


class Rig:
    """A running stack under fire."""

    def __init__(self, stack: LocalStack, deployed: Deployment, cast: Cast) -> None:
        """``stack`` runs the services of ``cast``, which serve ``deployed``."""
        self.stack = stack
        self.deployed = deployed
        self.cast = cast
        self.struck: list[Fault] = []
        self.badly_ended: list[str] = []
        """Who was asked to end and did not end with status 0."""
        self._admin = KafkaAdmin(connection(deployed.settings) | QUIET)
        self._recorders = recorder_group(deployed.group_prefix)
        self._groups = {
            deployed.dispatcher_group: cast.dispatchers,
            deployed.work_group: cast.consumers,
            self._recorders: (cast.recorder,),
        }
        self._members: dict[str, DescribedMember] = {}
        self._dead: set[str] = set()
        self._dead_pids: dict[str, int | None] = {}
        self._engines: dict[str, ProcessId] = {}
        # The one whose engines are struck: generating is what takes the time.
        self._model = deployed.model_for(Task.GENERATE).model

    @property
    def deaths(self) -> int:
        """How often services ended without the supervisor's doing, those that were struck included."""
        return sum(view.deaths for view in self.stack.supervisor.processes())

    @property
    def ended_by_themselves(self) -> int:
        """How many of these were not struck: a fenced service ends, and is started again."""
        others = (FaultTarget.ENGINE, FaultTarget.BROKER)
        fatal = (fault for fault in self.struck if fault.sign in (KILL, END) and fault.target not in others)
        return self.deaths - sum(len(fault.victims) for fault in fatal)

    def unowned(self, victims: Sequence[str] = ()) -> str | None:
        """Why not all dispatchers and all consumers, as they run now, share all partitions of their groups, and the
        recorder, when it is a victim, has those of the replies. None when they do.

        By the broker's word; a dead member still counts there until its session times out, and is told apart by its id.
        """
        found: dict[str, DescribedMember] = {}
        for group, expected in self._groups.items():
            if group == self._recorders and self.cast.recorder not in victims:
                continue
            here = members(self._admin, group)
            present = sorted(member.name for member in here)
            if present != sorted(expected):
                return f"the stable members of {group} are {present}"
            if idle := [member.name for member in here if not member.partitions or member.member_id in self._dead]:
                return f"{idle} of {group} own nothing, or are dead"
            if not self._places(group) <= {place for member in here for place in member.partitions}:
                return f"not all partitions of {group} are owned"
            found |= {member.name: member for member in here}
        self._members = found
        return None

    def unready(self, victims: Sequence[str] = ()) -> str | None:
        """Who does not run, or what is ``unowned``; None when all is well. Raises RuntimeError when the stack ended."""
        failure = self.stack.supervisor.failure
        if failure is not None:
            raise RuntimeError(failure)
        # The supervisor may not have seen a death yet.
        down = [view.name for view in self.stack.supervisor.processes() if not self._is_up(view)]
        return f"{down} do not run" if down else self.unowned(victims)

    def wait_all_own(self, timeout_s: float) -> None:
        """Wait until nothing is ``unready``."""
        wait_while(self.unready, timeout_s, "every service ready and partitions for each of both groups")

    def strike(self, fault: Fault) -> str | None:
        """Send the signal if it hits: everybody owns partitions, the victims too, and the engine works. Returns why
        nothing was done, or else None."""
        unready = self.unready(fault.victims)
        if unready is not None:
            return unready
        if fault.target is FaultTarget.ENGINE and not all(map(self._engine_works, fault.victims)):
            return f"no engine of {fault.victims} works"
        self.struck.append(fault)
        for name in fault.victims:
            if fault.target is FaultTarget.BROKER:
                self._dead_pids[name] = self.stack.supervisor.process(name).pid
                self.stack.supervisor.restart(name)
            elif fault.target is FaultTarget.ENGINE:
                self._engines[name].send(fault.sign)
            else:
                pid = self.stack.supervisor.kill(name, fault.sign)
                if fault.sign is not PAUSE:
                    self._dead_pids[name] = pid
                    if name in self._members:
                        self._dead.add(self._members[name].member_id)
        return None

    def see_through(self, fault: Fault, timeout_s: float) -> None:
        """What a blow needs after it: who is paused wakes when the others have all its partitions; an engine's consumer
        has another one; who was asked to end has ended, and the broker answers again."""
        for name in fault.victims:
            if fault.target is FaultTarget.ENGINE:
                self._wait_other_engine(name, timeout_s)
            elif fault.sign is PAUSE:
                self._wake_after_the_session(name, timeout_s)
            elif fault.sign is END:
                view = self.stack.supervisor.wait_ready(name, timeout_s, other_than_pid=self._dead_pids[name])
                # A broker says by its status that it was a signal.
                if view.last_exit != 0 and fault.target is not FaultTarget.BROKER:
                    self.badly_ended.append(f"{name} ended with {view.last_exit} on SIGTERM")

    def _wake_after_the_session(self, name: str, timeout_s: float) -> None:
        group = next(group for group, expected in self._groups.items() if name in expected)

        def ended() -> bool:
            found = _settled_members(self._admin, group)
            return found is not None and all(member.name != name for member in found)

        try:
            wait_until(ended, timeout_s, f"the end of {name}'s session")
        finally:
            self.stack.supervisor.kill(name, signal.SIGCONT)

    def _wait_other_engine(self, consumer: str, timeout_s: float) -> None:
        struck = self._engines.pop(consumer)

        def replaced() -> bool:
            return not struck.is_alive() and self._engine_of(consumer) is not None

        wait_until(replaced, timeout_s, f"another engine of {consumer}")

    def _engine_works(self, consumer: str) -> bool:
        """Remembers which process it is."""
        engine = self._engine_of(consumer)
        if engine is None or not self._running_items(consumer):
            return False
        self._engines[consumer] = engine
        return True

    def _engine_of(self, consumer: str) -> ProcessId | None:
        """The process of the model under fire."""
        pid = self.stack.supervisor.process(consumer).pid
        for child in psutil.process_iter(["ppid", "cmdline"]):
            command = child.info["cmdline"] or ()
            if child.info["ppid"] == pid and _ENGINE_MODULE in command and self._model in command:
                return identify(child.pid)
        return None

    def _running_items(self, consumer: str) -> float:
        """Of the model under fire, by the consumer's metrics; 0 while it does not answer."""
        with suppress(URLError, TimeoutError, ConnectionError):
            return sum(
                sample.value
                for sample in samples(self.stack, consumer, _HTTP_TIMEOUT_S)
                if sample.name == "fairlane_running_items" and sample.labels.get("model") == self._model
            )
        return 0.0

    def _is_up(self, view: ProcessRecord) -> bool:
        return view.state is State.DONE or (
            view.state is State.READY and view.pid is not None and view.pid != self._dead_pids.get(view.name)
        )

    def _places(self, group: str) -> set[Place]:
        deployed = self.deployed
        if group == self._recorders:
            return {(replies_topic(tenant), 0) for tenant in deployed.tenants}
        if group == deployed.dispatcher_group:
            topics = (requests_topic, backfill_topic)
            return {(topic(tenant), 0) for tenant in deployed.tenants for topic in topics}
        known = self._admin.list_topics(timeout=_HTTP_TIMEOUT_S * 5).topics
        work = [priority_topic(deployed.pool, priority) for priority in Priority]
        return {(topic, partition) for topic in work for partition in known[topic].partitions}
