"""When a reader that began somewhere has read what was there at its start. Pure.

Judged by positions: librdkafka tells of the end of a partition only after an empty fetch, which never comes where
something is always written. It still has to be listened to, for markers of transactions at the end are no records.
"""

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

PlaceT = TypeVar("PlaceT", bound=Hashable)


class CatchUp(Generic[PlaceT]):
    """``starts`` and ``ends``: by partition, the first offset to be read, and the one after the last that is there."""

    def __init__(self, starts: Mapping[PlaceT, int], ends: Mapping[PlaceT, int]) -> None:
        self._behind = {place: end for place, end in ends.items() if starts[place] < end}

    @property
    def is_done(self) -> bool:
        return not self._behind

    def reached(self, place: PlaceT, position: int) -> None:
        """Everything before this position was read."""
        if place in self._behind and position >= self._behind[place]:
            del self._behind[place]

    def ended(self, place: PlaceT) -> None:
        """There is no more, for now."""
        self._behind.pop(place, None)

    def moved(self, place: PlaceT, end: int) -> None:
        """The log ends elsewhere: it was replaced by another."""
        if place in self._behind:
            self._behind[place] = end
