"""Select dead letters by filters: fields, times and offsets. Pure."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from fairlane_server.dead_letters.letters import Letter
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

    def takes(self, letter: Letter) -> bool:
        return (
            letter.place.offset in self.offsets
            and (self.since_ms is None or letter.died_at_ms >= self.since_ms)
            and (self.until_ms is None or letter.died_at_ms < self.until_ms)
            and (self.tenant is None or letter.tenant == self.tenant)
            and (self.model is None or letter.model == self.model)
            and (self.request_id is None or letter.request_id == self.request_id)
            and (self.exception is None or self.exception.lower() in (letter.exception or "").lower())
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
