"""The plan that brings users, ACLs and quotas of a cluster to their desired state."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.access.plan import (
    AccessPlan,
    AccessState,
    Allow,
    CreateUser,
    DeleteUser,
    SetQuotas,
    Withdraw,
    plan,
)
from fairlane_server.access.rights import ANY, CLUSTER_NAME, Grant, Operation, Resource
from fairlane_server.access.users import KafkaUser, first_users
from fairlane_server.topics.families import KafkaRole, load_families
from tests.kit.cpu_time import cpu_time
from tests.kit.topic_prefix import topic_prefix

FAMILIES = load_families()
ACME = KafkaUser(KafkaRole.TENANT, "acme")
EMPTY = AccessState((), ())


def planned(
    state: AccessState,
    *tenants: str,
    added: KafkaUser | None = None,
    retired: KafkaUser | None = None,
    delete: bool = False,
) -> AccessPlan:
    users = first_users(tenants, ["generate"])
    return plan(state, users, FAMILIES, "fairlane", {}, added=added, retired=retired, delete=delete)


def after(state: AccessState, made: AccessPlan) -> AccessState:
    """What the cluster holds when all changes were made in their order."""
    users, grants = set(state.users), set(state.grants)
    quotas = {user: dict(given) for user, given in state.quotas.items()}
    for change in made.changes:
        match change:
            case CreateUser(user):
                users.add(user)
            case DeleteUser(user):
                # Kafka keeps the ACLs of a deleted user.
                assert not any(grant.user == user for grant in grants)
                users.discard(user)
            case Allow(grant):
                assert grant.user not in users or grant.user in state.users
                grants.add(grant)
            case Withdraw(grant):
                grants.remove(grant)
            case SetQuotas(user, given):
                quotas[user] = {key: value for key, value in {**quotas.get(user, {}), **given}.items() if value}
    return AccessState(users, grants, {user: given for user, given in quotas.items() if given})


# Names that begin like others, or end like the second user of another one.
alike = ["acme", "acme2", "acme-2", "a", "2", "2-2", "tenant", "gateway"]
tenants = st.sets(st.sampled_from(alike))


@given(tenants, tenants)
def test_any_set_of_tenants_becomes_any_other_and_then_nothing_is_left_to_do(before: set[str], then: set[str]) -> None:
    state = after(EMPTY, planned(EMPTY, *before))
    changed = after(state, planned(state, *then, delete=True))
    assert planned(changed, *then) == AccessPlan((), (), (), ())
    assert changed == after(EMPTY, planned(EMPTY, *then))


def test_a_removed_tenant_keeps_its_rights_until_it_is_deleted() -> None:
    state = after(EMPTY, planned(EMPTY, "acme", "b"))
    made = planned(state, "b", "new")
    kept = after(state, made)
    assert {*state.grants} <= {*kept.grants}
    assert {change.user for change in made.removals} == {ACME.name}
    deleted = planned(kept, "b", "new", delete=True)
    assert (deleted.changes, deleted.removals) == (made.removals, ())


def test_a_removed_tenant_loses_its_rights_before_its_user() -> None:
    state = after(EMPTY, planned(EMPTY, "acme", "b"))
    changes = planned(state, "b", delete=True).changes
    assert changes
    assert all(change.user == ACME.name for change in changes)
    assert [type(change) for change in changes[-2:]] == [Withdraw, DeleteUser]


def test_a_rotation_has_two_users_with_the_same_rights_until_one_is_retired() -> None:
    state = after(EMPTY, planned(EMPTY, "acme"))
    both = after(state, planned(state, "acme", added=ACME.other))
    assert {ACME.name, ACME.other.name} <= set(both.users)

    def rights(user: KafkaUser) -> set[Grant]:
        return {replace(grant, user="") for grant in both.grants if grant.user == user.name}

    assert rights(ACME) == rights(ACME.other) != set()
    assert planned(both, "acme").changes == ()
    one = after(both, planned(both, "acme", retired=ACME).only([ACME]))
    assert ACME.name not in one.users
    assert planned(one, "acme").changes == ()
    again = after(one, planned(one, "acme", added=ACME))
    assert after(again, planned(again, "acme", retired=ACME.other)) == state


@given(st.sets(st.sampled_from(alike), min_size=1), st.data())
def test_rotations_change_the_rights_of_no_other_user(names: set[str], data: st.DataObject) -> None:
    state = after(EMPTY, planned(EMPTY, *names))
    for _ in range(data.draw(st.integers(1, 4))):
        first = KafkaUser(KafkaRole.TENANT, data.draw(st.sampled_from(sorted(names))))
        old, new = (first, first.other) if first.name in state.users else (first.other, first)
        both = after(state, planned(state, *names, added=new).only([old, new]))
        then = after(both, planned(both, *names, retired=old).only([old, new]))
        assert {*then.users} == {*state.users} - {old.name} | {new.name}
        of_pair = {old.name, new.name}
        assert {one for one in then.grants if one.user not in of_pair} == {
            one for one in state.grants if one.user not in of_pair
        }
        assert {replace(one, user="") for one in then.grants if one.user == new.name} == {
            replace(one, user="") for one in state.grants if one.user == old.name
        }
        state = then


def test_a_rotation_changes_nothing_but_its_pair() -> None:
    state = after(EMPTY, planned(EMPTY, "acme", "gone"))
    drift = replace(state, grants={grant for grant in state.grants if grant.user != "fairlane_gateway"})
    made = planned(drift, "acme", "new", added=ACME.other)
    assert {"fairlane_gateway", "fairlane_tenant_new"} <= {change.user for change in made.changes}
    only = made.only([ACME, ACME.other])
    assert {change.user for change in only.changes} == {ACME.other.name}
    assert (only.removals, only.unknown_users) == ((), ())


def test_what_was_interrupted_is_carried_on() -> None:
    """Rights come before users, and go before them: whatever is missing then is made or taken by the next run."""
    given = after(EMPTY, planned(EMPTY, "acme"))
    without_user = replace(given, users={user for user in given.users if user != ACME.name})
    assert planned(without_user, "acme").changes == (CreateUser(ACME.name),)
    both = after(given, planned(given, "acme", added=ACME.other))
    without_rights = replace(both, grants={grant for grant in both.grants if grant.user != ACME.name})
    assert planned(without_rights, "acme", retired=ACME).changes == (DeleteUser(ACME.name),)
    assert planned(without_rights, "acme", retired=ACME).unknown_users == ()
    without_file_removed = after(both, planned(both, "acme", retired=ACME))
    assert planned(without_file_removed, "acme", retired=ACME).changes == (DeleteUser(ACME.name),)


def test_a_user_that_others_may_have_created_is_not_given_rights() -> None:
    planted = planned(AccessState({ACME.name}, ()), "acme")
    assert planted.unknown_users == (ACME.name,)
    given = after(EMPTY, planned(EMPTY, "acme"))
    of_others = Grant(ACME.name, Resource.TOPIC, "theirs", is_prefix=False, operation=Operation.READ)
    planted_beside = planned(AccessState({*given.users, ACME.other.name}, {*given.grants}), "acme")
    assert planted_beside.unknown_users == (ACME.other.name,)
    assert planned(AccessState({ACME.name}, {of_others}), "acme").unknown_users == (ACME.name,)
    some = {grant for grant in given.grants if grant.resource is Resource.TOPIC}
    assert planned(AccessState(given.users, some), "acme").unknown_users == ()


def test_two_pipelines_on_one_cluster_see_nothing_of_each_other() -> None:
    prefixes = ("", "staging.", "staging", "tenant-acme.")
    state = EMPTY
    for prefix in prefixes:
        with topic_prefix(prefix):
            state = after(state, planned(state, "acme", "staging", "tenant"))
    for prefix in prefixes:
        with topic_prefix(prefix):
            assert planned(state, "acme", "staging", "tenant", delete=True) == AccessPlan((), (), (), ())


@pytest.mark.parametrize(
    ("operation", "is_reported"),
    [
        *((operation, False) for operation in (Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)),
        *((Operation.IDEMPOTENT_WRITE, False), (Operation.ALTER, True), (Operation.ALL, True)),
        *((Operation.CLUSTER_ACTION, True), (Operation.UNKNOWN, True)),
    ],
)
def test_of_the_rights_of_others_on_the_cluster_those_that_change_something_are_reported(
    operation: Operation, *, is_reported: bool
) -> None:
    grant = Grant("intruder", Resource.CLUSTER, CLUSTER_NAME, is_prefix=False, operation=operation)
    state = after(EMPTY, planned(EMPTY, "acme"))
    assert planned(replace(state, grants={*state.grants, grant}), "acme").foreign == ((grant,) if is_reported else ())


@pytest.mark.parametrize(
    ("resource", "operation"), [(Resource.TOPIC, Operation.UNKNOWN), (Resource.UNKNOWN, Operation.DESCRIBE)]
)
def test_a_right_that_this_program_does_not_know_is_reported_also_of_an_own_user(
    resource: Resource, operation: Operation
) -> None:
    own = Grant(ACME.name, resource, "anything", is_prefix=False, operation=operation)
    state = after(EMPTY, planned(EMPTY, "acme"))
    found = planned(replace(state, grants={*state.grants, own}), "acme")
    assert (found.changes, found.foreign) == ((), (own,))


def test_thousands_of_tenants_beside_thousands_of_rights_of_others_are_planned_in_seconds() -> None:
    tenants = [f"tenant-{number}" for number in range(2_000)]
    state = after(EMPTY, planned(EMPTY, *tenants))
    foreign = {
        Grant("other", Resource.TOPIC, f"elsewhere.{number}", is_prefix=number % 2 == 0, operation=Operation.READ)
        for number in range(10_000)
    }
    met = Grant("other", Resource.TOPIC, "replies.tenant-1", is_prefix=True, operation=Operation.READ)
    with cpu_time() as time:
        found = planned(replace(state, grants={*state.grants, *foreign, met}), *tenants)
    assert time.spent_s < 5
    assert found == AccessPlan((), (), (met,), ())


def test_rights_of_others_are_reported_and_left_alone() -> None:
    state = after(EMPTY, planned(EMPTY, "acme"))
    wide = Grant("intruder", Resource.TOPIC, "req", is_prefix=True, operation=Operation.READ)
    narrow = Grant("intruder", Resource.TOPIC, "replies.acme.search", is_prefix=False, operation=Operation.READ)
    everything = Grant("intruder", Resource.GROUP, ANY, is_prefix=False, operation=Operation.ALL)
    elsewhere = Grant("intruder", Resource.TOPIC, "orders", is_prefix=False, operation=Operation.WRITE)
    found = planned(replace(state, grants={*state.grants, wide, narrow, everything, elsewhere}), "acme")
    assert found.changes == ()
    assert set(found.foreign) == {wide, narrow, everything}


def test_a_right_too_many_of_an_own_user_is_withdrawn() -> None:
    state = after(EMPTY, planned(EMPTY, "acme", "b"))
    grant = Grant(ACME.name, Resource.TOPIC, "replies.b", is_prefix=False, operation=Operation.READ)
    bound = replace(grant, name="replies.acme", host="10.0.0.1")
    found = planned(replace(state, grants={*state.grants, grant, bound}), "acme", "b")
    assert set(found.changes) == {Withdraw(grant), Withdraw(bound)}


def test_quotas_of_tenants_are_set_and_those_of_nobody_removed() -> None:
    state = after(EMPTY, planned(EMPTY, "acme"))
    state = replace(
        state, quotas={ACME.name: {"producer_byte_rate": 1.0, "request_percentage": 5.0}, "other": {"x": 1.0}}
    )
    users = first_users(["acme"], ["generate"])
    wanted = {"acme": {"producer_byte_rate": 2.0, "consumer_byte_rate": 3.0}}
    changes = plan(state, users, FAMILIES, "fairlane", wanted).changes
    assert changes == (
        SetQuotas(ACME.name, {"producer_byte_rate": 2.0, "consumer_byte_rate": 3.0, "request_percentage": None}),
    )
    gone = plan(state, first_users([], ["generate"]), FAMILIES, "fairlane", wanted, delete=True).changes
    assert SetQuotas(ACME.name, {"producer_byte_rate": None, "request_percentage": None}) in gone
    assert changes[0].detail == "producer_byte_rate=2, consumer_byte_rate=3, request_percentage=none"
