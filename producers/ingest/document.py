"""A tenant's document: its name, its format, and how far its ingestion has come. Pure."""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from fairlane_server.retrieval.parsers import DocumentFormat, format_of

MOST_NAME_BYTES = 512
HEAD_BYTES = 1_024
"""Of a document, by which its format is found."""

_DOCUMENT_ID = re.compile(r"doc-[0-9a-f]{32}")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_PDF_MARK = b"%PDF-"
_TEXT_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf", b"\x00\x00\xfe\xff")
# A comment ends at its first end: with several ways to divide them, a head of comments would take exponential time.
_HTML = re.compile(
    rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--(?:(?!-->).)*-->\s*)*<(?:!doctype\s+html|html|head|body)[\s>]", re.I | re.S
)
_MEDIA_TYPES = {
    "application/pdf": DocumentFormat.PDF,
    "text/html": DocumentFormat.HTML,
    "application/xhtml+xml": DocumentFormat.HTML,
    "text/markdown": DocumentFormat.MARKDOWN,
    "text/x-markdown": DocumentFormat.MARKDOWN,
    "text/plain": DocumentFormat.TEXT,
}
MEDIA_TYPES = tuple(_MEDIA_TYPES)


class DocumentStatus(StrEnum):
    """How far the newest version of a document is."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a collection, without its content.

    Attributes:
        document_id: follows from the collection and the name.
        name: unique in its collection.
        status: of its newest version.
        size_bytes: of the newest version's file; 0: not known.
        passages: that are stored and found; of the version before while the newest is not done.
        reason: why the newest version failed, without its text.
        uploaded_at_ms: of the newest version, unless it is done.
        stored_at_ms: of the passages.
    """

    document_id: str
    name: str
    status: DocumentStatus
    size_bytes: int
    passages: int
    reason: str | None = None
    uploaded_at_ms: int | None = None
    stored_at_ms: int | None = None


class DocumentRefusedError(Exception):
    """This cannot be a document; the message says why. ``field``: what is at fault; ``is_format``: its type is."""

    def __init__(self, field: str, reason: str, *, is_format: bool = False) -> None:
        super().__init__(reason)
        self.field = field
        self.is_format = is_format


def is_document_id(text: str) -> bool:
    """Whether a document can have this id."""
    return _DOCUMENT_ID.fullmatch(text) is not None


def checked_name(given: str | None) -> str:
    """The name as it is stored: parts divided by ``/``, printable. It names no file. Raises DocumentRefusedError."""
    if not given:
        raise DocumentRefusedError("name", "must be given")
    if _UNPRINTABLE.search(given):
        raise DocumentRefusedError("name", "holds characters that cannot be printed")
    if len(given.encode()) > MOST_NAME_BYTES:
        raise DocumentRefusedError("name", f"has more than {MOST_NAME_BYTES} bytes")
    if any(part != part.strip() or part in {"", ".", ".."} for part in given.split("/")):
        raise DocumentRefusedError("name", "must be parts divided by /, none of which is empty, . or ..")
    return given


def sniffed(head: bytes, name: str, media_type: str | None) -> DocumentFormat:
    """The format by the first ``HEAD_BYTES``. Name and media type choose among the formats of text alone, which every
    text could be. Raises DocumentRefusedError."""
    said = _MEDIA_TYPES.get((media_type or "").partition(";")[0].strip().lower())
    hint = said or format_of(PurePosixPath(name))
    # The specification lets other bytes precede the mark, and a text may quote it.
    if head.startswith(_PDF_MARK) or (_PDF_MARK in head and hint in {None, DocumentFormat.PDF}):
        return DocumentFormat.PDF
    if hint is DocumentFormat.PDF:
        raise DocumentRefusedError("file", "is said to be a PDF, and does not begin as one", is_format=True)
    if b"\0" in head and not head.startswith(_TEXT_MARKS):
        raise DocumentRefusedError("file", "is neither a PDF nor text (Markdown, HTML, plain)", is_format=True)
    if hint in {None, DocumentFormat.TEXT} and _HTML.match(head):
        return DocumentFormat.HTML
    return hint or DocumentFormat.TEXT
