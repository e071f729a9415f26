"""An open-loop load generator for Kafka: requests go out when they are due, whether or not the last ones were answered.

It shares two cores with the broker and everything under test, so it does little while it runs: the records of a plan
are encoded before the start, one thread hands those that are due to one producer, one thread reads the replies and the
ledger. Load benchmarks ask for at most some hundreds of requests a second; the simulated engine's declared speed is so
slow that it, and not this machine, is the bottleneck (see ``simulated_pool``).
"""

import threading
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from time import monotonic
from typing import Any, Self

from confluent_kafka import OFFSET_BEGINNING, KafkaException, Message, Producer, TopicPartition

from benchmarks.service_curve import Interval, ServedRequest, percentile
from benchmarks.simulated_pool import MODEL
from benchmarks.trace import MAX_CONTEXT_TOKENS, RequestSize, TraceSampler
from benchmarks.traffic import Arrival
from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.kafka_clients import KafkaConsumer, KafkaProducer
from fairlane.kafka_config import idempotent_producer, read_committed_consumer
from fairlane.names import LEDGER_USAGE, backfill_topic, replies_topic, requests_topic
from fairlane.outcomes import DEFAULT_TIMEOUT_MS, Outcome, Priority, Task
from fairlane.records import (
    InferenceReply,
    InferenceRequest,
    ModelVersion,
    Parameters,
    RequestInput,
    SourceCoordinate,
    UsageEvent,
    WorkItem,
)
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings

GENEROUS_TOKENS = 512
"""``max_tokens`` of a client that allows more than it gets."""
_TICK_S = 0.004
_IDLE_S = 0.05
_METADATA_TIMEOUT_S = 10.0
_DELIVERY_TIMEOUT_MS = 120_000
"""Longer than any outage of a fault run: a request that is not acknowledged proves nothing."""
_LEDGER_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 60.0
_MAX_WAITING_RECORDS = 500_000
WARM_UP_S = 5.0
"""Of each load; nothing that is submitted then counts."""
QUIET = {"log_level": 0}
"""Client options of observers: a broker that is stopped on purpose is not logged."""
MAX_LAG_MS = 500.0
"""A record that goes out later than that is not the load that was asked for. A quiet machine keeps it below 60."""


REQUEST_TIMEOUT_MS = 3_600_000
"""Long enough that no request of a backlog is refused while the speed of an engine is still unknown."""


def make_request(**fields: Any) -> InferenceRequest:
    """A request to generate one token, with a new id and other values for these fields."""
    made = InferenceRequest(
        str(uuid.uuid4()), MODEL, Task.GENERATE, RequestInput(prompt="hello"), Parameters(max_tokens=1)
    )
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


def make_usage(tenant: str, model: ModelVersion, size: RequestSize) -> UsageEvent:
    """The usage of an answered request of this size, as the cost model learns from it."""
    return UsageEvent(
        request_id="taught",
        tenant=tenant,
        pool=model.pool,
        model=model.model,
        model_version=model.version,
        priority_class=Priority.NORMAL,
        outcome=Outcome.OK,
        code=None,
        prompt_tokens=size.prompt_tokens,
        completion_tokens=size.output_tokens,
        cached_tokens=0,
        cost_tokens=size.cost_tokens,
        engine_ms=0,
        occurred_at_ms=0,
        work=SourceCoordinate("taught", 0, 0),
    )


def ends_of(settings: KafkaSettings, topics: Sequence[str]) -> list[TopicPartition]:
    """The end of every partition of these topics."""
    consumer = KafkaConsumer(read_committed_consumer(settings, "bench-ends"))
    try:
        known = consumer.list_topics(timeout=_METADATA_TIMEOUT_S).topics
        places = [TopicPartition(topic, partition) for topic in topics for partition in known[topic].partitions]
        for place in places:
            place.offset = consumer.get_watermark_offsets(place, timeout=_METADATA_TIMEOUT_S)[1]
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
        """Whether the reply came after the deadline; an ``expired`` reply always does."""
        return bool(self.outcome) and (
            self.outcome == Outcome.EXPIRED or self.seen_at_ms > self.submitted_at_ms + self.timeout_ms
        )

    @property
    def latency_ms(self) -> int:
        """Until its answer; a request that got none counts with all the time it allowed."""
        return self.seen_at_ms - self.submitted_at_ms if self.served else self.timeout_ms


def completions(observed: Iterable[Observed]) -> list[ServedRequest]:
    """The served requests, in order of their replies."""
    served = (ServedRequest(one.replied_at_ms, one.tenant, one.cost_tokens) for one in observed if one.served)
    return sorted(served, key=lambda one: one.at_ms)


def waits(observed: Iterable[Observed], tenants: Sequence[str], until_ms: int) -> dict[str, list[Interval]]:
    """Waiting intervals of each tenant's requests: from the append to the dispatch, or to ``until_ms`` for those still
    waiting. Refused requests are left out."""
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


@dataclass(frozen=True, slots=True)
class Offered:
    """What one tenant sends.

    Attributes:
        rate_per_s: requests a second on average, from ``start_s`` on.
        steady: at a steady pace and not in the trace's bursts.
        burst: requests that it sends in the first second, beside the rate; evenly, so that no tenant's stand before
            another's.
        start_s: when it begins.
    """

    tenant: str
    rate_per_s: float
    steady: bool = False
    burst: int = 0
    start_s: float = 0.0
    timeout_ms: int = 60_000
    priority: str = Priority.NORMAL
    backfill: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """A record that is due at a time, in seconds from the start."""

    at_s: float
    topic: str
    value: bytes
    request: Observed

    @classmethod
    def of(
        cls, request: InferenceRequest, tenant: str, codec: Codec, at_s: float = 0.0, *, backfill: bool = False
    ) -> Self:
        """The record of a request of this tenant."""
        topic = backfill_topic(tenant) if backfill else requests_topic(tenant)
        timeout_ms = request.timeout_ms or DEFAULT_TIMEOUT_MS[request.priority]
        return cls(at_s, topic, codec.encode(request), Observed(request.request_id, tenant, timeout_ms, 0))


def plan(offered: Iterable[Offered], seconds: float, sampler: TraceSampler, *, model: str = MODEL) -> list[Planned]:
    """The records of all tenants for so many seconds, in the order in which they are due."""
    planned: list[Planned] = []
    for one in offered:
        burst = (number / one.burst for number in range(one.burst))
        for at_s in (*burst, *sampler.arrivals(one.rate_per_s, seconds - one.start_s, steady=one.steady)):
            request = request_of(sampler.size(), priority=str(one.priority), timeout_ms=one.timeout_ms, model=model)
            due_s = one.start_s + at_s
            planned.append(Planned.of(request, one.tenant, default_codec(), due_s, backfill=one.backfill))
    return sorted(planned, key=lambda record: record.at_s)


def plan_arrivals(arrivals: Iterable[Arrival], generous: Container[str] = (), **fields: Any) -> list[Planned]:
    """The records of these arrivals. The ``generous`` tenants allow more tokens than they get."""
    codec = default_codec()
    return [
        Planned.of(request_of(one.size, is_generous=one.tenant in generous, **fields), one.tenant, codec, one.at_s)
        for one in arrivals
    ]


def request_of(size: RequestSize, *, is_generous: bool = False, **fields: Any) -> InferenceRequest:
    """A request of this size to the simulated engine; a generous one allows more tokens than it gets, as most clients
    do, so that its length is not known before. With a new id, whatever the seed: a repeated id is a duplicate."""
    text, most = text_of(size.prompt_tokens), size.output_tokens
    if is_generous:
        asked = f" answer in {size.output_tokens:6d} tokens"
        text = text[: max(0, len(text) - len(asked))] + asked
        most = max(most, min(GENEROUS_TOKENS, MAX_CONTEXT_TOKENS - size.prompt_tokens))
    return make_request(input=RequestInput(prompt=text), parameters=Parameters(max_tokens=most), **fields)


def text_of(tokens: int) -> str:
    """A text of so many tokens: four bytes are one to the simulated engine, and to the dispatcher that estimates."""
    return "load" * tokens


class GeneratorLateError(RuntimeError):
    """The load was not the one that was asked for."""


class LoadGenerator:
    """Publishes plans and follows their replies, on two threads of its own.

    with LoadGenerator(settings, tenants) as load:
        load.start(plan(...))
        load.wait_published(90)
        for one in load.observed(): ...

    The waits raise TimeoutError, or RuntimeError when one of the threads failed. A broker that is unavailable for a
    while is waited for; only fatal errors of the clients are failures.
    """

    def __init__(self, settings: KafkaSettings, tenants: Sequence[str], codec: Codec | None = None) -> None:
        """``tenants``: whose replies to read."""
        self.codec = codec or default_codec()
        self._settings = settings
        self._tenants = tuple(tenants)
        self._requests: dict[str, Observed] = {}
        self._submitted_at_ms: dict[str, int] = {}
        self._metered: dict[str, int] = {}
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Planned, float, Iterator[Planned]]] = []
        """A heap with the next record of each plan: when it is due, a number, the record, the plan's start and rest."""
        self._plans = 0
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (("load-reader", self._read), ("load-publisher", self._publish))
        ]
        self.published_at: dict[str, float] = {}
        """When each request was handed to the producer, in seconds of the monotonic clock."""
        self.replied_at: dict[str, float] = {}
        """When the first final reply to each request was read."""
        self.started_at_ms = 0
        """When the last plan began."""
        self.largest_lag_ms = 0.0
        """How much later than due a record went out at worst: how open this loop is."""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop at once; what is still planned is not sent."""
        self._stopping.set()
        self._wake.set()
        for thread in self._threads:
            thread.join()

    def start(self, planned: Iterable[Planned]) -> None:
        """Publish these records beside those of earlier plans. They are taken one by one, ordered by ``at_s``."""
        with self._changed:
            self.started_at_ms = now_ms()
            self._plans += 1
            self._take_next(monotonic(), self._plans, iter(planned))
        self._wake.set()

    def interval(self, seconds: float) -> Interval:
        """So many seconds of the last plan, after WARM_UP_S."""
        start_ms = self.started_at_ms + round(WARM_UP_S * 1000)
        return start_ms, start_ms + round(seconds * 1000)

    def cut(self) -> None:
        """Send nothing more of any plan: they count as published with what was sent so far."""
        with self._changed:
            self._due.clear()

    @property
    def published(self) -> int:
        return len(self.published_at)

    @property
    def outstanding(self) -> int:
        """Published and, as far as a tenant can see, not answered."""
        return len(self.published_at) - len(self.replied_at)

    def wait_published(self, timeout_s: float) -> None:
        """Wait until the broker has acknowledged all that was planned."""

        def done() -> bool:
            return not self._due and len(self._submitted_at_ms) == len(self._requests)

        self._wait(done, timeout_s, lambda: f"{self.published - len(self._submitted_at_ms)} acknowledgements")

    def wait_answered(self, timeout_s: float, tenants: Sequence[str] = ()) -> None:
        """Wait for a reply to every request so far, by default of all tenants."""
        self._wait(lambda: self._missing(tenants) == 0, timeout_s, lambda: f"{self._missing(tenants)} replies")

    def wait_replies(self, more: int, timeout_s: float = _ANSWER_TIMEOUT_S) -> None:
        """Wait until so many more requests than now are answered."""
        wanted = len(self.replied_at) + more
        self._wait(lambda: len(self.replied_at) >= wanted, timeout_s, lambda: f"{more} more replies")

    def checked_lag_ms(self, most_ms: float = MAX_LAG_MS) -> float:
        """How much later than due a record went out at worst. Raises GeneratorLateError when that is above ``most_ms``:
        the generator was the bottleneck."""
        if self.largest_lag_ms > most_ms:
            raise GeneratorLateError(f"the load came up to {self.largest_lag_ms:.0f} ms late, allowed are {most_ms:g}")
        return self.largest_lag_ms

    def observed(self) -> list[Observed]:
        """Every acknowledged request so far and its outcome.

        Raises:
            TimeoutError: an answer is not in the ledger 20 s after it was seen.
            RuntimeError: a request has more than one final reply.
        """
        with self._changed:
            requests = dict(self._requests)
        served = [request_id for request_id, one in requests.items() if one.served]

        def unmetered() -> int:
            return sum(request_id not in self._metered for request_id in served)

        self._wait(lambda: unmetered() == 0, _LEDGER_TIMEOUT_S, lambda: f"{unmetered()} usage events of answers")
        with self._changed:
            twice = [request_id for request_id, one in self._requests.items() if one.replies > 1]
        if twice:
            raise RuntimeError(f"{len(twice)} requests have more than one final reply, for instance {twice[0]}")
        return [
            replace(
                one, submitted_at_ms=self._submitted_at_ms[request_id], cost_tokens=self._metered.get(request_id, 0)
            )
            for request_id, one in requests.items()
            if request_id in self._submitted_at_ms
        ]

    def _missing(self, tenants: Sequence[str]) -> int:
        if not tenants:
            return self.outstanding
        return sum(not one.outcome and one.tenant in tenants for one in self._requests.values())

    def _wait(self, condition: Callable[[], bool], timeout_s: float, missing: Callable[[], str]) -> None:
        deadline = monotonic() + timeout_s
        with self._changed:
            while not condition():
                if self._failures:
                    raise RuntimeError(f"the load generator failed: {self._failures[0]}")
                left = deadline - monotonic()
                if left <= 0:
                    raise TimeoutError(f"{missing()} did not come within {timeout_s:g} s")
                self._changed.wait(min(left, 0.2))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            self._failures.append(f"{type(error).__name__}: {error}")

    def _take_next(self, began_s: float, number: int, records: Iterator[Planned]) -> None:
        record = next(records, None)
        if record is not None:
            heappush(self._due, (began_s + record.at_s, number, record, began_s, records))

    def _publish(self) -> None:
        options = {"queue.buffering.max.messages": _MAX_WAITING_RECORDS, "delivery.timeout.ms": _DELIVERY_TIMEOUT_MS}
        producer = KafkaProducer(idempotent_producer(self._settings) | options | QUIET)
        while not self._stopping.is_set():
            self._wake.clear()
            wait_s = self._publish_due(producer)
            producer.poll(0)
            # A tick at least, and then everything that is due: not one wake-up for each record.
            self._wake.wait(min(max(wait_s, _TICK_S), _IDLE_S))
        producer.purge()

    def _publish_due(self, producer: Producer) -> float:
        """Publish all that is due. Returns the seconds until the next record is."""
        while not self._stopping.is_set():
            with self._changed:
                if not self._due:
                    return _IDLE_S
                now_s = monotonic()
                if self._due[0][0] > now_s:
                    return self._due[0][0] - now_s
                due_s, number, record, began_s, records = heappop(self._due)
                self._take_next(began_s, number, records)
                self.largest_lag_ms = max(self.largest_lag_ms, (now_s - due_s) * 1000)
                request_id = record.request.request_id
                self._requests[request_id] = record.request
                self.published_at[request_id] = now_s
            producer.produce(record.topic, record.value, request_id, on_delivery=self._delivered)
            producer.poll(0)
        return 0.0

    def _delivered(self, error: Any, message: Message) -> None:
        if error is None:
            key = message.key()
            assert isinstance(key, bytes)
            with self._changed:
                self._submitted_at_ms[key.decode()] = message.timestamp()[1]
        elif not self._stopping.is_set():
            self._failures.append(f"a request was not acknowledged: {error.str()}")

    def _read(self) -> None:
        consumer = KafkaConsumer(read_committed_consumer(self._settings, f"load-{uuid.uuid4()}") | QUIET)
        ledger = consumer.list_topics(LEDGER_USAGE, timeout=_METADATA_TIMEOUT_S).topics[LEDGER_USAGE].partitions
        consumer.assign(
            [
                *(TopicPartition(replies_topic(tenant), 0, OFFSET_BEGINNING) for tenant in self._tenants),
                *(TopicPartition(LEDGER_USAGE, partition, OFFSET_BEGINNING) for partition in ledger),
            ]
        )
        while not self._stopping.is_set():
            first = consumer.poll(0.05)
            if first is None:
                continue
            messages = [first, *consumer.consume(2_000, 0)]
            seen_at_ms = now_ms()
            with self._changed:
                for message in messages:
                    self._take(message, seen_at_ms)
                self._changed.notify_all()
        consumer.close()

    def _take(self, message: Message, seen_at_ms: int) -> None:
        error = message.error()
        if error is not None:
            if error.fatal():
                raise KafkaException(error)
        elif message.topic() == LEDGER_USAGE:
            event = self.codec.decode_as(UsageEvent, message.value())
            if event.outcome == Outcome.OK:
                self._metered[event.request_id] = event.prompt_tokens + 2 * event.completion_tokens
        else:
            self._take_reply(self.codec.decode_as(InferenceReply, message.value()), message.timestamp()[1], seen_at_ms)

    def _take_reply(self, reply: InferenceReply, replied_at_ms: int, seen_at_ms: int) -> None:
        known = self._requests.get(reply.request_id)
        if known is None or reply.replayed:
            return
        if known.replies:
            self._requests[reply.request_id] = replace(known, replies=known.replies + 1)
            return
        self.replied_at[reply.request_id] = monotonic()
        self._requests[reply.request_id] = replace(
            known,
            outcome=reply.outcome,
            code=reply.code or "",
            retry_after_ms=reply.retry_after_ms,
            dispatched_at_ms=reply.timings.dispatched_at_ms or 0,
            engine_started_at_ms=reply.timings.engine_started_at_ms or 0,
            replied_at_ms=replied_at_ms,
            seen_at_ms=seen_at_ms,
            completion_tokens=reply.usage.completion_tokens,
            replies=1,
        )


class Neighbour(LoadGenerator):
    """Latencies are from just before the publish to the reply at a reader, in the order of the replies."""

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        tenant: str,
        make_request: Callable[[], InferenceRequest],
        per_s: float = 25.0,
    ) -> None:
        """The tenant's topics must exist."""
        super().__init__(settings, (tenant,), codec)
        self._tenant, self._make_request, self._interval_s = tenant, make_request, 1 / per_s

    @contextmanager
    def sending(self) -> Iterator[Self]:
        """Requests go out until the context ends; AssertionError unless every one was answered ``ok``, once."""
        with self:
            self.start(
                Planned.of(self._make_request(), self._tenant, self.codec, number * self._interval_s)
                for number in count()
            )
            yield self
            self.cut()
            self.wait_published(_ANSWER_TIMEOUT_S)
            self.wait_answered(_ANSWER_TIMEOUT_S)
            if refused := {one.outcome for one in self.observed() if not one.served}:
                raise AssertionError(f"some requests ended as {sorted(refused)}")

    def mark(self) -> int:
        """A place among the latencies; see ``latencies_s``."""
        return len(self.replied_at)

    def latencies_s(self, since: int = 0) -> list[float]:
        """Those from a mark on."""
        return [at - self.published_at[request_id] for request_id, at in list(self.replied_at.items())[since:]]
