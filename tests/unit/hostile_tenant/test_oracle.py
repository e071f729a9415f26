"""The oracle of the hostile tenant, and that the rights of `fairlane access` agree with it on any name."""

from collections.abc import Mapping
from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.layout import PROJECT_ROOT
from fairlane.records import ModelVersion, TenantSpec
from fairlane_server.access.rights import Grant, Operation, Resource, is_allowed, wanted_grants
from fairlane_server.access.users import first_users
from fairlane_server.topics.families import expand, load_families
from tests.hostile_tenant.cluster import PIPELINES, PLAIN, STAGING, attackers
from tests.hostile_tenant.drawing import Names
from tests.hostile_tenant.oracle import GROUP_PREFIX, Action, Actor, Kind, Need, Oracle
from tests.hostile_tenant.world import Attacker, Pipeline, World, describe_world
from tests.kit.topic_prefix import topic_prefix

ORACLE = Oracle.from_file(PROJECT_ROOT / "topics.yaml")
ACME, A = Actor("", "tenant", "acme"), Actor("", "tenant", "a")
STAGING_ACME = Actor("staging.", "tenant", "acme")
FAST, FAST_2 = Actor("", "consumer", "fast"), Actor("", "consumer", "fast-2")


@pytest.mark.parametrize(
    ("actor", "topic", "actions"),
    [
        (ACME, "requests.acme", "WD"),
        (ACME, "backfill.acme", "WD"),
        (ACME, "replies.acme", "RD"),
        (ACME, "replies.acme.search", "RD"),
        (ACME, "chunks.acme", "RD"),
        (ACME, "dead-letter.replies.acme", "RWD"),
        *((ACME, f"{family}.acme2", "") for family in ("requests", "backfill", "replies", "chunks")),
        *((A, f"{family}.acme", "") for family in ("requests", "replies", "dead-letter.replies")),
        *((ACME, name, "") for name in ("requests.Acme", "requests.acme.", "requests.acme-2", "requests.\u0430cme")),
        *((ACME, name, "") for name in ("", "*", "requests.", "__consumer_offsets", "__transaction_state")),
        *((ACME, name, "") for name in ("gateway.replies", "ledger.usage", "control.tenants", "priority.fast.high")),
        (ACME, "staging.requests.acme", ""),
        (STAGING_ACME, "staging.requests.acme", "WD"),
        (STAGING_ACME, "requests.acme", ""),
        (FAST, "priority.fast.high", "RD"),
        (FAST, "priority.fast-2.high", ""),
        (FAST, "returned.fast", "WD"),
        (FAST, "returned.fast-2", ""),
        (FAST, "replies.acme", "WD"),
        (FAST, "replies.of-nobody-yet.search", "WD"),
        (FAST, "requests.acme", ""),
        (FAST, "control.cancellations", "RD"),
        (FAST, "control.capacity", "RWD"),
        (FAST, "control.models", "RD"),
        (FAST, "staging.replies.acme", ""),
    ],
)
def test_topics(actor: Actor, topic: str, actions: str) -> None:
    letters = {"R": Action.READ, "W": Action.WRITE, "D": Action.DESCRIBE}
    found = {action for action in Action if ORACLE.permits(actor, (Need(action, Kind.TOPIC, topic),))}
    assert found == {letters[letter] for letter in actions}


@pytest.mark.parametrize(
    ("actor", "group", "may_read", "may_describe"),
    [
        (ACME, "tenant_acme.readers", True, True),
        (ACME, "tenant_acme.", True, True),
        (ACME, "tenant_acme2.readers", False, False),
        (ACME, "tenant_acme", False, False),
        (ACME, "fairlane.pool.fast", False, False),
        (ACME, "fairlane-observer.top", False, False),
        (FAST, "fairlane.pool.fast", True, True),
        (FAST, "fairlane.pool.fast-2", False, False),
        (FAST, "fairlane-observer.top", False, True),
        (FAST, "staging.fairlane.pool.fast", False, False),
        (STAGING_ACME, "staging.tenant_acme.readers", True, True),
        (Actor("", "tenant", "staging"), "staging.tenant_acme.readers", False, False),
    ],
)
def test_groups(actor: Actor, group: str, *, may_read: bool, may_describe: bool) -> None:
    assert ORACLE.permits(actor, (Need(Action.READ, Kind.GROUP, group),)) is may_read
    assert ORACLE.permits(actor, (Need(Action.DESCRIBE, Kind.GROUP, group),)) is may_describe
    assert not ORACLE.permits(actor, (Need(Action.DELETE, Kind.GROUP, group),))


@pytest.mark.parametrize(
    ("actor", "transactional_id", "may"),
    [
        (FAST, "fairlane.consumer.fast.1", True),
        (FAST, "fairlane.consumer-2.fast.1", True),
        (FAST, "fairlane.consumer.fast-2.1", False),
        (FAST_2, "fairlane.consumer.fast.1", False),
        (FAST, "fairlane.dispatcher.1", False),
        (ACME, "fairlane.consumer.fast.1", False),
        (ACME, "tenant_acme.writer", False),
    ],
)
def test_transactional_ids(actor: Actor, transactional_id: str, *, may: bool) -> None:
    assert ORACLE.permits(actor, (Need(Action.WRITE, Kind.TRANSACTIONAL_ID, transactional_id),)) is may


def test_nobody_may_do_anything_with_the_cluster_and_all_needs_count() -> None:
    for actor in (ACME, FAST):
        assert not any(ORACLE.permits(actor, (Need(action, Kind.CLUSTER),)) for action in Action)
    own = Need(Action.WRITE, Kind.TOPIC, "requests.acme")
    assert ORACLE.permits(ACME, ())
    assert ORACLE.permits(ACME, (own, own))
    assert not ORACLE.permits(ACME, (own, Need(Action.WRITE, Kind.TOPIC, "requests.a")))


# ------------------------------------------------------------------ against the rights of `fairlane access`


def _world(pipelines: tuple[Pipeline, ...] = PIPELINES) -> World:
    topics: dict[str, UUID] = {}
    for pipeline in pipelines:
        specs = [TenantSpec(name, services=tuple(services)) for name, services in pipeline.tenants.items()]
        models = [ModelVersion(pool, "1", pool, "simulated", ("generate",), "-", 100, 100) for pool in pipeline.pools]
        with topic_prefix(pipeline.prefix):
            topics |= {spec.name: UUID(int=0) for spec in expand(load_families(), specs, models)}
    return describe_world(pipelines, topics, ())


def _grants() -> Mapping[Attacker, frozenset[Grant]]:
    found = {}
    for pipeline in PIPELINES:
        with topic_prefix(pipeline.prefix):
            users = first_users(pipeline.tenants, pipeline.pools)
            grants = wanted_grants(load_families(), [*users, *(user.other for user in users)], GROUP_PREFIX)
        for attacker in attackers():
            if attacker.actor.prefix == pipeline.prefix:
                found[attacker] = frozenset(grant for grant in grants if grant.user == attacker.user)
    return found


WORLD, GRANTS = _world(), _grants()
RESOURCES = {
    Kind.TOPIC: Resource.TOPIC,
    Kind.GROUP: Resource.GROUP,
    Kind.TRANSACTIONAL_ID: Resource.TRANSACTIONAL_ID,
}
OPERATIONS = {action: Operation[action.name] for action in Action if action.name in Operation.__members__}


@given(st.integers(min_value=0), st.sampled_from([*GRANTS]), st.sampled_from([*RESOURCES]))
def test_the_granted_rights_are_those_of_the_documents_for_any_name(seed: int, attacker: Attacker, kind: Kind) -> None:
    rng, names = Random(seed), Names(WORLD, ORACLE)
    for _ in range(20):
        name = names.draw(rng, attacker.actor, kind)
        for action, operation in OPERATIONS.items():
            allowed = is_allowed(GRANTS[attacker], attacker.user, operation, RESOURCES[kind], name)
            assert allowed is ORACLE.permits(attacker.actor, (Need(action, kind, name),)), (action, name)


def test_every_attacker_owns_something_and_not_everything() -> None:
    names = Names(WORLD, ORACLE)
    for attacker in attackers():
        owned = {*names.owned(attacker.actor, Kind.TOPIC)}
        assert 4 < len(owned) < len(WORLD.topics)
        assert names.owned(attacker.actor, Kind.GROUP)
    assert STAGING.prefix.removesuffix(".") in PLAIN.tenants
