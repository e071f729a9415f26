"""What each Kafka user may do, as ACLs: least rights by the roles of topics.yaml. Pure.

Services get prefixes such as ``requests.``, so that a new tenant needs no change of their rights. Tenants get whole
names: a prefix ``replies.acme`` would also open ``replies.acme2``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fairlane import names
from fairlane_server.access.users import KafkaUser
from fairlane_server.topics.families import KafkaRole, TopicFamily


class Resource(StrEnum):
    """Kinds of things in Kafka that rights are given on."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional_id"
    CLUSTER = "cluster"
    UNKNOWN = "unknown"
    """A kind that this program does not know; nothing is given or taken there."""


class Operation(StrEnum):
    """What may be done with a resource, in Kafka's terms."""

    READ = "read"
    WRITE = "write"
    CREATE = "create"
    DELETE = "delete"
    ALTER = "alter"
    DESCRIBE = "describe"
    ALTER_CONFIGS = "alter_configs"
    DESCRIBE_CONFIGS = "describe_configs"
    ALL = "all"
    CLUSTER_ACTION = "cluster_action"
    IDEMPOTENT_WRITE = "idempotent_write"
    UNKNOWN = "unknown"
    """One of a newer broker; neither given nor taken."""


ANY = "*"
"""Every name, and every host."""
CLUSTER_NAME = "kafka-cluster"
"""The one name of a resource of kind cluster."""

_IMPLIES = {
    Operation.DESCRIBE: {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER},
    Operation.DESCRIBE_CONFIGS: {Operation.ALTER_CONFIGS},
}
"""Operations that a right on another one includes."""


@dataclass(frozen=True, slots=True, order=True)
class Grant:
    """One permission.

    Attributes:
        user: name of the Kafka user.
        name: of the resource; ANY stands for all of them.
        is_prefix: it holds for every resource whose name begins with ``name``.
        host: address from which it holds. Nothing that Fairlane grants is bound to one.
    """

    user: str
    resource: Resource
    name: str
    is_prefix: bool
    operation: Operation
    host: str = ANY

    def covers(self, resource: Resource, name: str) -> bool:
        """Whether it is about this resource."""
        if self.is_prefix:
            return resource is self.resource and name.startswith(self.name)
        return resource is self.resource and self.name in {name, ANY}

    def __str__(self) -> str:
        place = "" if self.host == ANY else f" from {self.host}"
        return f"{self.operation} {self.resource} {self.name}{'*' if self.is_prefix else ''}{place}"


def is_allowed(grants: Iterable[Grant], user: str, operation: Operation, resource: Resource, name: str) -> bool:
    """Kafka's rule: something is allowed by any matching grant, and by nothing else."""
    enough = {operation, Operation.ALL, *_IMPLIES.get(operation, ())}
    return any(grant.user == user and grant.operation in enough and grant.covers(resource, name) for grant in grants)


def wanted_grants(families: Sequence[TopicFamily], users: Iterable[KafkaUser], group_prefix: str) -> frozenset[Grant]:
    """All rights of these users. ``group_prefix``: GROUP_PREFIX.

    Raises ValueError: a prefix that a role needs also covers a family that it has no right on.
    """
    _check_prefixes(families)
    grants: set[Grant] = set()
    for user in users:
        grants.update(Grant(user.name, *right) for right in _topic_rights(families, user))
        grants.update(Grant(user.name, *right) for right in _group_rights(user, group_prefix))
        grants.update(Grant(user.name, *right) for right in _change_ids(user))
    return frozenset(grants)


_Right = tuple[Resource, str, bool, Operation]


def _topic_rights(families: Iterable[TopicFamily], user: KafkaUser) -> Iterator[_Right]:
    for family in families:
        name, is_prefix = _topics_of(family, user)
        if user.role in family.readers:
            yield Resource.TOPIC, name, is_prefix, Operation.READ
        if user.role in family.writers:
            yield Resource.TOPIC, name, is_prefix, Operation.WRITE
        if user.role is KafkaRole.GATEWAY and name == names.JOBS_REPLIES:
            # A new batch gets one of its partitions.
            yield Resource.TOPIC, name, is_prefix, Operation.DESCRIBE
        if user.role is KafkaRole.OPERATOR:
            for operation in _OPERATOR_ON_TOPICS:
                yield Resource.TOPIC, name, is_prefix, operation
        if user.role is KafkaRole.VIEWER:
            yield Resource.TOPIC, name, is_prefix, Operation.DESCRIBE
            yield Resource.TOPIC, name, is_prefix, Operation.DESCRIBE_CONFIGS
        if user.role is KafkaRole.ADMIN:
            if family.placeholders:
                # Of a new tenant, and of its pool.
                yield Resource.TOPIC, name, is_prefix, Operation.CREATE
                yield Resource.TOPIC, name, is_prefix, Operation.DESCRIBE
            if not family.records and not family.placeholders:
                # A purge.
                yield Resource.TOPIC, name, is_prefix, Operation.DELETE


_OPERATOR_ON_TOPICS = (
    *(Operation.CREATE, Operation.DELETE, Operation.ALTER),
    *(Operation.ALTER_CONFIGS, Operation.DESCRIBE_CONFIGS),
)
"""Of ``fairlane topics``."""


def _topics_of(family: TopicFamily, user: KafkaUser) -> tuple[str, bool]:
    """The name or the prefix of the family's topics that concern the user."""
    own = {KafkaRole.TENANT: "{tenant}", KafkaRole.CONSUMER: "{pool}"}.get(user.role)
    name = family.name.replace(own, user.owner) if own else family.name
    head, placeholder, _ = name.partition("{")
    return names.topic_name(head), bool(placeholder)


_READ_SETTINGS = frozenset({KafkaRole.OPERATOR, KafkaRole.ADMIN, KafkaRole.VIEWER})
"""Who reads the brokers' settings."""


def _group_rights(user: KafkaUser, prefix: str) -> Iterator[_Right]:
    """Of the consumer groups and transactional ids, and on the cluster."""
    if user.role is not KafkaRole.TENANT:
        yield Resource.GROUP, names.observer_group(""), True, Operation.DESCRIBE
    if user.role in _READ_SETTINGS:
        yield Resource.CLUSTER, CLUSTER_NAME, False, Operation.DESCRIBE_CONFIGS
    match user.role:
        case KafkaRole.TENANT:
            yield Resource.GROUP, names.tenant_group(user.owner, ""), True, Operation.READ
        case KafkaRole.GATEWAY:
            yield Resource.GROUP, names.gateway_group(prefix), False, Operation.READ
            yield Resource.GROUP, names.gateway_chunks_group(prefix), False, Operation.DESCRIBE
        case KafkaRole.BACKFILL:
            yield Resource.GROUP, names.jobs_group(prefix), False, Operation.DESCRIBE
            yield Resource.GROUP, names.job_group(prefix, ""), True, Operation.READ
            yield Resource.TRANSACTIONAL_ID, names.job_transactional_id(prefix, ""), True, Operation.WRITE
        case KafkaRole.DISPATCHER:
            yield Resource.GROUP, names.dispatcher_group(prefix), False, Operation.READ
            yield Resource.GROUP, names.dispatcher_archive_group(prefix), False, Operation.DESCRIBE
            # What a pool has finished is known from its committed offsets.
            yield Resource.GROUP, names.pool_group(prefix, ""), True, Operation.DESCRIBE
            for one in names.dispatcher_transactional_ids(prefix, ""):
                yield Resource.TRANSACTIONAL_ID, one, True, Operation.WRITE
        case KafkaRole.CONSUMER:
            yield Resource.GROUP, names.pool_group(prefix, user.owner), False, Operation.READ
            for one in names.consumer_transactional_ids(prefix, user.owner, ""):
                yield Resource.TRANSACTIONAL_ID, one, True, Operation.WRITE
        case KafkaRole.RECORDER:
            yield Resource.GROUP, names.recorder_group(prefix), False, Operation.READ
        case KafkaRole.ADMIN:
            # It carries out the replays of the log.
            yield Resource.GROUP, names.log_replay_group(prefix, ""), True, Operation.READ
            yield Resource.TRANSACTIONAL_ID, names.log_replay_transactional_id(prefix, ""), True, Operation.WRITE
        case KafkaRole.VIEWER:
            yield from _lags(prefix)


def _lags(prefix: str) -> Iterator[_Right]:
    """Of the lag of every service. Not of all that begins with GROUP_PREFIX: so may another pipeline's TOPIC_PREFIX."""
    for one in (names.dispatcher_group(prefix), names.gateway_group(prefix), names.recorder_group(prefix)):
        yield Resource.GROUP, one, False, Operation.DESCRIBE
    for one in (names.pool_group(prefix, ""), names.job_group(prefix, ""), names.log_replay_group(prefix, "")):
        yield Resource.GROUP, one, True, Operation.DESCRIBE


def _change_ids(user: KafkaUser) -> Iterator[_Right]:
    """Of the transactional ids by which something is changed, one at a time: the newer change ends the older."""
    if user.role in (KafkaRole.REPLAYER, KafkaRole.ADMIN):
        yield Resource.TRANSACTIONAL_ID, names.DEAD_LETTER_REPLAY_IDS, True, Operation.WRITE
    if user.role in (KafkaRole.OPERATOR, KafkaRole.ADMIN):
        yield Resource.TRANSACTIONAL_ID, names.MODEL_CHANGES_ID, False, Operation.WRITE


def _check_prefixes(families: Iterable[TopicFamily]) -> None:
    """A role's prefix of one family must not open another one."""
    families = tuple(families)
    for family in families:
        head, placeholder, _ = family.name.partition("{")
        for other in families if placeholder else ():
            if other is family or not other.name.startswith(head):
                continue
            wider = {*family.readers} - {*other.readers} | {*family.writers} - {*other.writers}
            wider.discard(KafkaRole.TENANT)  # whose rights are on names with the tenant in them
            if wider:
                raise ValueError(
                    f"topic family {family.family!r}: the rights of {', '.join(sorted(wider))} on {head}* would hold "
                    f"for family {other.family!r} as well"
                )
