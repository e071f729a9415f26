"""Kafka users of a pipeline: one for each shared service, one for each pool's consumers, one for each tenant. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from fairlane import names
from fairlane_server.topics.families import KafkaRole

_SEPARATOR = "_"
"""No part of a role, a tenant, a pool or TOPIC_PREFIX has this character, so a name is read in one way only."""
_PRODUCT = f"fairlane{_SEPARATOR}"
"""Keeps the names apart from users of other applications."""
_SECOND = "2"
_OF_EACH = {KafkaRole.TENANT, KafkaRole.CONSUMER}
_NAME = re.compile(
    rf"{_PRODUCT}({'|'.join(KafkaRole)})(?:{_SEPARATOR}({names.TENANT_PATTERN.pattern}))?({_SEPARATOR}{_SECOND})?"
)


@dataclass(frozen=True, slots=True, order=True)
class KafkaUser:
    """A user of Kafka with the rights of a role.

    Attributes:
        owner: the tenant, or the pool of consumers; empty for the other roles.
        is_second: the other one of two users with the same rights, so that a password can be replaced while both are
            valid.
    """

    role: KafkaRole
    owner: str = ""
    is_second: bool = False

    def __post_init__(self) -> None:
        if bool(self.owner) is not (self.role in _OF_EACH):
            raise ValueError(f"{self.role} {self.owner!r}: only users of tenants and pools have an owner, and all have")

    @property
    def name(self) -> str:
        """TOPIC_PREFIX, the product and the role, followed by the owner and by 2 for the second user."""
        parts = (self.role, *filter(None, [self.owner]), *([_SECOND] if self.is_second else []))
        return names.TOPIC_PREFIX + _PRODUCT + _SEPARATOR.join(parts)

    @property
    def other(self) -> Self:
        """The user with the same rights beside this one."""
        return replace(self, is_second=not self.is_second)

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The user of this name; None if it is none of this pipeline's."""
        prefix = names.TOPIC_PREFIX
        found = _NAME.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if found is None:
            return None
        role, owner, is_second = KafkaRole(found[1]), found[2] or "", found[3] is not None
        if role not in _OF_EACH and owner == _SECOND and not is_second:
            owner, is_second = "", True
        return cls(role, owner, is_second) if bool(owner) is (role in _OF_EACH) else None


def first_users(tenants: Iterable[str], pools: Iterable[str]) -> tuple[KafkaUser, ...]:
    """The first user of every role, pool and tenant."""
    shared = [KafkaUser(role) for role in KafkaRole if role not in _OF_EACH]
    consumers = [KafkaUser(KafkaRole.CONSUMER, pool) for pool in pools]
    return (*shared, *consumers, *(KafkaUser(KafkaRole.TENANT, tenant) for tenant in tenants))
