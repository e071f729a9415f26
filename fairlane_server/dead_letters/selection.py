"""Select dead letters by filters, and find the selected and replayed ones in one pass over a partition. Pure.

One bit per offset and set, because a dead-letter topic may hold millions: a million letters take 250 kB.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from fairlane.records import SourceCoordinate
from fairlane_server.dead_letters.letters import Letter, ReplayMark
from fairlane_server.text import span_ms

_OFFSETS = re.compile(r"(?P<one>\d{1,18})|(?P<first>\d{1,18})?-(?P<last>\d{1,18})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets from ``first`` to ``last``, both included; ``last`` None means no end."""

    first: int = 0
    last: int | None = None

    def __contains__(self, offset: int) -> bool:
        return self.first <= offset and (self.last is None or offset <= self.last)


ALL_OFFSETS = OffsetRange()


@dataclass(frozen=True, slots=True)
class Selection:
    """Filters for letters; None accepts any. Times are when a letter was written, in milliseconds since the epoch: from
    ``since_ms``, and before ``until_ms``. ``exception`` is a part of the class name, case-insensitive."""

    tenant: str | None = None
    model: str | None = None
    exception: str | None = None
    request_id: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    offsets: OffsetRange = ALL_OFFSETS

    @property
    def is_everything(self) -> bool:
        return self == Selection()

    def takes(self, letter: Letter) -> bool:
        return (
            self.takes_place(letter.place, letter.died_at_ms)
            and (self.tenant is None or letter.tenant == self.tenant)
            and (self.model is None or letter.model == self.model)
            and (self.request_id is None or letter.request_id == self.request_id)
            and (self.exception is None or self.exception.lower() in (letter.exception or "").lower())
        )

    def takes_place(self, place: SourceCoordinate, died_at_ms: int) -> bool:
        return (
            place.offset in self.offsets
            and (self.since_ms is None or died_at_ms >= self.since_ms)
            and (self.until_ms is None or died_at_ms < self.until_ms)
        )


def parse_time(text: str, now_ms: int) -> int:
    """Milliseconds since the epoch, from a time in ISO 8601 (UTC if it names no zone) or an age: ``90s``, ``30m``,
    ``2h``, ``7d``. Raises ValueError, whose message says what is accepted."""
    if (ago_ms := span_ms(text)) is not None:
        return now_ms - ago_ms
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("neither a time (2026-01-31T12:00:00Z) nor an age (90s, 30m, 2h, 7d)") from None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return int(at.timestamp() * 1_000)


def parse_offsets(text: str) -> OffsetRange:
    """Parse ``12``, ``12-40``, ``12-`` or ``-40``. Raises ValueError, whose message says what is accepted."""
    found = _OFFSETS.fullmatch(text)
    if found is None or text == "-":
        raise ValueError("neither an offset (12) nor a range of them (12-40, 12-, -40)")
    if found["one"] is not None:
        return OffsetRange(int(found["one"]), int(found["one"]))
    first = 0 if found["first"] is None else int(found["first"])
    last = None if found["last"] is None else int(found["last"])
    if last is not None and last < first:
        raise ValueError(f"ends at {last}, before it begins")
    return OffsetRange(first, last)


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
        for index, byte in enumerate(self._bits):
            for bit in range(8):
                if byte & 1 << bit:
                    yield self._base + 8 * index + bit


@dataclass(slots=True)
class Survey:
    """One partition's letters, passed to ``take`` in log order: offsets of the selected ones, and of all that a mark
    names as replayed."""

    selection: Selection
    meant: OffsetSet
    replayed: OffsetSet

    @classmethod
    def begin(cls, selection: Selection, first_offset: int) -> "Survey":
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
