"""PDF to plain text, from the text layer. A scanned page has none."""

import re
from io import BytesIO

from fairlane_server.retrieval.documents.document import DocumentLimits, ParsedDocument, UnreadableError, check_length
from fairlane_server.retrieval.documents.text import clean

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
