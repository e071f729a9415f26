"""Checks that answer when the test says so, or at once, and that find marked words; post-processing is the real one."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from inference_consumers.guardrails.check import Finding
from inference_consumers.guardrails.decision import Answers, CheckFailure
from inference_consumers.guardrails.examination import CheckCall
from inference_consumers.guardrails.post_processing import PostProcessor

Done = Callable[[Answers | CheckFailure], None]

MARKED: Mapping[str, str] = {
    "secrets": r"KEY\w*",
    "pii": r"MAIL\w*",
    "prompt_injection": r"MAIL\w*",
    "toxicity": r"VILE",
    "patterns": r"WORD",
}


def found(check: str, text: str) -> list[Finding]:
    """What the check finds in a text."""
    return [
        Finding(f"{check}_type", match.start(), match.end(), 1.0)
        for match in re.finditer(MARKED.get(check, r"(?!)"), text)
    ]


def answer(call: CheckCall) -> Answers:
    if call.check == PostProcessor.name:
        return PostProcessor().process(call.texts, call.context)
    return [found(call.check, text) for text in call.texts]


@dataclass
class ScriptedChecks:
    """Keeps the calls until ``answer_next`` or ``fail_next``; with ``at_once`` it answers before ``submit`` returns,
    and with ``refusal`` it takes nothing."""

    at_once: bool = False
    refusal: CheckFailure | None = None
    calls: list[tuple[CheckCall, int]] = field(default_factory=list)
    waiting: list[tuple[CheckCall, Done]] = field(default_factory=list)

    def submit(self, tenant: str, call: CheckCall, within_ms: int, done: Done) -> CheckFailure | None:
        self.calls.append((call, within_ms))
        if self.refusal is not None:
            return self.refusal
        if self.at_once:
            done(answer(call))
        else:
            self.waiting.append((call, done))
        return None

    def answer_next(self) -> CheckCall:
        call, done = self.waiting.pop(0)
        done(answer(call))
        return call

    def answer_all(self) -> None:
        while self.waiting:
            self.answer_next()

    def fail_next(self, reason: str = "died") -> None:
        self.waiting.pop(0)[1](CheckFailure(reason))
