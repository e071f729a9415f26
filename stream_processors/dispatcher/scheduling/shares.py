"""A tenant's share: its weight, and the groups that divide it. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from fairlane.outcomes import Priority
from fairlane.records import TenantGroup

DEFAULT_CLASS_WEIGHTS: Mapping[str, float] = {
    Priority.HIGH.value: 8.0,
    Priority.NORMAL.value: 3.0,
    Priority.LOW.value: 1.0,
}

NO_GROUP = ""


def checked_weight(name: str, weight: float) -> float:
    """The weight. Raises ValueError unless it is positive and finite."""
    if not 0.0 < weight < inf:
        raise ValueError(f"{name}: a weight must be positive and finite, not {weight}")
    return weight


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's weight within its class, and its groups, which divide the tenant's service by their weights.

    Requests without a group, or of an unknown one, count as one more group of weight 1 on the first level; requests of
    a group that has groups below it count as one more of those.

    Raises:
        ValueError: a weight that is not positive and finite, a group named twice or not at all, a parent that is not
            among the groups, or a cycle.
    """

    weight: float = 1.0
    groups: tuple[TenantGroup, ...] = ()

    def __post_init__(self) -> None:
        checked_weight("tenant", self.weight)
        parents = {group.group: group.parent or NO_GROUP for group in self.groups}
        if len(parents) < len(self.groups) or NO_GROUP in parents:
            raise ValueError("groups need a name each")
        for group in self.groups:
            checked_weight(f"group {group.group}", group.weight)
            above, seen = parents[group.group], {group.group}
            while above != NO_GROUP:
                if above in seen:
                    raise ValueError(f"group {group.group}: its parents form a cycle")
                if above not in parents:
                    raise ValueError(f"group {group.group}: its parent {above} is not a group of this tenant")
                seen.add(above)
                above = parents[above]

    @property
    def structure(self) -> frozenset[tuple[str, str]]:
        """Every group with its parent, without weights."""
        return frozenset((group.group, group.parent or NO_GROUP) for group in self.groups)


DEFAULT_SHARE = Share()
