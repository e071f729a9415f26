"""``python -m tests.kit.troubled_engine``: a process with a simulated engine that gets into trouble on some
prompts. Its answers begin with its process id. A consumer that starts it in the place of its engines is
``tests.kit.troubled_consumer``.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

from inference_consumers.engine_process.child import main
from inference_consumers.engines import registry
from inference_consumers.engines.protocol import EngineItem, RunCost, RunObserver, TransientEngineError
from inference_consumers.engines.simulated import SimulatedEngine

POISON = "this one breaks the engine"
DEADLY = "this one kills the engine"
KILLED = "this one has the engine killed"
ENDLESS = "this one never ends"
TOO_LARGE = "there is no memory for this one"
ONCE = "this one fails once"
ALWAYS = "this one fails every time"
PADDED = "this one is filled up"

NEVER_LOADED_MS = 1e9
"""An engine whose batches would take this long never ends loading."""
PADDING_TOKENS = 5
"""What each item with ``PADDED`` in it makes the engine compute in vain."""


class TroubledEngine(SimulatedEngine):
    """Does with a whole batch what one prompt in it asks for, as an engine with a bug would."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]  # handed on as they are
        self._failed_once: set[str] = set()

    def load(self) -> None:
        if self._cost.batch_ms == NEVER_LOADED_MS:
            signal.pause()

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        """Raises for a batch with trouble in it, and quotes the prompt, as exceptions do."""
        for item in batch:
            prompt = item.input.prompt or ""
            if POISON in prompt:
                raise RuntimeError(f"cannot digest {prompt!r}")
            if DEADLY in prompt:
                ctypes.string_at(0)
            if KILLED in prompt:
                # As from outside: nobody can tell.
                os.kill(os.getpid(), signal.SIGKILL)
            if ENDLESS in prompt:
                while True:  # it computes all the time, as what loops does
                    pass
            if TOO_LARGE in prompt:
                raise MemoryError(prompt)
            if ALWAYS in prompt:
                raise TransientEngineError(prompt)
            if ONCE in prompt and prompt not in self._failed_once:
                self._failed_once.add(prompt)
                raise TransientEngineError(prompt)
        cost = super().run(batch, observer)
        padded = sum(PADDED in (item.input.prompt or "") for item in batch)
        return replace(cost, computed_tokens=cost.computed_tokens + padded * PADDING_TOKENS)


if __name__ == "__main__":
    words = (str(os.getpid()), "made", "this", "answer")
    with (
        mock.patch("inference_consumers.engines.registry.SimulatedEngine", TroubledEngine),
        mock.patch("inference_consumers.engines.simulated._WORDS", words),
    ):
        sys.exit(main(registry.create_engine))
