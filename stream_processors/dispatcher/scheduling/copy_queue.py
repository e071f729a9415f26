"""Copies that wait to run for evaluation, by pool and version, each in order of arrival. Pure.

They are no part of the fair queue: it serves them nothing, and nothing that it predicts counts them. The scheduler
gives them what is left when no request of a tenant waits for their pool (``Scheduler.spare_turns``).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stream_processors.dispatcher.scheduling.backlog_statistics import Schedulable

ItemT = TypeVar("ItemT", bound=Schedulable)

_Line = OrderedDict[Hashable, ItemT]


@dataclass(slots=True)
class CopyQueue(Generic[ItemT]):
    """For one thread. All calls are O(1) but those that look at every copy."""

    _lines: dict[str, OrderedDict[str, _Line[ItemT]]] = field(default_factory=dict)
    """By pool and version. The version that was served last is last, so that each of several gets its turn."""
    _requests: int = 0
    _bytes: int = 0

    def push(self, item: ItemT) -> None:
        line = self._lines.setdefault(item.pool, OrderedDict()).setdefault(item.version_key, OrderedDict())
        if line.setdefault(item.claim, item) is item:
            self._requests += 1
            self._bytes += item.size_bytes

    def pools(self) -> list[str]:
        """The pools that copies wait for."""
        return list(self._lines)

    def count(self, pool: str) -> int:
        """The number of copies that wait for a pool. O(versions)."""
        return sum(map(len, self._lines.get(pool, {}).values()))

    def heads(self, pool: str) -> Iterator[ItemT]:
        """The first copy of each version that waits for a pool, the version first whose last turn is longest ago."""
        for line in list(self._lines.get(pool, {}).values()):
            yield next(iter(line.values()))

    def pop(self, item: ItemT) -> None:
        """Remove a copy whose turn has come."""
        self._remove(item)
        versions = self._lines.get(item.pool)
        if versions is not None and item.version_key in versions:
            versions.move_to_end(item.version_key)

    def take(self, wanted: Callable[[ItemT], bool]) -> list[ItemT]:
        """Remove and return the matching copies. O(waiting)."""
        taken = [item for item in self if wanted(item)]
        for item in taken:
            self._remove(item)
        return taken

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return self._requests

    def __iter__(self) -> Iterator[ItemT]:
        for versions in self._lines.values():
            for line in versions.values():
                yield from line.values()

    def _remove(self, item: ItemT) -> None:
        versions = self._lines[item.pool]
        line = versions[item.version_key]
        del line[item.claim]
        self._requests -= 1
        self._bytes -= item.size_bytes
        if not line:
            del versions[item.version_key]
        if not versions:
            del self._lines[item.pool]
