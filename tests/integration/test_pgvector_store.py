"""Collections in the real Postgres: what every store does, and what only this one has to."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import psycopg
import pytest

from fairlane_server.postgres.connection import act_for, connect
from fairlane_server.retrieval import pgvector_store
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from fairlane_server.retrieval.store import CollectionNotFoundError, NewDocument, NewPassage
from fairlane_server.store_error import StoreError
from tests.kit.collection_store_suite import CollectionStoreSuite
from tests.kit.pgvector_kit import DIMENSIONS, document, number_of, numbered, paused, unit_vectors
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually


@pytest.fixture
def store(migrated: PostgresServer) -> Iterator[PgVectorCollections]:
    """A store without a collection."""
    with PgVectorCollections(migrated.operator_dsn) as found:
        yield found


class TestPgVectorCollections(CollectionStoreSuite):
    """Postgres does what every store does."""


def test_deleting_leaves_nothing_of_a_collection(store: PgVectorCollections, migrated: PostgresServer) -> None:
    query = "SELECT relname FROM pg_class WHERE relname ~ '^passage(s|_terms)_[0-9]' AND relkind IN ('r', 'i')"
    store.create("acme", "a", "e", DIMENSIONS)
    store.put("acme", "a", [numbered(10)])
    with psycopg.connect(migrated.owner_dsn, autocommit=True, connect_timeout=5) as owner:
        assert owner.execute(query).fetchall()
        assert documents_of(owner, "acme") == 1
        store.delete("acme", "a")
        assert owner.execute(query).fetchall() == []
        assert documents_of(owner, "acme") == 0


def documents_of(connection: psycopg.Connection, tenant: str) -> int:
    with connection.transaction():
        act_for(connection, tenant)
        row = connection.execute("SELECT count(*) FROM documents").fetchone()
    assert row is not None
    return int(row[0])


def test_words_go_with_their_passages(store: PgVectorCollections, migrated: PostgresServer) -> None:
    store.create("acme", "a", "e", DIMENSIONS)
    store.put("acme", "a", [numbered(5), document("b.md", ["other"], unit_vectors(1))])
    store.put("acme", "a", [numbered(3)])
    store.remove("acme", "a", ["b.md"])
    with psycopg.connect(migrated.owner_dsn, connect_timeout=5) as owner:
        table = f"passage_terms_{number_of(migrated, 'acme')}"
        assert owner.execute(f"SELECT count(*) FROM {table}".encode()).fetchone() == (3,)  # noqa: S608 - a number


def test_what_postgres_cannot_store_is_left_out(store: PgVectorCollections) -> None:
    store.create("acme", "a", "e\0", DIMENSIONS)
    odd = NewDocument("o.md", "h\0", "t\ud800", [NewPassage("nul\0 and \ud83d half", "h\0", 3)], unit_vectors(1))
    store.put("acme", "a", [odd])
    assert store.content_hashes("acme", "a") == {"o.md": "h"}
    assert store.get("acme", "a").embedder == "e"


@pytest.mark.parametrize(
    "bad",
    [
        document("", ["one"], unit_vectors(1)),
        document("a\0b", ["one"], unit_vectors(1)),
        document("x" * 1_025, ["one"], unit_vectors(1)),
        document("a", ["one"], unit_vectors(2)),
        document("a", ["one"], unit_vectors(1, DIMENSIONS + 1)),
        document("a", ["one"], np.full((1, DIMENSIONS), np.nan, np.float32)),
        document("a", ["one"], np.full((1, DIMENSIONS), 1e6, np.float32)),
    ],
)
def test_what_cannot_be_stored_is_said_and_nothing_of_it_is(store: PgVectorCollections, bad: NewDocument) -> None:
    store.create("acme", "a", "e", DIMENSIONS)
    before = store.get("acme", "a")
    with pytest.raises(StoreError) as caught:
        store.put("acme", "a", [document("good", ["two"], unit_vectors(1)), bad])
    assert "\n" not in str(caught.value)
    assert "one" not in str(caught.value)
    assert store.get("acme", "a") == before
    assert store.content_hashes("acme", "a") == {}


def test_a_source_given_twice_is_refused(store: PgVectorCollections) -> None:
    store.create("acme", "a", "e", DIMENSIONS)
    with pytest.raises(StoreError, match="twice"):
        store.put("acme", "a", [numbered(1), numbered(2)])


@pytest.mark.parametrize("tenant", ["*", "", "Acme", "acme\0", "a'b"])
def test_no_tenant_is_no_way_to_all_of_them(store: PgVectorCollections, tenant: str) -> None:
    store.create("acme", "a", "e", DIMENSIONS)
    with pytest.raises(StoreError, match="no tenant's name"):
        store.list(tenant)
    with pytest.raises(StoreError, match="no tenant's name"):
        store.delete(tenant, "a")


@pytest.mark.parametrize("dimensions", [0, 4_001])
def test_dimensions_that_cannot_be_indexed_are_refused(store: PgVectorCollections, dimensions: int) -> None:
    with pytest.raises(StoreError, match="CheckViolation"):
        store.create("acme", "a", "e", dimensions)
    assert list(store.list("acme")) == []


def test_large_vectors_and_long_passages_fit(store: PgVectorCollections) -> None:
    store.create("acme", "a", "e", 4_000)
    words = " ".join(f"word{number}" for number in range(50_000))
    store.put("acme", "a", [document("a", [words, "x" * 3_000], unit_vectors(2, 4_000))])
    assert store.get("acme", "a").passages == 2


def test_ingests_at_the_same_time_lose_nothing(migrated: PostgresServer, store: PgVectorCollections) -> None:
    store.create("acme", "a", "e", DIMENSIONS)
    start = threading.Barrier(4)

    def ingest(number: int) -> None:
        with PgVectorCollections(migrated.operator_dsn) as own:
            start.wait(20)
            for round_ in range(5):
                both = replace(numbered(10, seed=round_), source="same.md")
                own.put("acme", "a", [both, replace(numbered(3), source=f"{number}-{round_}.md")])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ingest, range(4)))
    found = store.get("acme", "a")
    assert (found.documents, found.passages) == (21, 70)
    with connect(migrated.owner_dsn, "test") as connection:
        act_for(connection, "acme")
        assert connection.execute("SELECT count(*) FROM passages").fetchone() == (70,)


def test_an_index_is_built_once_there_is_enough(
    store: PgVectorCollections, migrated: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgvector_store, "INDEX_FROM_PASSAGES", 100)
    store.create("acme", "a", "e", DIMENSIONS)
    store.put("acme", "a", [numbered(99)])
    assert not store.build_index("acme", "a")
    store.put("acme", "a", [numbered(2_000)])
    with PgVectorCollections(migrated.operator_dsn) as other, ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda one: one.build_index("acme", "a"), (store, other))) == [False, True]
    with psycopg.connect(migrated.owner_dsn, connect_timeout=5) as owner:
        indexed = owner.execute("SELECT indexname FROM pg_indexes WHERE indexdef LIKE '%hnsw%'").fetchall()
    assert indexed == [(f"passages_{number_of(migrated, 'acme')}_nearest",)]


def test_two_stores_that_create_the_same_collection_make_one(migrated: PostgresServer) -> None:
    start = threading.Barrier(3)

    def create(_: int) -> str:
        with PgVectorCollections(migrated.operator_dsn) as own:
            start.wait(20)
            try:
                return own.create("acme", "a", "e", DIMENSIONS).name
            except StoreError as error:
                return str(error)

    with ThreadPoolExecutor(3) as pool:
        said = sorted(pool.map(create, range(3)))
    assert said == ["a", "there is a collection 'a' already", "there is a collection 'a' already"]


def test_a_server_that_hangs_costs_no_more_than_its_time_and_is_used_again(migrated: PostgresServer) -> None:
    with PgVectorCollections(migrated.operator_dsn) as patient:
        patient.create("acme", "a", "e", DIMENSIONS)
    with PgVectorCollections(migrated.operator_dsn, call_timeout_s=0.5) as store:
        eventually(lambda: can_get(store), what="a connection")
        with paused(migrated), pytest.raises(StoreError):
            store.get("acme", "a")
        eventually(lambda: can_get(store), what="a connection")


def test_what_is_wrong_with_the_server_is_one_line_without_a_secret() -> None:
    for dsn in ("postgresql://fairlane:hush@127.0.0.1:1/fairlane", "nonsense hush"):
        with pytest.raises(StoreError) as caught:
            PgVectorCollections(dsn).get("acme", "a")
        assert "hush" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_without_tables_it_says_so(database: PostgresServer) -> None:
    with (
        PgVectorCollections(database.operator_dsn) as store,
        pytest.raises(StoreError, match="does not exist") as caught,
    ):
        store.get("acme", "a")
    assert not isinstance(caught.value, CollectionNotFoundError)


def can_get(store: PgVectorCollections) -> bool:
    try:
        return store.get("acme", "a").name == "a"
    except CollectionNotFoundError:
        raise
    except StoreError:
        return False


def test_a_tenant_has_so_many_collections_and_no_more(
    store: PgVectorCollections, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgvector_store, "MOST_COLLECTIONS", 2)
    for name in ("one", "two"):
        store.create(unique, name, "words-1", 2)
    with pytest.raises(StoreError, match="at most 2 collections"):
        store.create(unique, "three", "words-1", 2)
    assert [one.name for one in store.list(unique)] == ["one", "two"]
    store.delete(unique, "one")
    store.create(unique, "three", "words-1", 2)
    store.create(f"{unique}-other", "one", "words-1", 2)
