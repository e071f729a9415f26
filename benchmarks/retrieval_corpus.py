"""Passages to search among: sentences of Python's own documentation, combined anew, with the vectors of the static
embedder that ships; made from a seed."""

import inspect
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pydoc_data.topics import topics

from fairlane_server.retrieval.embedder import Embedder, FloatArray
from fairlane_server.retrieval.store import NewDocument, NewPassage

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
