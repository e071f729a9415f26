"""Tries on topics: their records, their descriptions, and what makes, changes and deletes them."""

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

from aiokafka.record.default_records import DefaultRecordBatchBuilder

from tests.hostile_tenant.messages import Values
from tests.hostile_tenant.operation import (
    Body,
    Needs,
    Operation,
    Target,
    each,
    nothing,
    of_cluster,
    of_id,
    of_topic,
    single,
    together,
)
from tests.hostile_tenant.oracle import Action, Kind, Need
from tests.hostile_tenant.world import World

_ALL_REPLICAS, _TIMEOUT_MS = -1, 10_000
_NO_PRODUCER = (-1, -1, -1)
_LIKELY_PRODUCER_IDS = 32
"""Kafka counts them up, so that those of others are guessed easily."""
_EPOCHS, _SEQUENCES = (0, 1, 32_767), (0, 1, 50)
NO_ID = UUID(int=0)
_BY_NAME, _BY_ID = (0, 12), (13, 32_767)
_TOPIC = 2
_INVALID = frozenset({17})
_FORBIDDEN = frozenset({42})
"""Of the name of the cluster's own log."""
_MISSING = frozenset({3})


def forged_producer(number: int) -> tuple[int, int, int]:
    """A producer id that somebody may have, an epoch and a sequence number."""
    rest, producer_id = divmod(number, _LIKELY_PRODUCER_IDS)
    rest, epoch = divmod(rest, len(_EPOCHS))
    return producer_id, _EPOCHS[epoch], _SEQUENCES[rest % len(_SEQUENCES)]


def records(producer: tuple[int, int, int] = _NO_PRODUCER, *, is_transactional: bool = False) -> bytes:
    """A batch of one record, of this producer: its id, epoch and sequence number."""
    producer_id, epoch, sequence = producer
    builder = DefaultRecordBatchBuilder(2, 0, int(is_transactional), producer_id, epoch, sequence, 1_000)
    builder.append(0, timestamp=None, key=b"hostile", value=b"forged", headers=[])
    return bytes(builder.build())


def _produced(target: Target, world: World, batch: bytes) -> Values:
    return {
        "Name": target.topic,
        "TopicId": world.topics.get(target.topic, NO_ID),
        "PartitionData": [{"Index": 0, "Records": batch}],
    }


_PRODUCE = {"Acks": _ALL_REPLICAS, "TimeoutMs": _TIMEOUT_MS}
_plain = each("TopicData", lambda target, world: _produced(target, world, records()), **_PRODUCE)
_idempotent = each(
    "TopicData",
    lambda target, world: _produced(target, world, records(forged_producer(target.number))),
    **_PRODUCE,
)


@single
def _transactional(target: Target, world: World) -> Values:
    batch = records(forged_producer(target.number), is_transactional=True)
    return {
        "TransactionalId": target.transactional_id,
        "TopicData": [_produced(target, world, batch)],
        **_PRODUCE,
    }


def _fetched(target: Target, world: World) -> Values:
    return {
        "Topic": target.topic,
        "TopicId": world.topics.get(target.topic, NO_ID),
        "Partitions": [{"Partition": 0, "FetchOffset": 0, "PartitionMaxBytes": 1_000}],
    }


_fetch = each("Topics", _fetched, MaxBytes=100_000)
_fetch_as_broker = each(
    "Topics", _fetched, ReplicaId=1, ReplicaState={"ReplicaId": 1, "ReplicaEpoch": 0}, MaxBytes=100_000
)
_list_offsets = each(
    "Topics",
    lambda target, _: {
        "Name": target.topic,
        "Partitions": [{"PartitionIndex": 0, "Timestamp": -1 - target.number % 2}],
    },
    ReplicaId=-1,
    TimeoutMs=_TIMEOUT_MS,
)
_epochs = each("Topics", lambda target, _: {"Topic": target.topic, "Partitions": [{"Partition": 0, "LeaderEpoch": 0}]})


def _metadata(*, creates: bool) -> Body:
    return each(
        "Topics",
        lambda target, _: {"Name": target.topic},
        AllowAutoTopicCreation=creates,
        IncludeTopicAuthorizedOperations=True,
    )


def _to_create(target: Target, world: World) -> tuple[Need, ...]:
    """Of metadata that may create what does not exist."""
    needs = of_topic(Action.DESCRIBE)(target, world)
    return needs if target.topic in world.topics else (*needs, Need(Action.CREATE, Kind.TOPIC, target.topic))


def _by_id(**others: Any) -> Body:
    return each("Topics", lambda target, world: {"Name": None, "TopicId": world.topics[target.topic]}, **others)


def _partition_of(target: Target, _world: World) -> Values:
    return {"Name": target.topic, "PartitionIndexes": [0]}


def _told_topics(answer: Mapping[str, Any], _world: World) -> Iterator[Need]:
    for topic in answer["Topics"]:
        yield Need(Action.DESCRIBE, Kind.TOPIC, topic["Name"])


def _new_topic(target: Target, _world: World) -> Values:
    return {"Name": target.topic, "NumPartitions": 1, "ReplicationFactor": 1}


def _creation(*, only_tries: bool) -> Body:
    return each("Topics", _new_topic, timeoutMs=_TIMEOUT_MS, validateOnly=only_tries)


_names_to_delete: Body = lambda targets, _: {  # noqa: E731 - one of many bodies
    "TopicNames": [target.topic for target in targets],
    "TimeoutMs": _TIMEOUT_MS,
}
_delete_records = each(
    "Topics",
    lambda target, _: {"Name": target.topic, "Partitions": [{"PartitionIndex": 0, "Offset": -1}]},
    TimeoutMs=_TIMEOUT_MS,
)
_more_partitions = each(
    "Topics", lambda target, _: {"Name": target.topic, "Count": 50, "Assignments": None}, TimeoutMs=_TIMEOUT_MS
)
_SETTINGS = ({"Name": "retention.ms", "Value": "1"}, {"Name": "cleanup.policy", "Value": "compact"})


def configured(kind: int, name: str, number: int) -> Values:
    """A resource whose settings are to change."""
    return {"ResourceType": kind, "ResourceName": name, "Configs": [_SETTINGS[number % 2]]}


def _on(name: str, api: str, needs: Needs, body: Body, **others: Any) -> Operation:
    """On any topics, several in a request."""
    return Operation(name, api, ("topic",), needs, body, labels="topic", **others)


def _on_existing(name: str, api: str, needs: Needs, body: Body, **others: Any) -> Operation:
    return Operation(name, api, ("existing",), needs, body, labels="topic", **others)


TOPIC_OPERATIONS = (
    _on("Produce", "Produce", of_topic(Action.WRITE), _plain, versions=_BY_NAME, weight=8),
    _on("Produce, forged producer", "Produce", of_topic(Action.WRITE), _idempotent, versions=_BY_NAME, weight=6),
    _on_existing("Produce by id", "Produce", of_topic(Action.WRITE), _plain, versions=_BY_ID, weight=3),
    Operation(
        *("Produce in a transaction", "Produce", ("topic", "transactional_id")),
        *(together(of_id(Action.WRITE), of_topic(Action.WRITE)), _transactional, _BY_NAME),
        weight=4,
    ),
    _on("Fetch", "Fetch", of_topic(Action.READ), _fetch, versions=_BY_NAME, weight=8),
    _on_existing("Fetch by id", "Fetch", of_topic(Action.READ), _fetch, versions=_BY_ID, weight=3),
    _on_existing("Fetch as a broker", "Fetch", of_cluster(Action.CLUSTER_ACTION), _fetch_as_broker),
    _on("ListOffsets", "ListOffsets", of_topic(Action.DESCRIBE), _list_offsets, weight=4),
    _on("OffsetForLeaderEpoch", "OffsetForLeaderEpoch", of_topic(Action.DESCRIBE), _epochs),
    _on("Metadata", "Metadata", of_topic(Action.DESCRIBE), _metadata(creates=False), versions=(4, 32_767), weight=4),
    _on("Metadata, creating", "Metadata", _to_create, _metadata(creates=True), versions=(4, 32_767), weight=4),
    _on_existing("Metadata by id", "Metadata", of_topic(Action.DESCRIBE), _by_id(), versions=(12, 32_767)),
    Operation(
        *("Metadata of everything", "Metadata", (), nothing, single(lambda _target, _: {"Topics": None}), (1, 32_767)),
        weight=1,
        tells=_told_topics,
        tells_all=True,
    ),
    _on(
        *("DescribeTopicPartitions", "DescribeTopicPartitions", of_topic(Action.DESCRIBE)),
        each("Topics", lambda target, _: {"Name": target.topic}),
    ),
    Operation(
        *("DescribeTopicPartitions of everything", "DescribeTopicPartitions", (), nothing, single(lambda _t, _w: {})),
        weight=1,
        tells=_told_topics,
        tells_all=True,
    ),
    _on(
        *("DescribeProducers", "DescribeProducers", of_topic(Action.READ), each("Topics", _partition_of)),
        before=_INVALID,
    ),
    _on(
        *("CreateTopics", "CreateTopics", of_topic(Action.CREATE), _creation(only_tries=False)),
        weight=4,
        before=_FORBIDDEN,
    ),
    _on(
        *("CreateTopics, validated", "CreateTopics", of_topic(Action.CREATE), _creation(only_tries=True)),
        before=_FORBIDDEN,
    ),
    _on(
        *("DeleteTopics", "DeleteTopics", of_topic(Action.DELETE), _names_to_delete),
        versions=(0, 5),
        weight=4,
        before=_MISSING,
    ),
    _on_existing(
        *("DeleteTopics by id", "DeleteTopics", of_topic(Action.DELETE), _by_id(TimeoutMs=_TIMEOUT_MS)),
        versions=(6, 32_767),
    ),
    _on("DeleteRecords", "DeleteRecords", of_topic(Action.DELETE), _delete_records, weight=4),
    _on("CreatePartitions", "CreatePartitions", of_topic(Action.ALTER), _more_partitions),
    _on(
        *("DescribeConfigs", "DescribeConfigs", of_topic(Action.DESCRIBE_CONFIGS)),
        each(
            "Resources",
            lambda target, _: {"ResourceType": _TOPIC, "ResourceName": target.topic, "ConfigurationKeys": None},
        ),
    ),
    _on(
        *("AlterConfigs", "AlterConfigs", of_topic(Action.ALTER_CONFIGS)),
        each("Resources", lambda target, _: configured(_TOPIC, target.topic, target.number)),
    ),
    _on(
        *("IncrementalAlterConfigs", "IncrementalAlterConfigs", of_topic(Action.ALTER_CONFIGS)),
        each("Resources", lambda target, _: configured(_TOPIC, target.topic, target.number)),
    ),
)
