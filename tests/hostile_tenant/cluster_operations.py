"""Tries on the cluster itself: rights, users, quotas, settings, brokers, and the log-in."""

from tests.hostile_tenant.group_operations import GROUP_OPERATIONS, ID_OPERATIONS
from tests.hostile_tenant.messages import Values
from tests.hostile_tenant.operation import Body, Operation, Target, of_cluster, of_group, single
from tests.hostile_tenant.oracle import Action
from tests.hostile_tenant.topic_operations import NO_ID, TOPIC_OPERATIONS, configured
from tests.hostile_tenant.world import World

_TOPIC, _GROUP, _CLUSTER, _TRANSACTIONAL_ID = 2, 3, 4, 5
_ANY_RESOURCE = 1
_LITERAL, _PREFIXED, _ANY_PATTERN = 3, 4, 1
_DENY, _ALLOW, _ANY_PERMISSION = 2, 3, 1
_ANY_OPERATION, _EVERYTHING = 1, 2
_SCRAM_SHA_512 = 2
_ITERATIONS = 4_096
_BROKER_CONFIG, _LOGGER_CONFIG, _METRICS_CONFIG, _GROUP_CONFIG = 4, 8, 16, 32
_BROKER = 1


def _on_cluster(
    name: str, action: Action, body: Body, draws: tuple[str, ...] = (), *, api: str = "", weight: int = 1
) -> Operation:
    return Operation(name, api or name, draws, of_cluster(action), body, weight=weight)


@single
def _new_right(target: Target, _world: World) -> Values:
    """For the attacker itself, or against another user."""
    kinds = ((_TOPIC, target.topic), (_GROUP, "*"), (_TRANSACTIONAL_ID, "*"), (_CLUSTER, "kafka-cluster"))
    kind, name = kinds[target.number % len(kinds)]
    denies = target.number // 4 % 4 == 0
    return {
        "Creations": [
            {
                "ResourceType": kind,
                "ResourceName": name or "*",
                "ResourcePatternType": _PREFIXED if kind == _TOPIC and target.number // 16 % 2 else _LITERAL,
                "Principal": f"User:{target.user if denies else target.attacker}",
                "Host": "*",
                "Operation": _EVERYTHING,
                "PermissionType": _DENY if denies else _ALLOW,
            }
        ]
    }


def _acl_filter(target: Target) -> Values:
    return {
        "ResourceTypeFilter": _ANY_RESOURCE,
        "ResourceNameFilter": None,
        "PatternTypeFilter": _ANY_PATTERN,
        "PrincipalFilter": f"User:{target.user}" if target.number % 2 else None,
        "HostFilter": None,
        "Operation": _ANY_OPERATION,
        "PermissionType": _ANY_PERMISSION,
    }


@single
def _quotas(target: Target, _world: World) -> Values:
    operations = [{"Key": "producer_byte_rate", "Value": 1.0, "Remove": target.number % 2 == 0}]
    return {"Entries": [{"Entity": [{"EntityType": "user", "EntityName": target.user}], "Ops": operations}]}


@single
def _password(target: Target, _world: World) -> Values:
    if target.number % 3 == 0:
        return {"Deletions": [{"Name": target.user, "Mechanism": _SCRAM_SHA_512}]}
    salted = {"Iterations": _ITERATIONS, "Salt": b"salt" * 4, "SaltedPassword": b"known" * 13}
    return {"Upsertions": [{"Name": target.user, "Mechanism": _SCRAM_SHA_512, **salted}]}


def _config_of(kind: int, *, changes: bool) -> Body:
    def body(target: Target, _world: World) -> Values:
        name = target.group if kind in {_GROUP_CONFIG, _METRICS_CONFIG} else str(_BROKER)
        described = {"ResourceType": kind, "ResourceName": name, "ConfigurationKeys": None}
        return {"Resources": [configured(kind, name, target.number) if changes else described]}

    return single(body)


def _described_config(what: str, kind: int, draws: tuple[str, ...] = ()) -> Operation:
    body = _config_of(kind, changes=False)
    return _on_cluster(
        f"DescribeConfigs of {what}", Action.DESCRIBE_CONFIGS, body, draws, api="DescribeConfigs", weight=2
    )


def _altered_config(api: str, what: str, kind: int, draws: tuple[str, ...] = ()) -> Operation:
    body = _config_of(kind, changes=True)
    return _on_cluster(f"{api} of {what}", Action.ALTER_CONFIGS, body, draws, api=api)


def _of_partitions(field: str, name: str, entry: Values, **others: object) -> Body:
    return single(lambda target, _: {field: [{name: target.topic, **entry}], **others})


_CONFIG_OPERATIONS = (
    _described_config("a broker", _BROKER_CONFIG),
    _described_config("its loggers", _LOGGER_CONFIG),
    _described_config("client metrics", _METRICS_CONFIG, ("group",)),
    Operation(
        *("DescribeConfigs of a group", "DescribeConfigs", ("group",), of_group(Action.DESCRIBE_CONFIGS)),
        _config_of(_GROUP_CONFIG, changes=False),
    ),
    _altered_config("AlterConfigs", "a broker", _BROKER_CONFIG),
    _altered_config("IncrementalAlterConfigs", "a broker", _BROKER_CONFIG),
    _altered_config("IncrementalAlterConfigs", "client metrics", _METRICS_CONFIG, ("group",)),
    Operation(
        *("IncrementalAlterConfigs of a group", "IncrementalAlterConfigs", ("group",)),
        *(of_group(Action.ALTER_CONFIGS), _config_of(_GROUP_CONFIG, changes=True)),
    ),
    _on_cluster("ListConfigResources", Action.DESCRIBE_CONFIGS, single(lambda _target, _: {})),
)

_RIGHTS_OPERATIONS = (
    _on_cluster("CreateAcls", Action.ALTER, _new_right, ("topic", "user"), weight=8),
    _on_cluster("DeleteAcls", Action.ALTER, single(lambda target, _: {"Filters": [_acl_filter(target)]}), ("user",)),
    _on_cluster("DescribeAcls", Action.DESCRIBE, single(lambda target, _: _acl_filter(target)), ("user",)),
    _on_cluster("AlterUserScramCredentials", Action.ALTER, _password, ("user",), weight=8),
    _on_cluster(
        *("DescribeUserScramCredentials", Action.DESCRIBE),
        # None of them means all, as does null; null from one without the right ends in an error within Kafka 4.2, which
        # then never answers.
        single(lambda target, _: {"Users": [{"Name": target.user}] if target.number % 2 else ()}),
        ("user",),
    ),
    _on_cluster("AlterClientQuotas", Action.ALTER_CONFIGS, _quotas, ("user",), weight=4),
    _on_cluster(
        *("DescribeClientQuotas", Action.DESCRIBE_CONFIGS),
        single(lambda _target, _: {"Components": [{"EntityType": "user", "MatchType": 2, "Match": None}]}),
    ),
)

_BROKER_OPERATIONS = (
    _on_cluster(
        *("ElectLeaders", Action.ALTER),
        *(_of_partitions("TopicPartitions", "Topic", {"Partitions": [0]}), ("existing",)),
    ),
    _on_cluster(
        *("AlterPartitionReassignments", Action.ALTER),
        _of_partitions("Topics", "Name", {"Partitions": [{"PartitionIndex": 0, "Replicas": [_BROKER + 1]}]}),
        ("existing",),
    ),
    _on_cluster("ListPartitionReassignments", Action.DESCRIBE, single(lambda _target, _: {})),
    _on_cluster(
        *("AlterReplicaLogDirs", Action.ALTER),
        single(
            lambda target, _: {"Dirs": [{"Path": "/tmp", "Topics": [{"Name": target.topic, "Partitions": [0]}]}]}  # noqa: S108 - the broker is to refuse it
        ),
        ("existing",),
    ),
    Operation(
        *("DescribeLogDirs", "DescribeLogDirs", (), of_cluster(Action.DESCRIBE)),
        # Before version 3 a refusal is an answer without anything in it.
        *(single(lambda _target, _: {"Topics": None}), (3, 32_767)),
        weight=1,
    ),
    _on_cluster(
        *("UpdateFeatures", Action.ALTER),
        single(lambda _target, _: {"FeatureUpdates": [{"Feature": "group.version", "MaxVersionLevel": 0}]}),
    ),
    _on_cluster("UnregisterBroker", Action.ALTER, single(lambda _target, _: {"BrokerId": _BROKER})),
    _on_cluster(
        *("DescribeQuorum", Action.DESCRIBE),
        single(
            lambda _target, _: {"Topics": [{"TopicName": "__cluster_metadata", "Partitions": [{"PartitionIndex": 0}]}]}
        ),
    ),
    _on_cluster(
        *("AddRaftVoter", Action.ALTER),
        single(
            lambda _target, _: {
                "VoterId": 9,
                "VoterDirectoryId": NO_ID,
                "Listeners": [{"Name": "CONTROLLER", "Host": "127.0.0.1", "Port": 9}],
            }
        ),
    ),
    _on_cluster("RemoveRaftVoter", Action.ALTER, single(lambda _target, _: {"VoterId": _BROKER})),
)

CLUSTER_OPERATIONS = (*_CONFIG_OPERATIONS, *_RIGHTS_OPERATIONS, *_BROKER_OPERATIONS)
OPERATIONS = (*TOPIC_OPERATIONS, *GROUP_OPERATIONS, *ID_OPERATIONS, *CLUSTER_OPERATIONS)

LEFT_OUT = {
    **dict.fromkeys(("ApiVersions", "SaslHandshake", "SaslAuthenticate"), "before and during the log-in"),
    "DescribeCluster": "asks for no right: the brokers' addresses",
    **dict.fromkeys(("GetTelemetrySubscriptions", "PushTelemetry"), "ask for no right; no broker here has a receiver"),
    **dict.fromkeys(
        ("CreateDelegationToken", "RenewDelegationToken", "ExpireDelegationToken", "DescribeDelegationToken"),
        "no broker here has tokens",
    ),
}
"""Requests of a broker that are not tried, and why."""
