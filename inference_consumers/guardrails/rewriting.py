"""A text whose parts were replaced, with the place of each part in the text it was made from. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inference_consumers.guardrails.check import Finding


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of the text, made from the characters [start, end) of the original. Only a part that was not replaced can
    be divided."""

    start: int
    end: int
    text: str
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Rewriting:
    """A text after any number of redactions."""

    pieces: tuple[_Piece, ...]
    text: str

    @classmethod
    def of(cls, original: str) -> "Rewriting":
        """The original as it is."""
        return cls((_Piece(0, len(original), original),), original)

    def redacted(self, findings: Sequence[Finding]) -> "Rewriting":
        """With each of these findings in ``text`` replaced by its type in brackets, as "[EMAIL_ADDRESS]".

        Findings are cut to the text. Those that overlap or touch are one: the type is that of the highest score, then
        of the longest, then the first by name.
        """
        groups = _groups(findings, len(self.text))
        if not groups:
            return self
        pieces: list[_Piece] = []
        waiting = list(reversed(_placed(self.pieces)))
        for group in groups:
            start, end = group[0].start, max(one.end for one in group)
            while waiting and waiting[-1][0] + len(waiting[-1][1].text) <= start:
                pieces.append(waiting.pop()[1])
            taken: list[_Piece] = []
            while waiting and waiting[-1][0] < end:
                at, piece = waiting.pop()
                if piece.replaced:
                    taken.append(piece)
                    continue
                before, inside, after = _divided(piece, max(0, start - at), end - at)
                pieces += before
                taken.append(inside)
                waiting += [(at + inside.end - piece.start, rest) for rest in after]
            # Nothing is taken by a finding in a replaced part that a finding before it took whole.
            if taken:
                pieces.append(_Piece(taken[0].start, taken[-1].end, f"[{_type_of(group)}]", replaced=True))
        pieces += [piece for _, piece in reversed(waiting)]
        return Rewriting(tuple(pieces), "".join(piece.text for piece in pieces))

    @property
    def replacements(self) -> frozenset[str]:
        """What parts were replaced by."""
        return frozenset(piece.text for piece in self.pieces if piece.replaced)

    @property
    def original_length(self) -> int:
        """Characters of the original."""
        return self.pieces[-1].end

    def whole_until(self, position: int) -> int:
        """The last place in the original, at most ``position``, that lies within no replaced part."""
        for piece in self.pieces:
            if piece.replaced and piece.start < position < piece.end:
                return piece.start
        return position

    def between(self, start: int, end: int) -> str:
        """The text made from the characters [start, end) of the original, which begin and end within no replaced part,
        or which the caller has the beginning of already."""
        if start >= end:
            return ""
        parts: list[str] = []
        for piece in self.pieces:
            if piece.end <= start or piece.start >= end:
                continue
            low, high = max(start, piece.start) - piece.start, min(end, piece.end) - piece.start
            parts.append(piece.text if piece.replaced else piece.text[low:high])
        return "".join(parts)


def _divided(piece: _Piece, low: int, high: int) -> tuple[list[_Piece], _Piece, list[_Piece]]:
    """What is before [low, high) of a piece, in it, and behind it."""
    high = min(high, len(piece.text))

    def part(first: int, last: int) -> _Piece:
        return _Piece(piece.start + first, piece.start + last, piece.text[first:last])

    before = [part(0, low)] if low else []
    return before, part(low, high), [part(high, len(piece.text))] if high < len(piece.text) else []


def _placed(pieces: Sequence[_Piece]) -> list[tuple[int, _Piece]]:
    """The pieces with their places in the text."""
    placed, at = [], 0
    for piece in pieces:
        placed.append((at, piece))
        at += len(piece.text)
    return placed


def _type_of(group: Sequence[Finding]) -> str:
    return min((-one.score, one.start - one.end, one.type) for one in group)[2]


def _groups(findings: Sequence[Finding], length: int) -> list[list[Finding]]:
    """Findings that overlap or touch, in order; cut to the text."""
    cut = [replace(one, start=max(0, one.start), end=min(length, one.end)) for one in findings]
    groups: list[list[Finding]] = []
    end = -1
    for one in sorted((one for one in cut if one.start < one.end), key=lambda one: (one.start, one.end)):
        if groups and one.start <= end:
            groups[-1].append(one)
        else:
            groups.append([one])
        end = max(end, one.end)
    return groups
