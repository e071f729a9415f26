"""Text from outside: made safe to hand on, and how many tokens it is about."""

import re

# Five letters, or one character of any other kind.
TOKEN = re.compile(r"[A-Za-z]{1,5}|[^\sA-Za-z]")
CHARACTERS_OF_A_TOKEN = 8
"""At most, of any text that takes room: spaces are no tokens, and what has no spaces may be more than was estimated."""


NUL = "\x00"
NUL_PICTURE = "\u2400"
"""SYMBOL FOR NULL, what Postgres is given for a NUL, which its text cannot hold: visible, and nothing is lost."""


def clean_text(text: str) -> str:
    """The same text without lone surrogates, which no tokenizer and no encoder accepts: each becomes U+FFFD.

    Control characters stay: a tokenizer has tokens for them, and they are the tenant's to send.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # UTF-16 joins the surrogates that do form a pair.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def without_nul(text: str) -> str:
    """The text as Postgres stores it."""
    return text.replace(NUL, NUL_PICTURE) if NUL in text else text


def estimated_tokens(text: str) -> int:
    """About as many tokens as any model's tokenizer would make of the text, and seldom less; no model is needed.

    Texts go to models with different tokenizers. This one count for all is additive over words, so that the same
    document gives the same passages everywhere.
    """
    return len(TOKEN.findall(text))


def room_of(text: str) -> int:
    """Tokens of room that a text takes: as many as are estimated, and at least one for CHARACTERS_OF_A_TOKEN."""
    return max(estimated_tokens(text), -(-len(text) // CHARACTERS_OF_A_TOKEN))
