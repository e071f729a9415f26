"""Whether work without room in an engine is requeued to its dispatcher. Pure."""

from dataclasses import replace

from fairlane.outcomes import Code
from fairlane.records import WorkItem

MAX_HAND_BACKS = 1


def hand_back(item: WorkItem, code: Code) -> WorkItem | None:
    """The item to hand back; None when its failure is its answer.

    Only what was too large for the engine's memory goes back, and only once: its dispatcher tries it again with less
    context. What is still too large then is refused as overloaded.
    """
    if code != Code.OVERLOADED or item.handed_back >= MAX_HAND_BACKS:
        return None
    return replace(item, handed_back=item.handed_back + 1)
