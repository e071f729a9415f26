"""Observers of runs that keep the outcomes."""

from collections.abc import Collection, Sequence

from inference_consumers.engines.protocol import Engine, EngineItem, ItemOutcome


class Outcomes:
    """Keeps what it is told. An item is told once: RuntimeError for an engine that breaks that."""

    def __init__(self, cancelled: Collection[int] = ()) -> None:
        self.by_index: dict[int, ItemOutcome] = {}
        self.texts: dict[int, list[str]] = {}
        self.steps = 0
        self.cancelled = set(cancelled)

    def text(self, index: int, delta: str) -> None:
        """Keep it."""
        if index in self.by_index:
            raise RuntimeError(f"text of item {index} after its outcome")
        self.texts.setdefault(index, []).append(delta)

    def finished(self, index: int, outcome: ItemOutcome) -> None:
        """Keep it."""
        if index in self.by_index:
            raise RuntimeError(f"a second outcome of item {index}")
        self.by_index[index] = outcome

    def step(self) -> None:
        """Count it."""
        self.steps += 1

    def is_cancelled(self, index: int) -> bool:
        """Whether it was named at the start, or put into ``cancelled`` since."""
        return index in self.cancelled


def run_batch(engine: Engine, batch: Sequence[EngineItem]) -> list[ItemOutcome]:
    """The outcomes of a batch, in its order. Raises what the engine raises, RuntimeError when one is missing."""
    outcomes = Outcomes()
    engine.run(batch, outcomes)
    if len(outcomes.by_index) != len(batch):
        raise RuntimeError(f"the engine gave {len(outcomes.by_index)} outcomes for {len(batch)} items")
    return [outcomes.by_index[index] for index in range(len(batch))]
