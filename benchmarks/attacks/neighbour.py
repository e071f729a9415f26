"""An honest tenant beside a hostile one: requests at an even pace, and how long each waits for its reply."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from uuid import uuid4

from confluent_kafka import Consumer, Producer, TopicPartition

from fairlane import names
from fairlane.codec import Codec
from fairlane.kafka_config import idempotent_producer, read_committed_consumer
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply, InferenceRequest
from fairlane.settings import KafkaSettings

PATIENCE_S = 60.0
_LONGEST_POLL_S = 0.01


class Neighbour:
    """Sends from a thread of its own. Latencies are from just before the publish to the reply at a reader."""

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        tenant: str,
        make_request: Callable[[], InferenceRequest],
        per_s: float = 25.0,
    ) -> None:
        """The tenant's topics must exist."""
        self._settings, self._codec, self._make_request = settings, codec, make_request
        self._requests, self._replies = names.requests_topic(tenant), names.replies_topic(tenant)
        self._every_s = 1 / per_s
        self._sent_at: dict[str, float] = {}
        self._answered = threading.Condition()
        self._latencies_s: list[float] = []
        self._refused: set[str] = set()
        self._failure: BaseException | None = None

    @contextmanager
    def sending(self) -> Iterator["Neighbour"]:
        """Requests go out until the context ends; AssertionError unless every one was answered ``ok``, once."""
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,), name="neighbour")
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join(PATIENCE_S)
        self._check()
        if self._sent_at:
            raise AssertionError(f"{len(self._sent_at)} requests were not answered")
        if self._refused:
            raise AssertionError(f"some requests ended as {sorted(self._refused)}")

    def mark(self) -> int:
        """A place among the latencies; see ``quantile_s``."""
        with self._answered:
            return len(self._latencies_s)

    def wait_for(self, more: int) -> None:
        """Wait until so many more requests were answered."""
        with self._answered:
            wanted = len(self._latencies_s) + more
            came = self._answered.wait_for(lambda: self._failure or len(self._latencies_s) >= wanted, PATIENCE_S)
        self._check()
        if not came:
            raise AssertionError(f"{more} answers did not come within {PATIENCE_S:g} s")

    def latencies_s(self, since: int = 0) -> list[float]:
        """Those from a mark on."""
        with self._answered:
            return self._latencies_s[since:]

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self, stop: threading.Event) -> None:
        producer = Producer(idempotent_producer(self._settings))
        consumer = Consumer(read_committed_consumer(self._settings, f"neighbour-{uuid4()}"))
        try:
            replies = TopicPartition(self._replies, 0)
            replies.offset = consumer.get_watermark_offsets(replies, timeout=PATIENCE_S)[1]
            consumer.assign([replies])
            self._send_and_read(producer, consumer, stop)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            with self._answered:
                self._failure = error
                self._answered.notify_all()
        finally:
            consumer.close()

    def _send_and_read(self, producer: Producer, consumer: Consumer, stop: threading.Event) -> None:
        due, give_up = monotonic(), None
        while True:
            now = monotonic()
            if stop.is_set():
                give_up = give_up or now + PATIENCE_S
                if not self._sent_at or now > give_up:
                    return
            elif now >= due:
                request = self._make_request()
                self._sent_at[request.request_id] = now
                producer.produce(self._requests, self._codec.encode(request), request.request_id)
                due = max(due + self._every_s, now)
            producer.poll(0)
            self._read(consumer, max(0.001, min(_LONGEST_POLL_S, due - monotonic())))

    def _read(self, consumer: Consumer, timeout_s: float) -> None:
        message = consumer.poll(timeout_s)
        if message is None or message.error() is not None:
            return
        reply = self._codec.decode_as(InferenceReply, message.value())
        sent_at = self._sent_at.pop(reply.request_id, None)
        if sent_at is None:
            raise AssertionError(f"{reply.request_id} was answered twice")
        with self._answered:
            self._latencies_s.append(monotonic() - sent_at)
            if reply.outcome != Outcome.OK:
                self._refused.add(reply.outcome)
            self._answered.notify_all()


def quantile(latencies_s: list[float], part: float) -> float:
    """Of latencies; the largest of few."""
    ordered = sorted(latencies_s)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]
