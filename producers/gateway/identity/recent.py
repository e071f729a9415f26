"""What a store said of late: to be believed for a moment, and a while longer when the store is away. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Freshness:
    """For how long, in milliseconds from when the store was asked.

    Attributes:
        fresh_ms: it need not be asked again.
        grace_ms: what it said counts if it cannot be asked.
    """

    fresh_ms: int
    grace_ms: int


class Recent(Generic[ValueT]):
    """At most ``most`` answers; who was asked for least recently goes first."""

    def __init__(self, freshness: Freshness, most: int) -> None:
        self._freshness = freshness
        self._most = most
        self._known: OrderedDict[Hashable, tuple[ValueT, int]] = OrderedDict()

    def fresh(self, name: Hashable, now_ms: int) -> ValueT | None:
        """What need not be asked again."""
        return self.within(name, now_ms, self._freshness.fresh_ms)

    def in_grace(self, name: Hashable, now_ms: int) -> ValueT | None:
        """What counts if the store cannot be asked."""
        return self.within(name, now_ms, self._freshness.grace_ms)

    def within(self, name: Hashable, now_ms: int, span_ms: int) -> ValueT | None:
        """What the store said no longer ago than this."""
        known = self._known.get(name)
        if known is None:
            return None
        value, asked_at_ms = known
        return value if now_ms - asked_at_ms < span_ms else None

    def put(self, name: Hashable, value: ValueT, asked_at_ms: int) -> None:
        """The store says so; it was asked then."""
        self._known[name] = (value, asked_at_ms)
        self._known.move_to_end(name)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def forget(self, name: Hashable) -> None:
        """The store knows no such thing."""
        self._known.pop(name, None)

    def __len__(self) -> int:
        return len(self._known)
