"""Find the selected and the replayed letters in one pass over a dead-letter partition. Pure.

One bit per offset and set, because a dead-letter topic may hold millions: a million letters take 250 kB.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fairlane.dead_letters import Letter, ReplayMark
from fairlane_server.dead_letters.selection import Selection


class OffsetSet:
    """A set of offsets at or above ``base``."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._bits = bytearray()
        self._count = 0

    def add(self, offset: int) -> None:
        """Add an offset; one below the base is ignored."""
        index = offset - self._base
        if index < 0 or offset in self:
            return
        missing = index // 8 + 1 - len(self._bits)
        if missing > 0:
            self._bits.extend(bytes(missing))
        self._bits[index // 8] |= 1 << index % 8
        self._count += 1

    def discard(self, offset: int) -> None:
        """Remove an offset if it is present."""
        if offset in self:
            index = offset - self._base
            self._bits[index // 8] &= ~(1 << index % 8)
            self._count -= 1

    def __contains__(self, offset: int) -> bool:
        index = offset - self._base
        return 0 <= index < 8 * len(self._bits) and bool(self._bits[index // 8] & 1 << index % 8)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        """The offsets in order."""
        for index, byte in enumerate(self._bits):
            for bit in range(8):
                if byte & 1 << bit:
                    yield self._base + 8 * index + bit


@dataclass(slots=True)
class Survey:
    """One partition's letters, passed to ``take`` in log order.

    Attributes:
        selection: the filters.
        meant: offsets of the selected letters.
        replayed: offsets of letters, selected or not, that a mark names as replayed.
    """

    selection: Selection
    meant: OffsetSet
    replayed: OffsetSet

    @classmethod
    def begin(cls, selection: Selection, first_offset: int) -> "Survey":
        """Begin a survey of a partition that is read from this offset on."""
        return cls(selection, OffsetSet(first_offset), OffsetSet(first_offset))

    def take(self, found: Letter | ReplayMark) -> bool:
        """Add a letter or mark. Returns whether it is a selected letter."""
        if isinstance(found, ReplayMark):
            self.replayed.add(found.letter.offset)
            return False
        if not self.selection.takes(found):
            return False
        self.meant.add(found.place.offset)
        return True
