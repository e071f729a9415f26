"""Which topics a dispatcher wants and how much of each it reads; worked out when something changed, not before."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from fairlane.names import EVALUATION_WORK, backfill_topic, requests_topic, returned_topic
from fairlane.ownership import PartitionId
from fairlane.records import TenantSpec
from fairlane_server.models.catalog import ModelCatalog
from stream_processors.dispatcher.reading.request_topics import RequestTopics


@dataclass
class Cluster:
    """As much of an admin client and of a group as is asked here: topics, how many partitions they have, and those that
    the group committed in."""

    partitions: dict[str, int] = field(default_factory=dict)
    committed_in: dict[str, int] = field(default_factory=dict)
    """One partition of each, by topic."""
    asked: list[str] = field(default_factory=list)
    is_away: bool = False

    def list_topics(self, timeout: float) -> Any:
        assert timeout > 0
        return SimpleNamespace(
            topics={
                topic: SimpleNamespace(
                    error=None, partitions={number: SimpleNamespace(leader=1) for number in range(count)}
                )
                for topic, count in self.partitions.items()
            }
        )

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        assert timeout > 0
        if self.is_away:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        self.asked += [one.topic for one in partitions]
        return [
            TopicPartition(one.topic, one.partition, 7 if self.committed_in.get(one.topic) == one.partition else -1001)
            for one in partitions
        ]


def topics_of(cluster: Cluster) -> RequestTopics:
    return RequestTopics(cast(AdminClient, cluster), cluster)


def specs(*tenants: str, **fields: Any) -> dict[str, TenantSpec]:
    return {tenant: TenantSpec(tenant, **fields) for tenant in tenants}


def test_wanted_topics_are_worked_out_when_tenants_or_models_changed() -> None:
    topics = topics_of(Cluster())
    tenants = specs("acme", pool="own")
    wanted = topics.wanted(tenants, ModelCatalog())
    assert wanted == {requests_topic("acme"), backfill_topic("acme"), returned_topic("own"), EVALUATION_WORK}
    models = ModelCatalog()
    again = topics.wanted(tenants, models)
    assert again == wanted
    assert topics.wanted(tenants, models) is again
    assert topics.wanted(specs("globex"), models) == {
        *(requests_topic("globex"), backfill_topic("globex"), EVALUATION_WORK)
    }


def test_parts_are_worked_out_when_tenants_or_the_assignment_or_the_topics_changed() -> None:
    cluster = Cluster({requests_topic("acme"): 4, requests_topic("globex"): 1})
    topics = topics_of(cluster)
    tenants = specs("acme", "globex")
    owned = tuple(PartitionId(requests_topic("acme"), number) for number in range(3))
    assert topics.parts(tenants, owned) == {}, "nobody asked the cluster yet"

    wanted = topics.wanted(tenants, ModelCatalog())
    asyncio.run(topics.existing(wanted))
    parts = topics.parts(tenants, owned)
    assert parts == {"acme": 0.75}
    asyncio.run(topics.existing(wanted))
    assert topics.parts(tenants, owned) is parts
    assert topics.parts(tenants, owned[:1]) == {"acme": 0.25}
    assert topics.parts(tenants, ()) == {"acme": 0.25}, "never nothing: its requests may be on their way"
    cluster.partitions[requests_topic("acme")] = 8
    asyncio.run(topics.existing(wanted))
    assert topics.parts(tenants, ()) == {"acme": 0.125}
    assert topics.parts(specs("globex"), ()) == {}


def test_it_is_time_to_ask_often_while_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("stream_processors.dispatcher.reading.request_topics.monotonic", lambda: now_s)
    topics = topics_of(Cluster())
    asyncio.run(topics.existing({"a"}))
    now_s = 100.9
    assert not topics.should_look({"a"}, set())
    now_s = 101.0
    assert topics.should_look({"a"}, {"b"})
    assert not topics.should_look({"a"}, {"a", "b"})
    now_s = 130.0
    assert topics.should_look({"a"}, {"a"})


def test_what_the_group_read_before_is_read_on_though_its_tenant_or_pool_is_gone() -> None:
    gone = {requests_topic("gone"): 2, backfill_topic("gone"): 1, returned_topic("left"): 1}
    no_names = ("requests.Not A Name", "requests.a.b", "requests.", "requests", "priority.left.high", "replies.gone")
    never_ours = dict.fromkeys((requests_topic("not-yet"), *no_names), 1)
    cluster = Cluster({requests_topic("acme"): 1, **gone, **never_ours})
    cluster.committed_in = {requests_topic("gone"): 1, backfill_topic("gone"): 0, returned_topic("left"): 0}
    cluster.committed_in |= dict.fromkeys(no_names, 0)
    topics = topics_of(cluster)
    wanted = topics.wanted(specs("acme"), ModelCatalog())
    assert asyncio.run(topics.existing(wanted)) == {requests_topic("acme"), *gone}
    assert set(cluster.asked) == {requests_topic("not-yet"), *gone}

    cluster.asked.clear()
    assert asyncio.run(topics.existing(wanted)) == {requests_topic("acme"), *gone}
    assert cluster.asked == [requests_topic("not-yet")], "of the others it is known"
    del cluster.partitions[requests_topic("gone")]
    assert asyncio.run(topics.existing(wanted)) == {requests_topic("acme"), *gone} - {requests_topic("gone")}


def test_without_an_answer_of_the_group_there_is_none() -> None:
    cluster = Cluster({requests_topic("acme"): 1, requests_topic("gone"): 1}, is_away=True)
    topics = topics_of(cluster)
    assert asyncio.run(topics.existing(topics.wanted(specs("acme"), ModelCatalog()))) == frozenset()
