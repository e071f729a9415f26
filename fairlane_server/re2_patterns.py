"""Patterns of tenants, in RE2: matching takes time linear in the text, whatever the pattern (Cox 2010, "Regular
Expression Matching in the Wild").
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import re2

_MOST_MEMORY_BYTES = 1 << 20
"""Of a compiled pattern with its automata. It bounds counted repetitions of repetitions."""
MOST_MATCHES = 1_000
"""Of a pattern in a text. One search is linear in the text; as many searches as the text has characters are not."""


def check_pattern(pattern: str) -> None:
    """Raises ValueError, with the reason, for a pattern that is not to be used: not in RE2's syntax (no look-around, no
    back-references), too large when it is compiled, or one that matches the empty text, and so everywhere."""
    if compiled(pattern).search("") is not None:
        raise ValueError("the pattern matches the empty text")


def matches(pattern: str, text: str, group: int = 0) -> Iterator[tuple[int, int]]:
    """[start, end) in characters of this group of each match, where it is not empty. Behind MOST_MATCHES the rest of
    the text is one match.

    Raises ValueError for a pattern that ``check_pattern`` refuses; UnicodeEncodeError for lone surrogates in the text.
    """
    for number, match in enumerate(islice(compiled(pattern).finditer(text), MOST_MATCHES + 1)):
        start, end = match.span(group)
        if number == MOST_MATCHES:
            start, end = match.start(), len(text)
        if 0 <= start < end:
            yield start, end


@lru_cache(maxsize=256)
def compiled(pattern: str) -> "re2._Regexp[str]":
    """Raises ValueError with RE2's reason."""
    import re2

    options = re2.Options()
    options.max_mem = _MOST_MEMORY_BYTES
    # Else RE2 writes the pattern to standard error.
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        raise ValueError(f"not a pattern of RE2: {_reason(error)}") from None


def _reason(error: Any) -> str:
    text = error.args[0] if error.args else type(error).__name__
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
