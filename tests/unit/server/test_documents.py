"""Files to text: what is taken from each format, and that what cannot be taken says so and harms nobody."""

import codecs
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fairlane_server.retrieval import documents
from fairlane_server.retrieval.documents import DocumentError, DocumentReader, read_file
from fairlane_server.retrieval.parsers import (
    DocumentFormat,
    DocumentLimits,
    UnreadableError,
    clean,
    parse_html,
    parse_pdf,
)
from tests.kit.pdf_kit import pdf

LIMITS = DocumentLimits()
PAGE = b"""<!doctype html><html><head><title>The  Orion
 handbook</title><style>p { color: red }</style><script>let secret = 1</script></head>
<body><nav><a href="/">Home</a></nav><h1>Orion</h1><p>The <b>warehouse</b> is <a href="http://x.example/">open</a>.</p>
<!-- a remark --><h2>Hours</h2><ul><li>Monday</li><li>Tuesday</li></ul><img alt="a map" src="m.png">
<table><tr><th>Day</th><th>Hour</th></tr><tr><td>Monday</td><td>9</td></tr></table>
<pre>os_path = 1</pre></body></html>"""


@pytest.fixture
def reader() -> Iterator[DocumentReader]:
    with DocumentReader() as made:
        yield made


def reason_of(reader: DocumentReader, kind: DocumentFormat, data: bytes) -> str:
    with pytest.raises(DocumentError) as caught:
        reader.parse("a file", kind, data)
    assert caught.value.source == "a file"
    assert "\n" not in caught.value.reason
    return caught.value.reason


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (b"", "utf-8"),
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
def test_unicode_is_read_by_its_mark_and_as_utf8_without_one(
    reader: DocumentReader, mark: bytes, encoding: str
) -> None:
    text = "Grüße aus Köln: 漢字 😀\n"
    assert reader.parse("a file", DocumentFormat.TEXT, mark + text.encode(encoding)).text == text


@pytest.mark.parametrize(
    ("kind", "data", "reason"),
    [
        (DocumentFormat.TEXT, b"caf\xe9 au lait", "is not valid UTF-8 (byte 3)"),
        (DocumentFormat.MARKDOWN, b"# caf\xe9", "is not valid UTF-8 (byte 5)"),
        (DocumentFormat.HTML, b"<p>caf\xe9</p>", "is not valid UTF-8 (byte 6)"),
        (DocumentFormat.TEXT, codecs.BOM_UTF16_LE + b"a", "is not valid UTF-16-LE (byte 2)"),
        (DocumentFormat.TEXT, b"\x7fELF\0\0", "holds NUL characters: it is no text"),
        (DocumentFormat.TEXT, b"", "holds no text"),
        (DocumentFormat.MARKDOWN, b" \n\t\n", "holds no text"),
        (DocumentFormat.HTML, b"<script>1</script>", "holds no text"),
        (DocumentFormat.PDF, b"", "is no PDF that can be read (EmptyFileError: Cannot read an empty file)"),
    ],
)
def test_what_is_no_text_says_why(reader: DocumentReader, kind: DocumentFormat, data: bytes, reason: str) -> None:
    assert reason_of(reader, kind, data) == reason


def test_what_does_not_print_is_taken_out() -> None:
    assert clean("a\r\nb\rc\x0cd\u2028e\x00f\x1b[31mg\ud800h\ufeffi\xadj\tk") == "a\nb\nc\nd\nef[31mghij\tk"


def test_html_becomes_markdown_of_what_it_says(reader: DocumentReader) -> None:
    parsed = reader.parse("a file", DocumentFormat.HTML, PAGE)
    assert parsed.title == "The Orion handbook"
    assert parsed.markdown
    assert parsed.text.startswith("# Orion\n\nThe warehouse is open.\n\n## Hours\n\n* Monday\n* Tuesday\n")
    assert "a map" in parsed.text
    assert "| Monday | 9 |" in parsed.text
    assert "os_path = 1" in parsed.text
    for dropped in ("secret", "color", "Home", "remark", "example"):
        assert dropped not in parsed.text


def test_pdf_becomes_the_text_of_its_pages(reader: DocumentReader) -> None:
    parsed = reader.parse("a file", DocumentFormat.PDF, pdf("The ware-\nhouse is open.", "Second page.", title="Orion"))
    assert (parsed.title, parsed.markdown) == ("Orion", False)
    assert [part.strip() for part in parsed.text.split("\n\n")] == ["The warehouse is open.", "Second page."]


def test_pdf_that_only_forbids_printing_is_read(reader: DocumentReader) -> None:
    assert "open" in reader.parse("a file", DocumentFormat.PDF, pdf("It is open.", owner_password="boss")).text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pdf("Hush.", password="hunter2"), "is protected by a password"),
        (b"no pdf at all", "is no PDF that can be read ("),
        (pdf("It is open.")[:300], "is no PDF that can be read ("),
        (pdf("", ""), "holds no text (the text of scanned pages is not read)"),
    ],
)
def test_pdf_that_cannot_be_read_says_why(reader: DocumentReader, data: bytes, reason: str) -> None:
    assert reason_of(reader, DocumentFormat.PDF, data).startswith(reason)


def test_documents_have_a_most_of_text_and_pages() -> None:
    limits = DocumentLimits(max_characters=20, max_pages=1)
    text = "holds more text than a document may have (20 characters): split it"
    with pytest.raises(UnreadableError, match="has 2 pages, more than a document may have"):
        parse_pdf(pdf("one", "two"), limits)
    for parse, data in ((parse_pdf, pdf("x" * 40)), (parse_html, b"<p>" + b"x" * 40)):
        with pytest.raises(UnreadableError) as caught:
            parse(data, limits)
        assert str(caught.value) == text
    with DocumentReader(limits) as reader:
        assert reason_of(reader, DocumentFormat.TEXT, b"x" * 40) == text


@pytest.mark.parametrize("name", [limit.name for limit in fields(DocumentLimits)])
def test_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        DocumentLimits(**{name: 0})


# ------------------------------------------------------------------ the process that parses


def test_elements_nested_too_deeply_are_a_reason(reader: DocumentReader) -> None:
    assert reader.parse("deep", DocumentFormat.HTML, b"<div>" * 1_000 + b"text").text == "text"
    assert reason_of(reader, DocumentFormat.HTML, b"<div>" * 50_000 + b"text") == "its elements are nested too deeply"
    assert reader.parse("next", DocumentFormat.HTML, b"<p>fine</p>").text == "fine"


def test_document_that_takes_too_long_is_given_up_and_the_next_is_read() -> None:
    endless = b"<p>" + b"<b>word</b> " * 1_500_000
    with DocumentReader(DocumentLimits(max_parse_s=3)) as reader:
        assert reason_of(reader, DocumentFormat.HTML, endless) == "takes longer to parse than a document may (3 s)"
        assert reader.parse("next", DocumentFormat.HTML, b"<p>fine</p>").text == "fine"


def test_document_that_needs_too_much_memory_is_a_reason_and_the_next_is_read() -> None:
    with DocumentReader(DocumentLimits(max_parser_bytes=256 << 20)) as reader:
        reason = reason_of(reader, DocumentFormat.HTML, b"<p>" + b"<b>word</b> " * 1_000_000)
        assert reason == "needs more memory to parse than a document may (256 MiB)"
        assert reader.parse("next", DocumentFormat.HTML, b"<p>fine</p>").text == "fine"


def test_title_is_bounded_where_it_is_read() -> None:
    answered = documents.answer(DocumentFormat.HTML, b"<title>" + b"long " * 100_000 + b"</title><p>fine</p>", LIMITS)
    assert (answered["text"], len(answered["title"])) == ("fine", 500)


def test_answer_that_is_longer_than_one_may_be_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_BYTES_AROUND_THE_TEXT", 0)
    monkeypatch.setattr(documents, "MOST_TITLE_CHARACTERS", 0)
    with documents.ParserProcess(DocumentLimits(max_characters=10)) as parser:
        with pytest.raises(UnreadableError, match="made its parser crash"):
            parser.parse(DocumentFormat.HTML, b"<title>" + b"x" * 300 + b"</title><p>fine</p>")
        assert parser.parse(DocumentFormat.HTML, b"<p>fine</p>").text == "fine"


def test_parser_that_dies_takes_one_document_with_it() -> None:
    with documents.ParserProcess(LIMITS) as parser:
        parser.parse(DocumentFormat.HTML, b"<p>fine</p>")
        assert parser._process is not None
        os.kill(parser._process.pid, signal.SIGKILL)
        parser._process.wait(10)
        with pytest.raises(UnreadableError, match="made its parser crash"):
            parser.parse(DocumentFormat.HTML, b"<p>fine</p>")
        assert parser.parse(DocumentFormat.HTML, b"<p>fine</p>").text == "fine"
        child = parser._process
    assert child.returncode == -signal.SIGKILL, "it ends with whoever started it"


def test_interrupt_in_a_document_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with documents.ParserProcess(LIMITS) as parser:
        parser.parse(DocumentFormat.HTML, b"<p>first</p>")
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "recv_bytes", interrupt)
            with pytest.raises(KeyboardInterrupt):
                parser.parse(DocumentFormat.HTML, b"<p>second</p>")
        assert parser.parse(DocumentFormat.HTML, b"<p>third</p>").text == "third"


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_folder_of_documents_is_no_place_to_import_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bs4.py").write_text("raise SystemExit('taken in')")
    monkeypatch.chdir(tmp_path)
    with DocumentReader() as reader:
        assert reader.parse("a file", DocumentFormat.HTML, b"<p>fine</p>").text == "fine"


TELLING = """
import json, os
from fairlane_server.retrieval.documents import serve
serve(lambda kind, data, limits: {"text": json.dumps(dict(os.environ)), "title": ""})
"""


def test_parser_gets_nothing_of_the_environment_but_what_python_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POSTGRES_DSN", "KAFKA_SASL_PASSWORD_FILE", "AWS_SECRET_ACCESS_KEY", "EMBEDDER_API_KEY", "ANYTHING"):
        monkeypatch.setenv(name, "a secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    with documents.ParserProcess(LIMITS, TELLING) as parser:
        seen = json.loads(parser.ask(DocumentFormat.TEXT, b"")["text"])
    assert "a secret" not in seen.values()
    assert {"PATH", "PYTHONPATH", "LANG"} <= seen.keys() <= {*documents._PASSED_ON, "PYTHONPATH"}


def test_plain_text_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", interrupt)
    with DocumentReader() as reader:
        assert reader.parse("a file", DocumentFormat.MARKDOWN, b"# fine").text == "# fine"


# ------------------------------------------------------------------ files


def test_file_of_200_mb_is_refused_by_its_size_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate(200_000_000)
    monkeypatch.setattr(documents, "open", interrupt, raising=False)
    with pytest.raises(DocumentError) as caught:
        read_file("large.txt", large, LIMITS)
    assert caught.value.reason == "has 200,000,000 bytes, more than a document may have (50,000,000)"


def test_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    for path, reason in (
        (tmp_path / "none.txt", "cannot be read (No such file or directory)"),
        (pipe, "is no regular file"),
        (tmp_path, "is no regular file"),
    ):
        with pytest.raises(DocumentError) as caught:
            read_file("a file", path, LIMITS)
        assert caught.value.reason == reason
