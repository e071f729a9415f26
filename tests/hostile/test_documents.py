"""Hostile documents: each ends itself alone, whatever it does to its parser, while another tenant's are ingested."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fairlane_server.retrieval.parsers import DocumentLimits
from tests.kit.documents_kit import DocumentsBench, collection, documents, upload
from tests.kit.stack import PostgresServer, migrated_database
from tests.kit.waiting import eventually

pytestmark = pytest.mark.full

PARSE_S = 2.0


@pytest.fixture(scope="module")
def tables(postgres: PostgresServer) -> Iterator[PostgresServer]:
    with migrated_database(postgres, "hostile_documents") as database:
        yield database


@pytest.fixture
def bench(tables: PostgresServer, tmp_path: Path) -> DocumentsBench:
    limits = DocumentLimits(max_file_bytes=4_000_000, max_parse_s=PARSE_S, max_parser_bytes=1 << 29, max_passages=5_000)
    return DocumentsBench(tables, tmp_path, limits=limits, most_document_bytes=4_000_000)


def bomb(content: bytes) -> bytes:
    """A PDF of one page whose content is a thousand times as long as the file."""
    packed = zlib.compress(content, 9)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R /Resources << >> >>",
        b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(packed), packed),
    ]
    body, places = b"%PDF-1.7\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    rows = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    return body + head + rows + b"trailer << /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(body)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "bomb.pdf": lambda: bomb(b"BT (x) Tj ET\n" * 8_000_000),
    "nested.html": lambda: b"<html>" + b"<b>" * 1_000_000,
    "tables.html": lambda: b"<html>" + b"<table><tr><td>" * 60_000,
    "attributes.html": lambda: b"<html><a " + b"a=1 " * 900_000 + b">",
    "quotes.md": lambda: b">" * 3_900_000,
    "lists.md": lambda: b"".join(b" " * depth + b"* x\n" for depth in range(2_500)),
    "brackets.md": lambda: b"[" * 3_900_000,
    "words.txt": lambda: b"a " * 1_900_000,
    "one-word.txt": lambda: b"a" * 3_900_000,
    "not-utf-8.txt": lambda: b"\xff" * 100_000,
    "cut.pdf": lambda: bomb(b"BT (x) Tj ET")[:-200],
}


def test_each_ends_itself_alone_and_the_other_tenants_document_is_ingested(bench: DocumentsBench) -> None:
    with bench.client("mallory") as mallory, bench.client("acme") as acme, bench.service(lanes=2) as service:
        collection(mallory)
        collection(acme)
        for name, make in HOSTILE.items():
            upload(mallory, make(), name)
        service.step()
        upload(acme, b"the warranty lasts two years", "a.txt")

        def is_ingested() -> bool:
            service.step()
            return bool(documents(acme)["a.txt"]["status"] == "done")

        eventually(is_ingested, timeout_s=60, what="the document of the other tenant")
        waiting = [one for one in documents(mallory).values() if one["status"] in ("pending", "running")]
        assert waiting, "the other tenant waited for all of them"

        def is_over() -> bool:
            service.step()
            return not service.store.counted()

        eventually(is_over, timeout_s=240, what="the end of the hostile ones")
        known = documents(mallory)
        assert set(known) == set(HOSTILE)
        for name, one in known.items():
            # What is stored is within its bounds; what is not says why.
            assert one["status"] == "done" or one["reason"], name
            assert one["passages"] <= bench.limits.max_passages
        assert known["bomb.pdf"]["status"] == known["nested.html"]["status"] == "failed"
        upload(mallory, b"the ferry leaves at seven", "honest.txt")

        def is_next() -> bool:
            service.step()
            return bool(documents(mallory)["honest.txt"]["status"] == "done")

        eventually(is_next, what="the next one")
