"""``python -m tests.integration.fragile_consumer``: an inference consumer whose engine breaks on some prompts."""

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import typer

from fairlane.records import ModelVersion
from inference_consumers import __main__ as service
from inference_consumers.engines.protocol import EngineItem, ItemOutcome
from inference_consumers.engines.registry import limits_of
from inference_consumers.engines.simulated import FREE, SimulatedCost, SimulatedEngine

POISON = "this one breaks the engine"


class FragileEngine(SimulatedEngine):
    """Fails on a whole batch when one prompt in it is poison, as an engine with a bug would."""

    def run(self, batch: Sequence[EngineItem]) -> list[ItemOutcome]:
        """Raises for a batch with poison in it; quotes the prompt, as exceptions do."""
        for item in batch:
            if item.input.prompt is not None and POISON in item.input.prompt:
                raise RuntimeError(f"cannot digest {item.input.prompt!r}")
        return super().run(batch)


def create_fragile_engine(
    model: ModelVersion,
    models_dir: Path,
    threads: int,
    *,
    engine: str | None = None,
    simulated_cost: SimulatedCost = FREE,
) -> FragileEngine:
    """In the place of the registry's."""
    return FragileEngine(limits_of(model), simulated_cost)


if __name__ == "__main__":
    with mock.patch("inference_consumers.app.create_engine", create_fragile_engine):
        typer.run(service.run)
