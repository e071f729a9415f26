"""What every CollectionStore does. A test class takes it over and says in the fixture ``store`` which one."""

from collections.abc import Sequence

import numpy as np
import pytest

from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.store import (
    CollectionExistsError,
    CollectionNotFoundError,
    CollectionStore,
    NewDocument,
    NewPassage,
)

TENANT, OTHER, NAME = "acme", "globex", "handbook"
EMBEDDER, DIMENSIONS = "an embedder", 8


def vectors(count: int, seed: int = 0) -> FloatArray:
    """Unit vectors of shape (count, DIMENSIONS)."""
    drawn = np.random.default_rng(seed).normal(size=(count, DIMENSIONS)).astype(np.float32)
    unit: FloatArray = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return unit


def document(source: str, *texts: str, content_hash: str = "first") -> NewDocument:
    """A document with a passage for each text."""
    passages = tuple(NewPassage(text, "A heading", len(text.split())) for text in texts)
    return NewDocument(source, content_hash, f"Title of {source}", passages, vectors(len(texts)))


class CollectionStoreSuite:
    """Needs the fixture ``store``: an empty CollectionStore."""

    def test_collection_is_created_once_and_found_by_its_tenant(self, store: CollectionStore) -> None:
        made = store.create(TENANT, NAME, EMBEDDER, DIMENSIONS)
        assert (made.tenant, made.name, made.embedder, made.dimensions) == (TENANT, NAME, EMBEDDER, DIMENSIONS)
        assert (made.documents, made.passages) == (0, 0)
        assert store.get(TENANT, NAME) == made
        assert list(store.list(TENANT)) == [made]
        with pytest.raises(CollectionExistsError):
            store.create(TENANT, NAME, EMBEDDER, DIMENSIONS)
        assert store.get(TENANT, NAME) == made

    def test_collections_are_listed_by_name(self, store: CollectionStore) -> None:
        for name in ("c", "a", "b"):
            store.create(TENANT, name, EMBEDDER, DIMENSIONS)
        assert [collection.name for collection in store.list(TENANT)] == ["a", "b", "c"]

    def test_documents_are_put_counted_and_replaced(self, store: CollectionStore) -> None:
        store.create(TENANT, NAME, EMBEDDER, DIMENSIONS)
        store.put(TENANT, NAME, [document("a.md", "one", "two"), document("b/ü.md", "three")])
        assert store.content_hashes(TENANT, NAME) == {"a.md": "first", "b/ü.md": "first"}
        assert counts(store) == (2, 3)
        store.put(TENANT, NAME, [document("a.md", "one", content_hash="second"), document("c.md", "four")])
        assert store.content_hashes(TENANT, NAME) == {"a.md": "second", "b/ü.md": "first", "c.md": "first"}
        assert counts(store) == (3, 3)

    def test_documents_are_removed(self, store: CollectionStore) -> None:
        store.create(TENANT, NAME, EMBEDDER, DIMENSIONS)
        store.put(TENANT, NAME, [document(source, "one", "two") for source in ("a", "b", "c")])
        assert store.remove(TENANT, NAME, ["a", "c", "none"]) == 2
        assert store.remove(TENANT, NAME, ["a"]) == 0
        assert store.content_hashes(TENANT, NAME) == {"b": "first"}
        assert counts(store) == (1, 2)

    def test_documents_are_removed_only_as_they_were_seen(self, store: CollectionStore) -> None:
        store.create(TENANT, NAME, EMBEDDER, DIMENSIONS)
        store.put(TENANT, NAME, [document("a", "one"), document("b", "two", "three")])
        store.put(TENANT, NAME, [document("b", "four", content_hash="second")])
        assert store.remove(TENANT, NAME, {"a": "first", "b": "first", "none": "first"}) == 1
        assert store.content_hashes(TENANT, NAME) == {"b": "second"}
        assert counts(store) == (1, 1)

    def test_nothing_is_written_to_another_collection_of_the_same_name(self, store: CollectionStore) -> None:
        first = store.create(TENANT, NAME, EMBEDDER, DIMENSIONS)
        store.put(TENANT, NAME, [document("a", "one")], number=first.number)
        assert store.remove(TENANT, NAME, ["a"], number=first.number) == 1
        store.build_index(TENANT, NAME, number=first.number)
        store.delete(TENANT, NAME)
        store.create(TENANT, NAME, EMBEDDER, DIMENSIONS)
        store.put(TENANT, NAME, [document("a", "two")])
        before = store.get(TENANT, NAME)
        for attempt in (
            lambda: store.put(TENANT, NAME, [document("b", "three")], number=first.number),
            lambda: store.remove(TENANT, NAME, ["a"], number=first.number),
            lambda: store.build_index(TENANT, NAME, number=first.number),
        ):
            with pytest.raises(CollectionNotFoundError):
                attempt()
        assert store.get(TENANT, NAME) == before
        assert store.content_hashes(TENANT, NAME) == {"a": "first"}

    def test_every_change_raises_the_version_and_none_comes_back(self, store: CollectionStore) -> None:
        seen = [store.create(TENANT, NAME, EMBEDDER, DIMENSIONS).version]
        for change in (
            lambda: store.put(TENANT, NAME, [document("a", "one")]),
            lambda: store.put(TENANT, NAME, [document("a", "two")]),
            lambda: store.remove(TENANT, NAME, ["a"]),
        ):
            change()
            seen.append(store.get(TENANT, NAME).version)
        store.remove(TENANT, NAME, ["a"])
        assert store.get(TENANT, NAME).version == seen[-1], "nothing was there to be removed"
        store.delete(TENANT, NAME)
        seen.append(store.create(TENANT, NAME, EMBEDDER, DIMENSIONS).version)
        assert seen == sorted(set(seen))

    def test_collection_is_deleted_with_what_is_in_it(self, store: CollectionStore) -> None:
        store.create(TENANT, NAME, EMBEDDER, DIMENSIONS)
        store.put(TENANT, NAME, [document("a", "one", "two")])
        gone = store.delete(TENANT, NAME)
        assert (gone.name, gone.documents, gone.passages) == (NAME, 1, 2)
        assert list(store.list(TENANT)) == []
        store.create(TENANT, NAME, EMBEDDER, DIMENSIONS)
        assert store.content_hashes(TENANT, NAME) == {}
        assert counts(store) == (0, 0)

    def test_collection_of_another_tenant_is_not_found(self, store: CollectionStore) -> None:
        store.create(OTHER, NAME, EMBEDDER, DIMENSIONS)
        store.put(OTHER, NAME, [document("theirs", "one")])
        theirs = store.get(OTHER, NAME)
        not_found(store)
        assert list(store.list(TENANT)) == []
        store.create(TENANT, NAME, EMBEDDER, DIMENSIONS)
        store.put(TENANT, NAME, [document("ours", "two")])
        assert store.remove(TENANT, NAME, ["theirs"]) == 0
        store.delete(TENANT, NAME)
        assert store.get(OTHER, NAME) == theirs
        assert store.content_hashes(OTHER, NAME) == {"theirs": "first"}

    def test_collection_that_is_not_there_is_not_found(self, store: CollectionStore) -> None:
        not_found(store)

    def test_index_may_be_asked_for_again(self, store: CollectionStore) -> None:
        store.create(TENANT, NAME, EMBEDDER, DIMENSIONS)
        store.build_index(TENANT, NAME)
        store.put(TENANT, NAME, [document("a", *many("word", 50))])
        before = store.get(TENANT, NAME)
        store.build_index(TENANT, NAME)
        assert not store.build_index(TENANT, NAME), "it is there, or does not pay"
        assert (store.get(TENANT, NAME).documents, store.get(TENANT, NAME).passages) == (1, 50)
        assert store.get(TENANT, NAME).version >= before.version


def counts(store: CollectionStore) -> tuple[int, int]:
    """Documents and passages."""
    found = store.get(TENANT, NAME)
    return found.documents, found.passages


def many(word: str, count: int) -> Sequence[str]:
    """Texts that differ."""
    return [f"{word} {number}" for number in range(count)]


def not_found(store: CollectionStore) -> None:
    """Nothing can be done to a collection of this name."""
    for attempt in (
        lambda: store.get(TENANT, NAME),
        lambda: store.delete(TENANT, NAME),
        lambda: store.content_hashes(TENANT, NAME),
        lambda: store.put(TENANT, NAME, [document("a", "one")]),
        lambda: store.remove(TENANT, NAME, ["theirs"]),
        lambda: store.build_index(TENANT, NAME),
    ):
        with pytest.raises(CollectionNotFoundError):
            attempt()
