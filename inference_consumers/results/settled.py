"""An item and what became of it, to be answered."""

from fairlane.frozen import frozen_dataclass
from fairlane.outcomes import Code, GuardrailStage
from fairlane.records import TokenUsage
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.engines.protocol import ItemOutcome


@frozen_dataclass(frozen=True, slots=True)
class EngineRun:
    """The run an outcome came from; times in milliseconds since the epoch."""

    engine: str
    batch_size: int
    started_at_ms: int
    finished_at_ms: int


@frozen_dataclass(frozen=True, slots=True)
class Withheld:
    """A guardrail refused the item: its input, so that no engine saw it, or its answer, whose cost is ``usage``."""

    stage: GuardrailStage
    code: Code
    message: str
    usage: TokenUsage = TokenUsage()


SettledOutcome = ItemOutcome | Withheld


@frozen_dataclass(frozen=True, slots=True)
class Settled:
    """``run`` is the engine's, or ``no_run``."""

    work: ReceivedWork
    outcome: SettledOutcome
    run: EngineRun


def no_run(now_ms: int) -> EngineRun:
    """The run of an item that no engine ran."""
    return EngineRun("none", 0, now_ms, now_ms)
