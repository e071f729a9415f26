"""Plan the changes that bring a cluster's users, ACLs and quotas to their desired state. Pure.

Only users of this pipeline are managed. What others may do with its topics, groups and transactional ids is reported.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from fairlane_server.access.rights import ANY, Grant, Operation, Resource, wanted_grants
from fairlane_server.access.users import KafkaUser
from fairlane_server.control.tenants_file import KafkaQuotas
from fairlane_server.topics.families import KafkaRole, TopicFamily

PRODUCE_BYTES = "producer_byte_rate"
FETCH_BYTES = "consumer_byte_rate"
REQUEST_PERCENT = "request_percentage"
QUOTA_KEYS = (PRODUCE_BYTES, FETCH_BYTES, REQUEST_PERCENT)
"""Kafka's names; the rates are bytes a second on each broker, the percentage is that of one of its threads."""

Quotas = Mapping[str, float]
"""Client quotas of a user, by Kafka's names."""


def by_kafkas_names(quotas: KafkaQuotas) -> Quotas:
    """A tenant's quotas as those of its users."""
    return {
        PRODUCE_BYTES: float(quotas.produce_bytes_per_s),
        FETCH_BYTES: float(quotas.fetch_bytes_per_s),
        REQUEST_PERCENT: quotas.request_percent,
    }


@dataclass(frozen=True, slots=True)
class AccessState:
    """Users, ACLs and client quotas of a cluster.

    Attributes:
        users: names of all users with a SCRAM-SHA-512 password.
        grants: all permissions, of any user and host. ACLs that deny are not managed.
        quotas: client quotas by user name.
        allows_unlisted: the brokers may let everybody use what no ACL names.
        open_listeners: names of listeners that take clients without a password or a certificate.
    """

    users: Collection[str]
    grants: Collection[Grant]
    quotas: Mapping[str, Quotas] = field(default_factory=dict)
    allows_unlisted: bool = False
    open_listeners: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class CreateUser:
    """Create a user with a new password."""

    action: ClassVar[str] = "create-user"
    user: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DeleteUser:
    """Delete a user that no file names any more."""

    action: ClassVar[str] = "delete-user"
    user: str
    detail: str = "open connections stay open, without rights"


@dataclass(frozen=True, slots=True)
class _GrantChange:
    grant: Grant

    @property
    def user(self) -> str:
        return self.grant.user

    @property
    def detail(self) -> str:
        return str(self.grant)


@dataclass(frozen=True, slots=True)
class Allow(_GrantChange):
    """Create an ACL."""

    action: ClassVar[str] = "allow"


@dataclass(frozen=True, slots=True)
class Withdraw(_GrantChange):
    """Delete an ACL."""

    action: ClassVar[str] = "withdraw"


@dataclass(frozen=True, slots=True)
class SetQuotas:
    """Set client quotas; None removes one."""

    action: ClassVar[str] = "set-quotas"
    user: str
    quotas: Mapping[str, float | None]

    @property
    def detail(self) -> str:
        return ", ".join(f"{key}={'none' if value is None else f'{value:g}'}" for key, value in self.quotas.items())


AccessChange = CreateUser | DeleteUser | Allow | Withdraw | SetQuotas


@dataclass(frozen=True, slots=True)
class AccessPlan:
    """The changes to make, and the findings that a person must decide on.

    Attributes:
        changes: in the order to make them.
        removals: likewise, of users whose tenant or pool no file names any more.
        foreign: rights on what belongs to this pipeline that it did not give: those of others, and those of its own
            users that this program does not know.
        unknown_users: users with names of this pipeline's and none of its rights. Whoever created them knows their
            passwords, so they must not be given rights.
    """

    changes: tuple[AccessChange, ...]
    removals: tuple[AccessChange, ...]
    foreign: tuple[Grant, ...]
    unknown_users: tuple[str, ...]

    def only(self, users: Iterable[KafkaUser]) -> Self:
        """The part that concerns these users."""
        names = {user.name for user in users}
        return replace(
            self,
            changes=tuple(change for change in self.changes if change.user in names),
            removals=(),
            unknown_users=tuple(user for user in self.unknown_users if user in names),
        )


def plan(
    state: AccessState,
    users: Sequence[KafkaUser],
    families: Sequence[TopicFamily],
    group_prefix: str,
    tenants_quotas: Mapping[str, Quotas],
    *,
    added: KafkaUser | None = None,
    retired: KafkaUser | None = None,
    delete: bool = False,
) -> AccessPlan:
    """Compare the desired rights with the existing ones.

    ``users`` are the first users. Of a pair with the same rights at least one must exist; both may: ``added`` is to be
    created beside the other one, ``retired`` to be deleted because the other one took its place. ``tenants_quotas``: by
    tenant. ``delete``: the removals are changes. Rights are taken before users are deleted, and given before users are
    created. Raises as ``wanted_grants``.
    """
    users_before = frozenset(state.users)
    present = set(users_before)
    if added is not None:
        present.add(added.name)
    if retired is not None:
        present.discard(retired.name)
    wanted = _present(users, present)
    grants = wanted_grants(families, wanted, group_prefix)
    names = {user.name for user in wanted}
    existing = frozenset(state.grants)
    of_own_users = {grant for grant in existing if KafkaUser.parse(grant.user) is not None}
    managed = {grant for grant in of_own_users if _is_known(grant)}
    used = _UsedNames(grants)
    foreign = [*(of_own_users - managed), *(grant for grant in existing - of_own_users if used.meet(grant))]
    entitled = {grant.user for grant in grants & existing}
    gone = {user for user in users_before - names if KafkaUser.parse(user) is not None}
    if retired is not None:
        # Also when it is gone already: the command that deleted it may not have come to its file.
        gone.add(retired.name)
    quotas = {user.name: tenants_quotas.get(user.owner, {}) for user in wanted if user.role is KafkaRole.TENANT}
    quotas_before = {user: given for user, given in state.quotas.items() if KafkaUser.parse(user) is not None}
    changes: list[AccessChange] = [
        *(Withdraw(grant) for grant in sorted(managed - grants)),
        *(DeleteUser(user) for user in sorted(gone)),
        *_quota_changes(quotas, quotas_before),
        *(Allow(grant) for grant in sorted(grants - existing)),
        *(CreateUser(user.name) for user in sorted(wanted) if user.name not in users_before),
    ]
    named = {one.name for user in users for one in (user, user.other)}
    return AccessPlan(
        tuple(change for change in changes if delete or change.user in named),
        tuple(change for change in changes if not delete and change.user not in named),
        tuple(sorted(foreign)),
        tuple(sorted((names & users_before) - entitled)),
    )


def _present(users: Iterable[KafkaUser], existing: Collection[str]) -> tuple[KafkaUser, ...]:
    """Both users of each pair that exist; the first one if there is none."""
    present: list[KafkaUser] = []
    for user in users:
        found = [one for one in (user, user.other) if one.name in existing]
        present += found or [user]
    return tuple(present)


def _is_known(grant: Grant) -> bool:
    return grant.resource is not Resource.UNKNOWN and grant.operation is not Operation.UNKNOWN


_HARMLESS_ON_CLUSTER = {Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS, Operation.IDEMPOTENT_WRITE}


class _UsedNames:
    """Names and prefixes of what a pipeline uses, by kind of resource, in sets and in order: with thousands of tenants
    and of foreign rights, no pair of the two is compared."""

    def __init__(self, grants: Iterable[Grant]) -> None:
        names: dict[Resource, set[str]] = {resource: set() for resource in Resource}
        self._prefixes: dict[Resource, set[str]] = {resource: set() for resource in Resource}
        for grant in grants:
            names[grant.resource].add(grant.name)
            if grant.is_prefix:
                self._prefixes[grant.resource].add(grant.name)
        self._sorted = {resource: sorted(found) for resource, found in names.items()}

    def meet(self, foreign: Grant) -> bool:
        """Whether a right of others is about any of them."""
        if foreign.resource is Resource.CLUSTER:
            return foreign.operation not in _HARMLESS_ON_CLUSTER
        name, names, prefixes = foreign.name, self._sorted[foreign.resource], self._prefixes[foreign.resource]
        if name == ANY and not foreign.is_prefix:
            return bool(names)
        if any(name[:length] in prefixes for length in range(len(name) + 1)):
            return True
        at = bisect_left(names, name)
        return at < len(names) and (names[at].startswith(name) if foreign.is_prefix else names[at] == name)


def _quota_changes(wanted: Mapping[str, Quotas], existing: Mapping[str, Quotas]) -> Iterable[SetQuotas]:
    for user in sorted({*wanted, *existing}):
        before, after = existing.get(user, {}), wanted.get(user, {})
        changed: dict[str, float | None] = {
            key: after.get(key) for key in QUOTA_KEYS if before.get(key) != after.get(key)
        }
        if changed:
            yield SetQuotas(user, changed)
