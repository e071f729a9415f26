"""Running a micro-batch on an engine so that the failure of one item stays the failure of one item."""

from collections.abc import Sequence

from fairlane.logs import get_logger
from fairlane.outcomes import Code
from inference_consumers.engines.protocol import Engine, EngineItem, Failure, ItemOutcome
from inference_consumers.micro_batch import ReceivedWork

log = get_logger(__name__)


def engine_items(work: Sequence[ReceivedWork]) -> list[EngineItem]:
    """The items of a batch as an engine takes them, in order."""
    return [
        EngineItem(
            item_id=one.item.request.request_id,
            task=one.item.request.task,
            input=one.item.request.input,
            parameters=one.item.request.parameters,
            passages=one.item.passages,
        )
        for one in work
    ]


def run_batch(engine: Engine, items: Sequence[EngineItem]) -> list[ItemOutcome]:
    """One outcome per item, in order. Never raises because of an item.

    When the engine fails on a batch, its halves are run apart, down to the item that fails alone: that one is poison.
    """
    try:
        outcomes = engine.run(items)
    except Exception as error:  # noqa: BLE001 - any failure of the engine is narrowed down to the item that causes it
        # The type alone: the text of an engine's exception may quote a prompt.
        log.warning("engine_failed", engine=engine.name, items=len(items), error=type(error).__name__)
        if len(items) == 1:
            return [Failure(Code.POISON, f"the engine failed on this item alone: {type(error).__name__}")]
        middle = len(items) // 2
        return [*run_batch(engine, items[:middle]), *run_batch(engine, items[middle:])]
    if len(outcomes) != len(items):
        mismatch = f"the engine gave {len(outcomes)} outcomes for {len(items)} items"
        log.error("engine_broke_its_contract", engine=engine.name, outcomes=len(outcomes), items=len(items))
        return [Failure(Code.ENGINE_ERROR, mismatch)] * len(items)
    return outcomes
