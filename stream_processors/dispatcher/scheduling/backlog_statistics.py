"""Shares of the tenants, and running sums of the backlog per class and tenant. Pure."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from math import inf
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from fairlane.outcomes import Priority
from fairlane.ownership import Claim
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


_TOKENS = attrgetter("backlog.tokens")


class Queueable(Protocol):
    """The fields of a request that a queue uses. The claim identifies it."""

    @property
    def claim(self) -> Hashable: ...
    @property
    def tenant(self) -> str: ...
    @property
    def group(self) -> str:
        """The tenant's group; empty for none."""
        ...

    @property
    def priority_class(self) -> str: ...
    @property
    def cost_tokens(self) -> int:
        """Estimated prompt tokens plus twice the output tokens."""
        ...

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def deadline_at_ms(self) -> int: ...
    @property
    def is_backfill(self) -> bool: ...


class Schedulable(Queueable, Protocol):
    """The fields of a request that the scheduler uses."""

    @property
    def claim(self) -> Claim: ...
    @property
    def pool(self) -> str: ...
    @property
    def model_name(self) -> str: ...
    @property
    def version_key(self) -> str:
        """``model/version``, as consumers report what they have loaded."""
        ...

    @property
    def request_id(self) -> str: ...
    @property
    def submitted_at_ms(self) -> int: ...
    @property
    def latency_target_ms(self) -> int: ...
    @property
    def cautious_cost_tokens(self) -> int:
        """``cost_tokens`` with an answer that nine of ten such requests do not exceed."""
        ...

    @property
    def input_bytes(self) -> int: ...
    @property
    def most_output_tokens(self) -> int:
        """The longest answer that the request and its model allow."""
        ...


ItemT = TypeVar("ItemT", bound=Queueable)


@dataclass(slots=True)
class Backlog:
    """Queued requests, their cost tokens and their bytes. ``backfill_tokens``: of one tenant's, those of backfill."""

    requests: int = 0
    tokens: int = 0
    size_bytes: int = 0
    backfill_tokens: int = 0


class _ClassSums:
    __slots__ = ("backlog", "tenants", "weight")

    def __init__(self) -> None:
        self.backlog = Backlog()
        self.tenants: dict[str, TenantSums] = {}
        """Tenants with queued requests only."""
        self.weight = 0.0
        """Sum of their weights."""


class TenantSums:
    """Running sums of one tenant in one class; part of the class while the tenant has queued requests."""

    __slots__ = ("backlog", "of_class", "tenant")

    def __init__(self, tenant: str, of_class: _ClassSums) -> None:
        self.backlog = Backlog()
        self.tenant = tenant
        self.of_class = of_class


class BacklogStatistics(Generic[ItemT]):
    """Running sums by class and tenant, and the tenants' shares. All but ``busiest`` is O(1)."""

    def __init__(self, classes: Iterable[str]) -> None:
        self._classes = {name: _ClassSums() for name in classes}
        self._shares: dict[str, Share] = {}
        self._leaving: set[str] = set()

    def _sums(self, tenant: str, priority_class: str) -> TenantSums:
        """The sums for ``_add`` and ``_subtract``. Raises ValueError for an unknown class."""
        of_class = self._classes.get(priority_class)
        if of_class is None:
            raise ValueError(f"unknown class: {priority_class}")
        return of_class.tenants.get(tenant) or TenantSums(tenant, of_class)

    def _add(self, sums: TenantSums, item: Queueable) -> None:
        of_class, own = sums.of_class, sums.backlog
        everything = of_class.backlog
        if not own.requests:
            of_class.tenants[sums.tenant] = sums
            of_class.weight += self.share(sums.tenant).weight
        cost_tokens, size_bytes = item.cost_tokens, item.size_bytes
        own.requests += 1
        own.tokens += cost_tokens
        if item.is_backfill:
            own.backfill_tokens += cost_tokens
        own.size_bytes += size_bytes
        everything.requests += 1
        everything.tokens += cost_tokens
        everything.size_bytes += size_bytes

    def _subtract(self, sums: TenantSums, item: Queueable) -> bool:
        """Count a request that left. True when its tenant is to be forgotten and has none left."""
        of_class, own = sums.of_class, sums.backlog
        everything = of_class.backlog
        cost_tokens, size_bytes = item.cost_tokens, item.size_bytes
        own.requests -= 1
        own.tokens -= cost_tokens
        if item.is_backfill:
            own.backfill_tokens -= cost_tokens
        own.size_bytes -= size_bytes
        everything.requests -= 1
        everything.tokens -= cost_tokens
        everything.size_bytes -= size_bytes
        if own.requests:
            return False
        tenant = sums.tenant
        del of_class.tenants[tenant]
        # Reset to zero, so that no rounding error outlives a backlog.
        of_class.weight = of_class.weight - self.share(tenant).weight if of_class.tenants else 0.0
        return tenant in self._leaving and not self.is_waiting(tenant)

    def share(self, tenant: str) -> Share:
        return self._shares.get(tenant, DEFAULT_SHARE)

    def _keep_share(self, tenant: str, share: Share | None) -> bool:
        """Set the share, or with None forget it; False when it is kept until nothing of the tenant is queued."""
        if share is None and self.is_waiting(tenant):
            self._leaving.add(tenant)
            return False
        self._leaving.discard(tenant)
        added_weight = (share or DEFAULT_SHARE).weight - self.share(tenant).weight
        if share is None:
            self._shares.pop(tenant, None)
        else:
            self._shares[tenant] = share
        for of_class in self._classes.values():
            if tenant in of_class.tenants:
                of_class.weight += added_weight
        return True

    def is_waiting(self, tenant: str) -> bool:
        return any(tenant in of_class.tenants for of_class in self._classes.values())

    def backlogged_weight(self, priority_class: str) -> float:
        """Sum of the weights of the tenants with queued requests in this class."""
        of_class = self._classes.get(priority_class)
        return 0.0 if of_class is None else of_class.weight

    def waiting(self, tenant: str, priority_class: str) -> Backlog:
        """A live object."""
        of_class = self._classes.get(priority_class)
        sums = None if of_class is None else of_class.tenants.get(tenant)
        return Backlog() if sums is None else sums.backlog

    def waiting_in_class(self, priority_class: str) -> Backlog:
        """A live object."""
        of_class = self._classes.get(priority_class)
        return Backlog() if of_class is None else of_class.backlog

    @property
    def total(self) -> Backlog:
        requests = tokens = size_bytes = 0
        for of_class in self._classes.values():
            backlog = of_class.backlog
            requests += backlog.requests
            tokens += backlog.tokens
            size_bytes += backlog.size_bytes
        return Backlog(requests, tokens, size_bytes)

    def busiest(self, count: int) -> list[tuple[str, int]]:
        """At most ``count`` tenants with queued requests, each with its tokens in all classes, most first. A tenant
        that is among the first ``count`` of no class is left out: the one walk over all tenants is a comparison
        each."""
        tokens: Counter[str] = Counter()
        classes = [of_class.tenants for of_class in self._classes.values()]
        for tenants in classes:
            for sums in nlargest(count, tenants.values(), key=_TOKENS):
                tokens[sums.tenant] = sum(
                    found[sums.tenant].backlog.tokens for found in classes if sums.tenant in found
                )
        return tokens.most_common(count)


def checked_class_weights(weights: Mapping[str, float], known: Iterable[str]) -> dict[str, float]:
    """The positive ``weights``: a class of weight 0 keeps its weight. Raises ValueError for an unknown class and for a
    weight that is negative or not finite."""
    if unknown := weights.keys() - set(known):
        raise ValueError(f"unknown classes: {', '.join(sorted(unknown))}")
    return {name: checked_weight(name, weight) for name, weight in weights.items() if weight != 0}
