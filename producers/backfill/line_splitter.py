"""Splits blocks of bytes into records with their positions; skips records that are too long. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field

_NEWLINE = b"\n"
_QUOTE = b'"'


@dataclass(frozen=True, slots=True)
class Piece:
    """A line of text or a CSV record, without its newline. ``content`` is None if it is too long; ``end`` is the offset
    behind its newline."""

    content: bytes | None
    size_bytes: int
    end: int


@dataclass(slots=True)
class LineSplitter:
    """Splits at newlines; with ``quoted`` not at those between double quotes (RFC 4180).

    A record that is too long ends at the next newline, quoted or not: an unbalanced quote costs one record, not the
    rest of the file.
    """

    max_bytes: int
    position: int = 0
    quoted: bool = False
    _parts: list[bytes] = field(default_factory=list, init=False)
    _held: int = field(default=0, init=False)
    _skipped: int = field(default=0, init=False)
    _in_quotes: bool = field(default=False, init=False)

    def feed(self, block: bytes) -> Iterator[Piece]:
        """The records that end in this block."""
        begin = 0
        while (at := block.find(_NEWLINE, begin)) >= 0:
            self._hold(block[begin:at])
            begin = at + 1
            if self._in_quotes and not self._skipped:
                self._hold(_NEWLINE)
                continue
            yield self._ended(1)
        self._hold(block[begin:])

    def last(self) -> Piece | None:
        """The text after the last newline, if any. Nothing follows it."""
        return self._ended(0) if self._held or self._skipped else None

    def _hold(self, part: bytes) -> None:
        if not part:
            return
        if self.quoted and not self._skipped and part.count(_QUOTE) % 2:
            self._in_quotes = not self._in_quotes
        if self._skipped or self._held + len(part) > self.max_bytes:
            self._skipped += self._held + len(part)
            self._held = 0
            self._parts.clear()
            return
        self._held += len(part)
        self._parts.append(part)

    def _ended(self, newline_bytes: int) -> Piece:
        size = self._held + self._skipped
        self.position += size + newline_bytes
        content = None if self._skipped else b"".join(self._parts)
        self._parts.clear()
        self._held = self._skipped = 0
        self._in_quotes = False
        return Piece(content, size, self.position)
