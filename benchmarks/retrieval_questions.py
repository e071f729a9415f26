"""Questions on the standard library, asked of its own documentation: what the static embedder gives up for its speed.

The documentation is cut into passages as ingestion does it, and embedded twice: by the static embedder that ships, and
by all-MiniLM-L6-v2, which that one was made from, in the engine that serves it. Nearest passages are found exactly, by
cosine, so that no index has a part in the figures.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from benchmarks.result import Figure
from benchmarks.stdlib_questions import Question, documentation, read_questions
from fairlane.models import load_models
from fairlane.outcomes import Task
from fairlane.records import Parameters, RequestInput
from fairlane_server.retrieval.chunking import Chunker, Chunking
from fairlane_server.retrieval.documents.document import ParsedDocument
from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.static_embedder import StaticEmbedder
from inference_consumers.engines.observing import run_batch
from inference_consumers.engines.protocol import Engine, EngineItem, Success
from inference_consumers.engines.registry import create_engine

MODELS_DIR = Path(".fairlane/models")
STATIC, ENCODER = "all-minilm-l6-v2-static", "all-minilm-l6-v2"
CUTS = (1, 5, 10)
_ROUNDS = 5
_TEXTS_AT_A_TIME = 64

Embed = Callable[[Sequence[str]], FloatArray]
EmbedQuery = Callable[[str], Awaitable[FloatArray]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One embedder. ``recall`` is by how many nearest passages are looked at; ``query_us`` is the median time that one
    question takes, alone."""

    embedder: str
    recall: dict[int, float]
    query_us: float


def measure(models_dir: Path = MODELS_DIR) -> tuple[Measured, Measured]:
    """The static embedder and the encoder, on the same questions and passages."""
    static = StaticEmbedder(models_dir / STATIC)
    by_table = asyncio.run(_measured(STATIC, static.embed, static.embed_query))
    # Afterwards: the encoder's threads wait for one another for a while when it is done.
    engine = _encoder(models_dir)

    async def embed_query(text: str) -> FloatArray:
        vector: FloatArray = _encoded(engine, [text])[0]
        return vector

    try:
        by_encoder = asyncio.run(_measured(ENCODER, lambda texts: _encoded(engine, texts), embed_query))
    finally:
        engine.close()
    return by_table, by_encoder


def figures(measured: Sequence[Measured]) -> tuple[Figure, ...]:
    """For a report."""
    found = []
    for one in measured:
        found += [Figure(f"recall@{cut}, {one.embedder}", one.recall[cut], "of 1") for cut in CUTS]
        found.append(Figure(f"time per query, {one.embedder}", one.query_us, "µs"))
    return tuple(found)


def stdlib_passages() -> list[tuple[str, str]]:
    """Source and text of every passage."""
    chunker = Chunker(Chunking())
    return [
        (source, passage.text)
        for source, text in documentation().items()
        for passage in chunker.passages(ParsedDocument(text, markdown=False, title=""))
    ]


def recalled(
    questions: Sequence[Question], passages: Sequence[tuple[str, str]], asked: FloatArray, held: FloatArray, cut: int
) -> float:
    """The part of the questions whose answering passage is among the ``cut`` nearest. ``asked`` has a row for each
    question and ``held`` one for each passage."""
    nearest = np.argsort(-(asked @ held.T), axis=1, kind="stable")[:, :cut]
    found = [
        any(question.is_answered_by(*passages[index]) for index in row)
        for question, row in zip(questions, nearest, strict=True)
    ]
    return sum(found) / len(found)


async def _measured(name: str, embed: Embed, embed_query: EmbedQuery) -> Measured:
    questions, passages = read_questions(), stdlib_passages()
    held = embed([text for _, text in passages])
    times = []
    for _ in range(_ROUNDS):
        asked = []
        for question in questions:
            started = perf_counter()
            asked.append(await embed_query(question.question))
            times.append(perf_counter() - started)
    recall = {cut: recalled(questions, passages, np.array(asked), held, cut) for cut in CUTS}
    return Measured(name, recall, median(times) * 1e6)


def _encoder(models_dir: Path) -> Engine:
    [model] = [model for model in load_models(Path("deploy/models.yaml")) if model.model == ENCODER]
    engine = create_engine(model, models_dir, 0, device="cpu")
    engine.load()
    return engine


def _encoded(engine: Engine, texts: Sequence[str]) -> FloatArray:
    vectors: list[tuple[float, ...]] = []
    for start in range(0, len(texts), _TEXTS_AT_A_TIME):
        given = RequestInput(texts=tuple(texts[start : start + _TEXTS_AT_A_TIME]))
        [outcome] = run_batch(engine, [EngineItem("texts", Task.EMBED, given, Parameters())])
        if not isinstance(outcome, Success) or outcome.output.embeddings is None:
            raise RuntimeError(f"the encoder did not embed the passages: {outcome}")
        vectors += outcome.output.embeddings
    return np.array(vectors, dtype=np.float32)
