"""Ingestion into the real store: through the SDK and the command, over interrupts, and apart by tenant."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from fairlane_server.cli import main
from fairlane_server.postgres.connection import act_for
from fairlane_server.retrieval import embedders
from fairlane_server.retrieval.collections import Collections
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from fairlane_server.retrieval.store import CollectionStore
from tests.kit.collection_store_suite import CollectionStoreSuite
from tests.kit.memory_collections import LetterEmbedder
from tests.kit.pdf_kit import pdf
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

DOCUMENTS = Path(__file__).parents[2] / "docs"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def store(migrated: PostgresServer) -> Iterator[PgVectorCollections]:
    with PgVectorCollections(migrated.operator_dsn) as made:
        yield made


class TestPgVectorCollections(CollectionStoreSuite):
    @pytest.fixture
    def store(self, migrated: PostgresServer) -> Iterator[CollectionStore]:
        with PgVectorCollections(migrated.operator_dsn) as made:
            yield made


@pytest.fixture
def run(migrated: PostgresServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `fairlane collections` on the test's database: exit status, what it printed, what it complained about."""
    monkeypatch.setenv("POSTGRES_DSN", migrated.operator_dsn)
    monkeypatch.setattr(embedders, "embedder_for", lambda _settings: LetterEmbedder())

    def run_command(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["collections", *map(str, arguments)])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    return run_command


def passages(migrated: PostgresServer, tenant: str) -> list[tuple[str, int, str, str]]:
    """Source, ordinal, heading and text of what is stored of a tenant."""
    with psycopg.connect(migrated.owner_dsn, connect_timeout=5) as connection:
        act_for(connection, tenant)
        return connection.execute(
            "SELECT source, ordinal, heading, text FROM passages ORDER BY source, ordinal"
        ).fetchall()


def test_folder_of_real_documents_is_ingested_and_only_what_changed_again(
    run: Run, migrated: PostgresServer, tmp_path: Path
) -> None:
    root = tmp_path / "docs"
    root.mkdir()
    for document in DOCUMENTS.glob("*.md"):
        (root / document.name).write_bytes(document.read_bytes())
    (root / "paper.pdf").write_bytes(pdf("The warehouse of Orion opens at nine."))
    (root / "page.html").write_text("<title>Gate</title><h1>Gate</h1><p>The gate is closed.</p>")
    (root / "locked.pdf").write_bytes(pdf("Hush.", password="hunter2"))
    (root / "latin.txt").write_bytes(b"caf\xe9")
    with (root / "large.txt").open("wb") as file:
        file.truncate(200_000_000)
    count = len(list(DOCUMENTS.glob("*.md"))) + 2

    assert run("create", "handbook", "--tenant", "acme")[0] == 0
    code, out, _ = run("ingest", "handbook", root, "--tenant", "acme", "--json")
    report = json.loads(out)
    assert (code, report["new"], report["changed"]) == (1, count, 0)
    assert {failure["source"] for failure in report["failures"]} == {"large.txt", "latin.txt", "locked.pdf"}
    found = passages(migrated, "acme")
    assert len(found) == report["passages"] > 100
    assert ("paper.pdf", 0, "", "The warehouse of Orion opens at nine.") in found
    assert ("page.html", 0, "Gate", "The gate is closed.") in found
    assert passages(migrated, "globex") == []

    shown = json.loads(run("show", "handbook", "--tenant", "acme", "--json")[1])
    assert (shown["documents"], shown["passages"]) == (count, len(found))
    (root / "page.html").unlink()
    (root / "client.md").write_text("# Client\n\nIt changed.\n")
    report = json.loads(run("ingest", "handbook", root, "--prune", "--tenant", "acme", "--json")[1])
    assert (report["new"], report["changed"], report["unchanged"], report["removed"]) == (0, 1, count - 2, 1)
    after = passages(migrated, "acme")
    assert [row for row in after if row[0] == "client.md"] == [("client.md", 0, "Client", "It changed.")]
    untouched = {"client.md", "page.html"}
    assert [row for row in after if row[0] not in untouched] == [row for row in found if row[0] not in untouched]

    assert run("show", "handbook", "--tenant", "globex")[2].startswith("error: ")
    assert run("delete", "handbook", "--tenant", "globex", "--yes")[0] == 1
    assert len(passages(migrated, "acme")) == len(after)
    assert run("delete", "handbook", "--tenant", "acme", "--yes")[0] == 0
    assert passages(migrated, "acme") == []


PROGRAM = """
import sys, time
from fairlane_server.cli import main
from fairlane_server.retrieval import embedders
from tests.kit.memory_collections import LetterEmbedder

class Slow(LetterEmbedder):
    def embed(self, texts):
        time.sleep(0.05)
        return super().embed(texts)

embedders.embedder_for = lambda settings: Slow()
main(sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ingest_that_is_interrupted_goes_on_where_it_was(
    store: PgVectorCollections, migrated: PostgresServer, tmp_path: Path, number: signal.Signals
) -> None:
    total = 600
    for name in range(total):
        (tmp_path / f"{name:03}.md").write_text(f"# Number {name}\n\nThe document with the number {name}.\n")
    collections = Collections(store, LetterEmbedder, "acme")
    collections.create("handbook")
    command = [sys.executable, "-c", PROGRAM, "collections", "ingest", "handbook", str(tmp_path), "--tenant", "acme"]
    with subprocess.Popen(
        command,
        env={**os.environ, "POSTGRES_DSN": migrated.operator_dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        # The first batch is stored, and the others are not.
        eventually(lambda: collections.get("handbook").documents, 60, "the first batch")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    stored = collections.get("handbook").documents
    assert 0 < stored < total, (out, err)
    assert err == b""
    if number is not signal.SIGKILL:
        assert process.returncode == 1
        assert out.startswith(f"stopped: {stored} new, ".encode())
    assert len({source for source, _, _, _ in passages(migrated, "acme")}) == stored
    report = collections.ingest("handbook", [tmp_path])
    assert (report.new, report.unchanged, report.changed) == (total - stored, stored, 0)
    assert collections.get("handbook").passages == total


def test_parser_ends_with_the_process_that_was_killed(tmp_path: Path) -> None:
    program = (
        "from fairlane_server.retrieval.documents import DocumentReader\n"
        "from fairlane_server.retrieval.parsers import DocumentFormat\n"
        "reader = DocumentReader()\n"
        "reader.parse('a', DocumentFormat.HTML, b'<p>text</p>')\n"
        "print(reader._parser._process.pid, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        parser = int(process.stdout.readline())
        process.kill()
    eventually(lambda: not Path(f"/proc/{parser}").exists(), what="the end of the parser")
