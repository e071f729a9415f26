"""Who reads what: tenants whole on one member, spread evenly, the same whoever computes it."""

import random
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace

from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata
from hypothesis import given
from hypothesis import strategies as st

from fairlane.names import backfill_topic, is_returned, requests_topic, returned_topic
from stream_processors.dispatcher.reading.assignor import Assignment, TenantAssignor, assign_co_partitions

tenants = st.lists(st.integers(0, 200).map("tenant-{}".format), unique=True, max_size=40)
member_names = st.lists(st.integers(0, 99).map("member-{}".format), unique=True, min_size=1, max_size=6)
pools = st.lists(st.sampled_from(["shared", "own", "big"]), unique=True)
some_partitions = st.integers(1, 3)


def topics_of(names: Iterable[str], pool_names: Iterable[str] = ()) -> list[str]:
    of_tenants = [topic for name in names for topic in (requests_topic(name), backfill_topic(name))]
    return of_tenants + [returned_topic(pool) for pool in pool_names]


def owners(assigned: Assignment) -> dict[tuple[str, int], str]:
    """The member of each partition; AssertionError when there are two."""
    found: dict[tuple[str, int], str] = {}
    for member, topics in assigned.items():
        for topic, partitions in topics.items():
            for partition in partitions:
                assert (topic, partition) not in found
                found[topic, partition] = member
    return found


@given(tenants, pools, member_names, some_partitions)
def test_everything_of_a_tenant_is_together_and_the_tenants_are_spread(
    names: list[str], pool_names: list[str], members: list[str], count: int
) -> None:
    topics = topics_of(names, pool_names)
    assigned = assign_co_partitions({topic: range(count) for topic in topics}, dict.fromkeys(members, topics))
    found = owners(assigned)
    assert found.keys() == {(topic, partition) for topic in topics for partition in range(count)}
    for name in names:
        for partition in range(count):
            assert found[requests_topic(name), partition] == found[backfill_topic(name), partition]
    of_tenants = Counter(found[requests_topic(name), partition] for name in names for partition in range(count))
    returned = Counter(member for (topic, _), member in found.items() if is_returned(topic))
    for held in (of_tenants, of_tenants + returned):
        assert max(held[member] for member in members) - min(held[member] for member in members) <= 1


@given(tenants, pools, member_names, st.randoms(use_true_random=False))
def test_it_does_not_depend_on_any_order(
    names: list[str], pool_names: list[str], members: list[str], rng: random.Random
) -> None:
    topics = topics_of(names, pool_names)
    shuffled_topics, shuffled_members = rng.sample(topics, len(topics)), rng.sample(members, len(members))
    one = assign_co_partitions(dict.fromkeys(topics, range(1)), dict.fromkeys(members, topics))
    other = assign_co_partitions(
        dict.fromkeys(shuffled_topics, range(1)), dict.fromkeys(shuffled_members, shuffled_topics)
    )
    assert owners(one) == owners(other)


@given(tenants, member_names, st.data())
def test_nobody_gets_what_it_did_not_ask_for_and_what_anybody_asked_for_is_read(
    names: list[str], members: list[str], data: st.DataObject
) -> None:
    topics = topics_of(names)
    wanted = {member: [topic for topic in topics if data.draw(st.booleans())] for member in members}
    found = owners(assign_co_partitions(dict.fromkeys(topics, range(1)), wanted))
    assert found.keys() == {(topic, 0) for topics in wanted.values() for topic in topics}
    assert all(topic in wanted[member] for (topic, _), member in found.items())


def test_a_new_tenant_goes_whole_to_the_member_that_knows_all_of_it() -> None:
    online, offline = topics_of(["new"])
    assigned = assign_co_partitions({online: [0], offline: [0]}, {"a": [online], "b": [online, offline]})
    assert assigned == {"a": {}, "b": {online: [0], offline: [0]}}


def test_what_nobody_knows_whole_is_read_in_parts() -> None:
    online, offline = topics_of(["new"])
    assigned = assign_co_partitions({online: [0], offline: [0]}, {"a": [online], "b": [offline]})
    assert assigned == {"a": {online: [0]}, "b": {offline: [0]}}


def test_a_topic_of_more_partitions_stands_alone_beyond_the_others() -> None:
    online, offline = topics_of(["acme"])
    found = owners(assign_co_partitions({online: [0, 1, 2], offline: [0]}, dict.fromkeys("ab", (online, offline))))
    assert found[online, 0] == found[offline, 0]
    assert found[online, 0] != found[online, 1]


def test_the_leader_of_a_group_assigns_so() -> None:
    topics = topics_of(["acme", "globex"])
    partitions = {topic: {0} for topic in topics}
    cluster = SimpleNamespace(partitions_for_topic=partitions.get)
    members = dict.fromkeys(("a", "b"), ConsumerProtocolMemberMetadata(0, [*topics, "requests.unseen"], b""))
    assigned = TenantAssignor.assign(cluster, members)
    assert {member: assignment.assignment for member, assignment in assigned.items()} == {
        "a": [(backfill_topic("acme"), [0]), (requests_topic("acme"), [0])],
        "b": [(backfill_topic("globex"), [0]), (requests_topic("globex"), [0])],
    }
    assert TenantAssignor.name != "roundrobin", "members with the one and members with the other must not be mixed up"
