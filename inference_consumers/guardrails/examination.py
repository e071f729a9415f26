"""The way of one item's texts through the rules of a stage, one after the other, and of an answer through its
post-processing. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from fairlane.frozen import frozen_dataclass
from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule, GuardrailVerdict, PostProcessing
from fairlane.outcomes import Code, GuardrailAction, GuardrailCheck, GuardrailResult, GuardrailStage
from inference_consumers.guardrails.check import CheckContext, Finding, Processed
from inference_consumers.guardrails.decision import (
    Answers,
    CheckFailure,
    Findings,
    Ruling,
    rule_on,
    rule_on_processed,
)
from inference_consumers.guardrails.rewriting import Rewriting

_UNEXPECTED = CheckFailure("unexpected")


@frozen_dataclass(frozen=True, slots=True)
class CheckCall:
    """A question to one check, or to the post-processor. Calls with the same check and context can be asked
    together."""

    check: str
    context: CheckContext
    texts: tuple[str, ...]


@dataclass(slots=True)
class Examination:
    """Texts on their way through the rules of one stage, and then through the post-processing if they are an answer. A
    later rule sees what the ones before it left; the first refusal ends it.

    An answer that post-processing put together anew is looked at once more by the rules that redact or block, as it is
    delivered: escapes of JSON, or two parts of a text, may have hidden what they look for. What they find then is
    blocked.
    """

    stage: GuardrailStage
    policy: GuardrailPolicy
    texts: tuple[Rewriting, ...]
    system_prompt: str = ""
    verdicts: list[GuardrailVerdict] = field(default_factory=list)
    refusal: Code | None = None
    reason: str = ""
    """Of a refusal, where the last verdict does not say it."""
    _waiting: deque[GuardrailRule | PostProcessing] = field(default_factory=deque)
    _replacements: frozenset[str] | None = None
    """What the rules wrote into the text that is looked at once more."""

    @classmethod
    def of(
        cls, stage: GuardrailStage, policy: GuardrailPolicy, texts: Sequence[str], system_prompt: str = ""
    ) -> "Examination":
        """The examination of these texts by the rules, before the first one."""
        rules = policy.input if stage is GuardrailStage.INPUT else policy.output
        return cls(stage, policy, tuple(map(Rewriting.of, texts)), system_prompt, _waiting=deque(rules))

    @classmethod
    def of_answer(cls, policy: GuardrailPolicy, text: str, system_prompt: str) -> "Examination":
        """The examination of a whole answer, with its post-processing."""
        examination = cls.of(GuardrailStage.OUTPUT, policy, (text,), system_prompt)
        if policy.post_processing is not None:
            examination._waiting.append(policy.post_processing)
        return examination

    def call(self) -> CheckCall | None:
        """The next question; None if nothing more is to be asked."""
        if self.refusal is not None or not self._waiting:
            return None
        step = self._waiting[0]
        texts = tuple(text.text for text in self.texts)
        if isinstance(step, PostProcessing):
            return CheckCall(GuardrailCheck.POST_PROCESSING, CheckContext(post_processing=step), texts)
        return CheckCall(step.check, self._context(step.check), texts)

    def answered(self, answer: Answers | CheckFailure) -> None:
        """Apply the rule, or the post-processing, to the answer to ``call``."""
        step = self._waiting.popleft()
        if isinstance(step, PostProcessing):
            self._process(step, answer)
            return
        found: Findings | CheckFailure
        if isinstance(answer, CheckFailure):
            found = answer
        else:
            found = [findings for findings in answer if not isinstance(findings, Processed)]
        if self._replacements is None:
            self._apply(rule_on(self.stage, step, self.texts, found))
        else:
            self._look_again(step, found)

    def _process(self, wanted: PostProcessing, answer: Answers | CheckFailure) -> None:
        processed: Processed | CheckFailure = _UNEXPECTED
        if isinstance(answer, CheckFailure):
            processed = answer
        elif len(answer) == 1 and isinstance(answer[0], Processed):
            processed = answer[0]
        ruling = rule_on_processed(self.stage, wanted, self.texts, processed)
        if isinstance(processed, Processed) and processed.is_put_together:
            (text,) = self.texts
            self._replacements = text.replacements
            again = (GuardrailAction.REDACT, GuardrailAction.BLOCK)
            self._waiting.extend(rule for rule in self.policy.output if rule.action in again)
        self._apply(ruling)

    def _look_again(self, rule: GuardrailRule, answer: Findings | CheckFailure) -> None:
        (text,) = self.texts
        if not isinstance(answer, CheckFailure):
            written = _places(text.text, self._replacements or ())
            answer = [[one for one in found if not _is_within(one, written)] for found in answer]
        ruling = rule_on(self.stage, replace(rule, action=GuardrailAction.BLOCK), self.texts, answer)
        # The first look had its verdict.
        if ruling.verdict.verdict != GuardrailResult.PASSED:
            self._apply(ruling)

    def _apply(self, ruling: Ruling) -> None:
        self.verdicts.append(ruling.verdict)
        self.texts, self.refusal, self.reason = ruling.texts, ruling.refusal, ruling.reason

    def _context(self, check: str) -> CheckContext:
        """The context of a check, without what it does not need: those of several tenants are then the same."""
        has_patterns = check == GuardrailCheck.PATTERNS
        return CheckContext(
            system_prompt=self.system_prompt if check == GuardrailCheck.LEAKED_PROMPT else "",
            patterns=self.policy.patterns if has_patterns else (),
            denied_words=self.policy.denied_words if has_patterns else (),
        )


def _places(text: str, parts: Iterable[str]) -> list[tuple[int, int]]:
    """[start, end) of each of these parts in the text."""
    places = []
    for part in parts:
        at = text.find(part)
        while at >= 0:
            places.append((at, at + len(part)))
            at = text.find(part, at + len(part))
    return places


def _is_within(finding: Finding, places: Sequence[tuple[int, int]]) -> bool:
    return any(start <= finding.start and finding.end <= end for start, end in places)
