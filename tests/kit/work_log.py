"""What dispatchers and consumers write about work, without either: for tests of those who read it."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from uuid import uuid4

from confluent_kafka import Consumer, Message, Producer, TopicPartition

from fairlane import headers, names
from fairlane.clock import now_ms
from fairlane.kafka_config import read_committed_consumer, transactional_producer
from fairlane.offsets import CommitPoint
from fairlane.outcomes import Outcome, Priority
from fairlane.records import DispatchReport, SourceCoordinate, UsageEvent, WorkItem
from fairlane.settings import Settings
from stream_processors.dispatcher.feedback.work_feed import WorkFeed
from stream_processors.dispatcher.feedback.work_records import (
    AgedCapacityReport,
    FeedEvent,
    UsageRead,
    UsageStarted,
    apply_to_in_flight,
)
from stream_processors.dispatcher.scheduling.in_flight import InFlight, SettledWork, WorkId
from tests.kit.pipeline import Pipeline

_TIMEOUT_S = 20.0
COST = 10

EventT = TypeVar("EventT")


class WorkLog:
    """Writes work of one pool as a dispatcher does, and settles it as its consumers do."""

    def __init__(self, pipeline: Pipeline, pool: str | None = None, dispatcher_id: str = "me") -> None:
        self.pipeline = pipeline
        self.pool = pool or pipeline.pool
        self.dispatcher_id = dispatcher_id
        self.tenant = pipeline.tenant("a")
        self.settings = Settings(
            kafka_bootstrap_servers=pipeline.settings.kafka_bootstrap_servers,
            group_prefix=pipeline.group_prefix,
            instance_id=f"{pipeline.unique}-log",
        )
        self._sources = 0
        self._producer = self.producer()
        group = f"{pipeline.group_prefix}.pool.{self.pool}"
        self._group = Consumer(read_committed_consumer(self.settings, group))
        self._done: dict[tuple[str, int], set[int]] = {}
        self.sources: dict[WorkId, SourceCoordinate] = {}

    def close(self) -> None:
        self._group.close()

    def producer(self) -> Producer:
        """One more that writes in transactions."""
        config = transactional_producer(self.settings, f"{self.pool}-{uuid4()}", 10_000)
        made = Producer(config)
        made.init_transactions(_TIMEOUT_S)
        return made

    def next_source(self) -> SourceCoordinate:
        self._sources += 1
        return SourceCoordinate(names.requests_topic(self.tenant), 0, self._sources)

    def topic(self, priority: str = Priority.NORMAL) -> str:
        return names.priority_topic(self.pool, priority)

    def dispatch(
        self,
        count: int = 1,
        *,
        partition: int = 0,
        priority: str = Priority.NORMAL,
        commit: bool = True,
        sources: Sequence[SourceCoordinate] = (),
    ) -> list[WorkId]:
        """Write work in one transaction, each of COST tokens. Returns where it stands."""
        written: list[WorkId] = []

        def delivered(error: object, message: Message) -> None:
            assert error is None
            work = WorkId(str(message.topic()), message.partition() or 0, message.offset() or 0)
            self.sources[work] = places[len(written)]
            written.append(work)

        places = list(sources) or [self.next_source() for _ in range(count)]
        self._producer.begin_transaction()
        for source in places:
            item = self.item(source, priority)
            self._producer.produce(
                self.topic(priority),
                self.pipeline.codec.encode(item),
                item.request.request_id.encode(),
                partition=partition,
                headers=[
                    (headers.COST_TOKENS, b"%d" % COST),
                    (headers.TENANT, self.tenant.encode()),
                    (headers.DISPATCHER_ID, self.dispatcher_id.encode()),
                    (headers.SOURCE_TOPIC, source.topic.encode()),
                    (headers.SOURCE_PARTITION, b"%d" % source.partition),
                    (headers.SOURCE_OFFSET, b"%d" % source.offset),
                ],
                on_delivery=delivered,
            )
        assert self._producer.flush(_TIMEOUT_S) == 0
        if commit:
            self._producer.commit_transaction(_TIMEOUT_S)
        else:
            self._producer.abort_transaction(_TIMEOUT_S)
        return written

    def item(self, source: SourceCoordinate, priority: str) -> WorkItem:
        """Work that a real consumer of the pipeline's can do."""
        at_ms = now_ms()
        return WorkItem(
            request=self.pipeline.request(prompt="what is a watermark?"),
            tenant=self.tenant,
            pool=self.pool,
            model_version="1",
            priority_class=str(priority),
            cost_tokens=COST,
            submitted_at_ms=at_ms,
            admitted_at_ms=at_ms,
            dispatched_at_ms=at_ms,
            deadline_at_ms=at_ms + 600_000,
            reply_topic=names.replies_topic(self.tenant),
            dispatcher_id=self.dispatcher_id,
            source=source,
        )

    def settle(self, works: Iterable[WorkId], *, billed: bool = True, committed: bool = True) -> None:
        """Usage and the group's offsets in one transaction, or one of the two alone."""
        works = list(works)
        self._producer.begin_transaction()
        if billed:
            for work in works:
                usage = self.usage(work)
                self._producer.produce(names.LEDGER_USAGE, self.pipeline.codec.encode(usage), usage.tenant.encode())
        if committed:
            self._producer.send_offsets_to_transaction(
                self._offsets(works), self._group.consumer_group_metadata(), _TIMEOUT_S
            )
        self._producer.commit_transaction(_TIMEOUT_S)

    def usage(self, work: WorkId) -> UsageEvent:
        return UsageEvent(
            request_id=str(uuid4()),
            tenant=self.tenant,
            pool=self.pool,
            model="model",
            model_version="1",
            priority_class=Priority.NORMAL,
            outcome=Outcome.OK,
            code=None,
            prompt_tokens=4,
            completion_tokens=2,
            cached_tokens=0,
            cost_tokens=COST,
            engine_ms=1,
            occurred_at_ms=now_ms(),
            work=SourceCoordinate(*work),
        )

    def _offsets(self, works: Iterable[WorkId]) -> list[TopicPartition]:
        """As consumers commit them: everything below the first undone, and the done beyond it in the metadata."""
        touched = set()
        for work in works:
            self._done.setdefault(work[:2], set()).add(work.offset)
            touched.add(work[:2])
        offsets = []
        for topic, partition in touched:
            all_work = sorted(work.offset for work in self.sources if work[:2] == (topic, partition))
            done = self._done[topic, partition]
            undone = [offset for offset in all_work if offset not in done]
            first = undone[0] if undone else all_work[-1] + 1
            point = CommitPoint(first, sum(1 << (offset - first) for offset in done if offset > first))
            offsets.append(TopicPartition(topic, partition, point.offset, metadata=point.metadata))
        return offsets


class Follower:
    """A work feed and what it makes of in flight, as a dispatcher has them."""

    def __init__(self, log: WorkLog, pools: Callable[[], Iterable[str]] | None = None, instance_id: str = "me") -> None:
        self.in_flight = InFlight(instance_id)
        self.settled: list[SettledWork] = []
        self.events: list[FeedEvent] = []
        self.failures: list[Exception] = []
        self.started_ms = now_ms()
        self._lock = threading.Lock()
        self.feed = WorkFeed(log.settings, log.pipeline.codec, pools or (lambda: [log.pool]), self._on_events)
        self.feed.on_failure(self.failures.append)

    def _on_events(self, events: Sequence[FeedEvent]) -> None:
        with self._lock:
            for event in events:
                self.events.append(event)
                if isinstance(event, AgedCapacityReport | DispatchReport | UsageStarted | UsageRead):
                    continue
                settled = apply_to_in_flight(self.in_flight, event)
                if settled is not None:
                    self.settled.append(settled)

    def tokens(self, pool: str) -> int:
        with self._lock:
            return self.in_flight.tokens(pool)

    def seen(self, kind: type[EventT]) -> list[EventT]:
        with self._lock:
            return [event for event in self.events if isinstance(event, kind)]


@contextmanager
def following(
    log: WorkLog, pools: Callable[[], Iterable[str]] | None = None, instance_id: str = "me"
) -> Iterator[Follower]:
    """A follower that has caught up, until the end of the block."""
    follower = Follower(log, pools, instance_id)
    follower.feed.start(_TIMEOUT_S)
    try:
        yield follower
    finally:
        follower.feed.stop()
    assert not follower.failures, follower.failures
