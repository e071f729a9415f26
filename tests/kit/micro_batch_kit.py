"""What the tests of the micro-batcher make items and batches with."""

from collections.abc import Iterable
from itertools import count

from fairlane.outcomes import Priority
from fairlane.ownership import Claim, PartitionId
from fairlane.records import InferenceRequest, RequestInput, SourceCoordinate, WorkItem
from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.batching.length_buckets import Shape
from inference_consumers.batching.micro_batch import MicroBatch, MicroBatcher
from inference_consumers.batching.priority_pick import _STRIDES as STRIDES
from inference_consumers.batching.received_work import ModelKey, ReceivedWork

LIMITS = BatchLimits(max_items=4, max_tokens=100, timeout_ms=20)
MODEL: ModelKey = ("chat", "1")
SMALL_MODEL: ModelKey = ("small", "1")
SMALL_LIMITS = BatchLimits(max_items=2, max_tokens=30, timeout_ms=5)
PRIORITIES = tuple(str(priority) for priority in Priority)
FAR_AWAY_MS = 10**9

_offsets = count()


def work(
    priority: str = "normal",
    *,
    at_ms: int = 0,
    tokens: int = 10,
    prompt_tokens: int = 0,
    model: ModelKey = MODEL,
    deadline_at_ms: int = FAR_AWAY_MS,
    size_bytes: int = 100,
    partition: int = 0,
) -> ReceivedWork:
    """A work item of its own offset; ``tokens`` is its cost, of which ``prompt_tokens`` are the prompt's."""
    claim = Claim(PartitionId("priority.gpu." + priority, partition), next(_offsets), 1)
    request = InferenceRequest("id", model[0], "generate", RequestInput(prompt="hello"), priority=priority)
    item = WorkItem(
        request=request,
        tenant="acme",
        pool="gpu",
        model_version=model[1],
        priority_class=priority,
        cost_tokens=tokens,
        submitted_at_ms=0,
        admitted_at_ms=0,
        dispatched_at_ms=0,
        deadline_at_ms=deadline_at_ms,
        reply_topic="replies.acme",
        dispatcher_id="d",
        source=SourceCoordinate("requests.acme", 0, claim.offset),
        prompt_tokens=prompt_tokens,
    )
    return ReceivedWork(claim, item, size_bytes, at_ms)


def sized(prompt_tokens: int, output_tokens: int = 0, priority: str = "normal", at_ms: int = 0) -> ReceivedWork:
    """An item of this length."""
    return work(priority, at_ms=at_ms, tokens=prompt_tokens + 2 * output_tokens, prompt_tokens=prompt_tokens)


def batcher(*items: ReceivedWork, limits: BatchLimits = LIMITS) -> MicroBatcher:
    """One that holds these."""
    made = MicroBatcher(limits, {SMALL_MODEL: SMALL_LIMITS})
    for item in items:
        made.add(item)
    return made


def taken(batch: MicroBatch | None) -> tuple[ReceivedWork, ...]:
    """The items of a batch that there must be."""
    assert batch is not None
    return batch.work


def shape_of(items: Iterable[ReceivedWork]) -> Shape:
    """What these are together."""
    shape = Shape()
    for item in items:
        shape = shape.plus(item)
    return shape


def longest_wait(priority: str, *, has_jumped: bool = False, others_jump: bool = True) -> int:
    """How many turns others can have, at most, between the moment from which a priority has something in every choice
    and its next turn. For low: 13, with jumps of the others 15, and 26 after a jump of its own.

    Let s be its stride and v virtual time when the wait begins. Its tag is at most v + s, or v + 2 s after a jump, and
    virtual time does not pass it. Another priority of stride t takes its turns at tags that are at least v, at least t
    apart, and no later than that tag, or, for a jump, than t after it. Both ends count: of a span x that is at most
    floor(x / t) + 1 turns.
    """
    span = STRIDES[priority] * (2 if has_jumped else 1)
    others = (stride for other, stride in STRIDES.items() if other != priority)
    return sum((span + (stride if others_jump else 0)) // stride + 1 for stride in others)
