"""``python -m tests.kit.continuous_engine``: a process whose simulated engine takes items while others run."""

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from unittest import mock

from inference_consumers.engine_process.child import main
from inference_consumers.engines import registry
from inference_consumers.engines.protocol import EngineItem, RunObserver
from inference_consumers.engines.simulated import SimulatedEngine

UNJOINABLE = "this one cannot join"


class ContinuousSimulatedEngine(SimulatedEngine):
    """Each batch runs in a thread of its own, which ends with the process; what is cancelled, its observer knows."""

    def join(self, batch: Sequence[EngineItem], observer: RunObserver) -> None:
        """Raises for a batch with trouble in it, and quotes the prompt, as exceptions do."""
        for item in batch:
            if UNJOINABLE in (item.input.prompt or ""):
                raise RuntimeError(f"cannot digest {item.input.prompt!r}")
        threading.Thread(target=self._run, args=(batch, observer), daemon=True).start()

    def cancel(self, item_ids: Collection[str]) -> None: ...

    def watch(self, on_death: Callable[[BaseException], None]) -> None: ...

    def metrics(self) -> str:
        return ""

    def _run(self, batch: Sequence[EngineItem], observer: RunObserver) -> None:
        self.run(batch, observer)
        observer.step()


if __name__ == "__main__":
    with mock.patch("inference_consumers.engines.registry.SimulatedEngine", ContinuousSimulatedEngine):
        sys.exit(main(registry.create_engine))
