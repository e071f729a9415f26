"""Interface of a check, and its results. Imports nothing heavy."""

from collections.abc import Sequence
from typing import Protocol

from fairlane.frozen import frozen_dataclass


@frozen_dataclass(frozen=True, slots=True)
class Finding:
    """What a check found in a text: [start, end) in characters, start < end. Never holds the text itself."""

    type: str
    """As "EMAIL_ADDRESS", "aws_access_key", "prompt_injection"."""
    start: int
    end: int
    score: float
    """How sure the check is, 0 to 1."""


@frozen_dataclass(frozen=True, slots=True)
class CheckContext:
    """What a check needs beside the texts. The values of a tenant come from its policy."""

    system_prompt: str = ""
    """For leaked_prompt."""
    patterns: tuple[str, ...] = ()
    """Of RE2; each has passed ``check_pattern``."""
    denied_words: tuple[str, ...] = ()


class Check(Protocol):
    """One kind of check. Runs in the guardrail process, one call at a time, so it needs no locks."""

    name: str
    """"pii", "secrets", "patterns", "prompt_injection", "toxicity", "leaked_prompt" or "repetition"."""

    def find(self, texts: Sequence[str], context: CheckContext) -> list[list[Finding]]:
        """Findings of each text, in order of their start; a text may have any length.

        A finding of a type may overlap one of another.
        """
        ...


class CheckUnavailableError(Exception):
    """A check cannot be loaded; the message names it and says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the check {name} cannot be loaded: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type["CheckUnavailableError"], tuple[str, str]]:
        return (type(self), (self.name, self.reason))
