"""What a rule makes of the findings of its check, and what post-processing makes of an answer, or of their failure.
Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fairlane.frozen import frozen_dataclass
from fairlane.guardrail_records import GuardrailRule, GuardrailVerdict, PostProcessing
from fairlane.outcomes import Code, GuardrailAction, GuardrailCheck, GuardrailFailure, GuardrailResult
from inference_consumers.guardrails.check import Finding, Processed
from inference_consumers.guardrails.rewriting import Rewriting

MOST_TYPES = 16
"""Of a verdict; others are left out."""

_MOST_TYPE_CHARACTERS = 64


@frozen_dataclass(frozen=True, slots=True)
class CheckFailure:
    """A check was not carried out. ``reason`` is one word, for logs and messages."""

    reason: str


Findings = Sequence[Sequence[Finding]]
"""Of each text of a call, in order."""

Answers = Sequence[Sequence[Finding] | Processed]
"""Of a process to a call: findings of each text from a check, else what became of it."""

JSON_SCHEMA = "json_schema"
"""Type in the verdict on an answer that is not in the format of its policy."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """The verdict of a rule, and the texts as they go on. With ``refusal`` nothing goes on; ``reason`` says more where
    the verdict does not."""

    verdict: GuardrailVerdict
    texts: tuple[Rewriting, ...]
    refusal: Code | None = None
    reason: str = ""


def rule_on(stage: str, rule: GuardrailRule, texts: tuple[Rewriting, ...], answer: Findings | CheckFailure) -> Ruling:
    """Findings that do not fit the texts are a failure of the check."""
    if isinstance(answer, CheckFailure) or len(answer) != len(texts):
        return _failed(stage, rule.check, rule.on_failure, texts)
    types = _types(found for one in answer for found in one)
    if not types:
        return Ruling(GuardrailVerdict(stage, rule.check, GuardrailResult.PASSED), texts)
    match rule.action:
        case GuardrailAction.LOG:
            return Ruling(GuardrailVerdict(stage, rule.check, GuardrailResult.LOGGED, types), texts)
        case GuardrailAction.REDACT:
            changed = tuple(text.redacted(found) for text, found in zip(texts, answer, strict=True))
            return Ruling(GuardrailVerdict(stage, rule.check, GuardrailResult.REDACTED, types), changed)
        case _:
            verdict = GuardrailVerdict(stage, rule.check, GuardrailResult.BLOCKED, types)
            return Ruling(verdict, texts, Code.GUARDRAIL_BLOCKED)


def rule_on_processed(
    stage: str, wanted: PostProcessing, texts: tuple[Rewriting, ...], answer: Processed | CheckFailure
) -> Ruling:
    """``texts`` is the one of an answer."""
    check = GuardrailCheck.POST_PROCESSING
    if isinstance(answer, CheckFailure):
        return _failed(stage, check, wanted.on_failure, texts)
    if answer.refusal is not None:
        verdict = GuardrailVerdict(stage, check, GuardrailResult.BLOCKED, (JSON_SCHEMA,))
        return Ruling(verdict, texts, Code.FORMAT_NOT_MET, answer.refusal)
    if not answer.steps:
        return Ruling(GuardrailVerdict(stage, check, GuardrailResult.PASSED), texts)
    return Ruling(GuardrailVerdict(stage, check, GuardrailResult.CHANGED, answer.steps), (Rewriting.of(answer.text),))


def _failed(stage: str, check: str, on_failure: str, texts: tuple[Rewriting, ...]) -> Ruling:
    if on_failure == GuardrailFailure.OPEN:
        return Ruling(GuardrailVerdict(stage, check, GuardrailResult.FAILED_OPEN), texts)
    verdict = GuardrailVerdict(stage, check, GuardrailResult.FAILED_CLOSED)
    return Ruling(verdict, texts, Code.GUARDRAIL_UNAVAILABLE)


def _types(findings: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(sorted({found.type[:_MOST_TYPE_CHARACTERS] for found in findings})[:MOST_TYPES])
