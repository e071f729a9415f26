"""Arithmetic of findings: joining, and cutting long texts into pieces that overlap."""

from collections.abc import Iterable, Iterator

from inference_consumers.guardrails.check import Finding


def joined(findings: Iterable[Finding]) -> list[Finding]:
    """Findings by their start; those of one type that overlap or touch are one, with the highest score."""
    merged: list[Finding] = []
    last_of: dict[str, int] = {}
    for one in sorted(findings, key=lambda found: (found.start, found.end, found.type)):
        place = last_of.get(one.type)
        if place is not None and one.start <= merged[place].end:
            before = merged[place]
            merged[place] = Finding(one.type, before.start, max(before.end, one.end), max(before.score, one.score))
        else:
            last_of[one.type] = len(merged)
            merged.append(one)
    return merged


def shifted(finding: Finding, by: int) -> Finding:
    return Finding(finding.type, finding.start + by, finding.end + by, finding.score)


def pieces(text: str, most: int, overlap: int) -> Iterator[tuple[int, str]]:
    """The start and the text of each piece of at most ``most`` characters. Each begins ``overlap`` characters or more
    before the end of the one before it, at the beginning of a word if there is one near. Every character is in one; of
    what is not longer than ``overlap``, one piece has all, unless it has no space to begin at.
    """
    if not 0 < 2 * overlap < most:
        raise ValueError(f"pieces of {most} characters cannot overlap by {overlap}")
    start = 0
    while True:
        end = start + most
        yield start, text[start:end]
        if end >= len(text):
            return
        start = next_start(text, end, overlap)


def next_start(text: str, end: int, overlap: int) -> int:
    """Where the piece behind one that ends there begins. The piece before must be longer than twice the overlap."""
    # Within another overlap's length, so that each piece brings something new.
    space = text.rfind(" ", end - 2 * overlap, end - overlap)
    return space + 1 if space >= 0 else end - overlap
