"""Searching in the real Postgres: what is found."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from fairlane_server.retrieval import pgvector_store
from fairlane_server.retrieval.pgvector_search import PgVectorSearch
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from fairlane_server.retrieval.store import Collection, CollectionNotFoundError, Found
from fairlane_server.store_error import StoreError
from tests.kit.pgvector_kit import (
    DIMENSIONS,
    PATIENT_S,
    TEXTS,
    VECTORS,
    document,
    numbered,
    searching,
    stored_handbook,
    unit_vectors,
)
from tests.kit.stack import PostgresServer


@pytest.fixture
def store(migrated: PostgresServer) -> Iterator[PgVectorCollections]:
    """A store in which acme has a handbook."""
    with stored_handbook(migrated) as made:
        yield made


def found_by(
    database: PostgresServer, collection: Collection, text: str | None, limit: int = 10, row: int = 0
) -> Found:
    return searching(database, lambda search: search.search(collection, VECTORS[row], text, limit, PATIENT_S))


def test_nearest_and_matching_passages_are_found_best_first(
    store: PgVectorCollections, migrated: PostgresServer
) -> None:
    handbook = store.get("acme", "handbook")
    assert searching(migrated, lambda search: search.collection("acme", "handbook")) == handbook
    found = found_by(migrated, handbook, "Who manages the warehouses of Orion?", limit=3)
    exact = np.argsort(-(VECTORS @ VECTORS[0]))[:3]
    assert [hit.passage_id for hit in found.nearest] == [f"handbook/rules/night.md#{number}" for number in exact]
    assert [hit.score for hit in found.nearest] == pytest.approx((VECTORS @ VECTORS[0])[exact], abs=2e-3)
    best = found.nearest[0]
    assert (best.source, best.heading, best.text, best.tokens) == ("rules/night.md", "Rules", TEXTS[0], 9)
    assert found.matching is not None
    assert [hit.text for hit in found.matching] == [TEXTS[0], TEXTS[2]]
    assert found.matching[0].score > found.matching[1].score > 0


def test_a_rare_word_counts_more_than_many_common_ones(store: PgVectorCollections, migrated: PostgresServer) -> None:
    texts = [f"pallets and parking and invoices, case {number}" for number in range(30)] + ["the gantry"]
    store.put("acme", "handbook", [document("more.md", texts, unit_vectors(len(texts)))])
    found = found_by(migrated, store.get("acme", "handbook"), "pallets, parking, invoices or a gantry?", limit=1)
    assert found.matching is not None
    assert [hit.text for hit in found.matching] == ["the gantry"]


def test_words_that_are_everywhere_are_found_all_the_same(store: PgVectorCollections, migrated: PostgresServer) -> None:
    store.create("acme", "large", "e", DIMENSIONS)
    store.put("acme", "large", [numbered(1_500)])
    large = store.get("acme", "large")
    everywhere, once = (found_by(migrated, large, text, limit=5) for text in ("a passage", "the passage of word1234"))
    assert everywhere.matching is not None
    assert len(everywhere.matching) == 5
    assert once.matching is not None
    assert [hit.text for hit in once.matching] == ["passage about word1234"]


def test_without_a_text_there_is_no_other_list(store: PgVectorCollections, migrated: PostgresServer) -> None:
    assert found_by(migrated, store.get("acme", "handbook"), None).matching is None


@pytest.mark.parametrize(
    "text", ["", "the of and", "& | ! ( ) <-> ':*", "'\\", "a\0b\ud800", "\\'; DROP TABLE passages; --", "%s %(a)s {}"]
)
def test_any_text_may_be_searched_for(store: PgVectorCollections, migrated: PostgresServer, text: str) -> None:
    found = found_by(migrated, store.get("acme", "handbook"), text)
    assert len(found.nearest) == len(TEXTS)
    assert found.matching == ()


@pytest.mark.parametrize("text", ["don't & warehouse\\ | 'Orion'", "warehouse " + "x" * 1_000_000])
def test_odd_texts_find_what_they_mean(store: PgVectorCollections, migrated: PostgresServer, text: str) -> None:
    found = found_by(migrated, store.get("acme", "handbook"), text)
    assert found.matching is not None
    assert TEXTS[0] in [hit.text for hit in found.matching]


def test_a_vector_without_a_direction_is_near_to_nothing(store: PgVectorCollections, migrated: PostgresServer) -> None:
    handbook, nothing = store.get("acme", "handbook"), np.zeros(DIMENSIONS, np.float32)
    found = searching(migrated, lambda search: search.search(handbook, nothing, "warehouse", 5, PATIENT_S))
    assert (found.nearest, len(found.matching or ())) == ((), 2)


def test_more_than_there_are_may_be_wanted(
    store: PgVectorCollections, migrated: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgvector_store, "INDEX_FROM_PASSAGES", 100)
    store.create("acme", "large", "e", DIMENSIONS)
    store.put("acme", "large", [numbered(3_000)])
    assert store.build_index("acme", "large")
    large = store.get("acme", "large")
    assert len(found_by(migrated, large, None, limit=10_000).nearest) == 3_000
    assert len(found_by(migrated, large, None, limit=700).nearest) == 700
    # What was removed is in the index until it is vacuumed, and must not crowd out what is there.
    store.put("acme", "large", [numbered(20)])
    assert len(found_by(migrated, store.get("acme", "large"), None).nearest) == 10


@pytest.mark.parametrize(
    ("limit", "dimensions", "tenant", "said"),
    [
        (0, DIMENSIONS, "acme", "limit must be"),
        (10_001, DIMENSIONS, "acme", "limit must be"),
        (5, DIMENSIONS + 1, "acme", "dimensions"),
        (5, DIMENSIONS, "*", "no tenant's name"),
    ],
)
def test_what_makes_no_sense_is_said(
    store: PgVectorCollections, migrated: PostgresServer, limit: int, dimensions: int, tenant: str, said: str
) -> None:
    handbook = store.get("acme", "handbook")
    other = Collection(tenant, "handbook", "e", DIMENSIONS, 1, number=handbook.number)
    vector = unit_vectors(1, dimensions)[0]
    with pytest.raises(StoreError, match=said):
        searching(migrated, lambda search: search.search(other, vector, None, limit, PATIENT_S))


def test_a_collection_that_is_gone_is_not_found(store: PgVectorCollections, migrated: PostgresServer) -> None:
    handbook = store.delete("acme", "handbook")
    with pytest.raises(CollectionNotFoundError):
        found_by(migrated, handbook, "warehouse")
    nothing = np.zeros(DIMENSIONS, np.float32)
    with pytest.raises(CollectionNotFoundError):
        searching(migrated, lambda search: search.search(handbook, nothing, "warehouse", 5, PATIENT_S))
    for name in ("handbook", "hand\0book"):
        with pytest.raises(CollectionNotFoundError):
            searching(migrated, partial(PgVectorSearch.collection, tenant="acme", name=name))


def test_without_tables_no_collection_is_said_to_be_gone(database: PostgresServer) -> None:
    with pytest.raises(StoreError, match="does not exist") as caught:
        searching(database, lambda search: search.collection("acme", "handbook"))
    assert not isinstance(caught.value, CollectionNotFoundError)


def test_tenants_in_turn_on_one_connection_see_their_own(store: PgVectorCollections, migrated: PostgresServer) -> None:
    store.create("globex", "handbook", "e", DIMENSIONS)
    store.put("globex", "handbook", [document("g.md", ["Globex keeps its warehouse secret."], unit_vectors(1))])
    ours, theirs = store.get("acme", "handbook"), store.get("globex", "handbook")
    forged = Collection("acme", "handbook", "e", DIMENSIONS, theirs.version, number=theirs.number)

    async def use(search: PgVectorSearch) -> None:
        for _ in range(8):  # beyond five, statements are prepared
            assert len((await search.search(ours, VECTORS[0], "warehouse", 9, PATIENT_S)).nearest) == len(TEXTS)
            assert len((await search.search(theirs, VECTORS[0], "warehouse", 9, PATIENT_S)).nearest) == 1
            assert await search.search(forged, VECTORS[0], "warehouse", 9, PATIENT_S) == Found((), ())

    searching(migrated, use, connections=1)
