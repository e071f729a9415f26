"""Parsed documents, the formats a parser accepts, and its errors."""

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import PurePath

PARSER_REVISION = 2
"""Raised with every change of a parser or of chunking that makes other passages of the same file."""


MOST_TITLE_CHARACTERS = 500


class Format(StrEnum):
    """File format, by suffix."""

    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"
    PDF = "pdf"


_FORMATS = {
    ".txt": Format.TEXT,
    ".text": Format.TEXT,
    ".rst": Format.TEXT,
    ".md": Format.MARKDOWN,
    ".markdown": Format.MARKDOWN,
    ".html": Format.HTML,
    ".htm": Format.HTML,
    ".xhtml": Format.HTML,
    ".pdf": Format.PDF,
}
SUFFIXES = tuple(_FORMATS)


def format_of(path: PurePath) -> Format | None:
    """The format of a suffix, in upper or lower case; None if unknown."""
    return _FORMATS.get(path.suffix.lower())


class DocumentError(Exception):
    """One document was not taken; the others are. ``source`` is its name in the collection; ``reason`` is one line
    without its text."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(source, reason)
        self.source = source
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}"


class UnreadableError(Exception):
    """Error of a parser: the reason in one line, without text of the document."""


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """Bounds on one document. A file above ``max_file_bytes`` is not read; ``max_parse_s`` and ``max_parser_bytes`` (of
    memory) are for the parsing of HTML or a PDF."""

    max_file_bytes: int = 50_000_000
    max_characters: int = 5_000_000
    max_passages: int = 20_000
    max_pages: int = 5_000
    max_parse_s: float = 120.0
    max_parser_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) <= 0:
                raise ValueError(f"{limit.name}: must be above 0, not {getattr(self, limit.name)}")


@dataclass(frozen=True, slots=True)
class ParsedDocument:
    """The text of a document: Markdown when ``markdown``, else without markup. The title is empty when it has none."""

    text: str
    title: str
    markdown: bool


def check_length(characters: int, limits: DocumentLimits) -> None:
    if characters > limits.max_characters:
        raise UnreadableError(
            f"holds more text than a document may have ({limits.max_characters:,} characters): split it"
        )
