"""Work as a dispatcher would write it, for tests of consumers without one."""

from typing import Any

from fairlane import names
from fairlane.clock import now_ms
from fairlane.outcomes import Priority
from fairlane.records import SourceCoordinate, WorkItem
from tests.kit.pipeline import Pipeline


def work_item(
    pipeline: Pipeline,
    prompt: str = "x" * 80,
    *,
    tenant: str = "a",
    offset: int = 0,
    pool: str | None = None,
    deadline_ms: int = 60_000,
    **fields: Any,
) -> WorkItem:
    """A generation of 4 tokens; ``offset`` is that of the request it stands for, ``fields`` replace any of its own."""
    now, name = now_ms(), pipeline.tenant(tenant)
    own: dict[str, Any] = {
        "request": pipeline.request(prompt=prompt),
        "tenant": name,
        "pool": pool or pipeline.models[0].pool,
        "model_version": "1",
        "priority_class": Priority.NORMAL,
        "cost_tokens": len(prompt) // 4 + 8,
        "prompt_tokens": len(prompt) // 4,
        "submitted_at_ms": now,
        "admitted_at_ms": now,
        "dispatched_at_ms": now,
        "deadline_at_ms": now + deadline_ms,
        "reply_topic": names.replies_topic(name),
        "dispatcher_id": "test",
        "source": SourceCoordinate(names.requests_topic(name), 0, offset),
    }
    return WorkItem(**(own | fields))


def write_work(
    pipeline: Pipeline, *items: WorkItem, pool: str | None = None, key: str | None = None
) -> list[SourceCoordinate]:
    """Write work of one class to its pool's topic, by default the items' own. Returns where each stands: with a ``key``
    for all of them in one partition, from where they are read together."""
    topic = names.priority_topic(pool or items[0].pool, items[0].priority_class)
    return pipeline.write(
        topic, [((key or one.request.request_id).encode(), pipeline.codec.encode(one)) for one in items]
    )
