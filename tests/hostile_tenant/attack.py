"""Send the tries of all attackers at once, a connection for each, and judge every answer."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from deploy.local.layout import KAFKA_LIBS_DIR
from tests.hostile_tenant.cluster_operations import OPERATIONS
from tests.hostile_tenant.connections import Connection, UnansweredError, can_log_in
from tests.hostile_tenant.drawing import Names
from tests.hostile_tenant.messages import Api, RawRequest, Versions, load_messages
from tests.hostile_tenant.operation import Operation, Target, is_refusal
from tests.hostile_tenant.oracle import Action, Kind, Need, Oracle
from tests.hostile_tenant.tally import Finding, Tally
from tests.hostile_tenant.world import Attacker, World

_IN_FLIGHT = 16
"""Requests of one attacker that wait for an answer; a broker handles those of a connection one after another."""
_LOG_IN = "LogIn"
_LOG_IN_PART = 0.003
_LOG_INS_AT_A_TIME = 8
_NONE = Versions(0, -1)
_DRAWN = {"topic": Kind.TOPIC, "group": Kind.GROUP, "transactional_id": Kind.TRANSACTIONAL_ID}


@dataclass(frozen=True, slots=True)
class _Request:
    operation: Operation
    version: int
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Attack:
    """On one broker.

    Attributes:
        passwords: of all attackers, by user.
        operations: those that the broker offers.
        on_answer: called with the number of tries that were answered.
    """

    servers: str
    world: World
    oracle: Oracle
    attackers: Sequence[Attacker]
    passwords: Mapping[str, str]
    operations: Sequence[Operation]
    tally: Tally = field(default_factory=Tally)
    on_answer: Callable[[int], None] = lambda _: None
    libs: Path = KAFKA_LIBS_DIR

    async def run(self, rng: Random, tries: int) -> None:
        """So many tries, all of them drawn before the first one."""
        names = Names(self.world, self.oracle)
        log_ins = sum(rng.random() < _LOG_IN_PART for _ in range(tries))
        drawn: dict[Attacker, list[tuple[Operation, Target]]] = {attacker: [] for attacker in self.attackers}
        weights = [operation.weight for operation in self.operations]
        for operation in rng.choices(self.operations, weights, k=tries - log_ins):
            attacker = rng.choice(self.attackers)
            drawn[attacker].append((operation, draw_target(rng, names, self.world, attacker, operation)))
        to_log_in = [(rng.choice(self.attackers), rng.choice(self.world.users), rng.random()) for _ in range(log_ins)]
        async with asyncio.TaskGroup() as tasks:
            for attacker, of_attacker in drawn.items():
                tasks.create_task(self._attack(attacker, of_attacker, Random(rng.random())))
            tasks.create_task(self._log_in(to_log_in))

    async def _attack(self, attacker: Attacker, drawn: Sequence[tuple[Operation, Target]], rng: Random) -> None:
        async with Connection(self.servers, attacker.user, self.passwords[attacker.user]) as connection:
            requests = list(self._requests(connection, drawn, rng))
            rng.shuffle(requests)
            slots = asyncio.Semaphore(_IN_FLIGHT)

            async def send(request: _Request) -> None:
                try:
                    await self._send(connection, attacker, request)
                finally:
                    slots.release()

            async with asyncio.TaskGroup() as tasks:
                for request in requests:
                    await slots.acquire()
                    tasks.create_task(send(request))

    def _requests(
        self, connection: Connection, drawn: Iterable[tuple[Operation, Target]], rng: Random
    ) -> Iterator[_Request]:
        """Together in one request go targets of different names."""
        messages, offered = load_messages(self.libs), connection.versions
        open_requests: dict[str, dict[str, Target]] = {}
        operations: dict[str, Operation] = {}

        def request(operation: Operation, targets: Iterable[Target]) -> _Request:
            message = Api.named(messages, operation.api).request
            versions = operation.range.common(offered[message.key]).common(message.versions)
            return _Request(operation, rng.randint(versions.first, versions.last), tuple(targets))

        for operation, target in drawn:
            operations[operation.name] = operation
            waiting = open_requests.setdefault(operation.name, {})
            name = getattr(target, operation.labels) if operation.labels else ""
            if len(waiting) == operation.most or name in waiting:
                yield request(operation, waiting.values())
                waiting.clear()
            waiting[name] = target
        for name, waiting in open_requests.items():
            yield request(operations[name], waiting.values())

    async def _send(self, connection: Connection, attacker: Attacker, request: _Request) -> None:
        operation = request.operation
        api = Api.named(load_messages(self.libs), operation.api)
        raw = RawRequest(api, request.version, operation.body(request.targets, self.world))
        try:
            answer = await connection.ask(raw)
        except UnansweredError as error:
            for target in request.targets:
                self.tally.found(Finding("unanswered", operation.name, target, f"version {request.version}: {error}"))
            raise
        for target in request.targets:
            self._judge(attacker, request, target, answer)
        if operation.tells is not None:
            self._judge_told(attacker, request, answer)
        if operation.api == "Produce":
            self._note_written(attacker, request, answer)
        self.on_answer(len(request.targets))

    def _judge(self, attacker: Attacker, request: _Request, target: Target, answer: Mapping[str, Any]) -> None:
        operation = request.operation
        codes = operation.codes(answer, target, self.world)
        permitted = self.oracle.permits(attacker.actor, operation.needs(target, self.world))
        is_refused = is_refusal(codes) or (not permitted and not operation.before.isdisjoint(codes))
        if is_refused != permitted and codes:
            (self.tally.permitted if permitted else self.tally.refused)[operation.name] += 1
            return
        what = "refused" if permitted else "allowed"
        self.tally.found(Finding(what, operation.name, target, f"version {request.version}: errors {codes}"))

    def _judge_told(self, attacker: Attacker, request: _Request, answer: Mapping[str, Any]) -> None:
        operation, (target,) = request.operation, request.targets
        assert operation.tells is not None
        told = set(operation.tells(answer, self.world))
        for need in told:
            if not self.oracle.permits(attacker.actor, (need,)):
                self.tally.found(Finding("told", operation.name, target, f"{need.kind} {need.name}"))
        topics = (Need(Action.DESCRIBE, Kind.TOPIC, topic) for topic in self.world.topics if operation.tells_all)
        for need in topics:
            if need not in told and self.oracle.permits(attacker.actor, (need,)):
                self.tally.found(Finding("not told", operation.name, target, need.name))

    def _note_written(self, attacker: Attacker, request: _Request, answer: Mapping[str, Any]) -> None:
        """What was written by those who may. The rest is a finding, and is to be one of the log's end as well."""
        own = {
            name: target.topic
            for target in request.targets
            if self.oracle.permits(attacker.actor, request.operation.needs(target, self.world))
            for name in (target.topic, self.world.topics.get(target.topic))
        }
        for topic in answer["Responses"]:
            name = own.get(topic.get("Name") or topic.get("TopicId"))
            for partition in topic["PartitionResponses"] if name is not None else ():
                if partition["ErrorCode"] == 0:
                    self.tally.written[str(name)].add(partition["BaseOffset"])

    async def _log_in(self, wanted: Sequence[tuple[Attacker, str, float]]) -> None:
        """As somebody else, or as oneself in the name of somebody else, with one's own password."""
        slots = asyncio.Semaphore(_LOG_INS_AT_A_TIME)

        async def one(attacker: Attacker, user: str, chance: float) -> None:
            password = self.passwords[attacker.user]
            name, acting_as = (user, "") if chance < 0.5 else (attacker.user, user)
            async with slots:
                let_in = await can_log_in(self.servers, name, password, acting_as)
            if let_in == (user == attacker.user):
                (self.tally.permitted if let_in else self.tally.refused)[_LOG_IN] += 1
            else:
                what = "allowed" if let_in else "refused"
                self.tally.found(Finding(what, _LOG_IN, Target(attacker.user, user=user), f"acting as {acting_as!r}"))
            self.on_answer(1)

        async with asyncio.TaskGroup() as tasks:
            for attacker, user, chance in wanted:
                tasks.create_task(one(attacker, user, chance))


def offered(versions: Mapping[int, Versions], libs: Path = KAFKA_LIBS_DIR) -> list[Operation]:
    """The operations that a broker with these versions of requests carries out."""

    def is_offered(operation: Operation) -> bool:
        message = Api.named(load_messages(libs), operation.api).request
        common = operation.range.common(versions.get(message.key, _NONE))
        return common.first <= common.last

    return [operation for operation in OPERATIONS if is_offered(operation)]


def draw_target(rng: Random, names: Names, world: World, attacker: Attacker, operation: Operation) -> Target:
    """Random names for what the operation is about."""
    drawn: dict[str, str] = {}
    for what in operation.draws:
        if what == "existing":
            drawn["topic"] = names.draw_existing(rng, attacker.actor, Kind.TOPIC)
        elif what == "user":
            drawn["user"] = rng.choice(world.users)
        else:
            drawn[what] = names.draw(rng, attacker.actor, _DRAWN[what])
    return Target(attacker.user, number=rng.getrandbits(31), **drawn)
