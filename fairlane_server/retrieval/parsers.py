"""Parsers of one document each: bytes to text, HTML to Markdown without styles and scripts, PDF to plain text.

Text is UTF-8 or begins with a byte order mark; characters that databases or prompts do not accept are dropped. Of a PDF
only the text layer is read: a scanned page has none.
"""

import codecs
import re
import warnings
from dataclasses import dataclass, fields
from enum import StrEnum
from io import BytesIO
from pathlib import PurePath

PARSER_REVISION = 3
"""Raised with every change of a parser or of chunking that makes other passages of the same file."""


MOST_TITLE_CHARACTERS = 500


class DocumentFormat(StrEnum):
    """File format, by suffix."""

    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"
    PDF = "pdf"


_FORMATS = {
    ".txt": DocumentFormat.TEXT,
    ".text": DocumentFormat.TEXT,
    ".rst": DocumentFormat.TEXT,
    ".md": DocumentFormat.MARKDOWN,
    ".markdown": DocumentFormat.MARKDOWN,
    ".html": DocumentFormat.HTML,
    ".htm": DocumentFormat.HTML,
    ".xhtml": DocumentFormat.HTML,
    ".pdf": DocumentFormat.PDF,
}
SUFFIXES = tuple(_FORMATS)


def format_of(path: PurePath) -> DocumentFormat | None:
    """The format of a suffix, in upper or lower case; None if unknown."""
    return _FORMATS.get(path.suffix.lower())


class UnreadableError(Exception):
    """Error of a parser: the reason in one line, without text of the document."""


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """Bounds on one document. A file above ``max_file_bytes`` is not read; ``max_characters`` include the headings that
    passages repeat; ``max_parse_s`` and ``max_parser_bytes`` (of
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
# What is neither printed nor a space, soft hyphens included, and lone surrogates, which UTF-8 cannot encode.
_UNPRINTABLE = re.compile("[\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f\xad\ufeff\ud800-\udfff]")


def decode(data: bytes) -> str:
    """The text of a file that is UTF-8, or begins with the byte order mark of another Unicode encoding.

    Raises UnreadableError for anything else: a guess would store what nobody wrote.
    """
    mark, encoding = next(((mark, name) for mark, name in _MARKS if data.startswith(mark)), (b"", "utf-8"))
    try:
        text = data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableError(f"is not valid {encoding.upper()} (byte {len(mark) + error.start:,})") from None
    if "\0" in text:
        raise UnreadableError("holds NUL characters: it is no text")
    return text


def clean(text: str) -> str:
    return _UNPRINTABLE.sub("", _LINE_END.sub("\n", text))


_DROPPED = ("script", "style", "nav", "noscript", "template", "svg", "iframe", "object", "canvas", "button", "select")
# Their text stays; the marks around it would be tokens that say nothing.
_PLAIN = ["a", "b", "strong", "i", "em"]


def parse_html(data: bytes, limits: DocumentLimits) -> ParsedDocument:
    from bs4 import BeautifulSoup
    from markdownify import ATX, MarkdownConverter

    text = decode(data)
    with warnings.catch_warnings():
        # XHTML read as HTML, text that looks like a file's name: warnings that are of no use to the operator.
        warnings.simplefilter("ignore")
        try:
            soup = BeautifulSoup(text, "html.parser")
            title = soup.title.get_text() if soup.title is not None else ""
            for element in soup.find_all(["title", *_DROPPED]):
                element.decompose()
            for image in soup.find_all("img"):
                image.replace_with(str(image.get("alt") or ""))
            converter = MarkdownConverter(
                heading_style=ATX, strip=_PLAIN, escape_asterisks=False, escape_underscores=False
            )
            markdown = converter.convert_soup(soup)
        except RecursionError:
            raise UnreadableError("its elements are nested too deeply") from None
    check_length(len(markdown), limits)
    return ParsedDocument(clean(markdown), " ".join(clean(title).split()), markdown=True)


# A word that was divided at the end of a line.
_HYPHENATED = re.compile(r"(?<=[^\W\d_])-\n(?=[a-z])")


def parse_pdf(data: bytes, limits: DocumentLimits) -> ParsedDocument:
    from pypdf.errors import DependencyError, FileNotDecryptedError, LimitReachedError

    try:
        title, pages = _title_and_pages(data, limits)
    except (UnreadableError, MemoryError):
        raise
    except (FileNotDecryptedError, DependencyError):
        raise UnreadableError("is encrypted, and cannot be opened without a password") from None
    except LimitReachedError as error:
        raise UnreadableError(f"is more work than a PDF may be: {_one_line(error)}") from None
    except Exception as error:  # noqa: BLE001 - a broken file may raise anything, as pypdf's own documentation says
        raise UnreadableError(f"is no PDF that can be read ({type(error).__name__}: {_one_line(error)})") from None
    text = _HYPHENATED.sub("", clean("\n\n".join(pages)))
    return ParsedDocument(text, " ".join(clean(title).split()), markdown=False)


def _title_and_pages(data: bytes, limits: DocumentLimits) -> tuple[str, list[str]]:
    from pypdf import PdfReader

    reader = PdfReader(BytesIO(data))
    # One that only forbids printing and the like opens with an empty password.
    if reader.is_encrypted and not reader.decrypt(""):
        raise UnreadableError("is protected by a password")
    if (count := len(reader.pages)) > limits.max_pages:
        raise UnreadableError(f"has {count:,} pages, more than a document may have ({limits.max_pages:,})")
    pages: list[str] = []
    characters = 0
    for page in reader.pages:
        pages.append(page.extract_text())
        characters += len(pages[-1])
        check_length(characters, limits)
    metadata = reader.metadata
    return (metadata.title or "" if metadata is not None else ""), pages


def _one_line(error: Exception) -> str:
    return " ".join(clean(str(error)).split())[:100]
