"""What a rule makes of the findings of its check, or of its failure. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fairlane.frozen import frozen_dataclass
from fairlane.guardrail_records import GuardrailRule, GuardrailVerdict
from fairlane.outcomes import Code, GuardrailAction, GuardrailFailure, GuardrailResult
from inference_consumers.guardrails.check import Finding
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


@dataclass(frozen=True, slots=True)
class Ruling:
    """The verdict of a rule, and the texts as they go on. With ``refusal`` nothing goes on."""

    verdict: GuardrailVerdict
    texts: tuple[Rewriting, ...]
    refusal: Code | None = None


def rule_on(stage: str, rule: GuardrailRule, texts: tuple[Rewriting, ...], answer: Findings | CheckFailure) -> Ruling:
    """Findings that do not fit the texts are a failure of the check."""
    if isinstance(answer, CheckFailure) or len(answer) != len(texts):
        return _failed(stage, rule, texts)
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


def _failed(stage: str, rule: GuardrailRule, texts: tuple[Rewriting, ...]) -> Ruling:
    if rule.on_failure == GuardrailFailure.OPEN:
        return Ruling(GuardrailVerdict(stage, rule.check, GuardrailResult.FAILED_OPEN), texts)
    verdict = GuardrailVerdict(stage, rule.check, GuardrailResult.FAILED_CLOSED)
    return Ruling(verdict, texts, Code.GUARDRAIL_UNAVAILABLE)


def _types(findings: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(sorted({found.type[:_MOST_TYPE_CHARACTERS] for found in findings})[:MOST_TYPES])
