"""The text of a streamed answer, held back until it is checked. Pure.

What is released cannot be taken back, so the latest ``hold_back`` characters are held: a finding that is still being
written is found before its first character is released, if it is no longer than that or is known by its beginning. Each
window that is checked begins with some of the text released before, so that a check sees what it continues.
"""

from dataclasses import dataclass

from fairlane.guardrail_records import GuardrailPolicy
from fairlane.outcomes import GuardrailStage
from inference_consumers.guardrails.examination import Examination

CONTEXT_CHARACTERS = 1_000
STEP_CHARACTERS = 64
"""New text is checked in pieces of at least this size."""


@dataclass(slots=True)
class HeldStream:
    """One run of one streamed answer."""

    policy: GuardrailPolicy
    system_prompt: str
    hold_back: int
    refused: Examination | None = None
    """That of the window that was refused."""
    released: int = 0
    """Characters of the model's text that are out, or were replaced by what is."""
    chunks: int = 0
    """Pieces of text released."""
    _tail: str = ""
    """The text from ``_tail_start`` on: what is before is needed no more."""
    _tail_start: int = 0
    _window: Examination | None = None
    _window_end: int = 0

    @property
    def is_checking(self) -> bool:
        return self._window is not None

    def add(self, delta: str) -> None:
        """More text of the model."""
        self._tail += delta

    def begin(self) -> Examination | None:
        """The examination of a window, if there is enough new text and none is under way."""
        end = self._tail_start + len(self._tail)
        # Of text that cannot be released yet, such as half a key, as much again must come before it is looked at again.
        enough = end >= max(self.released + self.hold_back, self._window_end) + STEP_CHARACTERS
        if self._window is not None or self.refused is not None or not enough:
            return None
        start = max(0, self.released - CONTEXT_CHARACTERS)
        self._tail, self._tail_start, self._window_end = self._tail[start - self._tail_start :], start, end
        self._window = Examination.of(GuardrailStage.OUTPUT, self.policy, (self._tail,), self.system_prompt)
        return self._window

    def finish(self) -> str:
        """The text to release after the examination of the window; empty if it was refused. Until ``resume`` no other
        window begins: what is released must be out before more is."""
        window = self._window
        if window is None:
            return ""
        if window.refusal is not None:
            self.refused = window
            return ""
        (checked,) = window.texts
        start = self.released - self._tail_start
        until = max(start, checked.whole_until(self._window_end - self.hold_back - self._tail_start))
        self.released = self._tail_start + until
        return self._counted(checked.between(start, until))

    def resume(self) -> None:
        """The text of the window is out."""
        self._window = None

    def rest(self, whole: Examination) -> str:
        """The text to release after the examination of the whole answer."""
        (checked,) = whole.texts
        start, self.released = self.released, checked.original_length
        return self._counted(checked.between(start, self.released))

    def _counted(self, text: str) -> str:
        self.chunks += bool(text)
        return text
