"""Requests, their replies and their outcomes as tenants see them, and figures from these."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer, TopicPartition

from benchmarks.service_curve import Completion, Interval, percentile
from benchmarks.simulated_pool import MODEL
from fairlane.kafka_config import read_committed_consumer
from fairlane.names import replies_topic, requests_topic
from fairlane.outcomes import Outcome, Task
from fairlane.records import InferenceRequest, Parameters, RequestInput, SourceCoordinate, WorkItem
from fairlane.settings import KafkaSettings

REQUEST_TIMEOUT_MS = 3_600_000
"""Long enough that no request of a backlog is refused while the speed of an engine is still unknown."""

_TIMEOUT_S = 10.0


def make_request(**fields: Any) -> InferenceRequest:
    """A request to generate one token, with a new id and other values for these fields."""
    made = InferenceRequest(str(uuid4()), MODEL, Task.GENERATE, RequestInput(prompt="hello"), Parameters(max_tokens=1))
    return replace(made, **fields)


def make_work_item(
    request: InferenceRequest, tenant: str, pool: str, number: int, *, model_version: str = "1", **fields: Any
) -> WorkItem:
    """The work item that a dispatcher makes of the request at this offset of the tenant's topic, without a deadline."""
    made = WorkItem(
        request=request,
        tenant=tenant,
        pool=pool,
        model_version=model_version,
        priority_class=request.priority,
        cost_tokens=100,
        submitted_at_ms=0,
        admitted_at_ms=0,
        dispatched_at_ms=0,
        deadline_at_ms=2**53,
        reply_topic=replies_topic(tenant),
        dispatcher_id="bench",
        source=SourceCoordinate(requests_topic(tenant), 0, number),
    )
    return replace(made, **fields) if fields else made


def ends_of(settings: KafkaSettings, topics: Sequence[str]) -> list[TopicPartition]:
    """The end of every partition of these topics."""
    consumer = Consumer(read_committed_consumer(settings, "bench-ends"))
    try:
        known = consumer.list_topics(timeout=_TIMEOUT_S).topics
        places = [TopicPartition(topic, partition) for topic in topics for partition in known[topic].partitions]
        for place in places:
            place.offset = consumer.get_watermark_offsets(place, timeout=_TIMEOUT_S)[1]
        return places
    finally:
        consumer.close()


@dataclass(frozen=True, slots=True)
class Observed:
    """One request. Times are milliseconds since the epoch; all processes share one clock, that of the machine.

    Attributes:
        submitted_at_ms: the broker's time of its append; its deadline counts from there.
        outcome: empty while no reply was seen.
        dispatched_at_ms, engine_started_at_ms: when the dispatcher wrote it to its pool, and when its batch began, by
            its reply; 0 for what never got there.
        replied_at_ms: the time of the reply's record, written within the transaction that settled the request.
        seen_at_ms: when a reader of committed records had the reply: what its client would call the end.
        cost_tokens: metered in ``ledger.usage``: prompt plus twice the output.
        replies: final replies seen; anything but 1 in the end breaks the promise.
    """

    request_id: str
    tenant: str
    timeout_ms: int
    submitted_at_ms: int
    outcome: str = ""
    code: str = ""
    retry_after_ms: int | None = None
    dispatched_at_ms: int = 0
    engine_started_at_ms: int = 0
    replied_at_ms: int = 0
    seen_at_ms: int = 0
    cost_tokens: int = 0
    completion_tokens: int = 0
    replies: int = 0

    @property
    def served(self) -> bool:
        return self.outcome == Outcome.OK

    @property
    def refused(self) -> bool:
        return self.outcome == Outcome.REJECTED

    @property
    def late(self) -> bool:
        """Whether its reply came after its deadline; an ``expired`` one always does."""
        return bool(self.outcome) and (
            self.outcome == Outcome.EXPIRED or self.seen_at_ms > self.submitted_at_ms + self.timeout_ms
        )

    @property
    def latency_ms(self) -> int:
        """Until its answer; a request that got none counts with all the time it allowed."""
        return self.seen_at_ms - self.submitted_at_ms if self.served else self.timeout_ms


def completions(observed: Iterable[Observed]) -> list[Completion]:
    """What was served, in order of time."""
    served = (Completion(one.replied_at_ms, one.tenant, one.cost_tokens) for one in observed if one.served)
    return sorted(served, key=lambda one: one.at_ms)


def waits(observed: Iterable[Observed], tenants: Sequence[str], until_ms: int) -> dict[str, list[Interval]]:
    """When each tenant's requests waited for their turn: from the append to the dispatch, or, for those that are still
    waiting, to ``until_ms``. What was refused did not wait."""
    found: dict[str, list[Interval]] = {tenant: [] for tenant in tenants}
    for one in observed:
        if one.tenant in found and not one.refused:
            waited_until_ms = one.dispatched_at_ms or (one.replied_at_ms if one.outcome else until_ms)
            found[one.tenant].append((one.submitted_at_ms, waited_until_ms))
    return found


def submitted_within(observed: Iterable[Observed], interval: Interval) -> list[Observed]:
    """The requests that were submitted in the interval."""
    start, end = interval
    return [one for one in observed if start <= one.submitted_at_ms < end]


def latency_percentile_ms(observed: Iterable[Observed], part: float) -> float:
    """Of all of them, whatever became of them."""
    return percentile([one.latency_ms for one in observed], part)


def goodput_tokens(observed: Iterable[Observed], interval: Interval) -> int:
    """Cost tokens of the answers that came within the interval and before their deadlines."""
    start, end = interval
    return sum(one.cost_tokens for one in observed if one.served and not one.late and start <= one.replied_at_ms < end)


def refusal_times_ms(observed: Iterable[Observed]) -> list[int]:
    """From the append of each refused request to its refusal."""
    return [one.seen_at_ms - one.submitted_at_ms for one in observed if one.refused]
