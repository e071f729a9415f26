"""Check ``leaked_prompt``: runs of words that an answer shares with the system prompt.

Shingles of words are compared (Broder 1997, "On the resemblance and containment of documents"); case, punctuation and
characters that show nothing do not matter. A paraphrase or a translation is not found.
"""

from collections.abc import Sequence

from inference_consumers.guardrails.check import CheckContext, Finding
from inference_consumers.guardrails.normalization import NormalizedText, normalized
from inference_consumers.guardrails.words import Word, words

LEAKED_PROMPT = "leaked_prompt"
_SHINGLE_WORDS = 6
_LEAST_RUN_WORDS = 12
"""So long a run is a leak by itself: shorter ones are common phrases ("You are a helpful assistant that")."""
_LEAST_PART = 0.5
"""Of the prompt's shingles; an answer with so many of them leaks it, however short the runs."""
_LEAST_WORDS = 4
"""A shorter prompt cannot be distinguished from common phrases."""

_Shingle = tuple[str, ...]


class LeakedPromptCheck:
    """The score is the part of the prompt's shingles that the answer has. Linear in both lengths."""

    name = LEAKED_PROMPT

    def find(self, texts: Sequence[str], context: CheckContext) -> list[list[Finding]]:
        prompt = [word.text for word in words(normalized(context.system_prompt).text)]
        if len(prompt) < _LEAST_WORDS:
            return [[] for _ in texts]
        size = min(_SHINGLE_WORDS, len(prompt))
        shingles = {tuple(prompt[place : place + size]) for place in range(len(prompt) - size + 1)}
        return [_find(normalized(text), shingles, size) for text in texts]


def _find(plain: NormalizedText, shingles: set[_Shingle], size: int) -> list[Finding]:
    answer = words(plain.text)
    seen: set[_Shingle] = set()
    runs: list[tuple[int, int]] = []
    for place in range(len(answer) - size + 1):
        shingle = tuple(word.text for word in answer[place : place + size])
        if shingle not in shingles:
            continue
        seen.add(shingle)
        if runs and place <= runs[-1][1]:
            runs[-1] = (runs[-1][0], place + size)
        else:
            runs.append((place, place + size))
    part = len(seen) / len(shingles)
    return [
        _finding(plain, answer[first], answer[last - 1], part)
        for first, last in runs
        if part >= _LEAST_PART or last - first >= _LEAST_RUN_WORDS
    ]


def _finding(plain: NormalizedText, first: Word, last: Word, part: float) -> Finding:
    return plain.original(Finding(LEAKED_PROMPT, first.start, last.end, round(part, 3)))
