"""Retrieval within its budget: how far it looks, what it says, and that nothing makes it fail."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from fairlane.backoff import Backoff
from fairlane.outcomes import RetrievalMode, RetrievalReason
from fairlane.records import Retrieval, RetrievalUse
from fairlane_server.retrieval.embedder import EmbedderError, QueryEmbedder
from fairlane_server.retrieval.store import CollectionNotFoundError, Hit
from fairlane_server.store_error import StoreError
from stream_processors.dispatcher.enrichment.background_embedder import BackgroundEmbedder
from stream_processors.dispatcher.enrichment.context import NO_MODE, Retrieved
from stream_processors.dispatcher.enrichment.retriever import Retriever
from stream_processors.dispatcher.response_cache.caches import PassageCache, QueryEmbeddings
from tests.kit.fake_passages import FakeEmbedder, FakePassages, FakeRetrievalCache, collection, hit
from tests.kit.waiting import PATIENCE_S

WANTED = Retrieval("handbook", 2)
QUERY = "who may open the vault?"
BUDGET_S = 0.3
"""Of what is late or never comes; what does come has more, since that is no matter of a busy machine."""


class Forgetful(dict[tuple[object, ...], tuple[Hit, ...]]):
    """Keeps nothing."""

    def __setitem__(self, key: tuple[object, ...], value: tuple[Hit, ...]) -> None: ...


@dataclass
class Desk:
    """A retriever with one collection of acme's, in which three passages are found."""

    store: FakePassages = field(default_factory=FakePassages)
    embedder: FakeEmbedder = field(default_factory=FakeEmbedder)
    cache: FakeRetrievalCache = field(default_factory=FakeRetrievalCache)
    now_ms: int = 1_000_000
    retriever: Retriever = field(init=False)

    def __post_init__(self) -> None:
        self.store.add(collection())
        self.store.nearest = (hit("a"), hit("b"), hit("c"))
        self.store.matching = (hit("c"),)
        self.retriever = Retriever(
            self.store, QueryEmbeddings(self.embedder), lambda: self.now_ms, cast("PassageCache", self.cache)
        )

    def ask(self, wanted: Retrieval = WANTED, query: str = QUERY, tenant: str = "acme") -> Retrieved:
        slow = self.store.hangs or self.store.hangs_once or self.store.late or self.embedder.hangs
        return asyncio.run(self.retriever.retrieve(tenant, wanted, query, BUDGET_S if slow else PATIENCE_S))


def ids(found: Retrieved) -> list[str]:
    return [one.passage_id for one in found.hits]


def use(mode: str, reason: RetrievalReason | None, version: int | None = 1) -> RetrievalUse:
    return RetrievalUse("handbook", mode, reason, version)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_both_lists_are_fused_and_the_best_are_kept(desk: Desk) -> None:
    found = desk.ask()
    assert ids(found) == ["c", "a"]
    assert found.use == use(RetrievalMode.HYBRID, None)
    assert desk.store.searches == [("acme", QUERY, 20)]


def test_vector_mode_asks_for_no_full_text(desk: Desk) -> None:
    found = desk.ask(replace(WANTED, mode=RetrievalMode.VECTOR))
    assert (ids(found), found.use) == (["a", "b"], use(RetrievalMode.VECTOR, None))
    assert desk.store.searches == [("acme", None, 20)]


def test_late_full_text_leaves_the_nearest_and_is_not_cached(desk: Desk) -> None:
    desk.store.matching = None
    found = desk.ask()
    assert (ids(found), found.use) == (["a", "b"], use(RetrievalMode.VECTOR, RetrievalReason.LATE))
    assert not desk.cache.entries


def test_what_was_found_is_not_searched_again_until_the_collection_changes(desk: Desk) -> None:
    first, again = desk.ask(), desk.ask(replace(WANTED, top_k=3))
    assert len(desk.store.searches) == 1
    assert ids(again)[:2] == ids(first)
    assert again.use == use(RetrievalMode.HYBRID, None)
    desk.store.add(collection(version=2))
    desk.store.nearest, desk.store.matching = (hit("new"),), ()
    desk.now_ms += 1_000
    assert ids(desk.ask()) == ["new"]


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda desk: desk.store.failures.append(StoreError("away")), RetrievalReason.UNAVAILABLE),
        (lambda desk: setattr(desk.store, "hangs", True), RetrievalReason.LATE),
    ],
    ids=["away", "hangs"],
)
@pytest.mark.parametrize("known", [True, False])
def test_without_the_store_what_was_found_before_is_used_and_named(
    desk: Desk, break_it: Callable[[Desk], None], reason: RetrievalReason, known: bool
) -> None:
    if known:
        desk.ask()
    desk.now_ms += 10_000
    break_it(desk)
    found = desk.ask()
    if known:
        assert (ids(found), found.use) == (["c", "a"], use(RetrievalMode.CACHED, reason))
    else:
        assert (ids(found), found.use) == ([], use(NO_MODE, reason, None))


def test_the_same_question_at_the_same_time_is_searched_once_for_a_tenant_and_each_gets_what_it_wants(
    desk: Desk,
) -> None:
    desk.store.add(collection("globex"))
    desk.cache.entries = Forgetful()

    async def ask() -> list[Retrieved]:
        asked = [("acme", 1), ("acme", 2), ("acme", 3), ("globex", 1)]
        return await asyncio.gather(
            *(
                desk.retriever.retrieve(tenant, replace(WANTED, top_k=top_k), QUERY, PATIENCE_S)
                for tenant, top_k in asked
            )
        )

    assert [len(found.hits) for found in asyncio.run(ask())] == [1, 2, 3, 1]
    assert sorted(tenant for tenant, _, _ in desk.store.searches) == ["acme", "globex"]


def test_cached_mode_never_searches(desk: Desk) -> None:
    wanted = replace(WANTED, mode=RetrievalMode.CACHED)
    assert desk.ask(wanted).use == use(NO_MODE, RetrievalReason.NOT_CACHED)
    assert not desk.store.searches
    desk.ask()
    found = desk.ask(wanted)
    assert (ids(found), found.use) == (["c", "a"], use(RetrievalMode.CACHED, None))
    assert len(desk.store.searches) == 1


def test_what_cannot_be_found_is_told_by_its_reason(desk: Desk) -> None:
    assert desk.ask(query="").use.reason == RetrievalReason.NOTHING_FOUND
    assert desk.ask(replace(WANTED, collection="other")).use.reason == RetrievalReason.NO_SUCH_COLLECTION
    assert desk.ask(tenant="globex").use.reason == RetrievalReason.NO_SUCH_COLLECTION
    desk.embedder.failures.append(EmbedderError("no"))
    assert desk.ask().use.reason == RetrievalReason.EMBEDDER_FAILED
    desk.store.nearest = desk.store.matching = ()
    assert desk.ask().use == use(NO_MODE, RetrievalReason.NOTHING_FOUND)
    assert not desk.cache.entries
    desk.store.add(collection(embedder="other-1"))
    desk.now_ms += 10_000
    assert desk.ask().use == use(NO_MODE, RetrievalReason.EMBEDDER_MISMATCH)


def test_a_store_that_fails_again_and_again_is_left_alone_and_tried_now_and_then(desk: Desk) -> None:
    desk.store.failures.extend(StoreError("away") for _ in range(100))
    reasons = [desk.ask().use.reason for _ in range(20)]
    assert reasons == [RetrievalReason.UNAVAILABLE] * 20
    assert desk.store.look_ups == 5
    desk.now_ms += 250
    desk.ask()
    assert desk.store.look_ups == 6
    # Another tenant's has not failed.
    desk.store.add(collection("globex"))
    desk.ask(tenant="globex")
    assert desk.store.look_ups == 7
    desk.store.failures.clear()
    desk.now_ms += 2_000
    assert desk.ask().use == use(RetrievalMode.HYBRID, None)
    assert desk.ask(query="another").use == use(RetrievalMode.HYBRID, None)


def test_a_collection_that_is_made_anew_is_found_and_one_that_is_made_just_now_as_well(desk: Desk) -> None:
    desk.ask()
    desk.store.failures.append(CollectionNotFoundError("its passages are gone"))
    desk.store.add(collection(version=7))
    found = desk.ask(query="another")
    assert (ids(found), found.use) == (["c", "a"], use(RetrievalMode.HYBRID, None, 7))
    later = replace(WANTED, collection="later")
    assert desk.ask(later).use.reason == RetrievalReason.NO_SUCH_COLLECTION
    desk.store.add(collection(name="later"))
    assert ids(desk.ask(later)) == ["c", "a"]


def test_passages_that_are_missing_from_a_collection_that_is_there_are_the_stores_fault(desk: Desk) -> None:
    desk.ask()
    desk.store.missing = True
    assert desk.ask(query="another").use.reason == RetrievalReason.UNAVAILABLE


def test_what_was_known_long_ago_is_not_used_any_more(desk: Desk) -> None:
    desk.ask()
    desk.store.hangs = True
    desk.now_ms += 299_000
    assert desk.ask().use.mode == RetrievalMode.CACHED
    desk.now_ms += 1_000
    assert desk.ask().use.mode == NO_MODE


def test_a_cached_answer_says_nothing_about_the_store(desk: Desk) -> None:
    """Searches that are always late are given up, whatever is known besides."""
    desk.ask()
    desk.store.late = True
    for number in range(5):
        assert desk.ask(query=f"new {number}").use.reason == RetrievalReason.LATE
        assert desk.ask().use.reason is None
    asked = len(desk.store.searches)
    assert desk.ask(query="one more").use.reason == RetrievalReason.UNAVAILABLE
    assert desk.ask().use == use(RetrievalMode.HYBRID, None)
    assert len(desk.store.searches) == asked


def test_a_slow_embedder_is_not_the_stores_fault(desk: Desk) -> None:
    desk.embedder.hangs = True
    for _ in range(6):
        assert desk.ask().use.reason == RetrievalReason.EMBEDDER_FAILED
    desk.embedder.hangs = False
    assert desk.ask().use == use(RetrievalMode.HYBRID, None)


def test_one_that_joins_a_search_late_has_its_own_time(desk: Desk) -> None:
    async def ask() -> list[Retrieved]:
        desk.store.hangs_once = True
        first = asyncio.create_task(desk.retriever.retrieve("acme", WANTED, QUERY, BUDGET_S))
        await asyncio.sleep(0)
        second = asyncio.create_task(desk.retriever.retrieve("acme", WANTED, QUERY, PATIENCE_S))
        return [await first, await second]

    first, second = asyncio.run(ask())
    assert first.use.reason == RetrievalReason.LATE
    assert ids(second) == ["c", "a"]


def test_an_embedder_that_cannot_be_loaded_is_tried_again_and_refuses_with_the_reason(desk: Desk) -> None:
    attempts: list[QueryEmbedder | None] = [desk.embedder, None, None]
    problems: list[str | None] = []

    def load() -> QueryEmbedder:
        made = attempts.pop()
        if made is None:
            raise FileNotFoundError("no such folder")
        return made

    def reported(problem: str | None) -> None:
        problems.append(problem)
        if problem is not None:
            with pytest.raises(EmbedderError, match="no such folder"):
                _ = lazy.name

    lazy = BackgroundEmbedder(load, reported, Backoff(first_s=0.001, longest_s=0.001))
    desk.retriever.vectors = QueryEmbeddings(lazy)
    assert desk.ask().use.reason == RetrievalReason.EMBEDDER_FAILED
    asyncio.run(lazy.load())
    assert problems == ["the embedder cannot be loaded: no such folder"] * 2 + [None]
    assert desk.ask().use == use(RetrievalMode.HYBRID, None)
