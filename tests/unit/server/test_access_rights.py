"""Rights on Kafka: who may read and write which topic, group and transactional id."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fairlane import names
from fairlane.names import TENANT_PATTERN
from fairlane.outcomes import Priority
from fairlane.records import ModelVersion, TenantSpec
from fairlane.settings import Settings
from fairlane_server.access.rights import Grant, Operation, Resource, is_allowed, wanted_grants
from fairlane_server.access.users import KafkaUser, first_users
from fairlane_server.topics.families import KafkaRole, TopicFamily, expand, load_families, pools_of
from tests.kit.topic_prefix import topic_prefix

FAMILIES = load_families()
PREFIX = "fairlane"
ROLES = [role for role in KafkaRole if role not in {KafkaRole.TENANT, KafkaRole.CONSUMER}]

# Words that names of users, groups and topics are made of, and that Kafka uses itself.
RESERVED = (
    *KafkaRole,
    *sorted({part for family in FAMILIES for part in family.name.split(".") if "{" not in part}),
    *("2", "acme-2", "fairlane", "kafka-cluster", "user", "all", "any", "high", "job", "pool", "top"),
)
# Short names from few characters, so that names that begin as others do are the rule.
tenant_names = st.text("ab-2", min_size=1, max_size=4).filter(
    lambda name: TENANT_PATTERN.fullmatch(name) is not None
) | st.sampled_from(RESERVED)


def grants_of(users: tuple[KafkaUser, ...]) -> frozenset[Grant]:
    return wanted_grants(FAMILIES, users, PREFIX)


def model(pool: str) -> ModelVersion:
    return ModelVersion(f"model-{pool}", "1", pool, "simulated", ("generate",), "-", 100, 100)


@given(st.sets(tenant_names, min_size=1, max_size=5), st.sets(tenant_names, min_size=1, max_size=3), st.data())
def test_every_role_has_the_rights_of_topics_yaml_and_no_others(
    tenants: set[str], pools: set[str], data: st.DataObject
) -> None:
    services = st.lists(st.sampled_from(sorted(tenants)), max_size=2, unique=True).map(tuple)
    specs = [TenantSpec(tenant, services=data.draw(services)) for tenant in sorted(tenants)]
    models = [model(pool) for pool in sorted(pools)]
    users = first_users([spec.tenant for spec in specs], pools_of(specs, models))
    grants = grants_of(users)
    for family in FAMILIES:
        for spec in specs:
            for topic in expand([family], [spec], models):
                for user in users:
                    # Of a family without tenants, this pass does not belong to one.
                    owner = spec.tenant if "tenant" in family.placeholders else ""
                    check_topic(grants, user, family, topic.name, owner)


def check_topic(grants: frozenset[Grant], user: KafkaUser, family: TopicFamily, topic: str, tenant: str) -> None:
    if user.role is KafkaRole.TENANT:
        concerns = user.owner == tenant
    elif user.role is KafkaRole.CONSUMER and "pool" in family.placeholders:
        concerns = topic in {
            names.returned_topic(user.owner),
            *(names.priority_topic(user.owner, name) for name in Priority),
        }
    else:
        concerns = True
    for operation, roles in ((Operation.READ, family.readers), (Operation.WRITE, family.writers)):
        expected = concerns and user.role in roles
        assert is_allowed(grants, user.name, operation, Resource.TOPIC, topic) is expected, (user, operation, topic)


GROUPS: dict[str, tuple[Callable[[str, str], str], KafkaRole]] = {
    "dispatcher": (lambda _tenant, _pool: names.dispatcher_group(PREFIX), KafkaRole.DISPATCHER),
    "gateway": (lambda _tenant, _pool: names.gateway_group(PREFIX), KafkaRole.GATEWAY),
    "recorder": (lambda _tenant, _pool: names.recorder_group(PREFIX), KafkaRole.RECORDER),
    "job": (lambda _tenant, _pool: names.job_group(PREFIX, "j1"), KafkaRole.BACKFILL),
    "log replay": (lambda _tenant, _pool: names.log_replay_group(PREFIX, "r1"), KafkaRole.ADMIN),
    "pool": (lambda _tenant, pool: names.pool_group(PREFIX, pool), KafkaRole.CONSUMER),
    "tenant": (lambda tenant, _pool: names.tenant_group(tenant, "search"), KafkaRole.TENANT),
}


@pytest.mark.parametrize(("make", "role"), GROUPS.values(), ids=GROUPS)
@given(tenants=st.sets(tenant_names, min_size=2, max_size=4), pools=st.sets(tenant_names, min_size=2, max_size=4))
def test_a_group_is_joined_by_its_own_members_alone(
    make: Callable[[str, str], str], role: KafkaRole, tenants: set[str], pools: set[str]
) -> None:
    users = first_users(sorted(tenants), sorted(pools))
    grants = grants_of(users)
    for tenant in tenants:
        for pool in pools:
            group = make(tenant, pool)
            owner = {KafkaRole.TENANT: tenant, KafkaRole.CONSUMER: pool}.get(role, "")
            able = [user for user in users if is_allowed(grants, user.name, Operation.READ, Resource.GROUP, group)]
            assert able == [KafkaUser(role, owner)]


IDS: dict[str, tuple[Callable[[str, str], str], tuple[KafkaRole, ...]]] = {
    "dispatcher": (lambda _tenant, _pool: names.dispatcher_transactional_ids(PREFIX, "1")[1], (KafkaRole.DISPATCHER,)),
    "consumer": (lambda _tenant, pool: names.consumer_transactional_ids(PREFIX, pool, "1")[0], (KafkaRole.CONSUMER,)),
    "job": (lambda _tenant, _pool: names.job_transactional_id(PREFIX, "j1"), (KafkaRole.BACKFILL,)),
    "log replay": (lambda _tenant, _pool: names.log_replay_transactional_id(PREFIX, "r1"), (KafkaRole.ADMIN,)),
    # One replay for a tenant at a time, whoever begins it.
    "replay": (lambda tenant, _pool: names.dead_letter_replay_id(tenant), (KafkaRole.REPLAYER, KafkaRole.ADMIN)),
    "tenant": (lambda tenant, _pool: names.tenant_group(tenant, "writer"), ()),
}


@pytest.mark.parametrize(("make", "roles"), IDS.values(), ids=IDS)
@given(tenants=st.sets(tenant_names, min_size=2, max_size=4), pools=st.sets(tenant_names, min_size=2, max_size=4))
def test_nobody_can_fence_another_by_its_transactional_id(
    make: Callable[[str, str], str], roles: tuple[KafkaRole, ...], tenants: set[str], pools: set[str]
) -> None:
    users = first_users(sorted(tenants), sorted(pools))
    grants = grants_of(users)
    for tenant in tenants:
        for pool in pools:
            one = make(tenant, pool)
            able = [
                user for user in users if is_allowed(grants, user.name, Operation.WRITE, Resource.TRANSACTIONAL_ID, one)
            ]
            assert able == [KafkaUser(role, pool if role is KafkaRole.CONSUMER else "") for role in roles]


# Tenants, prefixes and applications that are called alike are the rule here.
alike = st.sampled_from(["fairlane", "staging", "tenant", "a"])
topic_prefixes = st.builds("".join, st.lists(alike | st.sampled_from(["tenant-", ".", "-"]), max_size=3))


@given(
    prefixes=st.tuples(topic_prefixes, topic_prefixes),
    group_prefixes=st.tuples(alike, alike),
    tenants=st.sets(alike, min_size=1),
)
@example(prefixes=("fairlane.", ""), group_prefixes=("fairlane", "fairlane"), tenants={"fairlane"})
def test_no_tenant_owns_a_group_or_an_id_of_a_service_or_of_another_pipeline(
    prefixes: tuple[str, str], group_prefixes: tuple[str, str], tenants: set[str]
) -> None:
    def group_grants(of: int) -> set[tuple[KafkaUser, Grant]]:
        with topic_prefix(prefixes[of]):
            users = {user.name: user for user in first_users(sorted(tenants), sorted(tenants))}
            grants = wanted_grants(FAMILIES, users.values(), group_prefixes[of])
        return {(users[one.user], one) for one in grants if one.resource in {Resource.GROUP, Resource.TRANSACTIONAL_ID}}

    for user, grant in group_grants(0):
        if user.role is KafkaRole.TENANT:
            for other_user, other in group_grants(1):
                meet = other.name.startswith(grant.name) or (other.is_prefix and grant.name.startswith(other.name))
                assert not meet or (other_user == user and prefixes[0] == prefixes[1]), (grant, other)


def test_group_prefix_has_no_underscore() -> None:
    """With one, a service's group could be a tenant's."""
    with pytest.raises(ValueError, match="group_prefix"):
        Settings(group_prefix="tenant_acme")


def test_a_prefix_that_would_open_another_family_is_refused() -> None:
    wide = replace(FAMILIES[0], family="wide", name="control.{tenant}", readers=("backfill",), writers=("tenant",))
    with pytest.raises(ValueError, match=r"topic family 'wide': the rights of backfill on control\.\* would hold"):
        wanted_grants([*FAMILIES, wide], first_users(["acme"], ["generate"]), PREFIX)


users = st.one_of(
    st.builds(KafkaUser, st.sampled_from(ROLES), st.just(""), st.booleans()),
    st.builds(
        KafkaUser, st.sampled_from([KafkaRole.TENANT, KafkaRole.CONSUMER]), tenant_names | st.just("2"), st.booleans()
    ),
)


@given(users)
def test_a_users_name_is_read_back(user: KafkaUser) -> None:
    assert KafkaUser.parse(user.name) == user
    assert user.other.other == user != user.other


@given(users, users)
def test_two_users_have_two_names(one: KafkaUser, other: KafkaUser) -> None:
    assert (one.name == other.name) is (one == other)


@pytest.mark.parametrize(
    "name",
    [
        *("", "_root", "_tenant", "_tenant_", "_tenant_Acme", "_gateway_3", "_gateway_acme", "_tenant_acme_3"),
        *("_consumer_a_2_2", "_tenant_acme\n", "_tenant_\u00e4", "-gateway"),
    ],
)
def test_other_names_are_no_users_of_this_pipeline(name: str) -> None:
    assert KafkaUser.parse(f"fairlane{name}") is None


@pytest.mark.parametrize("name", ["operator", "gateway", "tenant_acme", "User:fairlane_gateway", "*"])
def test_generic_names_are_left_to_others(name: str) -> None:
    assert KafkaUser.parse(name) is None


def test_users_of_pipelines_with_different_prefixes_are_different() -> None:
    user = KafkaUser(KafkaRole.TENANT, "acme")
    with topic_prefix("staging."):
        assert user.name == "staging.fairlane_tenant_acme"
        assert KafkaUser.parse(user.name) == user
        assert KafkaUser.parse("fairlane_tenant_acme") is None
    assert KafkaUser.parse("staging.fairlane_tenant_acme") is None


@pytest.mark.parametrize(("role", "owner"), [(KafkaRole.TENANT, ""), (KafkaRole.GATEWAY, "acme")])
def test_only_tenants_and_pools_own_users(role: KafkaRole, owner: str) -> None:
    with pytest.raises(ValueError, match="only users of tenants and pools have an owner"):
        KafkaUser(role, owner)


def test_the_gateway_divides_batches_among_partitions_that_it_cannot_read() -> None:
    gateway = KafkaUser(KafkaRole.GATEWAY)
    allowed = {
        operation
        for operation in (Operation.DESCRIBE, Operation.READ, Operation.WRITE)
        if is_allowed(grants_of((gateway,)), gateway.name, operation, Resource.TOPIC, names.JOBS_REPLIES)
    }
    assert allowed == {Operation.DESCRIBE}
