"""``python -m tests.kit.troubled_check DESCRIPTOR CHECK``: a check that does what a text says."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference_consumers.guardrails.check import CheckContext, CheckUnavailableError, Finding
from inference_consumers.guardrails.process.child import main
from tests.kit.scripted_checks import found

CRASH, HANG, RAISE, SLOW, ODD, ALLOCATE, LEAK = "CRASH", "HANG", "RAISE", "SLOW", "ODD", "ALLOCATE", "LEAK"
ALLOCATED_BYTES, LEAKED_BYTES = 1 << 30, 1 << 24
SLOW_S = 0.3
PACED, PACE_S = "~", 0.000_2
"""A character, and the time that each takes."""
MISSING = "toxicity"
"""A check whose package is missing."""
LARGE = "pii"
"""A check that takes time to load."""
LARGE_S = 1.0
CUT = "prompt_injection"
"""A check that is asked about long texts in pieces."""


class TroubledCheck:
    """Finds what ``scripted_checks`` marks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._leaked: list[bytes] = []

    def find(self, texts: Sequence[str], context: CheckContext) -> list[list[Finding]]:
        if any(CRASH in text for text in texts):
            os.kill(os.getpid(), signal.SIGSEGV)
        if any(HANG in text for text in texts):
            time.sleep(60)
        if any(RAISE in text for text in texts):
            raise ValueError(f"cannot read {texts}")
        if any(ODD in text for text in texts):
            odd: Any = object()
            return [[Finding("odd", odd, odd, 1.0)]]
        if any(ALLOCATE in text for text in texts):
            bytes(ALLOCATED_BYTES)
        if any(LEAK in text for text in texts):
            self._leaked.append(bytes(LEAKED_BYTES))
        if any(SLOW in text for text in texts):
            time.sleep(SLOW_S)
        time.sleep(PACE_S * sum(text.count(PACED) for text in texts))
        return [found(self.name, text) for text in texts]


def load(name: str, models_dir: Path) -> TroubledCheck:
    if name == MISSING:
        raise CheckUnavailableError(MISSING, "its package is\nmissing")
    if name == LARGE:
        time.sleep(LARGE_S)
    return TroubledCheck(name)


if __name__ == "__main__":
    sys.exit(main(load))
