"""The way of one item's texts through the rules of a stage, one after the other. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fairlane.frozen import frozen_dataclass
from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule, GuardrailVerdict
from fairlane.outcomes import Code, GuardrailCheck, GuardrailStage
from inference_consumers.guardrails.check import CheckContext
from inference_consumers.guardrails.decision import CheckFailure, Findings, rule_on
from inference_consumers.guardrails.rewriting import Rewriting


@frozen_dataclass(frozen=True, slots=True)
class CheckCall:
    """A question to one check. Calls with the same check and context can be asked together."""

    check: str
    context: CheckContext
    texts: tuple[str, ...]


@dataclass(slots=True)
class Examination:
    """Texts on their way through the rules of one stage. A later rule sees what the ones before it left; the first
    refusal ends it."""

    stage: GuardrailStage
    policy: GuardrailPolicy
    texts: tuple[Rewriting, ...]
    system_prompt: str = ""
    verdicts: list[GuardrailVerdict] = field(default_factory=list)
    refusal: Code | None = None

    @classmethod
    def of(
        cls, stage: GuardrailStage, policy: GuardrailPolicy, texts: Sequence[str], system_prompt: str = ""
    ) -> "Examination":
        """The examination of these texts, before the first rule."""
        return cls(stage, policy, tuple(map(Rewriting.of, texts)), system_prompt)

    def call(self) -> CheckCall | None:
        """The next question; None if nothing more is to be asked."""
        rules = self._rules
        if self.refusal is not None or len(self.verdicts) >= len(rules):
            return None
        check = rules[len(self.verdicts)].check
        return CheckCall(check, self._context(check), tuple(text.text for text in self.texts))

    def answered(self, answer: Findings | CheckFailure) -> None:
        """Apply the rule to the answer to ``call``."""
        ruling = rule_on(self.stage, self._rules[len(self.verdicts)], self.texts, answer)
        self.verdicts.append(ruling.verdict)
        self.texts, self.refusal = ruling.texts, ruling.refusal

    @property
    def _rules(self) -> tuple[GuardrailRule, ...]:
        return self.policy.input if self.stage is GuardrailStage.INPUT else self.policy.output

    def _context(self, check: str) -> CheckContext:
        """The context of a check, without what it does not need: those of several tenants are then the same."""
        has_patterns = check == GuardrailCheck.PATTERNS
        return CheckContext(
            system_prompt=self.system_prompt if check == GuardrailCheck.LEAKED_PROMPT else "",
            patterns=self.policy.patterns if has_patterns else (),
            denied_words=self.policy.denied_words if has_patterns else (),
        )
