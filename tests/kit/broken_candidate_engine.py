"""``python -m tests.kit.broken_candidate_engine``: a process with a simulated engine that is broken in the way that the
name of its version says. A consumer that starts it in the place of its engines is
``tests.kit.broken_candidate_consumer``.
"""

import ctypes
import sys
from collections.abc import Sequence

from inference_consumers.engine_process.child import main
from inference_consumers.engines import registry
from inference_consumers.engines.protocol import Engine, EngineItem, EngineSpec, RunCost, RunObserver
from inference_consumers.engines.simulated import SimulatedEngine

CRASHES, FAILS, HANGS = "crashes", "fails", "hangs"
"""Versions that end their process with every batch, raise with every batch, and never come back."""


class BrokenEngine(SimulatedEngine):
    """Answers nothing."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec.limits, spec.simulated)
        self._version = spec.model.version

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        """Raises, dies, or hangs."""
        if self._version == CRASHES:
            ctypes.string_at(0)
        if self._version == HANGS:
            while True:  # it computes all the time, as what loops does
                pass
        raise RuntimeError("a bug")


def create_engine(spec: EngineSpec) -> Engine:
    broken = spec.model.version in (CRASHES, FAILS, HANGS)
    return BrokenEngine(spec) if broken else registry.create_engine(spec)


if __name__ == "__main__":
    sys.exit(main(create_engine))
