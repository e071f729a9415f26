"""Bytes to text: UTF-8 or a byte order mark; drops characters that databases or prompts do not accept."""

import codecs
import re

from fairlane_server.retrieval.documents.document import UnreadableError

# The longest first: the mark of UTF-32 begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Ends of lines in every alphabet's way, and pages.
_LINE_END = re.compile("\r\n|[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
# What is neither printed nor a space, soft hyphens included; a lone surrogate stands in no UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f\xad\ufeff\ud800-\udfff]")


def decode(data: bytes) -> str:
    """The text of a file that is UTF-8, or begins with the byte order mark of another Unicode encoding.

    Raises UnreadableError for anything else: a guess would store what nobody wrote.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _decoded(data[len(mark) :], encoding, len(mark))
    return _decoded(data, "utf-8", 0)


def _decoded(data: bytes, encoding: str, skipped: int) -> str:
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableError(f"is not valid {encoding.upper()} (byte {skipped + error.start:,})") from None
    if "\0" in text:
        raise UnreadableError("holds NUL characters: it is no text")
    return text


def clean(text: str) -> str:
    return _UNPRINTABLE.sub("", _LINE_END.sub("\n", text))
