"""retrieval: searches among 100,000 passages of 50 tenants, whose sizes follow Zipf's law, in the real Postgres.

Recall is against an exact search over the vectors before Postgres rounded them; the smallest tenant has no index, so
its recall shows the cost of half precision. A request's time is that of the look-up of its collection, the embedding,
the search and the fusion, one request at a time. Searches per second are compared with a plain psycopg loop that sends
the same statements in one pipeline; the two take turns.

Questions about the standard library's documentation, each with the passage that answers it, compare the nearest
passages, those with words of the question, and both lists fused; and recall and speed of the static embedder with those
of the model it was made from, all-MiniLM-L6-v2 in its engine, where nearest passages are found exactly, by cosine. The
texts come with CPython: ``pydoc_data.topics`` (the language reference as ``help()`` shows it) and the docstrings of
modules; passages are cut as ingestion does it.
"""

import asyncio
import inspect
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import psycopg
import yaml

from benchmarks.cluster import MODELS_DIR, shipped_engine, shipped_model, stores
from benchmarks.result import Figure, Result
from benchmarks.service_curve import percentile
from fairlane.outcomes import Task
from fairlane.records import Parameters, RequestInput
from fairlane.settings import Settings
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.retrieval.chunking import Chunker, Chunking
from fairlane_server.retrieval.embedder import Embedder, FloatArray
from fairlane_server.retrieval.parsers import ParsedDocument
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
from inference_consumers.engines.protocol import Engine, EngineItem, Success, run_batch

NAME = "retrieval"
HOW = "one run"
TENANTS, PASSAGES = 50, 100_000
QUERIES = 3_000
RECALL_QUERIES = 300
ROUNDS, ROUND_QUERIES = 10, 200
LIMIT = 10
RECALL_AIM, RATE_AIM = 0.95, 0.8
_DATA = Path(__file__).with_name("data")
_NAME = "documentation"
_AT_ONCE = 8
# Passages, words and their indexes.
_DISK_MB = "SELECT sum(pg_total_relation_size(oid)) / 1e6 FROM pg_class WHERE relkind = 'r' AND relname ~ '^passage'"
_DOCUMENTS_AT_A_TIME = 50
_PATIENT_S = 10.0
_MODULES: Mapping[str, Sequence[str]] = yaml.safe_load((_DATA / "stdlib_modules.yaml").read_text(encoding="utf-8"))
PASSAGES_PER_DOCUMENT = 20
_MIN_WORDS = 5
# Topics that only repeat others: they would answer every question twice.
_REPEATED_TOPICS = frozenset({"compound", "specialnames", "execmodel", "else"})
STATIC, ENCODER = "all-minilm-l6-v2-static", "all-minilm-l6-v2"
CUTS = (1, 5, 10)
_QUERY_ROUNDS = 5
_TEXTS_AT_A_TIME = 64

Run = dict[str, float]


@dataclass(frozen=True, slots=True)
class StdlibQuestion:
    """A question, the name of the text that answers it, and words that the answering passage holds."""

    question: str
    source: str
    phrase: str

    def is_answered_by(self, source: str, passage: str) -> bool:
        """Whether a passage of this source is the one; white space does not count."""
        return source == self.source and squeezed(self.phrase) in squeezed(passage)


def read_questions(path: Path = _DATA / "stdlib_questions.yaml") -> tuple[StdlibQuestion, ...]:
    """The questions of the file. Raises KeyError for an entry that lacks something."""
    entries: Sequence[Mapping[str, str]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = []
    for entry in entries:
        source = f"topic/{entry['topic']}" if "topic" in entry else f"module/{entry['module']}"
        found.append(StdlibQuestion(entry["question"], source, entry["phrase"]))
    return tuple(found)


def documentation() -> dict[str, str]:
    """The texts by name: ``topic/NAME`` and ``module/NAME``."""
    texts = {f"topic/{name}": text for name, text in sorted(topics.items()) if name not in _REPEATED_TOPICS}
    for name in _MODULES["questions"]:
        texts[f"module/{name}"] = import_module(name).__doc__ or ""
    return texts


def squeezed(text: str) -> str:
    """The text with one space for every run of white space."""
    return " ".join(text.split())


def sentences() -> list[list[str]]:
    """The sentences of each text, in order."""
    texts = []
    for text in (*topics.values(), *_docstrings()):
        parts = (squeezed(part) for part in re.split(r"(?<=[.:;!?])\s+|\n\s*\n", text))
        texts.append([part for part in parts if len(part.split()) >= _MIN_WORDS])
    return [text for text in texts if len(text) > 1]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Passages with their vectors, of shape (passages, dimensions)."""

    passages: Sequence[NewPassage]
    vectors: FloatArray

    def documents(self, first: int, count: int) -> Iterator[NewDocument]:
        """These passages, so many to a document, which is named after its first."""
        for start in range(first, first + count, PASSAGES_PER_DOCUMENT):
            part = slice(start, min(start + PASSAGES_PER_DOCUMENT, first + count))
            source = f"{start}.md"
            yield NewDocument(source, source, source, self.passages[part], self.vectors[part])


def make_corpus(embedder: Embedder, count: int, seed: int = 1) -> Corpus:
    """So many passages, no two alike, each of up to twelve sentences from two texts."""
    rng = random.Random(seed)
    source = sentences()
    texts: dict[str, None] = {}
    while len(texts) < count:
        parts = (_few_of(rng, rng.choice(source)) for _ in range(2))
        texts[" ".join(sentence for part in parts for sentence in part)] = None
    passages = [NewPassage(text, "", len(text.split())) for text in texts]
    return Corpus(passages, embedder.embed(list(texts)))


def questions(corpus: Corpus, passages: Sequence[int], seed: int = 2) -> list[str]:
    """A question about each of these passages: twelve words in a row from it."""
    rng = random.Random(seed)
    asked = []
    for number in passages:
        words = corpus.passages[number].text.split()
        start = rng.randrange(max(1, len(words) - 12))
        asked.append(" ".join(words[start : start + 12]))
    return asked


def _docstrings() -> Iterator[str]:
    for name in _MODULES["passages"]:
        module = import_module(name)
        yield inspect.getdoc(module) or ""
        for _, member in inspect.getmembers(module, lambda one: inspect.isclass(one) or inspect.isroutine(one)):
            if getattr(member, "__module__", None) != name:
                continue
            own = [inspect.getdoc(member) or ""]
            if inspect.isclass(member):
                own += [inspect.getdoc(one) or "" for one in vars(member).values() if inspect.isroutine(one)]
            yield "\n\n".join(own)


def _few_of(rng: random.Random, text: Sequence[str]) -> Sequence[str]:
    start = rng.randrange(len(text))
    return text[start : start + rng.randint(3, 6)]


def stdlib_passages() -> list[tuple[str, str]]:
    """Source and text of every passage."""
    chunker = Chunker(Chunking())
    return [
        (source, passage.text)
        for source, text in documentation().items()
        for passage in chunker.passages(ParsedDocument(text, markdown=False, title=""))
    ]


def recalled(
    questions: Sequence[StdlibQuestion],
    passages: Sequence[tuple[str, str]],
    asked: FloatArray,
    held: FloatArray,
    cut: int,
) -> float:
    """The part of the questions whose answering passage is among the ``cut`` nearest. ``asked`` has a row for each
    question and ``held`` one for each passage."""
    nearest = np.argsort(-(asked @ held.T), axis=1, kind="stable")[:, :cut]
    found = [
        any(question.is_answered_by(*passages[index]) for index in row)
        for question, row in zip(questions, nearest, strict=True)
    ]
    return sum(found) / len(found)


async def embedder_figures() -> list[Figure]:
    """Recall and speed of the static embedder and of the encoder, on the same questions and passages."""
    static = StaticEmbedder(MODELS_DIR / STATIC)
    found = await _embedder_figures(STATIC, static.embed, static.embed_query)
    # Afterwards: the encoder's threads wait for one another for a while when it is done.
    with shipped_engine(shipped_model(ENCODER), device="cpu") as engine:

        async def embed_query(text: str) -> FloatArray:
            vector: FloatArray = _encoded(engine, [text])[0]
            return vector

        return found + await _embedder_figures(ENCODER, lambda texts: _encoded(engine, texts), embed_query)


async def _embedder_figures(
    name: str, embed: Callable[[Sequence[str]], FloatArray], embed_query: Callable[[str], Awaitable[FloatArray]]
) -> list[Figure]:
    questions, passages = read_questions(), stdlib_passages()
    held = embed([text for _, text in passages])
    times = []
    for _ in range(_QUERY_ROUNDS):
        asked = []
        for question in questions:
            started = perf_counter()
            asked.append(await embed_query(question.question))
            times.append(perf_counter() - started)
    nearest = np.array(asked)
    return [
        *(Figure(f"recall@{cut}, {name}", recalled(questions, passages, nearest, held, cut), "of 1") for cut in CUTS),
        Figure(f"time per query, {name}", median(times) * 1e6, "µs"),
    ]


def _encoded(engine: Engine, texts: Sequence[str]) -> FloatArray:
    vectors: list[tuple[float, ...]] = []
    for start in range(0, len(texts), _TEXTS_AT_A_TIME):
        given = RequestInput(texts=tuple(texts[start : start + _TEXTS_AT_A_TIME]))
        [outcome] = run_batch(engine, [EngineItem("texts", Task.EMBED, given, Parameters())])
        if not isinstance(outcome, Success) or outcome.output.embeddings is None:
            raise RuntimeError(f"the encoder did not embed the passages: {outcome}")
        vectors += outcome.output.embeddings
    return np.array(vectors, dtype=np.float32)


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
    budget_ms = settings.retrieval_budget_ms
    embedder = StaticEmbedder(settings.models_dir / settings.retrieval_embedder_path)
    corpus = make_corpus(embedder, PASSAGES)
    with stores() as stack:
        fills, asks = map(stack.endpoints.postgres_dsn, (PostgresRole.OPERATOR, PostgresRole.DISPATCHER))
        tenants, found = load(fills, corpus, embedder)
        with psycopg.connect(stack.endpoints.postgres_owner_dsn, connect_timeout=5) as connection:
            row = connection.execute(_DISK_MB).fetchone()
        found["disk_mb"] = float(row[0]) if row else 0.0
        found |= asyncio.run(_search(asks, corpus, embedder, tenants, budget_ms))
        found |= asyncio.run(_answer(fills, asks, embedder))
    figures = (
        Figure("recall@10, largest tenant", found["recall_largest"], "part", "at least", RECALL_AIM),
        Figure(
            "recall@10, smallest tenant (without an index)", found["recall_smallest"], "part", "at least", RECALL_AIM
        ),
        Figure("retrieval of a request, 50 %", found["p50_ms"], "ms"),
        Figure("retrieval of a request, 99 %", found["p99_ms"], "ms", "at most", budget_ms),
        Figure("retrievals that were too late", found["late"], "part", "at most", 0),
        Figure("retrievals without full text", found["without_full_text"], "part"),
        Figure("searches per second divided by a psycopg loop's", found["ratio"], "ratio", "at least", RATE_AIM),
        Figure("searches per second", found["per_s"], "1/s"),
        Figure("psycopg loop", found["bare_per_s"], "1/s"),
        Figure(f"searches per second, {_AT_ONCE} at a time", found["together_per_s"], "1/s"),
        Figure("questions answered by the 10 nearest", found["answered_nearest"], "part"),
        Figure("questions answered by the 10 with most of their words", found["answered_words"], "part"),
        Figure("questions answered by the 10 best of both", found["answered_fused"], "part"),
        Figure("loading", found["load_s"], "s"),
        Figure("building indexes", found["build_s"], "s"),
        Figure("disk", found["disk_mb"], "MB"),
        *asyncio.run(embedder_figures()),
    )
    return Result(NAME, figures, (found,))


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

        async def ask(query: Query) -> Found:
            return await search.search(query.tenant.collection, query.vector, query.text, LIMIT, _PATIENT_S)

        figures: dict[str, float] = {}
        for name, tenant in (("largest", tenants[0]), ("smallest", tenants[-1])):
            asked = queries(corpus, embedder, [tenant], RECALL_QUERIES, seed=3)
            figures[f"recall_{name}"] = recall(corpus, asked, [await ask(query) for query in asked])
        figures |= await _latencies(search, embedder, queries(corpus, embedder, tenants, QUERIES, seed=4), budget_ms)
        asked = queries(corpus, embedder, tenants, ROUND_QUERIES, seed=5)
        return figures | await _rates(dsn, ask, asked)


async def _answer(fills: str, asks: str, embedder: StaticEmbedder) -> Run:
    """The part of the questions whose passage is among the first of each list."""
    asked, passages = read_questions(), stdlib_passages()
    tenant, lists = "stdlib", ("nearest", "words", "fused")
    with PgVectorCollections(fills) as store:
        store.create(tenant, _NAME, embedder.name, embedder.dimensions)
        vectors = embedder.embed([text for _, text in passages])
        held = [NewPassage(text, "", len(text.split())) for _, text in passages]
        store.put(tenant, _NAME, [NewDocument("all", "all", "all", held, vectors)])
        collection = store.get(tenant, _NAME)
    answered = dict.fromkeys(lists, 0)
    async with PgVectorSearch(asks, 1) as search:
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


async def _rates(dsn: str, ask: Callable[[Query], Awaitable[Found]], asked: Sequence[Query]) -> Run:
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


def _ask_plainly(connection: psycopg.Connection, query: Query) -> tuple[list[Any], list[Any]]:
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
