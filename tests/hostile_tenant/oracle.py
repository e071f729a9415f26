"""Who may do what on Kafka, by topics.yaml and docs/security.md alone. Pure.

It shares no code with ``fairlane_server.access`` or ``fairlane.names``: a mistake there must not be one here. The names
of groups and ids are those of docs/security.md and docs/architecture.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import yaml

GROUP_PREFIX = "fairlane"
_PLACEHOLDERS = {"tenant": "{tenant}", "consumer": "{pool}"}
"""What stands for the owner of a role's user in the name of a family."""


class Kind(StrEnum):
    """Kinds of things that Kafka gives rights on."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional id"
    CLUSTER = "cluster"


class Action(StrEnum):
    """What may be done with them, in Kafka's terms."""

    READ = "read"
    WRITE = "write"
    CREATE = "create"
    DELETE = "delete"
    ALTER = "alter"
    DESCRIBE = "describe"
    ALTER_CONFIGS = "alter configs"
    DESCRIBE_CONFIGS = "describe configs"
    CLUSTER_ACTION = "act as a broker"
    TWO_PHASE_COMMIT = "two-phase commit"


@dataclass(frozen=True, slots=True)
class Need:
    """A right without which a request must be refused."""

    action: Action
    kind: Kind
    name: str = ""


@dataclass(frozen=True, slots=True, order=True)
class Actor:
    """Whose rights they are.

    Attributes:
        prefix: TOPIC_PREFIX of the pipeline.
        role: ``tenant`` or ``consumer``.
        owner: the tenant or the pool.
    """

    prefix: str
    role: str
    owner: str


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    writers: frozenset[str]
    readers: frozenset[str]


class Oracle:
    """Answers from the content of topics.yaml."""

    def __init__(self, families: Iterable[Mapping[str, Any]]) -> None:
        self._families = [
            _Family(one["name"], frozenset(one["writers"]), frozenset(one["readers"])) for one in families
        ]

    @classmethod
    def from_file(cls, path: Path) -> Self:
        return cls(yaml.safe_load(path.read_text(encoding="utf-8"))["families"].values())

    def permits(self, actor: Actor, needs: Sequence[Need]) -> bool:
        """Whether a request that needs all of these rights is to be carried out."""
        return all(self._has(actor, need) for need in needs)

    def _has(self, actor: Actor, need: Need) -> bool:
        match need.kind:
            case Kind.TOPIC:
                return any(need.action in self._on_topics(actor, family, need.name) for family in self._families)
            case Kind.GROUP:
                return need.action in _on_group(actor, need.name)
            case Kind.TRANSACTIONAL_ID:
                return need.action in _on_transactional_id(actor, need.name)
            case Kind.CLUSTER:
                return False

    def _on_topics(self, actor: Actor, family: _Family, topic: str) -> set[Action]:
        if not _concerns(actor, family.name, topic):
            return set()
        found = set()
        if actor.role in family.readers:
            found |= {Action.READ, Action.DESCRIBE}
        if actor.role in family.writers:
            found |= {Action.WRITE, Action.DESCRIBE}
        return found


def _concerns(actor: Actor, name: str, topic: str) -> bool:
    """Whether a right of a user's role on a family is one on this topic: what is its owner's is meant by its whole
    name, and everything else by what comes before the first placeholder."""
    head, brace, _ = (actor.prefix + name.replace(_PLACEHOLDERS[actor.role], actor.owner)).partition("{")
    return topic.startswith(head) if brace else topic == head


def _on_group(actor: Actor, group: str) -> set[Action]:
    if actor.role == "tenant":
        return {Action.READ, Action.DESCRIBE} if group.startswith(f"{actor.prefix}tenant_{actor.owner}.") else set()
    if group == f"{actor.prefix}{GROUP_PREFIX}.pool.{actor.owner}":
        return {Action.READ, Action.DESCRIBE}
    return {Action.DESCRIBE} if group.startswith(f"{actor.prefix}fairlane-observer.") else set()


def _on_transactional_id(actor: Actor, transactional_id: str) -> set[Action]:
    if actor.role == "consumer":
        for kind in ("consumer", "consumer-2"):
            if transactional_id.startswith(f"{actor.prefix}{GROUP_PREFIX}.{kind}.{actor.owner}."):
                return {Action.WRITE, Action.DESCRIBE}
    return set()
