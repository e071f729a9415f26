"""Text from outside: cleaning, token estimates, time spans such as ``90s``."""

import re

# Five letters, or one character of any other kind.
TOKEN = re.compile(r"[A-Za-z]{1,5}|[^\sA-Za-z]")
CHARACTERS_OF_A_TOKEN = 8
"""``room_of`` counts at least one token for so many characters, because the estimate counts no spaces."""


NUL = "\x00"
NUL_PICTURE = "\u2400"
"""SYMBOL FOR NULL, stored for NUL, which a Postgres text cannot hold: visible, and nothing is lost."""


def clean_text(text: str) -> str:
    """Replace lone surrogates, which no tokenizer and no encoder accepts, by U+FFFD.

    Control characters stay: tokenizers have tokens for them, and tenants may send them.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # UTF-16 joins surrogates that form a pair.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def without_nul(text: str) -> str:
    return text.replace(NUL, NUL_PICTURE) if NUL in text else text


def estimated_tokens(text: str) -> int:
    """Estimate a text's tokens without a model; seldom too low for any tokenizer.

    Texts go to models with different tokenizers. This one count for all is additive over words, so that a document
    gives the same passages everywhere.
    """
    return len(TOKEN.findall(text))


def reserved_tokens(text: str) -> int:
    """Tokens to reserve for a text: the estimate, and at least one per CHARACTERS_OF_A_TOKEN characters."""
    return max(estimated_tokens(text), -(-len(text) // CHARACTERS_OF_A_TOKEN))


_SPAN = re.compile(r"(\d{1,9})(s|m|h|d)", re.ASCII)
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def span_ms(text: str) -> int | None:
    found = _SPAN.fullmatch(text)
    return None if found is None else int(found[1]) * _UNIT_MS[found[2]]
