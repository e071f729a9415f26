"""Tries on consumer groups, share groups, transactional ids and producers."""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.hostile_tenant.messages import Values
from tests.hostile_tenant.operation import (
    Body,
    Operation,
    Target,
    nothing,
    of_cluster,
    of_group,
    of_id,
    of_topic,
    single,
    together,
)
from tests.hostile_tenant.oracle import Action, Kind, Need
from tests.hostile_tenant.topic_operations import NO_ID, forged_producer
from tests.hostile_tenant.world import World

_GROUP_KEY, _ID_KEY, _SHARE_KEY = 0, 1, 2
_SESSION_MS = 6_000
_NO_MEMBER = ""
_NO_SHARE_SESSION = frozenset({122, 123})
_NOT_TO_ALTER = frozenset({68, 69})
"""No such group, or one with members."""


def forged_offset(target: Target) -> int:
    """What an offset commit of this target says; no reader commits so much."""
    return 1_000_000 + target.number % 1_000


def _described(field: str) -> Body:
    return lambda targets, _: {field: [target.group for target in targets]}


def _description(api: str) -> Operation:
    return Operation(
        *(api, api, ("group",), of_group(Action.DESCRIBE)),
        _described("Groups" if api == "DescribeGroups" else "GroupIds"),
        labels="group",
    )


@single
def _commit(target: Target, world: World) -> Values:
    return {"GroupId": target.group, "Topics": [_to_commit(target, world)]}


def _to_commit(target: Target, world: World) -> Values:
    return {
        "Name": target.topic,
        "TopicId": world.topics.get(target.topic, NO_ID),
        "Partitions": [{"PartitionIndex": 0, "CommittedOffset": forged_offset(target), "CommittedMetadata": "forged"}],
    }


@single
def _fetch_offsets(target: Target, world: World) -> Values:
    topic = {"Name": target.topic, "TopicId": world.topics.get(target.topic, NO_ID), "PartitionIndexes": [0]}
    # By names the older versions have one field less.
    old = {"Name": target.topic, "PartitionIndexes": [0]}
    return {
        "GroupId": target.group,
        "Topics": [old],
        "Groups": [{"GroupId": target.group, "Topics": [topic]}],
    }


@single
def _fetch_all_offsets(target: Target, _world: World) -> Values:
    return {"GroupId": target.group, "Topics": None, "Groups": [{"GroupId": target.group, "Topics": None}]}


def _told_offsets(answer: Mapping[str, Any], _world: World) -> Iterator[Need]:
    for topic in (*answer.get("Topics", ()), *(one for group in answer.get("Groups", ()) for one in group["Topics"])):
        yield Need(Action.DESCRIBE, Kind.TOPIC, topic["Name"])


def _coordinator(kind: int) -> Body:
    def body(target: Target, world: World) -> Values:
        key = target.transactional_id if kind == _ID_KEY else target.group
        if kind == _SHARE_KEY:
            key = f"{key}:{world.topics[target.topic]}:0"
        return {"Key": key, "KeyType": kind, "CoordinatorKeys": [key]}

    return single(body)


def _told_groups(answer: Mapping[str, Any], _world: World) -> Iterator[Need]:
    for group in answer["Groups"]:
        yield Need(Action.DESCRIBE, Kind.GROUP, group["GroupId"])


def _told_ids(answer: Mapping[str, Any], _world: World) -> Iterator[Need]:
    for state in answer["TransactionStates"]:
        yield Need(Action.DESCRIBE, Kind.TRANSACTIONAL_ID, state["TransactionalId"])


def _told_assignment(answer: Mapping[str, Any], world: World) -> Iterator[Need]:
    names = {topic_id: name for name, topic_id in world.topics.items()}
    for partition in (answer["Assignment"] or {}).get("TopicPartitions", ()):
        yield Need(Action.DESCRIBE, Kind.TOPIC, names[partition["TopicId"]])


def _member(target: Target) -> Values:
    """One of few, so that a later heartbeat gets what the first one asked for."""
    return {"GroupId": target.group, "MemberId": f"member-{target.number % 3}"}


@single
def _consumer_heartbeat(target: Target, _world: World) -> Values:
    return {
        **_member(target),
        "RebalanceTimeoutMs": _SESSION_MS,
        "SubscribedTopicNames": [target.topic],
        "TopicPartitions": (),
    }


@single
def _regex_heartbeat(target: Target, _world: World) -> Values:
    return {
        **_member(target),
        "RebalanceTimeoutMs": _SESSION_MS,
        "SubscribedTopicNames": (),
        "SubscribedTopicRegex": ".*",
        "TopicPartitions": (),
    }


@single
def _share_heartbeat(target: Target, _world: World) -> Values:
    return {**_member(target), "SubscribedTopicNames": [target.topic]}


@single
def _share_fetch(target: Target, world: World) -> Values:
    partition = {"PartitionIndex": 0, "PartitionMaxBytes": 1_000}
    return {
        **_member(target),
        "MaxBytes": 100_000,
        "MaxRecords": 10,
        "BatchSize": 10,
        "Topics": [{"TopicId": world.topics[target.topic], "Partitions": [partition]}],
    }


@single
def _share_acknowledge(target: Target, world: World) -> Values:
    accepted = {"FirstOffset": 0, "LastOffset": 0, "AcknowledgeTypes": [1]}
    partition = {"PartitionIndex": 0, "AcknowledgementBatches": [accepted]}
    return {
        **_member(target),
        "ShareSessionEpoch": 1,
        "Topics": [{"TopicId": world.topics[target.topic], "Partitions": [partition]}],
    }


def _share_offsets(field: str, entry: Values) -> Body:
    return single(
        lambda target, _: {"GroupId": target.group, field: [{"TopicName": target.topic, **entry}]},
    )


@single
def _described_share_offsets(target: Target, _world: World) -> Values:
    return {"Groups": [{"GroupId": target.group, "Topics": [{"TopicName": target.topic, "Partitions": [0]}]}]}


def _share_state(api: str) -> Operation:
    """Of the brokers among one another."""
    body = single(
        lambda target, world: {
            "GroupId": target.group,
            "Topics": [{"TopicId": world.topics[target.topic], "Partitions": [{"Partition": 0}]}],
        }
    )
    return Operation(api, api, ("group", "existing"), of_cluster(Action.CLUSTER_ACTION), body, weight=1)


@single
def _offsets_to_delete(target: Target, _world: World) -> Values:
    topic = {"Name": target.topic, "Partitions": [{"PartitionIndex": 0}]}
    return {"GroupId": target.group, "Topics": [topic]}


@single
def _join(target: Target, _world: World) -> Values:
    return {
        "GroupId": target.group,
        "SessionTimeoutMs": _SESSION_MS,
        "RebalanceTimeoutMs": _SESSION_MS,
        # A broker that lets one in without an id of a member would wait for the group's other members.
        "MemberId": _NO_MEMBER,
        "ProtocolType": "consumer",
        "Protocols": [{"Name": "range"}],
    }


def _as_member(**others: Any) -> Body:
    return single(lambda target, _: {**_member(target), **others})


_sync = _as_member(GenerationId=1, ProtocolType="consumer", ProtocolName="range")
_leave = single(lambda target, _: {**_member(target), "Members": [{"MemberId": _member(target)["MemberId"]}]})


def _producer(target: Target) -> Values:
    producer_id, epoch, _ = forged_producer(target.number)
    return {"ProducerId": producer_id, "ProducerEpoch": epoch}


def _init(*, two_phases: bool) -> Body:
    def body(target: Target, _world: World) -> Values:
        # Half of them say that they are the producer that has the id already.
        forged = _producer(target) if target.number % 2 else {}
        return {
            "TransactionalId": target.transactional_id,
            "TransactionTimeoutMs": 10_000,
            "Enable2Pc": two_phases,
            **forged,
        }

    return single(body)


@single
def _add_partitions(target: Target, _world: World) -> Values:
    producer, topics = _producer(target), [{"Name": target.topic, "Partitions": [0]}]
    return {
        "V3AndBelowTransactionalId": target.transactional_id,
        "V3AndBelowProducerId": producer["ProducerId"],
        "V3AndBelowProducerEpoch": producer["ProducerEpoch"],
        "V3AndBelowTopics": topics,
        "Transactions": [{"TransactionalId": target.transactional_id, "Topics": topics, **producer}],
    }


@single
def _add_offsets(target: Target, _world: World) -> Values:
    return {"TransactionalId": target.transactional_id, "GroupId": target.group, **_producer(target)}


@single
def _commit_in_transaction(target: Target, world: World) -> Values:
    topic = {name: value for name, value in _to_commit(target, world).items() if name != "TopicId"}
    return {
        "TransactionalId": target.transactional_id,
        "GroupId": target.group,
        "Topics": [topic],
        **_producer(target),
    }


@single
def _end(target: Target, _world: World) -> Values:
    committed = target.number // 2 % 2 == 0
    return {"TransactionalId": target.transactional_id, "Committed": committed, **_producer(target)}


@single
def _markers(target: Target, _world: World) -> Values:
    topics = [{"Name": target.topic, "PartitionIndexes": [0]}]
    return {"Markers": [{**_producer(target), "TransactionResult": target.number % 2 == 0, "Topics": topics}]}


_READ_GROUP, _WRITE_ID = of_group(Action.READ), of_id(Action.WRITE)
_READ_BOTH = together(_READ_GROUP, of_topic(Action.READ))
_DELETE_AND_READ = together(of_group(Action.DELETE), of_topic(Action.READ))
_DESCRIBE_BOTH = together(of_group(Action.DESCRIBE), of_topic(Action.DESCRIBE))
_BY_NAME, _BY_ID = (0, 9), (10, 32_767)

GROUP_OPERATIONS = (
    Operation("OffsetCommit", "OffsetCommit", ("group", "topic"), _READ_BOTH, _commit, _BY_NAME, weight=8),
    Operation("OffsetCommit by id", "OffsetCommit", ("group", "existing"), _READ_BOTH, _commit, _BY_ID),
    Operation("OffsetFetch", "OffsetFetch", ("group", "topic"), _DESCRIBE_BOTH, _fetch_offsets, _BY_NAME, weight=6),
    Operation("OffsetFetch by id", "OffsetFetch", ("group", "existing"), _DESCRIBE_BOTH, _fetch_offsets, _BY_ID),
    Operation(
        *("OffsetFetch of everything", "OffsetFetch", ("group",), of_group(Action.DESCRIBE)),
        *(_fetch_all_offsets, (2, 9)),
        tells=_told_offsets,
    ),
    Operation("OffsetDelete", "OffsetDelete", ("group", "topic"), _DELETE_AND_READ, _offsets_to_delete),
    Operation(
        *("FindCoordinator of a group", "FindCoordinator", ("group",), of_group(Action.DESCRIBE)),
        _coordinator(_GROUP_KEY),
    ),
    Operation(
        *("FindCoordinator of an id", "FindCoordinator", ("transactional_id",), of_id(Action.DESCRIBE)),
        *(_coordinator(_ID_KEY), (1, 32_767)),
    ),
    Operation(
        *("FindCoordinator of a share", "FindCoordinator", ("group", "existing"), of_cluster(Action.CLUSTER_ACTION)),
        *(_coordinator(_SHARE_KEY), (6, 32_767)),
        weight=1,
    ),
    Operation("JoinGroup", "JoinGroup", ("group",), _READ_GROUP, _join, (4, 32_767), weight=4),
    Operation("SyncGroup", "SyncGroup", ("group",), _READ_GROUP, _sync),
    Operation("Heartbeat", "Heartbeat", ("group",), _READ_GROUP, _as_member(GenerationId=1)),
    Operation("LeaveGroup", "LeaveGroup", ("group",), _READ_GROUP, _leave),
    *map(_description, ("DescribeGroups", "ConsumerGroupDescribe", "ShareGroupDescribe", "StreamsGroupDescribe")),
    Operation(
        *("DeleteGroups", "DeleteGroups", ("group",), of_group(Action.DELETE), _described("GroupsNames")),
        labels="group",
        weight=4,
    ),
    Operation("ListGroups", "ListGroups", (), nothing, single(lambda _target, _: {}), weight=1, tells=_told_groups),
    Operation(
        *("ConsumerGroupHeartbeat", "ConsumerGroupHeartbeat", ("group", "topic")),
        *(together(_READ_GROUP, of_topic(Action.DESCRIBE)), _consumer_heartbeat),
    ),
    Operation(
        *("ConsumerGroupHeartbeat, any topic", "ConsumerGroupHeartbeat", ("group",), _READ_GROUP, _regex_heartbeat),
        (1, 32_767),
        tells=_told_assignment,
    ),
    Operation(
        *("ShareGroupHeartbeat", "ShareGroupHeartbeat", ("group", "topic")),
        *(together(_READ_GROUP, of_topic(Action.DESCRIBE)), _share_heartbeat),
    ),
    Operation(
        *("StreamsGroupHeartbeat", "StreamsGroupHeartbeat", ("group",), _READ_GROUP, _as_member(MemberEpoch=1)),
    ),
    Operation("ShareFetch", "ShareFetch", ("group", "existing"), _READ_BOTH, _share_fetch),
    Operation(
        *("ShareAcknowledge", "ShareAcknowledge", ("group", "existing"), _READ_BOTH, _share_acknowledge),
        before=_NO_SHARE_SESSION,
    ),
    Operation(
        *("DescribeShareGroupOffsets", "DescribeShareGroupOffsets", ("group", "topic"), _DESCRIBE_BOTH),
        _described_share_offsets,
    ),
    Operation(
        *("AlterShareGroupOffsets", "AlterShareGroupOffsets", ("group", "topic"), _READ_BOTH),
        _share_offsets("Topics", {"Partitions": [{"PartitionIndex": 0, "StartOffset": 5}]}),
        before=_NOT_TO_ALTER,
    ),
    Operation(
        *("DeleteShareGroupOffsets", "DeleteShareGroupOffsets", ("group", "topic"), _DELETE_AND_READ),
        _share_offsets("Topics", {}),
    ),
    *map(
        _share_state,
        (
            *("InitializeShareGroupState", "ReadShareGroupState", "WriteShareGroupState"),
            *("DeleteShareGroupState", "ReadShareGroupStateSummary"),
        ),
    ),
)

ID_OPERATIONS = (
    Operation(
        *("InitProducerId", "InitProducerId", ("transactional_id",), _WRITE_ID, _init(two_phases=False)), weight=8
    ),
    Operation(
        *("InitProducerId, two phases", "InitProducerId", ("transactional_id",)),
        *(of_id(Action.WRITE, Action.TWO_PHASE_COMMIT), _init(two_phases=True), (6, 32_767)),
    ),
    Operation(
        *("InitProducerId without an id", "InitProducerId", (), nothing),
        single(lambda _target, _: {"TransactionalId": None}),
        weight=1,
    ),
    Operation(
        *("AddPartitionsToTxn", "AddPartitionsToTxn", ("transactional_id", "topic")),
        *(together(_WRITE_ID, of_topic(Action.WRITE)), _add_partitions, (0, 3)),
        weight=4,
    ),
    Operation(
        *("AddPartitionsToTxn as a broker", "AddPartitionsToTxn", ("transactional_id", "topic")),
        *(of_cluster(Action.CLUSTER_ACTION), _add_partitions, (4, 32_767)),
    ),
    Operation(
        *("AddOffsetsToTxn", "AddOffsetsToTxn", ("transactional_id", "group"), together(_WRITE_ID, _READ_GROUP)),
        _add_offsets,
        weight=4,
    ),
    Operation(
        *("TxnOffsetCommit", "TxnOffsetCommit", ("transactional_id", "group", "topic")),
        *(together(_WRITE_ID, _READ_BOTH), _commit_in_transaction),
        weight=4,
    ),
    Operation("EndTxn", "EndTxn", ("transactional_id",), _WRITE_ID, _end, weight=4),
    Operation("WriteTxnMarkers", "WriteTxnMarkers", ("topic",), of_cluster(Action.CLUSTER_ACTION), _markers),
    Operation(
        *("DescribeTransactions", "DescribeTransactions", ("transactional_id",), of_id(Action.DESCRIBE)),
        lambda targets, _: {"TransactionalIds": [target.transactional_id for target in targets]},
        labels="transactional_id",
    ),
    Operation(
        *("ListTransactions", "ListTransactions", (), nothing, single(lambda _target, _: {})),
        weight=1,
        tells=_told_ids,
    ),
)
