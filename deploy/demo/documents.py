"""Questions about documents: acme's handbook is loaded, and each question is asked with it and without it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from pydantic import SecretStr

from deploy.demo.workload import LANGUAGE_MODEL, TIMEOUT_MS
from fairlane import Client, Handle, Retrieval
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply
from fairlane.settings import Settings
from fairlane_server.retrieval.collections import open_collections
from fairlane_server.retrieval.ingestion import IngestReport

TENANT = "acme"
COLLECTION = "handbook"
HANDBOOK = Retrieval(COLLECTION, top_k=2)
FOLDER = Path(__file__).with_name("handbook")
QUESTIONS = Path(__file__).with_name("handbook_questions.yaml")

_MAX_TOKENS = 32
_SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n")
ASKED = (7, 10, 14, 22)
"""Indexes of the questions that the demo asks."""


@dataclass(frozen=True, slots=True)
class HandbookQuestion:
    """``expect`` is in the document ``source`` and in the right answer, not in the question; ``elsewhere`` replaces it
    in another tenant's documents."""

    question: str
    expect: str
    elsewhere: str
    source: str

    def is_answered_by(self, reply: InferenceReply) -> bool:
        """Whether the first sentence of the answer has the expected text: a list of everything is no answer."""
        return says(_SENTENCE_END.split(_text(reply).strip(), maxsplit=1)[0], self.expect)

    def is_known_to(self, reply: InferenceReply) -> bool:
        """Whether the expected text is anywhere in the answer."""
        return says(_text(reply), self.expect)

    def is_answered_elsewhere_by(self, reply: InferenceReply) -> bool:
        """Whether it is the right answer from the other tenant's documents."""
        return replace(self, expect=self.elsewhere).is_answered_by(reply)


def says(text: str, expected: str) -> bool:
    """Whether the text has these whole words in any case: 12 is not in 212 or 12:30, but in "the 12th", and Wednesday
    in "on Wednesdays"."""
    return _words(expected).search(text) is not None


def replaced(text: str, expected: str, other: str) -> str:
    """The text with other words for the expected ones."""
    return _words(expected).sub(lambda _found: other, text)


def _words(expected: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w)(?<!\d[.,:]){re.escape(expected)}(?:s|st|nd|rd|th)?(?!\w)(?![.,:]\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Compared:
    """A question's answer from the documents, and the one without."""

    question: HandbookQuestion
    grounded: InferenceReply
    ungrounded: InferenceReply

    @property
    def has_its_source(self) -> bool:
        return any(self.question.source in passage.passage_id for passage in self.grounded.passages)

    @property
    def ok(self) -> bool:
        """Both were answered, one of them from the right document; what a small model makes of it is not judged."""
        return self.has_its_source and self.grounded.outcome == self.ungrounded.outcome == Outcome.OK


def load_questions() -> list[HandbookQuestion]:
    return [HandbookQuestion(**entry) for entry in yaml.safe_load(QUESTIONS.read_text(encoding="utf-8"))]


def ingest(postgres_dsn: str, tenant: str = TENANT, folder: Path = FOLDER) -> IngestReport:
    """Load the handbook, or another tenant's folder, as an operator; existing documents stay."""
    settings = Settings(postgres_dsn=SecretStr(postgres_dsn))
    with open_collections(settings, tenant) as collections:
        if COLLECTION not in {one.name for one in collections.list()}:
            collections.create(COLLECTION)
        return collections.ingest(COLLECTION, [folder])


def compare(client: Client, questions: Sequence[HandbookQuestion], timeout_s: float) -> list[Compared]:
    """Ask each of these twice."""
    asked = [(one, submit(client, one, HANDBOOK), submit(client, one, None)) for one in questions]
    return [
        Compared(one, grounded.reply(timeout_s), ungrounded.reply(timeout_s)) for one, grounded, ungrounded in asked
    ]


def submit(
    client: Client, question: HandbookQuestion, retrieval: Retrieval | None, timeout_ms: int = TIMEOUT_MS
) -> Handle:
    """Ask it, with the handbook or without."""
    return client.submit(
        model=LANGUAGE_MODEL,
        task="generate",
        messages=[{"role": "user", "content": question.question}],
        max_tokens=_MAX_TOKENS,
        timeout_ms=timeout_ms,
        retrieval=retrieval,
    )


def _text(reply: InferenceReply) -> str:
    return (reply.output and reply.output.text) or ""
