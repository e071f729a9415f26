"""Files turned into text: plain text, Markdown, HTML and PDF, each within bounds, and each failure its own."""

from fairlane_server.retrieval.documents.document import DocumentError, DocumentLimits, Format, ParsedDocument
from fairlane_server.retrieval.documents.reader import DocumentReader, read_file

__all__ = ["DocumentError", "DocumentLimits", "DocumentReader", "Format", "ParsedDocument", "read_file"]
