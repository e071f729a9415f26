"""Requests published while things are struck, and the replies as a tenant sees them come."""

import random
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic
from types import TracebackType
from typing import Any, Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, Producer, TopicPartition

from benchmarks.faults import QUIET
from benchmarks.faults.deployed import Deployed, model_for
from benchmarks.waiting import wait_until
from fairlane.kafka_config import idempotent_producer, read_committed_consumer
from fairlane.names import replies_topic, requests_topic
from fairlane.outcomes import CacheMode, Outcome, Priority, Task
from fairlane.records import InferenceReply, InferenceRequest, Parameters, RequestInput

_PRODUCER_PATIENCE_MS = 120_000
"""Longer than any outage: a request that is not acknowledged proves nothing."""
_TIMEOUT_MS = 3_600_000
"""Longer than any run: a request that expires is answered, but its way ends early."""
_REFUSED_SHARE = 0.05
_EMBED_SHARE = 0.3
"""Two models share each partition, so that work is done out of order: the done sets matter then."""
_CACHED_SHARE = 0.15
"""Few distinct ones, so that many get an earlier answer again."""
_UNKNOWN_MODEL = "no-such-model"


class Traffic:
    """Publishes requests at a pace or at once, and follows their committed replies, on two threads of its own.

    The waits raise TimeoutError, or RuntimeError when one of the threads failed.
    """

    def __init__(self, deployed: Deployed, seed: int, per_s: float) -> None:
        """``per_s`` is the pace of what ``trickle`` allows."""
        self._deployed = deployed
        self._tenants = list(deployed.tenants)
        self._words, self._vectors = (model_for(deployed, task).model for task in (Task.GENERATE, Task.EMBED))
        self._random = random.Random(seed)
        self._interval_s = 1 / per_s
        self._changed = threading.Condition()
        self._at_once = self._at_pace = 0
        self._stopping = False
        self._failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (("publisher", self._publish), ("follower", self._follow))
        ]
        self.asked = 0
        """How many requests ``trickle`` and ``burst`` were called for."""
        self.expected: dict[str, str] = {}
        """The outcome that each published request must have."""
        self.published_at: dict[str, float] = {}
        self.replied_at: dict[str, float] = {}
        """When the first reply to each request was seen."""
        self._acknowledged = 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def trickle(self, count: int) -> None:
        """Publish so many more at the pace."""
        with self._changed:
            self.asked += count
            self._at_pace += count
            self._changed.notify_all()

    def burst(self, count: int) -> None:
        """Publish so many more at once."""
        with self._changed:
            self.asked += count
            self._at_once += count
            self._changed.notify_all()

    @property
    def published(self) -> int:
        return len(self.published_at)

    @property
    def outstanding(self) -> int:
        """Published and, as far as a tenant can see, not answered."""
        return len(self.published_at) - len(self.replied_at)

    def wait_published(self, count: int, timeout_s: float) -> None:
        """Wait until so many were published since the beginning, and all of them acknowledged."""
        self._wait(
            lambda: self.published >= count and self._acknowledged == self.published,
            timeout_s,
            f"{count} acknowledged requests",
        )

    def wait_answered(self, timeout_s: float) -> None:
        """Wait until everything that was published is answered."""
        self._wait(lambda: self.outstanding == 0, timeout_s, "a reply to every request")

    def wait_replies(self, more: int, timeout_s: float) -> None:
        """Wait until so many more requests than now are answered."""
        wanted = len(self.replied_at) + more
        self._wait(lambda: len(self.replied_at) >= wanted, timeout_s, f"{more} more replies")

    def longest_gap_s(self) -> float:
        """The longest time in which requests were outstanding and no reply came."""
        return longest_gap_s(self.published_at, self.replied_at)

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        def met() -> bool:
            if self._failures:
                raise RuntimeError(f"{len(self._failures)} failures of the traffic: {self._failures[0]}")
            return condition()

        wait_until(met, timeout_s, what)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            self._failures.append(f"{type(error).__name__}: {error}")

    def _publish(self) -> None:
        patience = {"delivery.timeout.ms": _PRODUCER_PATIENCE_MS}
        producer = Producer(idempotent_producer(self._deployed.settings) | patience | QUIET)
        while True:
            producer.poll(0)
            with self._changed:
                if self._stopping:
                    break
                if self._at_once:
                    self._at_once -= 1
                elif self._at_pace:
                    self._at_pace -= 1
                    self._changed.wait(self._interval_s)  # the pace, not a synchronisation
                else:
                    self._changed.wait(0.05)
                    continue
            self._publish_one(producer)
        producer.flush(_PRODUCER_PATIENCE_MS / 1000)

    def _publish_one(self, producer: Producer) -> None:
        tenant, request = self._random.choice(self._tenants), self._request()
        ok = request.model != _UNKNOWN_MODEL
        self.expected[request.request_id] = Outcome.OK if ok else Outcome.REJECTED
        self.published_at[request.request_id] = monotonic()
        producer.produce(
            requests_topic(tenant),
            self._deployed.codec.encode(request),
            request.request_id,
            on_delivery=self._delivered,
        )

    def _delivered(self, error: Any, _message: Message) -> None:
        if error is None:
            self._acknowledged += 1
        else:
            self._failures.append(f"a request was not acknowledged: {error.str()}")

    def _request(self) -> InferenceRequest:
        """Mostly text to generate of any length, much to embed, some that may be answered from a cache, a few that the
        dispatcher itself must answer."""
        dice = self._random
        request = InferenceRequest(
            request_id=str(uuid.UUID(int=dice.getrandbits(128), version=4)),
            model=self._words,
            task=str(Task.GENERATE),
            input=RequestInput(prompt="what is a watermark?"),
            parameters=Parameters(max_tokens=dice.randint(4, 24)),
            priority=str(dice.choice(list(Priority))),
            timeout_ms=_TIMEOUT_MS,
        )
        chance = dice.random()
        if chance < _REFUSED_SHARE:
            return replace(request, model=_UNKNOWN_MODEL)
        if chance < _REFUSED_SHARE + _EMBED_SHARE:
            return replace(
                request,
                model=self._vectors,
                task=str(Task.EMBED),
                input=RequestInput(texts=("a text",)),
                parameters=Parameters(),
            )
        if chance < _REFUSED_SHARE + _EMBED_SHARE + _CACHED_SHARE:
            return replace(request, cache=CacheMode.EXACT, parameters=Parameters(max_tokens=dice.choice((4, 8))))
        return request

    def _follow(self) -> None:
        consumer = Consumer(read_committed_consumer(self._deployed.settings, f"follower-{uuid.uuid4()}") | QUIET)
        consumer.assign([TopicPartition(replies_topic(tenant), 0, OFFSET_BEGINNING) for tenant in self._tenants])
        while not self._stopping:
            for message in consumer.consume(500, 0.05):
                error = message.error()
                if error is None:
                    reply = self._deployed.codec.decode_as(InferenceReply, message.value())
                    self.replied_at.setdefault(reply.request_id, monotonic())
                elif error.fatal():
                    raise KafkaException(error)
        consumer.close()


def longest_gap_s(published_at: Mapping[str, float], replied_at: Mapping[str, float]) -> float:
    """The longest time in which requests were outstanding and no reply came; times in seconds of one clock."""
    moments = sorted([(at, 1) for at in published_at.values()] + [(at, -1) for at in replied_at.values()])
    outstanding, since, longest = 0, 0.0, 0.0
    for at, change in moments:
        if outstanding > 0 and change < 0:
            longest = max(longest, at - since)
        if change < 0 or outstanding == 0:
            since = at
        outstanding += change
    return longest
