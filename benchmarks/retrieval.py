"""retrieval: searches among 100,000 passages of 50 tenants, whose sizes follow Zipf's law, in the real Postgres.

Recall is against an exact search over the vectors before Postgres rounded them; the smallest tenant has no index, so
its recall shows the cost of half precision. A request's time is that of the look-up of its collection, the embedding,
the search and the fusion, one request at a time. Searches per second are compared with a plain psycopg loop that sends
the same statements in one pipeline; the two take turns. Questions about the standard library's documentation, each with
the passage that answers it, compare the nearest passages, those with words of the question, and both lists fused; and
the static embedder with the model it was made from (`retrieval_questions`).
"""

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import psycopg

from benchmarks import retrieval_questions
from benchmarks.result import Figure, Result
from benchmarks.retrieval_questions import PASSAGES_PER_DOCUMENT, Corpus, make_corpus, questions, read_questions
from benchmarks.service_curve import percentile
from deploy.local.stack import LocalStack
from fairlane.settings import Settings
from fairlane_server.postgres.migrations import upgrade
from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.pgvector_search import (
    SETTINGS,
    PgVectorSearch,
    matching_statement,
    nearest_statement,
    search_settings,
)
from fairlane_server.retrieval.pgvector_store import PgVectorCollections, Wire, register
from fairlane_server.retrieval.rank_fusion import fuse
from fairlane_server.retrieval.static_embedder import StaticEmbedder
from fairlane_server.retrieval.store import Collection, Found, NewDocument, NewPassage

NAME = "retrieval"
HOW = "one run"
TENANTS, PASSAGES = 50, 100_000
QUERIES = 3_000
RECALL_QUERIES = 300
ROUNDS, ROUND_QUERIES = 10, 200
LIMIT = 10
RECALL_AIM, RATE_AIM = 0.95, 0.8

_NAME = "documentation"
_AT_ONCE = 8
_DOCUMENTS_AT_A_TIME = 50
_PATIENT_S = 10.0

Run = dict[str, float]
Row = tuple[Any, ...]
Ask = Callable[..., Awaitable[Found]]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's collection, and which of the corpus' passages are in it."""

    collection: Collection
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Query:
    """What is searched for in a collection."""

    tenant: Tenant
    text: str
    vector: FloatArray


def sizes(tenants: int, passages: int) -> list[int]:
    """Passages of each tenant, by Zipf's law: the n-th has an n-th of the first's."""
    whole = sum(1 / rank for rank in range(1, tenants + 1))
    found = [max(1, round(passages / rank / whole)) for rank in range(1, tenants + 1)]
    return [passages - sum(found[1:]), *found[1:]]


def run() -> Result:
    """One load, then each figure in turn."""
    settings = Settings()
    embedder = StaticEmbedder(settings.models_dir / settings.retrieval_embedder_path)
    corpus = make_corpus(embedder, PASSAGES)
    with (
        tempfile.TemporaryDirectory(prefix="fairlane-bench-") as name,
        LocalStack(data_dir=Path(name) / "stack", parts=("postgres",), environ={}) as stack,
    ):
        dsn, owner_dsn = stack.endpoints.postgres_dsn, stack.endpoints.postgres_owner_dsn
        upgrade(Settings(postgres_dsn=dsn, postgres_owner_dsn=owner_dsn))
        tenants, figures = load(dsn, corpus, embedder)
        figures["disk_mb"] = disk_mb(owner_dsn)
        figures |= asyncio.run(_search(dsn, corpus, embedder, tenants, settings.retrieval_budget_ms))
        figures |= asyncio.run(_answer(dsn, embedder))
    about_embedders = retrieval_questions.figures(retrieval_questions.measure())
    return Result(NAME, (*_figures(figures, settings.retrieval_budget_ms), *about_embedders), (figures,))


def load(dsn: str, corpus: Corpus, embedder: StaticEmbedder) -> tuple[list[Tenant], Run]:
    """Store a collection of each tenant and build its index where that pays."""
    tenants, first = [], 0
    load_s = build_s = 0.0
    with PgVectorCollections(dsn) as store:
        for rank, count in enumerate(sizes(TENANTS, len(corpus.passages)), 1):
            tenant = f"tenant-{rank}"
            store.create(tenant, _NAME, embedder.name, embedder.dimensions)
            documents = list(corpus.documents(first, count))
            started = perf_counter()
            for start in range(0, len(documents), _DOCUMENTS_AT_A_TIME):
                store.put(tenant, _NAME, documents[start : start + _DOCUMENTS_AT_A_TIME])
            loaded = perf_counter()
            store.build_index(tenant, _NAME)
            load_s, build_s = load_s + loaded - started, build_s + perf_counter() - loaded
            tenants.append(Tenant(store.get(tenant, _NAME), first, count))
            first += count
    return tenants, {"load_s": load_s, "build_s": build_s}


def disk_mb(owner_dsn: str) -> float:
    """What passages, words and their indexes take."""
    query = "SELECT sum(pg_total_relation_size(oid)) / 1e6 FROM pg_class WHERE relkind = 'r' AND relname ~ '^passage'"
    with psycopg.connect(owner_dsn, connect_timeout=5) as connection:
        row = connection.execute(query).fetchone()
    return float(row[0]) if row else 0.0


def queries(corpus: Corpus, embedder: StaticEmbedder, tenants: Sequence[Tenant], count: int, seed: int) -> list[Query]:
    """Questions to these tenants' collections, the more passages the more of them."""
    rng = random.Random(seed)
    asked = rng.choices(tenants, [tenant.count for tenant in tenants], k=count)
    texts = questions(corpus, [rng.randrange(one.first, one.first + one.count) for one in asked], seed)
    vectors = embedder.embed(texts)
    return [Query(*one) for one in zip(asked, texts, vectors, strict=True)]


def recall(corpus: Corpus, asked: Sequence[Query], found: Sequence[Found]) -> float:
    """The part of the truly nearest passages that is among the nearest found."""
    parts = []
    for query, one in zip(asked, found, strict=True):
        first, count = query.tenant.first, query.tenant.count
        order = np.argsort(-(corpus.vectors[first : first + count] @ query.vector))[:LIMIT]
        ids = {_passage_id(first, int(number)) for number in order}
        parts.append(len(ids & {hit.passage_id for hit in one.nearest}) / len(ids))
    return sum(parts) / len(parts)


async def _search(
    dsn: str, corpus: Corpus, embedder: StaticEmbedder, tenants: Sequence[Tenant], budget_ms: float
) -> Run:
    async with PgVectorSearch(dsn, _AT_ONCE) as search:

        async def ask(query: Query, timeout_s: float = _PATIENT_S) -> Found:
            return await search.search(query.tenant.collection, query.vector, query.text, LIMIT, timeout_s)

        figures: dict[str, float] = {}
        for name, tenant in (("largest", tenants[0]), ("smallest", tenants[-1])):
            asked = queries(corpus, embedder, [tenant], RECALL_QUERIES, seed=3)
            figures[f"recall_{name}"] = recall(corpus, asked, [await ask(query) for query in asked])
        figures |= await _latencies(search, embedder, queries(corpus, embedder, tenants, QUERIES, seed=4), budget_ms)
        asked = queries(corpus, embedder, tenants, ROUND_QUERIES, seed=5)
        return figures | await _rates(dsn, ask, asked)


async def _answer(dsn: str, embedder: StaticEmbedder) -> Run:
    """The part of the questions whose passage is among the first of each list."""
    asked, passages = read_questions(), retrieval_questions.stdlib_passages()
    tenant, lists = "stdlib", ("nearest", "words", "fused")
    with PgVectorCollections(dsn) as store:
        store.create(tenant, _NAME, embedder.name, embedder.dimensions)
        vectors = embedder.embed([text for _, text in passages])
        held = [NewPassage(text, "", len(text.split())) for _, text in passages]
        store.put(tenant, _NAME, [NewDocument("all", "all", "all", held, vectors)])
        collection = store.get(tenant, _NAME)
    answered = dict.fromkeys(lists, 0)
    async with PgVectorSearch(dsn, 1) as search:
        for question in asked:
            vector = await embedder.embed_query(question.question)
            found = await search.search(collection, vector, question.question, 2 * LIMIT, _PATIENT_S)
            for name, hits in zip(lists, (found.nearest, found.matching or (), fuse(found, LIMIT)), strict=True):
                numbers = [int(hit.passage_id.rpartition("#")[2]) for hit in hits[:LIMIT]]
                answered[name] += any(question.is_answered_by(*passages[number]) for number in numbers)
    return {f"answered_{name}": count / len(asked) for name, count in answered.items()}


async def _latencies(search: PgVectorSearch, embedder: StaticEmbedder, asked: Sequence[Query], budget_ms: float) -> Run:
    """All that is done for a request, one at a time, within the budget as a dispatcher has it; one that is too late
    takes its whole time."""
    took: list[float] = []
    late = incomplete = 0
    for query in asked:
        started = perf_counter()
        try:
            collection = await search.collection(query.tenant.collection.tenant, _NAME)
            vector = await embedder.embed_query(query.text)
            left_s = max(0.001, budget_ms / 1000 - (perf_counter() - started))
            found = await search.search(collection, vector, query.text, 2 * LIMIT, left_s)
            fuse(found, LIMIT)
            incomplete += found.matching is None
        except TimeoutError:
            late += 1
        took.append((perf_counter() - started) * 1000)
    parts = {"p50_ms": percentile(took, 0.5), "p99_ms": percentile(took, 0.99)}
    return parts | {"late": late / len(asked), "without_full_text": incomplete / len(asked)}


async def _rates(dsn: str, ask: Ask, asked: Sequence[Query]) -> Run:
    """Searches per second, ours and the plain loop's by turns, and ours several at a time."""
    ours_s, bare_s = [], []
    with psycopg.connect(dsn, autocommit=True, connect_timeout=5) as connection:
        register(connection)
        for _ in range(ROUNDS):
            started = perf_counter()
            for query in asked:
                await ask(query)
            turned = perf_counter()
            for query in asked:
                _ask_plainly(connection, query)
            ours_s.append(turned - started)
            bare_s.append(perf_counter() - turned)
    started = perf_counter()
    for start in range(0, len(asked), _AT_ONCE):
        await asyncio.gather(*(ask(query) for query in asked[start : start + _AT_ONCE]))
    together = len(asked) / (perf_counter() - started)
    ours, bare = (len(asked) / median(times) for times in (ours_s, bare_s))
    return {"per_s": ours, "bare_per_s": bare, "ratio": ours / bare, "together_per_s": together}


def _ask_plainly(connection: psycopg.Connection, query: Query) -> tuple[list[Row], list[Row]]:
    collection = query.tenant.collection
    with connection.pipeline():
        connection.execute(SETTINGS, search_settings(collection.tenant, LIMIT, _PATIENT_S))
        nearest = connection.execute(
            nearest_statement(collection.number, collection.dimensions, LIMIT), (Wire.vector(query.vector),)
        )
        matching = connection.execute(matching_statement(collection.number, LIMIT), (query.text,))
    return nearest.fetchall(), matching.fetchall()


def _passage_id(first: int, number: int) -> str:
    """Of a passage within its collection, whose first passage in the corpus is this."""
    start = first + number // PASSAGES_PER_DOCUMENT * PASSAGES_PER_DOCUMENT
    return f"{_NAME}/{start}.md#{number % PASSAGES_PER_DOCUMENT}"


def _figures(run: Run, budget_ms: float) -> tuple[Figure, ...]:
    return (
        Figure("recall@10, largest tenant", run["recall_largest"], "part", "at least", RECALL_AIM),
        Figure("recall@10, smallest tenant (without an index)", run["recall_smallest"], "part", "at least", RECALL_AIM),
        Figure("retrieval of a request, 50 %", run["p50_ms"], "ms"),
        Figure("retrieval of a request, 99 %", run["p99_ms"], "ms", "at most", budget_ms),
        Figure("retrievals that were too late", run["late"], "part", "at most", 0),
        Figure("retrievals without full text", run["without_full_text"], "part"),
        Figure("searches per second divided by a psycopg loop's", run["ratio"], "ratio", "at least", RATE_AIM),
        Figure("searches per second", run["per_s"], "1/s"),
        Figure("psycopg loop", run["bare_per_s"], "1/s"),
        Figure(f"searches per second, {_AT_ONCE} at a time", run["together_per_s"], "1/s"),
        Figure("questions answered by the 10 nearest", run["answered_nearest"], "part"),
        Figure("questions answered by the 10 with most of their words", run["answered_words"], "part"),
        Figure("questions answered by the 10 best of both", run["answered_fused"], "part"),
        Figure("loading", run["load_s"], "s"),
        Figure("building indexes", run["build_s"], "s"),
        Figure("disk", run["disk_mb"], "MB"),
    )
