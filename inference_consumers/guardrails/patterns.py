"""Check ``patterns``: a tenant's own patterns (RE2) and denied words."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from fairlane_server.re2_patterns import MOST_MATCHES, matches
from inference_consumers.guardrails.check import CheckContext, Finding
from inference_consumers.guardrails.normalization import normalized
from inference_consumers.guardrails.spans import joined

PATTERN, DENIED_WORD = "pattern", "denied_word"
# A word, or one sign: "c++" is not found in "c".
_TOKEN = re.compile(r"\w+|[^\w\s]")

_Token = tuple[str, int, int]
"""In lower case, with its start and end."""


class _Node(dict[str, "_Node"]):
    """What may follow a sequence of tokens in a denied phrase: a node of a trie."""

    is_phrase = False
    """Whether the sequence is a phrase."""


class PatternsCheck:
    """Searches the normalized text. Denied words match whole words in any case; those of several words match across
    any white space. Takes time linear in the text for each pattern, and for the longest phrase."""

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


def _denied(text: str, phrases: _Node) -> Iterator[Finding]:
    """The longest phrase that begins at each place. Behind MOST_MATCHES the rest of the text is one."""
    if not phrases:
        return
    tokens = [(match[0].casefold(), match.start(), match.end()) for match in _TOKEN.finditer(text)]
    count = 0
    for place, (_, start, _) in enumerate(tokens):
        end = _longest(tokens, place, phrases)
        if end is None:
            continue
        count += 1
        if count > MOST_MATCHES:
            yield Finding(DENIED_WORD, start, len(text), 1.0)
            return
        yield Finding(DENIED_WORD, start, end, 1.0)


def _longest(tokens: Sequence[_Token], place: int, phrases: _Node) -> int | None:
    """Where the longest phrase that begins at this token ends."""
    end, node = None, phrases
    while place < len(tokens) and (following := node.get(tokens[place][0])) is not None:
        node = following
        if node.is_phrase:
            end = tokens[place][2]
        place += 1
    return end


@lru_cache(maxsize=64)
def _phrases(words: tuple[str, ...]) -> _Node:
    root = _Node()
    for word in words:
        node = root
        for match in _TOKEN.finditer(normalized(word).text):
            node = node.setdefault(match[0].casefold(), _Node())
        node.is_phrase = node is not root
    return root
