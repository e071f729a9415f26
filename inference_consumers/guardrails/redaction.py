"""Replace what was found in a text by the names of its types."""

from collections.abc import Sequence

from inference_consumers.guardrails.check import Finding


def redacted(text: str, findings: Sequence[Finding]) -> str:
    """The text with each finding replaced by its type in brackets, as "[EMAIL_ADDRESS]".

    Findings are cut to the text. Those that overlap or touch are one: the type is that of the highest score, then of
    the longest, then the first by name.
    """
    parts: list[str] = []
    done = 0
    for start, end, kind in _merged(findings, len(text)):
        parts += (text[done:start], f"[{kind}]")
        done = end
    parts.append(text[done:])
    return "".join(parts)


def _merged(findings: Sequence[Finding], length: int) -> list[tuple[int, int, str]]:
    spans: list[tuple[int, int, tuple[float, int, str]]] = []
    for one in findings:
        start, end = max(0, one.start), min(length, one.end)
        if start < end:
            spans.append((start, end, (-one.score, start - end, one.type)))
    merged: list[tuple[int, int, tuple[float, int, str]]] = []
    for start, end, rank in sorted(spans):
        if merged and start <= merged[-1][1]:
            first, last, best = merged[-1]
            merged[-1] = (first, max(last, end), min(best, rank))
        else:
            merged.append((start, end, rank))
    return [(start, end, rank[2]) for start, end, rank in merged]
