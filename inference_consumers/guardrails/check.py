"""Interface of a check, and its results. Imports nothing heavy."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from fairlane.frozen import frozen_dataclass
from fairlane.guardrail_records import PostProcessing


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
class Processed:
    """An answer after its post-processing; ``steps`` names what changed it. With ``refusal``, a reason that quotes
    nothing of it, it is not in the format of its policy, and there is no text."""

    text: str = ""
    steps: tuple[str, ...] = ()
    refusal: str | None = None
    is_put_together: bool = False
    """Whether parts of it are next to one another, or written out, that were not before."""


@frozen_dataclass(frozen=True, slots=True)
class CheckContext:
    """What a check needs beside the texts. The values of a tenant come from its policy."""

    system_prompt: str = ""
    """For leaked_prompt."""
    patterns: tuple[str, ...] = ()
    """Of RE2; each has passed ``check_pattern``."""
    denied_words: tuple[str, ...] = ()
    post_processing: PostProcessing | None = None
    """For the post-processor alone."""


@frozen_dataclass(frozen=True, slots=True)
class QuestionSize:
    """What a check's process is asked about at once, at most. A longer text is cut into pieces that share ``overlap``
    characters; None: it is asked about whole, because what the check looks for may have any length."""

    characters: int = 65_536
    texts: int = 256
    overlap: int | None = None


class Check(Protocol):
    """One kind of check. Runs in the guardrail process, one call at a time, so it needs no locks."""

    name: str
    """"pii", "secrets", "patterns", "prompt_injection", "toxicity", "leaked_prompt" or "repetition"."""

    def find(self, texts: Sequence[str], context: CheckContext) -> list[list[Finding]]:
        """Findings of each text, in order of their start; a text may have any length.

        A finding of a type may overlap one of another.
        """
        ...


@runtime_checkable
class Processor(Protocol):
    """The post-processor: runs as a check does, and returns texts instead of findings."""

    name: str

    def process(self, texts: Sequence[str], context: CheckContext) -> list[Processed]:
        """What becomes of each text."""
        ...


class CheckUnavailableError(Exception):
    """A check cannot be loaded; the message names it and says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the check {name} cannot be loaded: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type["CheckUnavailableError"], tuple[str, str]]:
        return (type(self), (self.name, self.reason))
