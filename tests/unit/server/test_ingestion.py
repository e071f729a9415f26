"""What an ingest stores, leaves alone and removes, and what becomes of it when something fails or somebody stops it."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fairlane_server.retrieval import ingestion as ingestion_module
from fairlane_server.retrieval.chunking import Chunking
from fairlane_server.retrieval.embedder import EmbedderError, FloatArray, TextRefusedError
from fairlane_server.retrieval.ingestion import EmbedderMismatchError, IngestError, Ingestion, IngestOptions, Plan
from fairlane_server.retrieval.parsers import PARSER_REVISION, DocumentLimits
from fairlane_server.retrieval.sources import SkippedFile, find_sources
from fairlane_server.retrieval.store import CollectionNotFoundError, NewDocument
from tests.kit.memory_collections import LetterEmbedder, MemoryCollections
from tests.kit.pdf_kit import pdf

TENANT, NAME = "acme", "handbook"
SENTENCES = " ".join(f"Sentence number {number} speaks of the warehouse." for number in range(60))


@pytest.fixture
def store() -> MemoryCollections:
    made = MemoryCollections()
    made.create(TENANT, NAME, "letters", 26)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "hours.md").write_text("# Hours\n\nOpen on Monday.\n\n## Gate\n\nClosed.\n")
    (folder / "plain.txt").write_text(SENTENCES)
    (folder / "page.html").write_text("<title>Page</title><p>A page.</p>")
    (folder / "paper.pdf").write_bytes(pdf("A paper."))
    return folder


def ingestion_of(
    store: MemoryCollections, embedder: LetterEmbedder | None = None, options: IngestOptions | None = None
) -> Ingestion:
    return Ingestion(store, embedder or LetterEmbedder(), store.get(TENANT, NAME), options)


def sources_of(files: Sequence[object]) -> list[str]:
    return [getattr(file, "source") for file in files]  # noqa: B009 - of several types


def stored(store: MemoryCollections) -> dict[str, NewDocument]:
    return store.documents[TENANT, NAME]


def test_everything_is_stored_with_its_title_headings_and_vectors(store: MemoryCollections, root: Path) -> None:
    embedder = LetterEmbedder()
    ingestion = ingestion_of(store, embedder)
    plan = ingestion.plan(find_sources([root]))
    assert sources_of(plan.new) == ["hours.md", "page.html", "paper.pdf", "plain.txt"]
    assert (plan.changed, plan.unchanged, plan.gone, plan.failures) == ((), 0, {}, ())
    assert not stored(store), "a plan changes nothing"

    report = ingestion.run(plan)
    assert (report.new, report.changed, report.unchanged, report.removed, report.left) == (4, 0, 0, 0, 0)
    assert (report.failures, report.stopped, report.indexed) == ((), False, False)
    assert report.passages == sum(len(document.passages) for document in stored(store).values()) > 5
    assert report.seconds > 0
    assert report.passages_per_s == report.passages / report.seconds
    assert store.index_builds == 1

    titles = {source: document.title for source, document in stored(store).items()}
    assert titles == {"hours.md": "Hours", "page.html": "Page", "paper.pdf": "paper", "plain.txt": "plain"}
    hours = stored(store)["hours.md"]
    assert [(passage.heading, passage.text) for passage in hours.passages] == [
        ("Hours", "Open on Monday."),
        ("Hours > Gate", "Closed."),
    ]
    texts = ["Hours\nOpen on Monday.", "Hours > Gate\nClosed."]
    assert np.array_equal(hours.vectors, LetterEmbedder().embed(texts)), "the headings are in the vector"
    plain = stored(store)["plain.txt"]
    assert np.array_equal(plain.vectors, LetterEmbedder().embed([passage.text for passage in plain.passages]))


def test_second_run_touches_only_what_changed(store: MemoryCollections, root: Path) -> None:
    ingestion_of(store).run(ingestion_of(store).plan(find_sources([root])))
    before = dict(stored(store))
    (root / "plain.txt").write_text("Something else.")
    (root / "new.md").write_text("A new one.")
    (root / "page.html").unlink()
    os.utime(root / "hours.md", (1, 1))
    store.puts.clear()

    embedder = LetterEmbedder()
    ingestion = ingestion_of(store, embedder)
    plan = ingestion.plan(find_sources([root]))
    assert (sources_of(plan.new), sources_of(plan.changed), plan.unchanged) == (["new.md"], ["plain.txt"], 2)
    report = ingestion.run(plan)
    assert (report.new, report.changed, report.unchanged, report.removed) == (1, 1, 2, 0)
    assert store.puts == [["new.md", "plain.txt"]]
    assert embedder.texts == ["A new one.", "Something else."]
    assert stored(store)["hours.md"] is before["hours.md"]
    assert "page.html" in stored(store), "nobody asked to prune"


def test_prune_removes_what_is_gone_and_nothing_that_is_there(store: MemoryCollections, root: Path) -> None:
    ingestion = ingestion_of(store)
    ingestion.run(ingestion.plan(find_sources([root])))
    (root / "page.html").unlink()
    (root / "paper.pdf").write_bytes(b"broken since")
    (root / "plain.txt").write_bytes(b"\xff")
    plan = ingestion.plan(find_sources([root]), prune=True)
    assert plan.gone == {"page.html": stored(store)["page.html"].content_hash}
    report = ingestion.run(plan)
    assert report.removed == 1
    assert sources_of(report.failures) == ["paper.pdf", "plain.txt"]
    assert sorted(stored(store)) == ["hours.md", "paper.pdf", "plain.txt"], "what cannot be read now stays as it was"


def test_prune_leaves_what_was_stored_anew_since_it_was_planned(store: MemoryCollections, root: Path) -> None:
    ingestion = ingestion_of(store)
    ingestion.run(ingestion.plan(find_sources([root])))
    page = (root / "page.html").read_text()
    (root / "page.html").unlink()
    plan = ingestion.plan(find_sources([root]), prune=True)
    (root / "page.html").write_text(f"{page}<p>It is back.</p>")
    ingestion.run(ingestion.plan(find_sources([root])))
    assert ingestion.run(plan).removed == 0
    assert "page.html" in stored(store)


def test_prune_leaves_what_is_below_a_folder_that_was_left_out(store: MemoryCollections, root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "far.md").write_text("Far away.")
    (root / "linked").symlink_to(elsewhere)
    ingestion = ingestion_of(store)
    ingestion.run(ingestion.plan(find_sources([root], follow_links=True)))
    assert "linked/far.md" in stored(store)
    assert ingestion.plan(find_sources([root]), prune=True).gone == {}
    (root / "linked").unlink()
    assert list(ingestion.plan(find_sources([root]), prune=True).gone) == ["linked/far.md"]


def test_prune_needs_to_know_the_whole(store: MemoryCollections, root: Path) -> None:
    ingestion = ingestion_of(store)
    for given in ([root / "hours.md"], [f"{root}/*.md"], [root, root / "hours.md"]):
        with pytest.raises(IngestError, match="what is gone can be told of one folder alone"):
            ingestion.plan(find_sources(given), prune=True)
    partly = replace(find_sources([root]), unread=(SkippedFile("a", "Permission denied"),))
    with pytest.raises(IngestError, match=r"what is gone cannot be told: a cannot be read \(Permission denied\)"):
        ingestion.plan(partly, prune=True)
    plan = ingestion.plan(partly)
    assert [str(failure.reason) for failure in plan.failures] == ["cannot be read (Permission denied)"]


@pytest.mark.parametrize("what", ["chunking", "overlap", "embedder", "parser"])
def test_change_of_how_passages_are_made_makes_them_anew(
    store: MemoryCollections, root: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    ingestion_of(store).run(ingestion_of(store).plan(find_sources([root])))
    assert not ingestion_of(store).plan(find_sources([root])).due
    embedder, options = LetterEmbedder(), IngestOptions()
    if what == "chunking":
        options = IngestOptions(chunking=Chunking(max_tokens=100))
    elif what == "overlap":
        options = IngestOptions(chunking=Chunking(overlap_tokens=0))
    elif what == "parser":
        monkeypatch.setattr(ingestion_module, "PARSER_REVISION", PARSER_REVISION + 1)
    else:
        store.delete(TENANT, NAME)
        store.create(TENANT, NAME, "other", 26)
        store.documents[TENANT, NAME] = dict.fromkeys(
            ["hours.md", "page.html", "paper.pdf", "plain.txt"],
            NewDocument("", "of letters", "", (), np.zeros((0, 26), dtype=np.float32)),
        )
        embedder = LetterEmbedder("other")
    assert len(ingestion_of(store, embedder, options).plan(find_sources([root])).changed) == 4


def test_vectors_of_another_embedder_are_refused(store: MemoryCollections) -> None:
    with pytest.raises(EmbedderMismatchError) as caught:
        ingestion_of(store, LetterEmbedder("other"))
    assert str(caught.value) == (
        "collection handbook was embedded by letters (26 dimensions), and this embedder is other (26): "
        "use that one, or create a new collection"
    )


def test_bad_files_are_failures_and_the_others_are_taken(store: MemoryCollections, root: Path) -> None:
    (root / "empty.md").touch()
    (root / "latin.txt").write_bytes(b"caf\xe9")
    (root / "locked.pdf").write_bytes(pdf("Hush.", password="hunter2"))
    (root / "damaged.pdf").write_bytes(pdf("It is open.")[:300])
    (root / "deep.html").write_text("<div>" * 50_000 + "text")
    (root / ("x" * 200)).mkdir()
    with (root / "large.txt").open("wb") as file:
        file.truncate(200_000_000)
    ingestion = ingestion_of(store)
    report = ingestion.run(ingestion.plan(find_sources([root])))
    assert (report.new, sorted(stored(store))) == (4, ["hours.md", "page.html", "paper.pdf", "plain.txt"])
    reasons = {failure.source: failure.reason for failure in report.failures}
    assert reasons.pop("damaged.pdf").startswith("is no PDF that can be read (")
    assert reasons == {
        "large.txt": "has 200,000,000 bytes, more than a document may have (50,000,000)",
        "empty.md": "holds no text",
        "latin.txt": "is not valid UTF-8 (byte 3)",
        "locked.pdf": "is protected by a password",
        "deep.html": "its elements are nested too deeply",
    }


def test_path_that_is_too_long_to_be_stored_is_a_failure(store: MemoryCollections, root: Path) -> None:
    deep = root
    for _ in range(6):
        deep /= "\N{LATIN SMALL LETTER E WITH ACUTE}" * 100
    deep.mkdir(parents=True)
    (deep / "a.md").write_text("text")
    (failure,) = ingestion_of(store).plan(find_sources([root])).failures
    assert failure.reason == "its path has more than 1,024 bytes"


def test_file_that_vanishes_or_changes_meanwhile_is_stored_as_it_is_then(store: MemoryCollections, root: Path) -> None:
    ingestion = ingestion_of(store)
    plan = ingestion.plan(find_sources([root]))
    (root / "page.html").unlink()
    (root / "hours.md").write_text("Never open.")
    report = ingestion.run(plan)
    assert [(failure.source, failure.reason) for failure in report.failures] == [
        ("page.html", "cannot be read (No such file or directory)")
    ]
    assert stored(store)["hours.md"].passages[0].text == "Never open."
    assert not ingestion.plan(find_sources([root / "hours.md"])).due, "its hash is that of what was stored"


# ------------------------------------------------------------------ batches, interrupts, errors


@pytest.fixture
def many(tmp_path: Path) -> Path:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(f"Document number {number}.")
    (folder / "07.txt").write_bytes(b"\xff")
    (folder / "19.txt").write_bytes(b"\xff")
    return folder


def test_batches_are_bounded_and_progress_is_what_is_done(store: MemoryCollections, many: Path) -> None:
    (many / "03.txt").write_text(SENTENCES * 10)
    embedder, told = LetterEmbedder(), list[int]()
    ingestion = ingestion_of(store, embedder, IngestOptions(batch_passages=8, batch_documents=6))
    report = ingestion.run(ingestion.plan(find_sources([many])), progress=told.append)
    assert (report.new, sources_of(report.failures)) == (18, ["07.txt", "19.txt"])
    assert [len(put) for put in store.puts] == [4, 6, 6, 2], "a document is never divided between two"
    assert max(embedder.sizes) == 8, "but embedded in parts"
    assert told == [4, 11, 17, 20, 20]


def test_stop_stores_what_was_read_and_a_second_run_does_the_rest(store: MemoryCollections, many: Path) -> None:
    ingestion = ingestion_of(store, options=IngestOptions(batch_documents=4))
    plan = replace(ingestion.plan(find_sources([many])), gone={"gone.txt": "hash"})
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 6

    report = ingestion.run(plan, stop=stop)
    assert (report.stopped, report.new, report.left) == (True, 6, 14)
    assert [len(put) for put in store.puts] == [4, 2]
    assert (report.removed, store.index_builds) == (0, 0)

    rest = ingestion.plan(find_sources([many]))
    assert (len(rest.new), rest.unchanged) == (14, 6)
    report = ingestion.run(rest)
    assert (report.new, report.stopped, len(stored(store)), store.index_builds) == (12, False, 18, 1)


class _Interrupted(LetterEmbedder):
    """Embeds twice, and then somebody presses Ctrl-C."""

    def embed(self, texts: Sequence[str]) -> FloatArray:
        if len(self.sizes) == 2:
            raise KeyboardInterrupt
        return super().embed(texts)


def test_interrupt_at_once_leaves_what_was_stored(store: MemoryCollections, many: Path) -> None:
    options = IngestOptions(batch_documents=4)
    ingestion = ingestion_of(store, _Interrupted(), options)
    with pytest.raises(KeyboardInterrupt):
        ingestion.run(ingestion.plan(find_sources([many])))
    assert len(stored(store)) == 8
    again = ingestion_of(store, options=options)
    plan = again.plan(find_sources([many]))
    assert plan.unchanged == 8
    assert again.run(plan).new == 10


class _Failing(LetterEmbedder):
    def embed(self, texts: Sequence[str]) -> FloatArray:
        raise EmbedderError("nobody answers")


def test_embedder_or_store_that_fails_ends_the_run(
    store: MemoryCollections, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = ingestion_of(store, _Failing())
    with pytest.raises(EmbedderError, match="nobody answers"):
        failing.run(failing.plan(find_sources([many])))

    ingestion = ingestion_of(store)
    plan = ingestion.plan(find_sources([many]))
    store.delete(TENANT, NAME)
    with pytest.raises(CollectionNotFoundError):
        ingestion.run(plan)


class _Particular(LetterEmbedder):
    """Refuses whatever holds a text that it does not like."""

    def embed(self, texts: Sequence[str]) -> FloatArray:
        if any("number 5." in text for text in texts):
            raise TextRefusedError("the embedder refused a text (400)")
        return super().embed(texts)


@pytest.mark.parametrize("batch", [1, 6, 64])
def test_text_that_the_embedder_refuses_is_a_failure_and_the_others_are_stored(
    store: MemoryCollections, many: Path, batch: int
) -> None:
    (many / "07.txt").unlink()
    (many / "19.txt").unlink()
    ingestion = ingestion_of(store, _Particular(), IngestOptions(batch_documents=batch))
    report = ingestion.run(ingestion.plan(find_sources([many])))
    (failure,) = report.failures
    assert (failure.source, failure.reason) == ("05.txt", "the embedder refused a text (400)")
    assert (report.new, report.passages, len(stored(store)), store.index_builds) == (17, 17, 17, 1)
    assert [file.source for file in ingestion.plan(find_sources([many])).due] == ["05.txt"]


def test_nothing_is_written_to_a_collection_that_was_made_anew(store: MemoryCollections, many: Path) -> None:
    for work in (True, False):
        ingestion = ingestion_of(store)
        plan = ingestion.plan(find_sources([many])) if work else Plan(unchanged=3)
        store.delete(TENANT, NAME)
        store.create(TENANT, NAME, "letters", 26)
        with pytest.raises(CollectionNotFoundError):
            ingestion.run(plan)
        assert (stored(store), store.index_builds) == ({}, 0)


def test_document_of_too_many_passages_is_a_failure(store: MemoryCollections, root: Path) -> None:
    (root / "endless.md").write_text("# Much\n\nA line.\n\n" * 400)
    options = IngestOptions(limits=DocumentLimits(max_passages=300))
    ingestion = ingestion_of(store, options=options)
    report = ingestion.run(ingestion.plan(find_sources([root])))
    assert [(failure.source, failure.reason) for failure in report.failures] == [
        ("endless.md", "makes more passages than a document may (300): split it")
    ]
    assert report.new == 4


def test_link_that_leads_elsewhere_by_the_time_it_is_read_is_not_read(store: MemoryCollections, root: Path) -> None:
    secret = root.parent / "secret.txt"
    secret.write_text("The secret.")
    ingestion = ingestion_of(store)
    plan = ingestion.plan(find_sources([root]))
    (root / "plain.txt").unlink()
    (root / "plain.txt").symlink_to(secret)
    report = ingestion.run(plan)
    assert [(failure.source, failure.reason) for failure in report.failures] == [
        ("plain.txt", "is reached by a link that leads out of the folder")
    ]


def test_run_without_work_still_sees_to_the_index(store: MemoryCollections) -> None:
    report = ingestion_of(store).run(Plan(unchanged=3))
    assert (report.unchanged, report.passages, report.passages_per_s, store.index_builds) == (3, 0, 0.0, 1)


def test_limits_of_files_are_the_options(store: MemoryCollections, root: Path) -> None:
    options = IngestOptions(limits=DocumentLimits(max_file_bytes=100))
    plan = ingestion_of(store, options=options).plan(find_sources([root]))
    assert "plain.txt" in sources_of(plan.failures)
    assert "hours.md" in sources_of(plan.new)
