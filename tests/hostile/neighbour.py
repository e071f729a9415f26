"""An honest tenant beside a hostile one: requests at an even pace, and how long each waits for its reply."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from fairlane import names
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply
from tests.integration.pipeline import Pipeline
from tests.waiting import PATIENCE_S, eventually

_LONGEST_POLL_S = 0.01


class Neighbour:
    """Sends from a thread of its own. Latencies are from just before the publish to the reply at a reader."""

    def __init__(self, pipeline: Pipeline, tenant: str, per_s: float = 25.0) -> None:
        self._pipeline = pipeline
        self._topic = names.requests_topic(pipeline.tenant(tenant))
        self._every_s = 1 / per_s
        self._replies = pipeline.reader(names.replies_topic(pipeline.tenant(tenant)), from_beginning=False)
        self._sent_at: dict[str, float] = {}
        self._lock = threading.Lock()
        self._latencies_s: list[float] = []
        self._outcomes: list[str] = []
        self._failure: BaseException | None = None

    @contextmanager
    def sending(self) -> Iterator["Neighbour"]:
        """Requests go out until the context ends; then every one of them must have been answered ``ok``."""
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,), name="neighbour")
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join(PATIENCE_S)
        if self._failure is not None:
            raise self._failure
        assert not self._sent_at, f"{len(self._sent_at)} requests were not answered"
        assert set(self._outcomes) <= {Outcome.OK}, sorted(set(self._outcomes))

    def mark(self) -> int:
        """A place among the latencies; see ``p99_s``."""
        with self._lock:
            return len(self._latencies_s)

    def wait_for(self, more: int) -> None:
        """Wait until so many more requests were answered."""
        wanted = self.mark() + more
        eventually(lambda: self._failure is not None or self.mark() >= wanted, what=f"{more} answers")

    def quantile_s(self, quantile: float, since: int = 0, until: int | None = None) -> float:
        """Of the latencies between two marks."""
        with self._lock:
            ordered = sorted(self._latencies_s[since:until])
        return ordered[min(len(ordered) - 1, int(len(ordered) * quantile))]

    def _run(self, stop: threading.Event) -> None:
        try:
            self._send_and_read(stop)
        except BaseException as error:  # noqa: BLE001 - raised again where the context ends
            self._failure = error

    def _send_and_read(self, stop: threading.Event) -> None:
        due = monotonic()
        give_up = None
        while True:
            now = monotonic()
            if not stop.is_set() and now >= due:
                self._send(now)
                due = max(due + self._every_s, now)
            if stop.is_set():
                give_up = give_up or now + PATIENCE_S
                if not self._sent_at or now > give_up:
                    return
            self._read(max(0.0, min(_LONGEST_POLL_S, due - monotonic())))

    def _send(self, now: float) -> None:
        request = self._pipeline.request()
        self._sent_at[request.request_id] = now
        producer = self._pipeline.producer
        producer.produce(self._topic, self._pipeline.codec.encode(request), request.request_id)
        producer.poll(0)

    def _read(self, timeout_s: float) -> None:
        for message in self._replies.poll(timeout_s):
            reply = self._pipeline.codec.decode_as(InferenceReply, message.value())
            sent_at = self._sent_at.pop(reply.request_id, None)
            assert sent_at is not None, f"{reply.request_id} was answered twice"
            with self._lock:
                self._latencies_s.append(monotonic() - sent_at)
                self._outcomes.append(reply.outcome)
