"""Figures of requests and answers in which drift is looked for. Pure.

Numbers of tokens, confidences and scores are figures of every tenant. What depends on a text or a vector (languages,
refusals, labels, embeddings) is computed for tenants that allow evaluation alone, and only the figure is kept.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from operator import mul

from fairlane.outcomes import Task
from fairlane.records import RequestInput
from fairlane_server.drift.distances import Vector

Figure = float | str | Vector
"""One figure of a request: a number, a category, or a vector."""

DIRECTIONS = 16
"""Of a projected vector."""
REFUSED, ANSWERED = "refused", "answered"
MOST_CATEGORY_CHARS = 64
MOST_TEXT_CHARS = 2_000
"""Of an input that its language is told from."""
REFUSAL_CHARS = 160
"""Of an answer in which a refusal is looked for: the beginning."""

_TEXTS_OF_BLOCK = 16


class FigureKind(StrEnum):
    """Kind of a figure."""

    NUMBER = "number"
    CATEGORY = "category"
    VECTOR = "vector"


@dataclass(frozen=True, slots=True)
class DriftStatistic:
    """What is compared.

    Attributes:
        of_answer: it depends on the version that answered; otherwise it is a figure of the request.
        needs_consent: it is computed from texts, labels or vectors.
        most_of_block: so many requests of a block have it, however large blocks are; None: all.
    """

    name: str
    kind: FigureKind
    tasks: frozenset[Task]
    of_answer: bool
    needs_consent: bool = False
    most_of_block: int | None = None


_TEXTS = frozenset({Task.GENERATE, Task.EMBED, Task.RANK})

PROMPT_TOKENS = DriftStatistic("prompt_tokens", FigureKind.NUMBER, _TEXTS, of_answer=False)
LANGUAGE = DriftStatistic(
    "language", FigureKind.CATEGORY, _TEXTS, of_answer=False, needs_consent=True, most_of_block=_TEXTS_OF_BLOCK
)
OUTPUT_TOKENS = DriftStatistic("output_tokens", FigureKind.NUMBER, frozenset({Task.GENERATE}), of_answer=True)
REFUSALS = DriftStatistic(
    "refusals", FigureKind.CATEGORY, frozenset({Task.GENERATE}), of_answer=True, needs_consent=True
)
CONFIDENCE = DriftStatistic("confidence", FigureKind.NUMBER, frozenset({Task.CLASSIFY}), of_answer=True)
LABELS = DriftStatistic("labels", FigureKind.CATEGORY, frozenset({Task.CLASSIFY}), of_answer=True, needs_consent=True)
RANK_SCORE = DriftStatistic("rank_score", FigureKind.NUMBER, frozenset({Task.RANK}), of_answer=True)
EMBEDDING = DriftStatistic("embedding", FigureKind.VECTOR, frozenset({Task.EMBED}), of_answer=True, needs_consent=True)
STATISTICS: Mapping[str, DriftStatistic] = {
    one.name: one
    for one in (PROMPT_TOKENS, LANGUAGE, OUTPUT_TOKENS, REFUSALS, CONFIDENCE, LABELS, RANK_SCORE, EMBEDDING)
}


def statistics_of(task: str, *, of_answer: bool) -> list[DriftStatistic]:
    """What is compared of requests, or of answers, for a task."""
    return [one for one in STATISTICS.values() if task in one.tasks and one.of_answer == of_answer]


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """What Postgres has of an answered request, as far as drift is about it.

    Attributes:
        is_allowed: its tenant allows evaluation. Otherwise the fields below are None.
        beginning: of the text that was answered.
        label: the likeliest one.
        embedding: the first vector.
    """

    task: str
    prompt_tokens: int
    completion_tokens: int
    confidence: float | None = None
    best_score: float | None = None
    is_allowed: bool = False
    beginning: str | None = None
    label: str | None = None
    embedding: Sequence[float] | None = None


def figures_of(request: AnsweredRequest) -> dict[str, Figure]:
    """Its figures by statistic, but for its language, which needs the text of the request."""
    figures: dict[str, Figure] = {}
    if request.prompt_tokens > 0:
        figures[PROMPT_TOKENS.name] = float(request.prompt_tokens)
    if request.task == Task.GENERATE:
        figures[OUTPUT_TOKENS.name] = float(request.completion_tokens)
    if request.confidence is not None:
        figures[CONFIDENCE.name] = request.confidence
    if request.best_score is not None:
        figures[RANK_SCORE.name] = request.best_score
    if request.is_allowed:
        if request.beginning is not None:
            figures[REFUSALS.name] = REFUSED if is_refusal(request.beginning) else ANSWERED
        if request.label:
            figures[LABELS.name] = request.label[:MOST_CATEGORY_CHARS]
        if request.embedding:
            figures[EMBEDDING.name] = projected(request.embedding)
    return {name: value for name, value in figures.items() if request.task in STATISTICS[name].tasks}


_REFUSAL = re.compile(
    r"\W*(?:well,? |unfortunately,? |i understand[^.]{0,40}, but )?"
    r"(?:(?:i'm |i am |we're |we are )?(?:very |so |really )?sorry\b|i apologi[sz]e\b|my apologies\b"
    r"|(?:i|we) (?:can't|can ?not|won't|will not|am (?:unable|not able)|are (?:unable|not able)|must decline)\b"
    r"|i'm (?:unable|not able)\b|as an ai\b|it (?:is|would be) not (?:possible|appropriate) for me\b)",
    re.IGNORECASE,
)
_APOSTROPHE = "\N{RIGHT SINGLE QUOTATION MARK}"


def is_refusal(answer: str) -> bool:
    """Whether an English answer begins as models begin that refuse. A rate of these, not a verdict on one of them."""
    return _REFUSAL.match(answer[:REFUSAL_CHARS].replace(_APOSTROPHE, "'")) is not None


def projected(vector: Sequence[float]) -> Vector:
    """A vector in 16 random directions, always the same for vectors of a length. Distances are about kept (Achlioptas
    2003, "Database-friendly random projections"), and the vector cannot be had back."""
    return tuple(round(sum(map(mul, row, vector)), 6) for row in _directions(len(vector)))


@lru_cache(maxsize=8)
def _directions(length: int) -> list[list[float]]:
    signs = random.Random(length)  # noqa: S311 - no secret
    scale = DIRECTIONS**-0.5
    return [[scale if signs.getrandbits(1) else -scale for _ in range(length)] for _ in range(DIRECTIONS)]


def text_of(asked: RequestInput) -> str:
    """The text of an input that somebody wrote: of a chat the last message."""
    if asked.messages:
        return asked.messages[-1].content[:MOST_TEXT_CHARS]
    text = asked.prompt or asked.query or " ".join(asked.texts or ())
    return text[:MOST_TEXT_CHARS]
