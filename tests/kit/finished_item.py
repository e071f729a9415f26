"""A work item whose outcome is known."""

from fairlane.records import (
    InferenceRequest,
    Passage,
    RequestInput,
    SourceCoordinate,
    WorkItem,
)

SECRET = "a prompt nobody may see"


ITEM = WorkItem(
    request=InferenceRequest(
        "id-1", "words", "generate", RequestInput(prompt=SECRET), requested_by="key:0123456789abcdef"
    ),
    tenant="acme",
    pool="pool",
    model_version="3",
    priority_class="high",
    cost_tokens=21,
    submitted_at_ms=1_000,
    admitted_at_ms=1_010,
    dispatched_at_ms=1_020,
    deadline_at_ms=2_000,
    reply_topic="replies.acme.search",
    dispatcher_id="dispatcher-1",
    source=SourceCoordinate("requests.acme", 0, 5),
    degradations=("capped",),
    passages=(Passage("p-1", SECRET, 0.5),),
)
