"""Read users, ACLs and quotas of a cluster and apply a plan. Idempotent."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from fairlane.cluster import reason_of
from fairlane.settings import KafkaSettings
from fairlane_server.access.plan import AccessChange, AccessState, Allow, CreateUser, DeleteUser, SetQuotas, Withdraw
from fairlane_server.access.rights import Grant, Operation, Resource
from fairlane_server.kafka.cluster_admin import REQUEST_TIMEOUT_S, ClusterAdmin, ClusterError

_MECHANISM = ScramMechanism.SCRAM_SHA_512
_ITERATIONS = 8_192
"""Of the password's hash. Passwords are random and long, so more would only make a log-in slower."""
_BATCH = 500
_ANSWER_TIMEOUT_S = REQUEST_TIMEOUT_S + 5.0
_PRINCIPAL = "User:"
_AUTHORIZER = "authorizer.class.name"
_ALLOWS_UNLISTED = "allow.everyone.if.no.acl.found"
_LISTENERS, _CONTROLLER_LISTENERS = "listeners", "controller.listener.names"
_PROTOCOLS = "listener.security.protocol.map"
_CLIENT_CERTIFICATES = "ssl.client.auth"
_RESOURCES = {
    Resource.TOPIC: ResourceType.TOPIC,
    Resource.GROUP: ResourceType.GROUP,
    Resource.TRANSACTIONAL_ID: ResourceType.TRANSACTIONAL_ID,
    # librdkafka's name of the cluster.
    Resource.CLUSTER: ResourceType.BROKER,
}
_KINDS = {kind: resource for resource, kind in _RESOURCES.items()}
_OPERATIONS = {AclOperation[operation.name]: operation for operation in Operation}


@dataclass(frozen=True, slots=True)
class AccessApplied:
    """Result of one change. ``reason`` is set when it failed."""

    change: AccessChange
    result: Literal["done", "failed"]
    reason: str | None = None


def read_access(cluster: ClusterAdmin, settings: KafkaSettings) -> AccessState:
    """All users, permissions and client quotas of the cluster. Raises ClusterError, also when it checks no rights."""
    brokers = cluster.metadata().brokers
    if not brokers:
        raise ClusterError("no broker has joined the cluster")
    configs = [_broker_config(cluster, broker) for broker in sorted(brokers)]
    if not all(config.get(_AUTHORIZER) for config in configs):
        raise ClusterError(f"the brokers have no {_AUTHORIZER}: they check no rights, whatever ACLs there are")
    return AccessState(
        _scram_users(cluster),
        _grants(cluster),
        _client_quotas().read_quotas(settings),
        # Brokers hide the value of a setting that is the authorizer's and not their own.
        allows_unlisted=any(config.get(_ALLOWS_UNLISTED, "false") != "false" for config in configs),
        open_listeners=sorted({name for config in configs for name in open_listeners(config)}),
    )


def _broker_config(cluster: ClusterAdmin, broker: int) -> dict[str, str | None]:
    """A broker's settings; None for a value that it hides."""
    resource = ConfigResource(ResourceType.BROKER, str(broker))
    asked = cluster.admin.describe_configs([resource], request_timeout=REQUEST_TIMEOUT_S)
    found = _answer(asked[resource], "the broker's settings")
    return {name: entry.value for name, entry in found.items()}


def open_listeners(config: Mapping[str, str | None]) -> list[str]:
    """The listeners of a broker, those for controllers included, that ask clients for neither a password nor a
    certificate. None of a broker that does not show its listeners."""
    protocols = dict(
        entry.strip().upper().split(":", 1) for entry in (config.get(_PROTOCOLS) or "").split(",") if ":" in entry
    )
    names = [entry.partition("://")[0] for entry in (config.get(_LISTENERS) or "").split(",")]
    names += (config.get(_CONTROLLER_LISTENERS) or "").split(",")
    return [name for name in _distinct(names) if _is_open(config, name, protocols.get(name, name))]


def _distinct(names: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(name for one in names if (name := one.strip().upper()))


def _is_open(config: Mapping[str, str | None], listener: str, protocol: str) -> bool:
    """Whether it takes clients without a password or a certificate. A hidden value counts as the worse one."""
    own = f"listener.name.{listener.lower()}.{_CLIENT_CERTIFICATES}"
    certificates = config[own] if own in config else config.get(_CLIENT_CERTIFICATES)
    return protocol == "PLAINTEXT" or (protocol == "SSL" and certificates != "required")


def apply_access(
    cluster: ClusterAdmin, settings: KafkaSettings, changes: Sequence[AccessChange], passwords: Mapping[str, str]
) -> tuple[AccessApplied, ...]:
    """Apply the changes in their order. A failed change does not stop the others, except that no user is created when
    a right could not be taken or given. ``passwords``: by user, of those to create. Raises ClusterError."""
    applied = [*_withdraw(cluster, [change for change in changes if isinstance(change, Withdraw)])]
    applied += _delete_users(cluster, [change for change in changes if isinstance(change, DeleteUser)])
    applied += _set_quotas(settings, [change for change in changes if isinstance(change, SetQuotas)])
    applied += _allow(cluster, [change for change in changes if isinstance(change, Allow)])
    creations = [change for change in changes if isinstance(change, CreateUser)]
    if any(one.result == "failed" for one in applied):
        applied += [AccessApplied(one, "failed", "not tried, since another change failed") for one in creations]
    else:
        applied += _create_users(cluster, creations, passwords)
    return tuple(applied)


def _scram_users(cluster: ClusterAdmin) -> frozenset[str]:
    described: Any = cluster.admin.describe_user_scram_credentials(request_timeout=REQUEST_TIMEOUT_S)
    found = _answer(described, "users")
    return frozenset(
        user
        for user, description in found.items()
        if any(info.mechanism == _MECHANISM for info in description.scram_credential_infos)
    )


def _grants(cluster: ClusterAdmin) -> frozenset[Grant]:
    anything: Any = None  # which the stubs do not know
    everything = AclBindingFilter(
        *(ResourceType.ANY, anything, ResourcePatternType.ANY, anything, anything),
        *(AclOperation.ANY, AclPermissionType.ALLOW),
    )
    described = cluster.admin.describe_acls(everything, request_timeout=REQUEST_TIMEOUT_S)
    found = _answer(described, "ACLs")
    return frozenset(_grant(binding) for binding in found if binding.principal.startswith(_PRINCIPAL))


def _answer(future: "Future[Any]", what: str) -> Any:
    """The answer to a question. Raises ClusterError."""
    try:
        return future.result(_ANSWER_TIMEOUT_S)
    except KafkaException as error:
        reason = reason_of(error)
    except FutureTimeout:
        reason = f"no answer within {_ANSWER_TIMEOUT_S:g} s"
    raise ClusterError(f"{what} cannot be read: {reason}")


def _grant(binding: AclBinding) -> Grant:
    return Grant(
        binding.principal.removeprefix(_PRINCIPAL),
        _KINDS.get(ResourceType(binding.restype), Resource.UNKNOWN),
        binding.name,
        binding.resource_pattern_type is ResourcePatternType.PREFIXED,
        _OPERATIONS.get(AclOperation(binding.operation), Operation.UNKNOWN),
        binding.host,
    )


def _binding(grant: Grant) -> AclBinding:
    return AclBinding(
        _RESOURCES[grant.resource],
        grant.name,
        ResourcePatternType.PREFIXED if grant.is_prefix else ResourcePatternType.LITERAL,
        _PRINCIPAL + grant.user,
        grant.host,
        AclOperation[grant.operation.name],
        AclPermissionType.ALLOW,
    )


def _allow(cluster: ClusterAdmin, changes: Sequence[Allow]) -> Iterator[AccessApplied]:
    for batch in _batches(changes):
        bindings = [_binding(change.grant) for change in batch]
        futures = cluster.admin.create_acls(bindings, request_timeout=REQUEST_TIMEOUT_S)
        yield from (_result(change, futures[made]) for change, made in zip(batch, bindings, strict=True))


def _withdraw(cluster: ClusterAdmin, changes: Sequence[Withdraw]) -> Iterator[AccessApplied]:
    for batch in _batches(changes):
        filters = [_filter(_binding(change.grant)) for change in batch]
        futures = cluster.admin.delete_acls(filters, request_timeout=REQUEST_TIMEOUT_S)
        yield from (_result(change, futures[one]) for change, one in zip(batch, filters, strict=True))


def _filter(binding: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        binding.restype,
        binding.name,
        binding.resource_pattern_type,
        binding.principal,
        binding.host,
        binding.operation,
        binding.permission_type,
    )


def _create_users(
    cluster: ClusterAdmin, changes: Sequence[CreateUser], passwords: Mapping[str, str]
) -> Iterator[AccessApplied]:
    info = ScramCredentialInfo(_MECHANISM, _ITERATIONS)
    wanted = [UserScramCredentialUpsertion(one.user, info, passwords[one.user].encode()) for one in changes]
    yield from _alter_users(cluster, changes, wanted)


def _delete_users(cluster: ClusterAdmin, changes: Sequence[DeleteUser]) -> Iterator[AccessApplied]:
    yield from _alter_users(cluster, changes, [UserScramCredentialDeletion(one.user, _MECHANISM) for one in changes])


def _alter_users(
    cluster: ClusterAdmin, changes: Sequence[CreateUser | DeleteUser], alterations: Sequence[Any]
) -> Iterator[AccessApplied]:
    for batch, altered in zip(_batches(changes), _batches(alterations), strict=True):
        futures = cluster.admin.alter_user_scram_credentials([*altered], request_timeout=REQUEST_TIMEOUT_S)
        yield from (_result(change, futures[change.user]) for change in batch)


def _set_quotas(settings: KafkaSettings, changes: Sequence[SetQuotas]) -> Iterator[AccessApplied]:
    for batch in _batches(changes):
        reasons = _client_quotas().alter_quotas(settings, {change.user: change.quotas for change in batch})
        for change in batch:
            reason = reasons.get(change.user)
            yield AccessApplied(change, "failed" if reason else "done", reason)


def _client_quotas() -> ModuleType:
    """Loaded when needed: no other command uses aiokafka. Raises ClusterError where that is not installed."""
    try:
        from fairlane_server.access import client_quotas
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        reason = f"this needs the extra `access`: pip install 'fairlane[access]' ({missing} is missing)"
        raise ClusterError(reason) from None
    return client_quotas


def _batches(items: Sequence[Any]) -> Iterable[Any]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))


def _result(change: AccessChange, future: "Future[Any]") -> AccessApplied:
    try:
        future.result(timeout=_ANSWER_TIMEOUT_S)
    except KafkaException as error:
        if isinstance(change, DeleteUser) and error.args[0].code() == KafkaError.RESOURCE_NOT_FOUND:
            return AccessApplied(change, "done")
        return AccessApplied(change, "failed", reason_of(error))
    except FutureTimeout:
        return AccessApplied(change, "failed", f"no answer within {_ANSWER_TIMEOUT_S:g} s")
    return AccessApplied(change, "done")
