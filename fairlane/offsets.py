"""Track which records of a partition are done, and encode that in the committed offset.

Work finishes out of order. A commit therefore carries the first undone offset and, in the offset's metadata, a bitmap
of the done offsets beyond it: a successor skips exactly those. Pure: no Kafka, no clock.
"""

import base64
import re
from bisect import bisect_left, insort
from collections.abc import Iterable
from enum import Enum

from fairlane.frozen import frozen_dataclass

MAX_SPAN = 20_000
"""Offsets from the first undone to the newest delivered; beyond it the partition is paused."""

MAX_METADATA_CHARS = 4_000
"""Below the broker's limit ``offset.metadata.max.bytes``, by default 4,096."""

_BITMAP_ONLY, _WITH_TOPIC_ID = "1", "2"
_TOPIC_ID_CHARS = 22
_TOPIC_ID = re.compile(r"[A-Za-z0-9_-]{22}")
"""A UUID as Kafka's tools print it: URL-safe base64 without padding."""
_MAX_BITMAP_BYTES = (MAX_METADATA_CHARS - len("2::") - _TOPIC_ID_CHARS) // 4 * 3
_MAX_READ_BITMAP_BYTES = (MAX_METADATA_CHARS - len("1:")) // 4 * 3
"""For reading: format 1 has no topic id and so a longer bitmap."""
_MAX_BITMAP_BITS = _MAX_BITMAP_BYTES * 8


class MetadataError(ValueError):
    """The metadata of a committed offset has none of our formats."""


@frozen_dataclass(frozen=True, slots=True)
class CommitPoint:
    """The commit of a partition: every delivered offset below ``offset`` is done, and so is ``offset + i`` for every
    set bit ``i`` of ``done_beyond``. ``topic_id`` is "" when unknown."""

    offset: int
    done_beyond: int = 0
    topic_id: str = ""

    def __repr__(self) -> str:
        # Hexadecimal: Python refuses to convert long integers to decimal.
        topic = f", topic_id={self.topic_id!r}" if self.topic_id else ""
        return f"CommitPoint(offset={self.offset}, done_beyond={self.done_beyond:#x}{topic})"

    @property
    def metadata(self) -> str:
        """Topic id and bitmap: ``2:<topic id>:<bitmap>``; without an id ``1:<bitmap>``, or nothing when no offset
        beyond is done."""
        size = (self.done_beyond.bit_length() + 7) // 8
        bitmap = base64.b64encode(self.done_beyond.to_bytes(size, "little")).decode("ascii")
        if self.topic_id:
            return f"{_WITH_TOPIC_ID}:{self.topic_id}:{bitmap}"
        return f"{_BITMAP_ONLY}:{bitmap}" if bitmap else ""

    def cut_at(self, end: int) -> "CommitPoint":
        """The same without done offsets from ``end`` on: a log truncated there reuses those offsets."""
        reach = max(0, end - self.offset)
        return CommitPoint(self.offset, self.done_beyond & ((1 << reach) - 1), self.topic_id)

    @classmethod
    def parse(cls, offset: int, metadata: str | None) -> "CommitPoint":
        """Decode an offset and its metadata. Raises MetadataError."""
        if not metadata:
            return cls(offset)
        form, _, content = metadata.partition(":")
        topic_id = ""
        if form == _WITH_TOPIC_ID:
            topic_id, separator, content = content.partition(":")
            if not separator or _TOPIC_ID.fullmatch(topic_id) is None:
                raise MetadataError(f"offset metadata of {len(metadata)} characters has no topic id")
        elif form != _BITMAP_ONLY:
            raise MetadataError(f"offset metadata of {len(metadata)} characters has an unknown form")
        try:
            bitmap = base64.b64decode(content, validate=True)
        except ValueError as error:  # wrong alphabet, or not ASCII
            raise MetadataError(f"offset metadata of {len(metadata)} characters is no base64: {error}") from None
        if len(bitmap) > _MAX_READ_BITMAP_BYTES:
            raise MetadataError(f"a bitmap of {len(bitmap)} bytes is longer than any of ours")
        return cls(offset, int.from_bytes(bitmap, "little"), topic_id)


class Flow(Enum):
    """Change to make to the fetching of a partition."""

    KEEP = "keep"
    PAUSE = "pause"
    RESUME = "resume"


class OffsetTracker:
    """The delivered records of one partition during one assignment.

    Two bitmaps relative to ``_base`` hold the state: delivered and undone, and done. Gaps (transaction markers, aborted
    records, retention) are in neither, so a gap before a delivered record counts as done. Integers are the fastest
    bitmap Python has: 20,000 offsets are 2.5 kB, and every step is one operation on them. They never exceed what the
    metadata can carry; offsets delivered farther ahead are kept in a list until the first undone offset has moved.

    Records arrive in offset order; a seek may restart anywhere from the first undone offset on.
    """

    def __init__(
        self, committed: CommitPoint | None = None, max_span: int = MAX_SPAN, topic_id: str | None = None
    ) -> None:
        """``committed`` is a predecessor's commit; None when the group has none. ``topic_id`` is committed with every
        offset; None takes that of ``committed``. Raises ValueError for a ``max_span`` out of bounds."""
        if not 2 <= max_span <= MAX_SPAN:
            raise ValueError(f"max_span must be from 2 to {MAX_SPAN}, not {max_span}")
        self._max_span = max_span
        self._topic_id = topic_id if topic_id is not None else "" if committed is None else committed.topic_id
        self._base = committed.offset if committed is not None else 0
        self._undone = 0
        self._done = committed.done_beyond if committed is not None else 0
        self._far: list[int] = []
        """Undone offsets beyond the bitmap's reach, ascending; empty while nothing nearer is undone."""
        self._position: int | None = committed.offset if committed is not None else None
        self._paused = False

    @property
    def first_undone(self) -> int | None:
        """The oldest undone offset, or else the next offset to be delivered. None when neither is known."""
        oldest = self.oldest_undone
        return self._position if oldest is None else oldest

    @property
    def oldest_undone(self) -> int | None:
        """The oldest delivered offset that is not done; None when all are done."""
        return self._lowest(self._undone)

    @property
    def span(self) -> int:
        """Offsets from the first undone to the newest delivered, both included."""
        oldest = self.oldest_undone
        return 0 if oldest is None or self._position is None else self._position - oldest

    @property
    def escalated(self) -> bool:
        """Whether the partition is more than half way to being paused: its oldest item should then go first."""
        return self.span > self._max_span // 2

    def deliver(self, offset: int) -> bool:
        """Register a delivered record. Returns False when it must be skipped: done, or delivered before."""
        if self._position is None:
            self._base = self._position = offset
        elif offset < self._base:
            return False
        if not self._undone:
            # No earlier record is undone, so the base moves here and a gap of any size costs no bitmap.
            self._rebase(offset)
        self._position = max(self._position, offset + 1)
        distance = offset - self._base
        if self._done >> distance & 1 or self.is_undone(offset):
            return False
        if distance < _MAX_BITMAP_BITS:
            self._undone |= 1 << distance
        else:
            insort(self._far, offset)
        return True

    def advance(self, position: int) -> None:
        """Note that the log was read up to ``position``: everything before was delivered or is a gap."""
        if self._position is None:
            self._base = self._position = position
        self._position = max(self._position, position)

    def is_undone(self, offset: int) -> bool:
        """Whether this offset was delivered and is not done."""
        distance = offset - self._base
        if distance < _MAX_BITMAP_BITS:
            return distance >= 0 and bool(self._undone >> distance & 1)
        index = bisect_left(self._far, offset)
        return index < len(self._far) and self._far[index] == offset

    def can_settle(self, offset: int) -> bool:
        """Whether this offset is undone and within the reach of the metadata's bitmap."""
        return offset - self._base < _MAX_BITMAP_BITS and self.is_undone(offset)

    def commit_point(self, settling: Iterable[int] = ()) -> CommitPoint | None:
        """The commit if the offsets in ``settling`` were done as well; None before the first record.

        Changes nothing. Raises ValueError for an offset that cannot be settled now.
        """
        if self._position is None:
            return None
        settling_mask = self._mask(settling)
        first_undone = self._lowest(self._undone & ~settling_mask)
        offset = self._position if first_undone is None else first_undone
        return CommitPoint(offset, (self._done | settling_mask) >> (offset - self._base), self._topic_id)

    def settle(self, offsets: Iterable[int]) -> None:
        """Mark committed offsets as done. Raises ValueError for an offset that cannot be settled now."""
        mask = self._mask(offsets)
        self._undone &= ~mask
        self._done |= mask
        first_undone = self.first_undone
        if first_undone is not None:
            self._rebase(first_undone)

    def flow(self) -> Flow:
        """Whether to pause fetching (beyond the maximum span), resume it (below half of it), or change nothing."""
        if not self._paused and self.span > self._max_span:
            self._paused = True
            return Flow.PAUSE
        if self._paused and self.span < self._max_span // 2:
            self._paused = False
            return Flow.RESUME
        return Flow.KEEP

    @property
    def paused(self) -> bool:
        """Whether this partition is paused. If the client resumed it by itself, it must be paused again."""
        return self._paused

    def _lowest(self, undone: int) -> int | None:
        """First undone offset if ``undone`` were the bitmap."""
        if undone:
            return self._base + (undone & -undone).bit_length() - 1
        return self._far[0] if self._far else None

    def _mask(self, offsets: Iterable[int]) -> int:
        mask = 0
        for offset in offsets:
            if not self.can_settle(offset):
                raise ValueError(f"offset {offset} is not undone, or out of the bitmap's reach")
            mask |= 1 << (offset - self._base)
        return mask

    def _rebase(self, base: int) -> None:
        shift = base - self._base
        if shift <= 0:
            return
        self._undone >>= shift
        self._done >>= shift
        self._base = base
        reached = bisect_left(self._far, base + _MAX_BITMAP_BITS)
        for offset in self._far[:reached]:
            self._undone |= 1 << (offset - base)
        del self._far[:reached]
