"""Recall and speed of the static embedder on questions about the standard library, beside the model it was made from.

Passages, cut as ingestion does it, are embedded by the static embedder that ships and by all-MiniLM-L6-v2 in its
engine. Nearest passages are found exactly, by cosine. The texts come with CPython: ``pydoc_data.topics`` (the language
reference as ``help()`` shows it) and the docstrings of modules.
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

import numpy as np
import yaml

from benchmarks.result import Figure
from fairlane.models import load_models
from fairlane.outcomes import Task
from fairlane.records import Parameters, RequestInput
from fairlane_server.retrieval.chunking import Chunker, Chunking
from fairlane_server.retrieval.documents.document import ParsedDocument
from fairlane_server.retrieval.embedder import Embedder, FloatArray
from fairlane_server.retrieval.static_embedder import StaticEmbedder
from fairlane_server.retrieval.store import NewDocument, NewPassage
from inference_consumers.engines.protocol import Engine, EngineItem, EngineSpec, Success, run_batch
from inference_consumers.engines.registry import create_engine

QUESTIONS_FILE = Path(__file__).parent / "data/stdlib_questions.yaml"
# Topics that only repeat others: they would answer every question twice.
_REPEATED_TOPICS = frozenset({"compound", "specialnames", "execmodel", "else"})
_QUESTION_MODULES = (
    *("argparse", "cmd", "collections", "configparser", "copy", "difflib", "doctest", "heapq", "http.client"),
    *("http.cookies", "json", "pdb", "plistlib", "random", "sched", "shelve", "smtplib", "socketserver"),
    *("statistics", "subprocess", "tempfile", "timeit", "tokenize", "unittest", "urllib.parse", "urllib.request"),
    *("uuid", "wave"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the name of the text that answers it, and words that the answering passage holds."""

    question: str
    source: str
    phrase: str

    def is_answered_by(self, source: str, passage: str) -> bool:
        """Whether a passage of this source is the one; white space does not count."""
        return source == self.source and squeezed(self.phrase) in squeezed(passage)


def read_questions(path: Path = QUESTIONS_FILE) -> tuple[Question, ...]:
    """The questions of the file. Raises KeyError for an entry that lacks something."""
    entries: Sequence[Mapping[str, str]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tuple([Question(entry["question"], _source(entry), entry["phrase"]) for entry in entries])


def documentation() -> dict[str, str]:
    """The texts by name: ``topic/NAME`` and ``module/NAME``."""
    texts = {f"topic/{name}": text for name, text in sorted(topics.items()) if name not in _REPEATED_TOPICS}
    for name in _QUESTION_MODULES:
        texts[f"module/{name}"] = import_module(name).__doc__ or ""
    return texts


def squeezed(text: str) -> str:
    """The text with one space for every run of white space."""
    return " ".join(text.split())


def _source(entry: Mapping[str, str]) -> str:
    return f"topic/{entry['topic']}" if "topic" in entry else f"module/{entry['module']}"


PASSAGES_PER_DOCUMENT = 20

_MODULES = (
    *("argparse", "asyncio", "calendar", "collections", "concurrent.futures", "configparser", "contextlib", "csv"),
    *("dataclasses", "datetime", "decimal", "difflib", "email.message", "enum", "fractions", "ftplib", "functools"),
    *("gzip", "heapq", "html.parser", "http.client", "http.server", "imaplib", "inspect", "io", "ipaddress"),
    *("itertools", "json", "logging", "logging.handlers", "lzma", "mailbox", "multiprocessing", "optparse", "os"),
    *("pathlib", "pdb", "pickle", "queue", "random", "re", "sched", "selectors", "shelve", "shutil", "smtplib"),
    *("socket", "socketserver", "sqlite3", "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile"),
    *("textwrap", "threading", "timeit", "trace", "traceback", "turtle", "unittest", "unittest.mock"),
    *("urllib.parse", "urllib.request", "uuid", "wave", "weakref", "xml.dom.minidom", "xml.etree.ElementTree"),
    *("zipfile", "zoneinfo"),
)
_MIN_WORDS = 5


def sentences() -> list[list[str]]:
    """The sentences of each text, in order."""
    texts = [_of_text(text) for text in (*topics.values(), *_docstrings())]
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
        parts = (_run(rng, rng.choice(source)) for _ in range(2))
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
    for name in _MODULES:
        module = import_module(name)
        yield inspect.getdoc(module) or ""
        for _, member in inspect.getmembers(module, lambda one: inspect.isclass(one) or inspect.isroutine(one)):
            if getattr(member, "__module__", None) != name:
                continue
            own = [inspect.getdoc(member) or ""]
            if inspect.isclass(member):
                own += [inspect.getdoc(one) or "" for one in vars(member).values() if inspect.isroutine(one)]
            yield "\n\n".join(own)


def _of_text(text: str) -> list[str]:
    parts = re.split(r"(?<=[.:;!?])\s+|\n\s*\n", text)
    found = (" ".join(part.split()) for part in parts)
    return [sentence for sentence in found if len(sentence.split()) >= _MIN_WORDS]


def _run(rng: random.Random, text: Sequence[str]) -> Sequence[str]:
    start = rng.randrange(len(text))
    return text[start : start + rng.randint(3, 6)]


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
    engine = create_engine(EngineSpec(model, str(models_dir), device="cpu"))
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
