"""One kind of request: what it draws, which rights it needs, how it is written, and where its answer has the errors."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.hostile_tenant.messages import Values, Versions
from tests.hostile_tenant.oracle import Action, Kind, Need
from tests.hostile_tenant.world import World

ANY_VERSION = (0, 32_767)
MANY = 20
"""Tries in one request, where a request can hold several."""
_LABELS = ("Name", "Topic", "TopicName", "TopicId", "GroupId", "TransactionalId", "ResourceName")
_CODES = ("ErrorCode", "PartitionErrorCode")

_REFUSED = {
    29: "TOPIC_AUTHORIZATION_FAILED",
    30: "GROUP_AUTHORIZATION_FAILED",
    31: "CLUSTER_AUTHORIZATION_FAILED",
    53: "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    65: "DELEGATION_TOKEN_AUTHORIZATION_FAILED",
}
"""Kafka's errors for a missing right."""


@dataclass(frozen=True, slots=True)
class Target:
    """What one try is about.

    Attributes:
        attacker: name of the Kafka user who tries.
        number: random, for what has no name.
    """

    attacker: str
    topic: str = ""
    group: str = ""
    transactional_id: str = ""
    user: str = ""
    number: int = 0


Needs = Callable[[Target, World], tuple[Need, ...]]
Body = Callable[[Sequence[Target], World], Values]
Tells = Callable[[Mapping[str, Any], World], Iterable[Need]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One way to try.

    Attributes:
        api: Kafka's name of the request.
        draws: fields of a target that get a random name; ``existing`` draws a topic that exists.
        labels: the field of a target by which the answer names it; empty: the whole answer is about one target.
        most: tries in one request.
        before: errors after which the broker does not ask for every right, since there is nothing to do.
        tells: the rights without which something in the answer must not be told.
        tells_all: the answer must name every topic that may be described.
    """

    name: str
    api: str
    draws: tuple[str, ...]
    needs: Needs
    body: Body
    versions: tuple[int, int] = ANY_VERSION
    labels: str = ""
    weight: int = 2
    before: frozenset[int] = frozenset()
    tells: Tells | None = None
    tells_all: bool = False

    @property
    def most(self) -> int:
        return MANY if self.labels else 1

    @property
    def range(self) -> Versions:
        return Versions(*self.versions)

    def codes(self, answer: Mapping[str, Any], target: Target, world: World) -> list[int]:
        """The error codes of this answer that concern the target."""
        if not self.labels:
            return [code for _, code in _codes(answer, ())]
        name = getattr(target, self.labels)
        own = {name, world.topics.get(name)} if self.labels == "topic" else {name}
        return [code for labels, code in _codes(answer, ()) if not labels or own.intersection(labels)]


def is_refusal(codes: Iterable[int]) -> bool:
    """Whether one of these errors says that a right is missing."""
    return any(code in _REFUSED for code in codes)


def _codes(answer: Mapping[str, Any], labels: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Every error code, with the names of what it is about: those of the innermost thing that has names."""
    labels = tuple(answer[name] for name in _LABELS if name in answer) or labels
    for name, value in answer.items():
        if name in _CODES:
            yield labels, value
        elif isinstance(value, Mapping):
            yield from _codes(value, labels)
        elif isinstance(value, list):
            for one in value:
                if isinstance(one, Mapping):
                    yield from _codes(one, labels)


def of_topic(*actions: Action) -> Needs:
    """These rights on the topic."""
    return lambda target, _: tuple(Need(action, Kind.TOPIC, target.topic) for action in actions)


def of_group(*actions: Action) -> Needs:
    """These rights on the group."""
    return lambda target, _: tuple(Need(action, Kind.GROUP, target.group) for action in actions)


def of_id(*actions: Action) -> Needs:
    """These rights on the transactional id."""
    return lambda target, _: tuple(Need(action, Kind.TRANSACTIONAL_ID, target.transactional_id) for action in actions)


def of_cluster(action: Action) -> Needs:
    """This right on the cluster."""
    return lambda _target, _: (Need(action, Kind.CLUSTER),)


def together(*needs: Needs) -> Needs:
    """All of them."""
    return lambda target, world: tuple(need for one in needs for need in one(target, world))


def nothing(_target: Target, _world: World) -> tuple[Need, ...]:
    """Whoever has a password may do it."""
    return ()


def single(body: Callable[[Target, World], Values]) -> Body:
    """Of a request about one target."""
    return lambda targets, world: body(targets[0], world)


def each(field: str, entry: Callable[[Target, World], Any], **others: Any) -> Body:
    """Of a request with a list of targets in this field."""
    return lambda targets, world: {field: [entry(target, world) for target in targets], **others}
