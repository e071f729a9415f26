"""Sends faults to the services of a supervisor, which restarts them as in a deployment.

Before a fault the broker must report partitions for every member that shares work, the victim included; otherwise no
other member takes over. An engine is struck while it works, by its consumer's metrics.
"""

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
from confluent_kafka import ConsumerGroupState, KafkaException
from confluent_kafka.admin import AdminClient
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.faults.deployed import Deployment
from benchmarks.faults.plan import END, KILL, PAUSE, Cast, Fault, Target
from benchmarks.load import QUIET
from benchmarks.waiting import wait_until, wait_while
from deploy.local.run_record import ProcessId, ProcessRecord, RunRecord, State, identify
from deploy.local.stack import LocalStack
from fairlane import names
from fairlane.kafka_config import connection
from fairlane.names import backfill_topic, priority_topic, recorder_group, replies_topic, requests_topic
from fairlane.outcomes import Priority, Task
from fairlane.settings import Settings

_TIMEOUT_S = 10.0

Place = tuple[str, int]
"""Topic and partition."""
Owners = Mapping[str, frozenset[str]]
"""Tenants by the member id of their dispatcher."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member; ``name`` is its INSTANCE_ID, ``member_id`` is another after every restart."""

    name: str
    member_id: str
    partitions: frozenset[Place]


def members(admin: AdminClient, group: str) -> list[Member]:
    """The members of a stable group. Empty while it is rebalancing or the broker does not know it or does not answer.

    A member that was killed or stopped is included, with its partitions, until its session times out.
    """
    described = _described(admin, group)
    if described is None or described.state != ConsumerGroupState.STABLE:
        return []
    return [
        Member(
            member.client_id,
            member.member_id,
            frozenset(
                (partition.topic, partition.partition)
                for partition in (member.assignment.topic_partitions if member.assignment else ())
            ),
        )
        for member in described.members
    ]


def is_without(admin: AdminClient, group: str, name: str) -> bool:
    """Whether the group is settled without this member. False if the broker does not answer."""
    described = _described(admin, group)
    settled = (ConsumerGroupState.STABLE, ConsumerGroupState.EMPTY)
    return (
        described is not None
        and described.state in settled
        and all(member.client_id != name for member in described.members)
    )


def owners(settings: Settings, tenants: Sequence[str]) -> Owners:
    """The dispatchers of these tenants. Empty while the group rebalances or the broker does not answer."""
    tenant_of = {requests_topic(tenant): tenant for tenant in tenants}
    return {
        member.member_id: frozenset(tenant_of[topic] for topic, _ in member.partitions if topic in tenant_of)
        for member in members(AdminClient(connection(settings)), names.dispatcher_group(settings.group_prefix))
    }


def wait_owned(settings: Settings, tenants: Sequence[str], dispatchers: int, timeout_s: float = 60.0) -> Owners:
    """Wait until ``are_shared``, and return the owners. Raises TimeoutError."""
    found: Owners = {}

    def problem() -> str | None:
        nonlocal found
        found = owners(settings, tenants)
        return None if are_shared(found, tenants, dispatchers) else str(found)

    wait_while(problem, timeout_s, f"sharing {len(tenants)} tenants among {dispatchers} dispatchers")
    return found


def are_shared(found: Owners, tenants: Sequence[str], dispatchers: int) -> bool:
    """Whether this number of dispatchers shares all of these tenants, and each has some."""
    counts = [len(own) for own in found.values()]
    return len(counts) == dispatchers and all(counts) and sum(counts) == len(tenants)


def _described(admin: AdminClient, group: str) -> Any:
    """What the broker says of it; None when it does not answer."""
    try:
        return admin.describe_consumer_groups([group], request_timeout=_TIMEOUT_S)[group].result(_TIMEOUT_S)
    except KafkaException:
        return None


_HTTP_TIMEOUT_S = 2.0
_ENGINE_MODULE = "inference_consumers.engine_process"


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
        self._admin = AdminClient(connection(deployed.settings) | QUIET)
        self._recorders = recorder_group(deployed.group_prefix)
        self._groups = {
            deployed.dispatcher_group: cast.dispatchers,
            deployed.work_group: cast.consumers,
            self._recorders: (cast.recorder,),
        }
        self._members: dict[str, Member] = {}
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
        blows = (fault for fault in self.struck if fault.sign in (KILL, END) and _is_service(fault))
        return self.deaths - sum(len(fault.victims) for fault in blows)

    def unowned(self, victims: Sequence[str] = ()) -> str | None:
        """Why not all dispatchers and all consumers, as they run now, share all partitions of their groups, and the
        recorder, when it is a victim, has those of the replies. None when they do.

        By the broker's word; a dead member still counts there until its session times out, and is told apart by its id.
        """
        found: dict[str, Member] = {}
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
        if fault.target is Target.ENGINE and not all(map(self._engine_works, fault.victims)):
            return f"no engine of {fault.victims} works"
        self.struck.append(fault)
        for name in fault.victims:
            if fault.target is Target.BROKER:
                self._dead_pids[name] = self.stack.supervisor.process(name).pid
                self.stack.supervisor.restart(name)
            elif fault.target is Target.ENGINE:
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
            if fault.target is Target.ENGINE:
                self._wait_other_engine(name, timeout_s)
            elif fault.sign is PAUSE:
                self._wake_after_the_session(name, timeout_s)
            elif fault.sign is END:
                view = self.stack.supervisor.wait_ready(name, timeout_s, other_than_pid=self._dead_pids[name])
                # A broker says by its status that it was a signal.
                if view.last_exit != 0 and fault.target is not Target.BROKER:
                    self.badly_ended.append(f"{name} ended with {view.last_exit} on SIGTERM")

    def _wake_after_the_session(self, name: str, timeout_s: float) -> None:
        group = next(group for group, expected in self._groups.items() if name in expected)
        try:
            wait_until(lambda: is_without(self._admin, group, name), timeout_s, f"the end of {name}'s session")
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
        if engine is None or not self._metric(consumer, "fairlane_running_items", model=self._model):
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

    def _metric(self, service: str, name: str, **labels: str) -> float:
        """The sum of its samples with these labels; 0 while the service does not answer."""
        record = RunRecord.load(self.stack.data_dir.processes_file)
        urls = {} if record is None else {one.name: one.health_url for one in record.processes}
        url = (urls.get(service) or "").removesuffix("/health/ready") + "/metrics"
        with suppress(URLError, TimeoutError, ConnectionError), urlopen(url, timeout=_HTTP_TIMEOUT_S) as answer:  # noqa: S310 - our own address
            families = text_string_to_metric_families(answer.read().decode())
            return sum(
                sample.value
                for family in families
                for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()
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


def _is_service(fault: Fault) -> bool:
    return fault.target not in (Target.ENGINE, Target.BROKER)
