"""The collections of a tenant, as the SDK has them; and the store that other tests use in its place."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fairlane.settings import Settings
from fairlane_server.retrieval import embedders, pgvector_store
from fairlane_server.retrieval.collections import Collections, open_collections
from fairlane_server.retrieval.ingestion import EmbedderMismatchError
from fairlane_server.retrieval.sources import SourcesError
from fairlane_server.retrieval.store import CollectionExistsError, CollectionNotFoundError, CollectionStore
from tests.kit.collection_store_suite import CollectionStoreSuite
from tests.kit.memory_collections import LetterEmbedder, MemoryCollections


class TestMemoryCollections(CollectionStoreSuite):
    @pytest.fixture
    def store(self) -> CollectionStore:
        return MemoryCollections()


@pytest.fixture
def store() -> MemoryCollections:
    return MemoryCollections()


@pytest.fixture
def collections(store: MemoryCollections) -> Collections:
    return Collections(store, LetterEmbedder, "acme")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a.md", "b.md"):
        (tmp_path / name).write_text(f"The text of {name}.")
    return tmp_path


def test_collection_is_filled_looked_at_and_deleted(collections: Collections, root: Path) -> None:
    made = collections.create("handbook")
    assert (made.tenant, made.embedder, made.dimensions) == ("acme", "letters", 26)
    with pytest.raises(CollectionExistsError):
        collections.create("handbook")
    told: list[tuple[int, int]] = []
    report = collections.ingest("handbook", [root], progress=lambda done, total: told.append((done, total)))
    assert (report.new, told[-1]) == (2, (2, 2))
    assert collections.ingest("handbook", [str(root)]).unchanged == 2
    assert collections.documents("handbook") == ["a.md", "b.md"]
    assert [(found.name, found.documents) for found in collections.list()] == [("handbook", 2)]

    (root / "a.md").unlink()
    assert collections.ingest("handbook", [root], prune=True).removed == 1
    assert collections.remove("handbook", ["b.md", "none.md"]) == 1
    assert collections.get("handbook").documents == 0
    assert collections.delete("handbook").name == "handbook"
    with pytest.raises(CollectionNotFoundError):
        collections.get("handbook")


def test_collection_of_another_tenant_is_not_found(store: MemoryCollections, root: Path) -> None:
    theirs, ours = (Collections(store, LetterEmbedder, tenant) for tenant in ("globex", "acme"))
    theirs.create("handbook")
    attempts: list[Callable[[], object]] = [
        lambda: ours.get("handbook"),
        lambda: ours.delete("handbook"),
        lambda: ours.documents("handbook"),
        lambda: ours.remove("handbook", ["a.md"]),
        lambda: ours.ingest("handbook", [root]),
    ]
    for attempt in attempts:
        with pytest.raises(CollectionNotFoundError):
            attempt()
    assert list(ours.list()) == []
    assert theirs.get("handbook").documents == 0


@pytest.mark.parametrize("tenant", ["", "*", "Acme", "a b", "-a", "a" * 40])
def test_what_cannot_be_a_tenant_is_refused(store: MemoryCollections, tenant: str) -> None:
    with pytest.raises(ValueError, match="no tenant can have the name"):
        Collections(store, LetterEmbedder, tenant)


@pytest.mark.parametrize("name", ["", "A", "a/b", "a b", "-a", "a" * 40, "a\n"])
def test_what_cannot_be_a_collection_is_refused(collections: Collections, name: str) -> None:
    with pytest.raises(ValueError, match="no collection can have the name"):
        collections.create(name)
    with pytest.raises(CollectionNotFoundError):
        collections.get(name)


def test_wrong_embedder_and_nothing_to_ingest_are_errors(store: MemoryCollections, tmp_path: Path) -> None:
    collections = Collections(store, LetterEmbedder, "acme")
    collections.create("handbook")
    with pytest.raises(SourcesError, match="holds no file to ingest"):
        collections.ingest("handbook", [tmp_path])
    with pytest.raises(EmbedderMismatchError):
        Collections(store, lambda: LetterEmbedder("other"), "acme").ingest("handbook", [tmp_path])


def test_embedder_is_made_when_it_is_needed_and_closed(
    store: MemoryCollections, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LetterEmbedder] = []

    def embedder_for(_settings: Settings) -> LetterEmbedder:
        made.append(LetterEmbedder())
        return made[-1]

    monkeypatch.setattr(embedders, "embedder_for", embedder_for)
    monkeypatch.setattr(pgvector_store, "PgVectorCollections", lambda _dsn: store)
    with open_collections(Settings(), "acme") as collections:
        assert list(collections.list()) == []
        assert not made, "no model is needed to look"
        collections.create("handbook")
        assert collections.ingest("handbook", [root]).new == 2
        assert len(made) == 1
    assert store.closed
    assert made[0].closed.is_set()
