"""Documents into passages, on the boundaries of headings, paragraphs and sentences. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from semantic_text_splitter import TextSplitter

from fairlane_server.retrieval.documents.document import ParsedDocument
from fairlane_server.retrieval.sections import Section, sections, stretches
from fairlane_server.retrieval.store import NewPassage
from fairlane_server.text import CHARACTERS_OF_A_TOKEN, estimated_tokens

TokenCounter = Callable[[str], int]
_LEAST_MAX_TOKENS, _LARGEST_MAX_TOKENS = 16, 8_192


@dataclass(frozen=True, slots=True)
class Chunking:
    """How long passages are.

    Attributes:
        max_tokens: of a passage's text, overlap included. It has at most eight times as many characters, too: spaces
            are no tokens, and what has no spaces may be more of them than was estimated.
        overlap_tokens: that a passage may repeat of the one before it in the same section, in whole sentences.
    """

    max_tokens: int = 200
    overlap_tokens: int = 30

    def __post_init__(self) -> None:
        if not _LEAST_MAX_TOKENS <= self.max_tokens <= _LARGEST_MAX_TOKENS:
            raise ValueError(
                f"max_tokens: must be from {_LEAST_MAX_TOKENS} to {_LARGEST_MAX_TOKENS}, not {self.max_tokens}"
            )
        if not 0 <= self.overlap_tokens <= self.max_tokens // 2:
            raise ValueError(
                f"overlap_tokens: must be from 0 to half of max_tokens ({self.max_tokens // 2}), "
                f"not {self.overlap_tokens}"
            )


class Chunker:
    """Makes passages of documents, always the same of the same document."""

    def __init__(self, chunking: Chunking, count: TokenCounter = estimated_tokens) -> None:
        self._count = count
        # Not the splitter for Markdown of the same library: of a long section it takes minutes, and headings and
        # paragraphs are told apart before either.
        self._splitter = TextSplitter.from_callback(self._size, chunking.max_tokens, chunking.overlap_tokens)

    def passages(self, document: ParsedDocument, most: int | None = None) -> tuple[NewPassage, ...]:
        """The passages in order. None crosses a heading of Markdown, and each knows the headings above it.

        Once there are more than ``most``, one more is given and the rest of the document is not looked at.
        """
        found = (
            NewPassage(text, section.path, self._count(f"{section.path}\n{text}"))
            for section in sections(document.text, markdown=document.markdown)
            for stretch in stretches(section.text)
            for text in self._splitter.chunks(stretch)
            if text.strip()
        )
        return tuple(found if most is None else islice(found, most + 1))

    def _size(self, text: str) -> int:
        return max(self._count(text), -(-len(text) // CHARACTERS_OF_A_TOKEN))


def title_of(document: ParsedDocument) -> str:
    """The document's own title, else its first heading; empty when it has neither."""
    if document.title or not document.markdown:
        return document.title
    first: Section | None = next(iter(sections(document.text, markdown=True)), None)
    if first is None:
        return ""
    return first.headings[0] if first.headings else ""
