"""What can be a document: its name, and its format by its first bytes."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.retrieval.parsers import DocumentFormat
from producers.ingest.document import (
    HEAD_BYTES,
    MOST_NAME_BYTES,
    DocumentRefusedError,
    checked_name,
    is_document_id,
    sniffed,
)
from tests.kit.cpu_time import cpu_time

PDF, HTML, MARKDOWN, TEXT = DocumentFormat.PDF, DocumentFormat.HTML, DocumentFormat.MARKDOWN, DocumentFormat.TEXT


@pytest.mark.parametrize(
    ("head", "name", "media_type", "found"),
    [
        (b"%PDF-1.7\n", "a.pdf", "application/pdf", PDF),
        (b"%PDF-1.7\n", "a.txt", "text/plain", PDF),
        (b"junk\n%PDF-1.7\n", "a", None, PDF),
        (b"%!PS\n%PDF-1.7", "a.pdf", None, PDF),
        (b"the mark %PDF- begins a PDF", "a.txt", None, TEXT),
        (b"<!doctype html><p>x", "a", None, HTML),
        (b"\n<!-- x --> <HTML lang=en>", "a.txt", "text/plain", HTML),
        (b"<?xml version='1.0'?><html>", "a", "application/octet-stream", HTML),
        (b"<!--a--><!----> <!-- > -- -> -->\n<body>", "a", None, HTML),
        (b"<!-- <html> -->text<!-- --><html>", "a", None, TEXT),
        (b"<!-- <html>", "a", None, TEXT),
        (b"<p>no head", "a.html", None, HTML),
        (b"<p>no head", "a", "text/html; charset=utf-8", HTML),
        (b"# Title", "a.md", None, MARKDOWN),
        (b"# Title", "a", "text/markdown", MARKDOWN),
        (b"<html> in Markdown", "a.md", None, MARKDOWN),
        (b"# Title", "a", None, TEXT),
        (b"plain", "a.rst", "application/octet-stream", TEXT),
        ("\ufeffplain".encode("utf-16"), "a.txt", None, TEXT),
        (b"", "a.md", None, MARKDOWN),
    ],
)
def test_the_format_is_found_by_the_bytes_and_among_texts_by_what_is_said(
    head: bytes, name: str, media_type: str | None, found: DocumentFormat
) -> None:
    assert sniffed(head, name, media_type) is found


@pytest.mark.parametrize(
    ("head", "name", "media_type"),
    [
        (b"<html>", "a.pdf", None),
        (b"plain", "a", "application/pdf"),
        (b"PK\x03\x04\x00\x00", "a.docx", None),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "a.md", "text/markdown"),
        (b"\x7fELF\x02\x00", "a", None),
    ],
)
def test_what_is_no_document_is_refused_whatever_it_is_called(head: bytes, name: str, media_type: str | None) -> None:
    with pytest.raises(DocumentRefusedError) as refused:
        sniffed(head, name, media_type)
    assert refused.value.is_format


@given(st.binary(max_size=HEAD_BYTES), st.text(max_size=20), st.none() | st.text(max_size=20))
def test_any_bytes_have_a_format_or_are_refused(head: bytes, name: str, media_type: str | None) -> None:
    with suppress(DocumentRefusedError):
        assert sniffed(head, name, media_type) in DocumentFormat


@pytest.mark.parametrize(
    "piece", [b"<!---->", b"<!-- -->\n", b"<!--", b"<!---->--", b"-->", b"\n", b"<?xml", b"<!doctype "]
)
def test_a_head_costs_little_however_it_is_made_up(piece: bytes) -> None:
    # From the shortest on: what grows exponentially fails soon.
    for count in range(1, HEAD_BYTES // len(piece) + 1):
        with cpu_time() as time:
            assert sniffed(piece * count, "a", None) is TEXT
        assert time.spent_s < 0.1, count


@pytest.mark.parametrize(
    "name", ["a", "guides/returns.pdf", "Ärger & Co.md", "a..b", "x" * MOST_NAME_BYTES, "-", "日本"]
)
def test_names_of_documents(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *(None, "", "/a", "a/", "a//b", ".", "../a", "a/../b", " a", "a ", "a /b", "x" * (MOST_NAME_BYTES + 1)),
        *("a\0b", "a\nb", "a\x7f", "\ud800", "a\u2028b", "é" * MOST_NAME_BYTES),
    ],
)
def test_what_no_document_can_be_called(name: str | None) -> None:
    with pytest.raises(DocumentRefusedError) as refused:
        checked_name(name)
    assert refused.value.field == "name"
    assert name is None or len(name) < 2 or name not in str(refused.value)


def test_ids() -> None:
    assert is_document_id("doc-" + "0a" * 16)
    assert not any(map(is_document_id, ("", "doc-", "doc-" + "0A" * 16, "doc-" + "0" * 33, "file-" + "0" * 32)))
