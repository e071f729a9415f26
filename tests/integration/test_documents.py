"""A tenant's documents over HTTP: uploaded, ingested, found, replaced and deleted; on a real Postgres."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.parsers import DocumentLimits
from fairlane_server.retrieval.pgvector_search import PgVectorSearch
from fairlane_server.retrieval.store import CollectionNotFoundError
from producers.ingest.upload_store import DocumentQuota
from tests.kit.documents_kit import WORDS, DocumentsBench, WordEmbedder, collection, documents, upload
from tests.kit.pdf_kit import pdf
from tests.kit.stack import PostgresServer, migrated_database
from tests.kit.waiting import eventually

FORMATS = {
    "a.txt": b"The warranty lasts two years.",
    "b.md": b"# Canteen\n\nLunch in the canteen is at noon.",
    "c.html": b"<!doctype html><title>Ferry</title><h1>Ferry</h1><p>The ferry leaves at seven.</p>",
    "d.pdf": pdf("The archive is below the hall."),
}

LEFT_UPLOAD = """
INSERT INTO document_uploads
    (upload_id, tenant, collection_id, source, format, size_bytes, created_at_ms, lease_until)
SELECT 'upload-left', tenant, collection_id, '', '', 1, 1, now() + interval '1 hour' FROM collections RETURNING 1
"""


@pytest.fixture(scope="module")
def tables(postgres: PostgresServer) -> Iterator[PostgresServer]:
    with migrated_database(postgres, "documents") as database:
        yield database


@pytest.fixture
def bench(tables: PostgresServer, tmp_path: Path) -> Iterator[DocumentsBench]:
    made = DocumentsBench(tables, tmp_path)
    with made.service():
        """It announces the embedder."""
    yield made
    with made.client() as client:
        for one in client.get("/v1/collections", params={"limit": 100}).json()["data"]:
            assert client.delete(f"/v1/collections/{one['name']}").status_code == 200
    with made.service() as service:
        service.sweep()
    assert made.rows("SELECT count(*) FROM document_uploads") == [(0,)]
    assert made.stored() == set()


def found(bench: DocumentsBench, word: str, tenant: str = "acme", of: str = "handbook") -> list[str]:
    """Names of the documents that a dispatcher finds by this word, with its own rights."""

    async def search() -> list[str]:
        async with PgVectorSearch(bench.database.dispatcher_dsn, 2) as search:
            known = await search.collection(tenant, of)
            vector = np.array([float(word == one) for one in WORDS], dtype=np.float32)
            hits = await search.search(known, vector, word, 10, 10.0)
            return sorted({hit.source for hit in hits.matching or ()})

    return asyncio.run(search())


def test_each_format_is_uploaded_ingested_found_and_deleted(bench: DocumentsBench) -> None:
    with bench.client() as client:
        collection(client)
        made = {name: upload(client, content, name) for name, content in FORMATS.items()}
        assert {one["status"] for one in made.values()} == {"pending"}
        bench.ingest_all()
        assert bench.stored() == set()
        known = documents(client)
        assert {name: (one["status"], one["passages"]) for name, one in known.items()} == dict.fromkeys(
            FORMATS, ("done", 1)
        )
        for word, name in zip(("warranty", "canteen", "ferry", "archive"), FORMATS, strict=True):
            assert found(bench, word) == [name]
            path = f"/v1/collections/handbook/documents/{made[name]['id']}"
            assert client.get(path).json() == known[name]
            assert client.delete(path).json() == {"id": made[name]["id"], "deleted": True}
            assert found(bench, word) == []
            assert client.get(path).status_code == client.delete(path).status_code == 404
        answer = client.get("/v1/collections/handbook").json()
        assert (answer["documents"], answer["passages"]) == (0, 0)


def test_a_form_names_its_document_and_its_type_is_found_by_its_bytes(bench: DocumentsBench) -> None:
    with bench.client() as client:
        collection(client)
        path = "/v1/collections/handbook/documents"
        answer = client.post(path, files={"file": ("notes.txt", FORMATS["d.pdf"], "text/plain")})
        assert (answer.status_code, answer.json()["name"]) == (202, "notes.txt")
        assert answer.headers["location"] == f"{path}/{answer.json()['id']}"
        renamed = client.post(path, files={"file": ("x.txt", b"ferry", "text/plain")}, data={"name": "sea/ferry.txt"})
        assert renamed.json()["name"] == "sea/ferry.txt"
        bench.ingest_all()
        assert found(bench, "archive") == ["notes.txt"]
        assert found(bench, "ferry") == ["sea/ferry.txt"]


@pytest.mark.parametrize(
    ("name", "content", "media_type", "status", "code"),
    [
        ("a.docx", b"PK\x03\x04\x00\x00", "application/octet-stream", 415, "unsupported_format"),
        ("a.pdf", b"<html>", "application/pdf", 415, "unsupported_format"),
        ("../a", b"text", "text/plain", 400, "invalid"),
        ("a\nb", b"text", "text/plain", 400, "invalid"),
        ("a", b"x" * 1_000_001, "text/plain", 413, "invalid"),
        ("a", b"no form", "multipart/form-data", 400, "invalid"),
    ],
)
def test_what_is_not_taken_leaves_nothing(
    bench: DocumentsBench, name: str, content: bytes, media_type: str, status: int, code: str
) -> None:
    with bench.client() as client:
        collection(client)
        said = upload(client, content, name, media_type=media_type, status=status)
        assert said["error"]["code"] == code
        assert documents(client) == {}
    bench.ingest_all()


def test_a_document_that_cannot_be_read_fails_with_its_reason_and_goes(bench: DocumentsBench) -> None:
    with bench.client() as client:
        collection(client)
        broken = upload(client, b"%PDF-1.7 broken", "a.pdf")
        upload(client, FORMATS["a.txt"], "b.txt")
        bench.ingest_all()
        known = documents(client)
        assert known["a.pdf"]["status"] == "failed"
        assert known["a.pdf"]["reason"].startswith("is no PDF that can be read")
        assert known["b.txt"]["status"] == "done"
        assert bench.stored() == set()
        assert client.delete(f"/v1/collections/handbook/documents/{broken['id']}").status_code == 200
        assert set(documents(client)) == {"b.txt"}


def test_a_new_version_replaces_the_old_one_when_it_is_done_and_not_when_it_fails(bench: DocumentsBench) -> None:
    with bench.client() as client:
        collection(client)
        first = upload(client, b"the warranty", "a.txt")
        bench.ingest_all()
        second = upload(client, b"the ferry", "a.txt")
        assert first["id"] == second["id"]
        assert (documents(client)["a.txt"]["status"], documents(client)["a.txt"]["passages"]) == ("pending", 1)
        assert found(bench, "warranty") == ["a.txt"]
        bench.ingest_all()
        assert (found(bench, "warranty"), found(bench, "ferry")) == ([], ["a.txt"])
        upload(client, b"\xff\xfe\x00", "a.txt")
        bench.ingest_all()
        assert documents(client)["a.txt"]["status"] == "failed"
        assert found(bench, "ferry") == ["a.txt"]


def test_of_two_versions_on_their_way_the_newer_one_is_stored(bench: DocumentsBench) -> None:
    with bench.client() as client:
        collection(client)
        upload(client, b"the warranty", "a.txt")
        upload(client, b"the canteen", "a.txt")
        bench.ingest_all()
        assert (found(bench, "warranty"), found(bench, "canteen")) == ([], ["a.txt"])
        assert documents(client)["a.txt"]["passages"] == 1


def test_another_tenant_is_told_the_same_as_of_what_does_not_exist(bench: DocumentsBench) -> None:
    with bench.client() as client, bench.client("globex") as other:
        collection(client)
        document = upload(client, b"the warranty", "a.txt")
        bench.ingest_all()

        def told(name: str, document_id: str) -> list[tuple[int, str]]:
            base = f"/v1/collections/{name}"
            calls = [
                other.get(base),
                other.delete(base),
                other.get(f"{base}/documents"),
                other.get(f"{base}/documents/{document_id}"),
                other.delete(f"{base}/documents/{document_id}"),
                other.post(f"{base}/documents", params={"name": "x"}, content=b"x"),
            ]
            return [(answer.status_code, answer.text) for answer in calls]

        assert told("handbook", document["id"]) == told("nothing", "doc-" + "0" * 32)
        assert {status for status, _ in told("handbook", document["id"])} == {404}
        assert other.get("/v1/collections").json()["data"] == []
        with pytest.raises(CollectionNotFoundError):
            found(bench, "warranty", tenant="globex")
        assert found(bench, "warranty") == ["a.txt"]


def test_who_may_read_only_uploads_and_deletes_nothing(bench: DocumentsBench) -> None:
    with bench.client() as client, bench.client("acme:viewer") as viewer:
        collection(client)
        document = upload(client, b"the warranty", "a.txt")
        assert viewer.post("/v1/collections", json={"name": "x"}).status_code == 403
        upload(viewer, b"x", "b.txt", status=403)
        assert viewer.delete("/v1/collections/handbook").status_code == 403
        assert viewer.delete(f"/v1/collections/handbook/documents/{document['id']}").status_code == 403
        assert set(documents(viewer)) == {"a.txt"}


def test_pages_are_bounded_and_go_on_behind_their_cursor(bench: DocumentsBench) -> None:
    with bench.client() as client:
        for name in ("a", "b", "c"):
            collection(client, name)
        names = [f"{number:02}.txt" for number in range(7)]
        for name in names[::2]:
            upload(client, b"the warranty", name, of="b")
        bench.ingest_all()
        for name in names[1::2]:
            upload(client, b"the ferry", name, of="b")

        def walked(path: str) -> list[str]:
            seen: list[str] = []
            cursor: dict[str, str] = {}
            while True:
                page = client.get(path, params={"limit": 2, **cursor}).json()
                assert len(page["data"]) <= 2
                seen += [one["name"] for one in page["data"]]
                if not page["has_more"]:
                    return seen
                cursor = {"cursor": page["next_cursor"]}

        assert walked("/v1/collections") == ["a", "b", "c"]
        assert walked("/v1/collections/b/documents") == names
        foreign = client.get("/v1/collections", params={"limit": 1}).json()["next_cursor"]
        assert client.get("/v1/collections/b/documents", params={"cursor": foreign}).status_code == 400
        assert client.get("/v1/collections/b/documents", params={"limit": 101}).status_code == 400


@pytest.mark.parametrize(
    ("quota", "word"),
    [
        (DocumentQuota(most_documents=1), "at most 1 documents"),
        (DocumentQuota(most_bytes=20), "at most 20 bytes"),
        (DocumentQuota(most_passages=1), "at most 1 passages"),
    ],
)
def test_quotas_are_named_and_deleting_makes_room(bench: DocumentsBench, quota: DocumentQuota, word: str) -> None:
    bench.quota = quota
    with bench.client() as client:
        collection(client)
        first = upload(client, b"the warranty", "a.txt")
        bench.ingest_all()
        refused = upload(client, b"the canteen", "b.txt", status=429)
        assert (refused["error"]["code"], word in refused["error"]["message"]) == ("insufficient_quota", True)
        client.delete(f"/v1/collections/handbook/documents/{first['id']}")
        upload(client, b"the canteen", "b.txt")


def test_a_document_with_more_passages_than_the_tenant_may_have_fails(bench: DocumentsBench) -> None:
    bench.quota = DocumentQuota(most_passages=2)
    with bench.client() as client:
        collection(client)
        upload(client, b"\n\n".join(b"# %d\n\nthe ferry" % number for number in range(5)), "a.md")
        bench.ingest_all()
        assert documents(client)["a.md"]["reason"] == "a tenant has at most 2 passages, and this would be more"
        assert found(bench, "ferry") == []


def test_a_collection_is_created_once_and_its_name_is_one(bench: DocumentsBench) -> None:
    with bench.client() as client:
        collection(client)
        assert client.post("/v1/collections", json={"name": "handbook"}).status_code == 409
        for name in ("", "A", "-a", "a b", "x" * 40):
            assert client.post("/v1/collections", json={"name": name}).status_code == 400


def test_a_collection_of_another_embedder_takes_no_document(bench: DocumentsBench) -> None:
    with bench.client() as client:
        collection(client)
        upload(client, b"the warranty", "a.txt")

        class Other(WordEmbedder):
            name = "words:2"

        bench.embedder = Other()
        bench.ingest_all()
        assert documents(client)["a.txt"]["reason"].startswith("collection handbook was embedded by words:1")
    bench.embedder = WordEmbedder()
    with bench.service():
        """It announces the first one again."""


class Held(WordEmbedder):
    """Stops in the middle, for the test to do something meanwhile."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None

    def embed(self, texts: Sequence[str]) -> FloatArray:
        self.meanwhile()
        return super().embed(texts)


@pytest.mark.parametrize("what", ["document", "collection", "replaced", "recreated"])
def test_what_is_deleted_while_it_is_ingested_is_not_stored(bench: DocumentsBench, what: str) -> None:
    bench.embedder = held = Held()
    with bench.client() as client:
        collection(client)
        document = upload(client, b"the warranty", "a.txt")

        def meanwhile() -> None:
            held.meanwhile = lambda: None
            if what == "document":
                assert client.delete(f"/v1/collections/handbook/documents/{document['id']}").status_code == 200
            elif what == "replaced":
                upload(client, b"the ferry", "a.txt")
            else:
                assert client.delete("/v1/collections/handbook").status_code == 200
                if what == "recreated":
                    collection(client)

        held.meanwhile = meanwhile
        bench.ingest_all()
        if what != "collection":
            assert found(bench, "warranty") == []
            assert found(bench, "ferry") == (["a.txt"] if what == "replaced" else [])
    assert bench.stored() == set()


def test_a_lease_that_ended_is_taken_by_another_process_and_one_result_is_stored(bench: DocumentsBench) -> None:
    bench.embedder = held = Held()
    with bench.client() as client:
        collection(client)
        upload(client, b"the warranty", "a.txt")

        def meanwhile() -> None:
            # Its lease has ended, as if this process had hung.
            held.meanwhile = lambda: None
            eventually(lambda: bench.rows("SELECT lease_until < now() FROM document_uploads") == [(True,)], what="it")
            bench.ingest_all()

        held.meanwhile = meanwhile
        with bench.service(lease_s=0.05) as service:
            service.step()
        assert documents(client)["a.txt"]["status"] == "done"
        assert found(bench, "warranty") == ["a.txt"]
        assert client.get("/v1/collections/handbook").json()["passages"] == 1


def test_a_document_that_ends_its_process_again_and_again_fails(bench: DocumentsBench) -> None:
    with bench.client() as client:
        collection(client)
        upload(client, b"the warranty", "a.txt")
        store_rows = "UPDATE document_uploads SET attempts = 3 RETURNING 1"
        assert bench.rows(store_rows) == [(1,)]
        bench.ingest_all()
        assert documents(client)["a.txt"]["reason"] == "the process that ingests it ended 3 times while it was at it"


def test_content_that_was_lost_is_a_reason(bench: DocumentsBench) -> None:
    with bench.client() as client:
        collection(client)
        upload(client, b"the warranty", "a.txt")
        for path in bench.folder.rglob("upload-*"):
            path.unlink()
        bench.ingest_all()
        assert documents(client)["a.txt"]["reason"] == "its content is no longer stored: upload it again"


def test_an_upload_of_a_gateway_that_was_killed_goes_when_its_lease_ends(bench: DocumentsBench) -> None:
    with bench.client() as client:
        collection(client)
        folder = bench.folder / "acme"
        bench.rows(LEFT_UPLOAD)
        folder.mkdir(exist_ok=True)
        (folder / "upload-left").write_bytes(b"x")
        with bench.service() as service:
            assert service.sweep() == 0
            bench.rows("UPDATE document_uploads SET lease_until = now() RETURNING 1")
            assert service.sweep() == 1
        assert bench.stored() == set()


def test_a_large_collection_gets_its_index(bench: DocumentsBench) -> None:
    bench.limits = DocumentLimits(max_parser_bytes=1 << 30)
    text = b"\n\n".join(b"# Part %d\n\nthe ferry of word%d" % (number, number) for number in range(2_600))
    with bench.client() as client:
        collection(client)
        upload(client, text, "many.md")
        bench.ingest_all()
        assert documents(client)["many.md"]["passages"] == 2_600
        assert bench.rows("SELECT count(*) FROM pg_class WHERE relname LIKE 'passages\\_%%\\_nearest'") == [(1,)]
