"""Check ``patterns``: a tenant's own patterns (RE2) and denied words."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from fairlane_server.re2_patterns import matches
from inference_consumers.guardrails.check import CheckContext, Finding
from inference_consumers.guardrails.normalization import normalized
from inference_consumers.guardrails.spans import joined

PATTERN, DENIED_WORD = "pattern", "denied_word"
# A word, or one sign: "c++" is not found in "c".
_TOKEN = re.compile(r"\w+|[^\w\s]")

_Phrases = dict[str, tuple[tuple[str, ...], ...]]
"""Phrases by their first token; each is what follows it."""


class PatternsCheck:
    """Searches the normalized text. Denied words match whole words in any case; those of several words match across
    any white space. Takes time linear in the text for each pattern."""

    name = "patterns"

    def find(self, texts: Sequence[str], context: CheckContext) -> list[list[Finding]]:
        phrases = _phrases(context.denied_words)
        found: list[list[Finding]] = []
        for text in texts:
            plain = normalized(text)
            hits = [*_matches(plain.text, context.patterns), *_denied(plain.text, phrases)]
            found.append(joined(plain.original(hit) for hit in hits))
        return found


def _matches(text: str, patterns: Sequence[str]) -> Iterator[Finding]:
    for pattern in patterns:
        for start, end in matches(pattern, text):
            yield Finding(PATTERN, start, end, 1.0)


def _denied(text: str, phrases: _Phrases) -> Iterator[Finding]:
    if not phrases:
        return
    tokens = [(match[0].casefold(), match.start(), match.end()) for match in _TOKEN.finditer(text)]
    for place, (first, start, _) in enumerate(tokens):
        for rest in phrases.get(first, ()):
            following = tokens[place + 1 : place + 1 + len(rest)]
            if tuple(token for token, _, _ in following) == rest:
                yield Finding(DENIED_WORD, start, (following or tokens[place : place + 1])[-1][2], 1.0)


@lru_cache(maxsize=64)
def _phrases(words: tuple[str, ...]) -> _Phrases:
    found: dict[str, set[tuple[str, ...]]] = {}
    for word in words:
        tokens = tuple(match[0].casefold() for match in _TOKEN.finditer(normalized(word).text))
        if tokens:
            found.setdefault(tokens[0], set()).add(tokens[1:])
    return {first: tuple(rests) for first, rests in found.items()}
