"""Tenants' documents, divided into passages in a process of their own, whatever they are."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fairlane_server.retrieval.chunking import MOST_PATH_CHARACTERS, Chunker, Chunking
from fairlane_server.retrieval.dividing import DividingProcess, passages_of
from fairlane_server.retrieval.parsers import DocumentFormat, DocumentLimits, UnreadableError
from tests.kit.pdf_kit import pdf

LIMITS = DocumentLimits(max_parse_s=20.0, max_parser_bytes=1 << 30, max_passages=1_000)


@pytest.fixture(scope="module")
def divider() -> Iterator[DividingProcess]:
    with DividingProcess(LIMITS, Chunking()) as divider:
        yield divider


@pytest.mark.parametrize(
    ("kind", "data", "heading"),
    [
        (DocumentFormat.TEXT, b"The warranty lasts two years.", ""),
        (DocumentFormat.MARKDOWN, b"# Warranty\n\nThe warranty lasts two years.", "Warranty"),
        (DocumentFormat.HTML, b"<html><h1>Warranty</h1><p>The warranty lasts two years.</p>", "Warranty"),
        (DocumentFormat.PDF, pdf("The warranty lasts two years."), ""),
    ],
)
def test_each_format_becomes_passages(
    divider: DividingProcess, kind: DocumentFormat, data: bytes, heading: str
) -> None:
    divided = divider.divide(kind, data)
    (passage,) = divided.passages
    assert (passage.text.strip(), passage.heading, divided.title) == ("The warranty lasts two years.", heading, heading)
    assert passage.tokens > 0


@pytest.mark.parametrize(
    ("kind", "data", "reason"),
    [
        (DocumentFormat.TEXT, b" \n ", "holds no text"),
        (DocumentFormat.PDF, pdf(""), "holds no text (the text of scanned pages is not read)"),
        (DocumentFormat.TEXT, b"\xff\xfa", "is not valid UTF-8"),
        (DocumentFormat.PDF, b"%PDF-1.7 nothing", "is no PDF that can be read"),
        (DocumentFormat.MARKDOWN, b"word " * 1_000_000, "makes more passages than a document may (1,000): split it"),
    ],
)
def test_what_cannot_be_divided_says_why_and_the_next_one_is(
    divider: DividingProcess, kind: DocumentFormat, data: bytes, reason: str
) -> None:
    with pytest.raises(UnreadableError) as refused:
        divider.divide(kind, data)
    assert str(refused.value).startswith(reason)
    assert divider.divide(DocumentFormat.TEXT, b"next").passages


HEADINGS = "".join(f"{'#' * level} {'H' * 200}\n\n" for level in range(1, 7))


def test_headings_that_every_passage_repeats_are_short_and_count_as_text(divider: DividingProcess) -> None:
    short = "".join(f"###### {number}\n\nx\n\n" for number in range(900))
    passages = divider.divide(DocumentFormat.MARKDOWN, (HEADINGS + short).encode()).passages
    assert max(len(passage.heading) for passage in passages) <= MOST_PATH_CHARACTERS
    assert sum(len(passage.heading) for passage in passages) > 100_000
    limits = replace(LIMITS, max_characters=100_000)
    with pytest.raises(UnreadableError, match=r"holds more text than a document may have \(100,000 characters\)"):
        passages_of(DocumentFormat.MARKDOWN, (HEADINGS + short).encode(), limits, Chunker(Chunking()))


def test_a_document_that_never_ends_ends_with_its_process() -> None:
    limits = DocumentLimits(max_parse_s=0.5, max_parser_bytes=1 << 30)
    with DividingProcess(limits, Chunking()) as divider:
        # Its elements are never closed: the parser nests them, and its converter walks up from each.
        with pytest.raises(UnreadableError, match=r"takes longer to parse than a document may \(0.5 s\)"):
            divider.divide(DocumentFormat.HTML, b"<b>" * 1_000_000)
        assert divider.divide(DocumentFormat.TEXT, b"next").passages


def test_it_divides_as_the_operators_command_does() -> None:
    chunker = Chunker(Chunking())
    said = passages_of(DocumentFormat.MARKDOWN, b"# A\n\none\n\n## B\n\ntwo", LIMITS, chunker)
    assert said == {"title": "A", "passages": [("one", "A", 2), ("two", "A > B", 4)]}
