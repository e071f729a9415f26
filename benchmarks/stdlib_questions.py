"""Questions about the standard library's own documentation, and the texts that answer them.

The texts are what CPython brings along: ``pydoc_data.topics`` (the language reference as ``help()`` shows it) and the
documentation strings of modules. Nothing is fetched.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

QUESTIONS_FILE = Path(__file__).parent / "data/stdlib_questions.yaml"
# Topics that only repeat others: they would answer every question twice.
_REPEATED_TOPICS = frozenset({"compound", "specialnames", "execmodel", "else"})
_MODULES = (
    "argparse",
    "cmd",
    "collections",
    "configparser",
    "copy",
    "difflib",
    "doctest",
    "heapq",
    "http.client",
    "http.cookies",
    "json",
    "pdb",
    "plistlib",
    "random",
    "sched",
    "shelve",
    "smtplib",
    "socketserver",
    "statistics",
    "subprocess",
    "tempfile",
    "timeit",
    "tokenize",
    "unittest",
    "urllib.parse",
    "urllib.request",
    "uuid",
    "wave",
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
    from pydoc_data.topics import topics

    texts = {f"topic/{name}": text for name, text in sorted(topics.items()) if name not in _REPEATED_TOPICS}
    for name in _MODULES:
        texts[f"module/{name}"] = importlib.import_module(name).__doc__ or ""
    return texts


def squeezed(text: str) -> str:
    """The text with one space for every run of white space."""
    return " ".join(text.split())


def _source(entry: Mapping[str, str]) -> str:
    return f"topic/{entry['topic']}" if "topic" in entry else f"module/{entry['module']}"
