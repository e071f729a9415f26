"""A run: start a cluster, attack it in rounds, and look after each of them at what it holds."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

from deploy.local.layout import KAFKA_LIBS_DIR, PROJECT_ROOT
from tests.hostile_tenant.admin_routes import AdminServer, admin_server, try_routes
from tests.hostile_tenant.attack import Attack, offered
from tests.hostile_tenant.cluster import PIPELINES, SECOND_USER, Cluster, attackers, cluster
from tests.hostile_tenant.cluster_operations import LEFT_OUT, OPERATIONS
from tests.hostile_tenant.connections import Connection, UnansweredError, can_log_in
from tests.hostile_tenant.messages import load_messages
from tests.hostile_tenant.oracle import Action, Kind, Need, Oracle
from tests.hostile_tenant.report import Report
from tests.hostile_tenant.services import Services
from tests.hostile_tenant.state import Allowance, Reader, State, changes
from tests.hostile_tenant.tally import Tally
from tests.hostile_tenant.world import Attacker, describe_world
from tests.kit.own_postgres import OwnPostgres
from tests.kit.stack import migrated_database

ROUND_TRIES = 10_000
"""Between two looks at everything. A round must end well before the services' open transactions expire."""
_SAY_EVERY = 1_000
_ADMIN_PART = 0.05
"""Part of the tries that are calls of the admin API, where one runs."""

Say = Callable[[str], None]


def run(tries: int, seed: int, say: Say) -> Report:
    """On a cluster of its own. ``say`` is told how far it is."""
    began = time.monotonic()
    say("starting a broker, Postgres and the admin API; applying topics, users and rights of two pipelines")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairlane-hostile-")))
        started = stack.enter_context(cluster(folder))
        postgres = stack.enter_context(OwnPostgres(folder / "postgres"))
        database = stack.enter_context(migrated_database(postgres.server, "hostile"))
        admin = stack.enter_context(admin_server(started, database, folder / "admin"))
        report = attack(started, tries, seed, say, admin=admin)
    report.whole_s = time.monotonic() - began
    return report


def attack(
    started: Cluster,
    tries: int,
    seed: int,
    say: Say = lambda _: None,
    users: Collection[str] | None = None,
    names: Collection[str] | None = None,
    admin: AdminServer | None = None,
) -> Report:
    """On one that runs; by these users and with the operations of these names only, where some are given. With
    ``admin`` a part of the tries are calls of that server."""
    chosen = [attacker for attacker in attackers() if users is None or attacker.user in users]
    return asyncio.run(_Run(started, chosen, names, Report(seed), say, admin).attack(tries))


def missed(offered: Iterable[int], libs: Path = KAFKA_LIBS_DIR) -> list[str]:
    """The requests among these numbers that no operation sends and no reason leaves out."""
    names = {
        message.key: name.removesuffix("Request")
        for name, message in load_messages(libs).items()
        if name.endswith("Request")
    }
    return sorted({names[key] for key in offered} - {operation.api for operation in OPERATIONS} - LEFT_OUT.keys())


class _Run:
    def __init__(
        self,
        started: Cluster,
        chosen: Sequence[Attacker],
        names: Collection[str] | None,
        report: Report,
        say: Say,
        admin: AdminServer | None,
    ) -> None:
        self._admin = admin
        self._cluster = started
        self._attackers = chosen
        self._names = names
        self._report = report
        self._say = say
        self._oracle = Oracle.from_file(PROJECT_ROOT / "topics.yaml")
        self._services = Services(started)
        self._done = 0

    async def attack(self, tries: int) -> Report:
        try:
            await self._attack(tries)
        finally:
            await self._services.close()
        return self._report

    async def _attack(self, tries: int) -> None:
        report, rng = self._report, Random(self._report.seed)
        async with Connection(self._cluster.kafka.bootstrap_servers) as admin:
            reader = Reader(admin)
            report.missed = missed(admin.versions)
            operations = [one for one in offered(admin.versions) if self._names is None or one.name in self._names]
            self._say(f"{len(operations)} of {len(OPERATIONS)} operations are offered by this broker")
            self._say("starting the services' producers")
            await self._services.start()
            topics = {name: topic_id for name, (topic_id, _) in (await reader.topics()).items()}
            world = describe_world(PIPELINES, topics, [SECOND_USER])
            attack = Attack(
                *(self._cluster.kafka.secured_servers, world, self._oracle, self._attackers, self._cluster.passwords),
                operations,
                tally=report.tally,
                on_answer=lambda answered: self._progress(answered, tries),
            )
            for start in range(0, tries, ROUND_TRIES):
                await self._round(attack, reader, rng, min(ROUND_TRIES, tries - start))
                if report.changed or report.tally.kinds:
                    break
        self._say("logging in as every user")
        report.changed += await self._locked_out()

    async def _round(self, attack: Attack, reader: Reader, rng: Random, tries: int) -> None:
        world, report = attack.world, self._report
        await self._services.open()
        before = await reader.read(world.names[Kind.GROUP])
        began = time.monotonic()
        at_admin = 0 if self._admin is None else round(tries * _ADMIN_PART)
        try:
            await attack.run(rng, tries - at_admin)
        except* UnansweredError:
            pass  # which is a finding
        if self._admin is not None:
            report.changed += await self._attack_admin(self._admin, rng, at_admin, attack)
        report.attack_s += time.monotonic() - began
        after = await reader.read(world.names[Kind.GROUP])
        report.changed += changes(before, after, self._allowance(attack.tally, before, after))
        report.changed += await self._services.commit()

    async def _attack_admin(self, admin: AdminServer, rng: Random, tries: int, attack: Attack) -> list[str]:
        before = await asyncio.to_thread(admin.state)
        await try_routes(admin, rng, tries, attack.tally, attack.on_answer)
        after = await asyncio.to_thread(admin.state)
        changed = [f"Postgres: {was} is {now}" for was, now in zip(before, after, strict=True) if was != now]
        return [*changed, *await asyncio.to_thread(admin.unusable)]

    def _allowance(self, tally: Tally, before: State, after: State) -> Allowance:
        shared = {topic for topic in before.topics if self._may(Need(Action.WRITE, Kind.TOPIC, topic), "consumer")}
        groups = {group for group, _, _ in (*before.committed, *after.committed)}
        return Allowance(
            tally.written, shared, {one for one in groups if self._may(Need(Action.READ, Kind.GROUP, one))}
        )

    def _may(self, need: Need, role: str | None = None) -> bool:
        """Whether an attacker, of this role, has a right."""
        return any(
            self._oracle.permits(one.actor, (need,)) for one in self._attackers if role in {None, one.actor.role}
        )

    def _progress(self, answered: int, tries: int) -> None:
        before, self._done = self._done, self._done + answered
        if self._done // _SAY_EVERY != before // _SAY_EVERY:
            self._say(f"{self._done:,} of {tries:,} tries")

    async def _locked_out(self) -> list[str]:
        """The users whose passwords are no longer theirs."""
        servers, passwords = self._cluster.kafka.secured_servers, self._cluster.passwords
        return [
            f"{user} cannot log in"
            for user, password in passwords.items()
            if not await can_log_in(servers, user, password)
        ]
