"""Documents of tenants into passages, in the child process of ``documents.py``.

Text and Markdown are read there too, and divided: a hostile one keeps the splitter as busy as its HTML the parser.
"""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from fairlane_server.retrieval.chunking import Chunker, Chunking, title_of
from fairlane_server.retrieval.documents import ParserProcess, parse_plain, serve, without_text
from fairlane_server.retrieval.parsers import (
    MOST_TITLE_CHARACTERS,
    DocumentFormat,
    DocumentLimits,
    UnreadableError,
    parse_html,
    parse_pdf,
)
from fairlane_server.retrieval.store import NewPassage

_SERVE = "from fairlane_server.retrieval.dividing import serve_passages; serve_passages()"
_MOST_AROUND_BYTES = 256
"""What JSON adds to a passage."""


@dataclass(frozen=True, slots=True)
class DividedDocument:
    """A document as its passages, in order, of which there is at least one; the title is empty when it has none."""

    title: str
    passages: tuple[NewPassage, ...]


class DividingProcess(ParserProcess):
    """Divides documents of every format into passages, one document at a time. For one thread."""

    def __init__(self, limits: DocumentLimits, chunking: Chunking) -> None:
        super().__init__(limits, _SERVE, json.dumps(asdict(chunking)))

    def divide(self, kind: DocumentFormat, data: bytes) -> DividedDocument:
        """Raises UnreadableError, also for a document without text, and one that takes too long or ends the process."""
        answer = self.ask(kind, data)
        return DividedDocument(answer["title"], tuple(NewPassage(*passage) for passage in answer["passages"]))

    def most_bytes(self) -> int:
        # Half of each passage may be repeated in the next one.
        return 2 * super().most_bytes() + self._limits.max_passages * _MOST_AROUND_BYTES


def passages_of(kind: DocumentFormat, data: bytes, limits: DocumentLimits, chunker: Chunker) -> dict[str, Any]:
    """``title`` and ``passages`` of a document. Raises UnreadableError, and whatever a parser raises."""
    match kind:
        case DocumentFormat.PDF:
            parsed = parse_pdf(data, limits)
        case DocumentFormat.HTML:
            parsed = parse_html(data, limits)
        case DocumentFormat.TEXT | DocumentFormat.MARKDOWN:
            parsed = parse_plain(kind, data, limits)
    passages = chunker.passages_within(parsed, limits)
    if not passages:
        raise UnreadableError(without_text(kind, data))
    shown = [(passage.text, passage.heading, passage.tokens) for passage in passages]
    return {"title": title_of(parsed)[:MOST_TITLE_CHARACTERS], "passages": shown}


def serve_passages() -> None:
    """Main function of the process; its last argument is the chunking in JSON."""
    chunker = Chunker(Chunking(**json.loads(sys.argv[3])))
    serve(lambda kind, data, limits: passages_of(kind, data, limits, chunker))
