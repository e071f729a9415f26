"""Documents into passages, on the boundaries of headings, paragraphs and sentences. Pure."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token
from semantic_text_splitter import TextSplitter

from fairlane_server.retrieval.parsers import DocumentLimits, ParsedDocument, UnreadableError, check_length
from fairlane_server.retrieval.store import NewPassage
from fairlane_server.text import estimated_tokens, reserved_tokens

_MOST_HEADING_CHARACTERS = 200
MOST_PATH_CHARACTERS = 300
"""Of the headings above a passage together, which every passage repeats."""
_SEPARATOR = " > "
# Where a sentence goes on in the next line: the next line begins in lower case and is not set apart.
_WRAPPED = re.compile(r"(?<=[^\s.!?:;])[ \t]*\n(?=[^\W\d_A-Z])")
_STRETCH_CHARACTERS = 8_000
_CUTS = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"[.!?]\s+|[\u3002\uff01\uff1f]"), re.compile(r"\s+"))
_HARD_BREAKS = ("  ", "\\")


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of a document below one heading. ``headings`` is the path to it, the document's own first."""

    headings: tuple[str, ...]
    text: str

    @property
    def path(self) -> str:
        """The headings in one line, without the outermost ones if they are too long together."""
        kept: list[str] = []
        left = MOST_PATH_CHARACTERS + len(_SEPARATOR)
        for heading in reversed(self.headings):
            left -= len(_SEPARATOR) + len(heading)
            if left < 0:
                break
            kept.append(heading)
        return _SEPARATOR.join(reversed(kept))


def sections(text: str, *, markdown: bool) -> tuple[Section, ...]:
    """The sections with text, in order. A heading with nothing below it is the text of a section of its own.

    A paragraph is one line in them, so that sentences are found in it rather than the ends of lines. Text without
    markup is one section without headings. Lines must end in "\\n" alone.
    """
    found = _markdown_sections(text) if markdown else (Section((), _WRAPPED.sub(" ", text)),)
    return tuple(section for section in found if section.text.strip())


def stretches(text: str, most_characters: int = _STRETCH_CHARACTERS) -> Iterator[str]:
    """The text in parts of at most so many characters, cut between paragraphs if it can be, else lines, sentences,
    words. Splitters take more than twice the time for twice the text."""
    begin = 0
    while len(text) - begin > most_characters:
        window = text[begin : begin + most_characters]
        # Not before the middle: small parts would make small passages.
        ends = (max((found.end() for found in cut.finditer(window, most_characters // 2)), default=0) for cut in _CUTS)
        end = begin + (next(filter(None, ends), most_characters))
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _markdown_sections(text: str) -> Iterator[Section]:
    lines: list[str | None] = [*text.split("\n")]
    # Inline markup is not needed here, and takes most of the time.
    tokens = MarkdownIt("commonmark").enable("table").disable(["inline"]).parse(text)
    _join_paragraphs(lines, tokens)
    path: list[tuple[int, str]] = []
    begin = 0
    headings = list(_headings(tokens))
    for number, (level, title, start, end) in enumerate(headings):
        yield Section(_titles(path), _body(lines, begin, start))
        path = [(above, name) for above, name in path if above < level]
        has_more = number + 1 < len(headings) and headings[number + 1][0] > level
        next_start = headings[number + 1][2] if number + 1 < len(headings) else len(lines)
        if not has_more and not _body(lines, end, next_start).strip():
            # Nothing below it would carry its words.
            yield Section(_titles(path), title)
        path.append((level, title))
        begin = end
    yield Section(_titles(path), _body(lines, begin, len(lines)))


def _headings(tokens: Sequence[Token]) -> Iterator[tuple[int, str, int, int]]:
    """Level, title, first line and the line after it of each heading outside lists and quotations."""
    for token, inline in pairwise(tokens):
        if token.type == "heading_open" and token.level == 0 and token.map is not None:
            title = " ".join(inline.content.split())[:_MOST_HEADING_CHARACTERS]
            if title:
                yield int(token.tag[1]), title, token.map[0], token.map[1]


def _join_paragraphs(lines: list[str | None], tokens: Iterable[Token]) -> None:
    """Put each paragraph onto its first line; its other lines become None."""
    quoted = 0
    for token in tokens:
        quoted += (token.type == "blockquote_open") - (token.type == "blockquote_close")
        # In a quotation every line begins with its mark.
        if token.type != "paragraph_open" or quoted or token.map is None:
            continue
        first, end = token.map
        parts = [line for line in lines[first:end] if line is not None]
        ends = ["\n" if line.endswith(_HARD_BREAKS) else " " for line in parts[:-1]]
        tail = [before + line.strip() for before, line in zip(ends, parts[1:], strict=True)]
        lines[first:end] = ["".join([parts[0].rstrip(), *tail]), *[None] * (end - first - 1)]


def _body(lines: Sequence[str | None], begin: int, end: int) -> str:
    return "\n".join(line for line in lines[begin:end] if line is not None)


def _titles(path: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(title for _, title in path)


_LEAST_MAX_TOKENS, _LARGEST_MAX_TOKENS = 16, 8_192


@dataclass(frozen=True, slots=True)
class Chunking:
    """Bounds on the length of passages.

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

    def __init__(self, chunking: Chunking) -> None:
        # Not the splitter for Markdown of the same library: of a long section it takes minutes, and headings and
        # paragraphs are found before it in any case.
        self._splitter = TextSplitter.from_callback(reserved_tokens, chunking.max_tokens, chunking.overlap_tokens)

    def passages(self, document: ParsedDocument, most: int | None = None) -> tuple[NewPassage, ...]:
        """The passages in order. None crosses a heading of Markdown, and each knows the headings above it.

        Once there are more than ``most``, one more is given and the rest of the document is not looked at.
        """
        found = (
            NewPassage(text, path, estimated_tokens(f"{path}\n{text}"))
            for section in sections(document.text, markdown=document.markdown)
            for path in (section.path,)
            for stretch in stretches(section.text)
            for text in self._splitter.chunks(stretch)
            if text.strip()
        )
        return tuple(found if most is None else islice(found, most + 1))

    def passages_within(self, document: ParsedDocument, limits: DocumentLimits) -> tuple[NewPassage, ...]:
        """``passages``, bounded: the headings that they repeat count as text. Raises UnreadableError."""
        found = self.passages(document, limits.max_passages)
        if len(found) > limits.max_passages:
            raise UnreadableError(f"makes more passages than a document may ({limits.max_passages:,}): split it")
        check_length(len(document.text) + sum(len(passage.heading) for passage in found), limits)
        return found


def title_of(document: ParsedDocument) -> str:
    """The document's own title, else its first heading; empty when it has neither."""
    if document.title or not document.markdown:
        return document.title
    first = next(iter(sections(document.text, markdown=True)), Section((), ""))
    return first.headings[0] if first.headings else ""
