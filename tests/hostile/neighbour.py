"""A second tenant beside a hostile one: it sends good requests at an even pace and notes how long each answer takes."""

import threading
from time import monotonic
from types import TracebackType
from typing import Self

from confluent_kafka import Producer

from fairlane import names
from fairlane.kafka import idempotent_producer
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply
from tests.integration.log_reader import LogReader
from tests.integration.pipeline import Pipeline

ANSWER_TIMEOUT_S = 30.0


class Neighbour:
    """Sends while its context is open; ``waits_s`` has a time for every request afterwards, all of them answered ok."""

    def __init__(self, pipeline: Pipeline, tenant: str, per_s: float = 20.0) -> None:
        self._pipeline, self._tenant, self._every_s = pipeline, pipeline.tenant(tenant), 1.0 / per_s
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="neighbour", daemon=True)
        self.waits_s: list[float] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(2 * ANSWER_TIMEOUT_S)
        if self._failure is not None:
            raise self._failure

    @property
    def p99_s(self) -> float:
        return sorted(self.waits_s)[int(0.99 * (len(self.waits_s) - 1))]

    def _run(self) -> None:
        settings = self._pipeline.settings
        topic, producer = names.requests_topic(self._tenant), Producer(idempotent_producer(settings))
        reader = LogReader(settings, [names.replies_topic(self._tenant)], from_beginning=False)
        sent, last_at = dict[str, float](), monotonic()
        try:
            due = monotonic()
            while not self._stop.is_set() or (sent and monotonic() < last_at + ANSWER_TIMEOUT_S):
                if not self._stop.is_set() and monotonic() >= due:
                    request = self._pipeline.request()
                    sent[request.request_id] = last_at = monotonic()
                    producer.produce(topic, self._pipeline.codec.encode(request), request.request_id)
                    due += self._every_s
                producer.poll(0)
                for message in reader.poll(0.005):
                    reply = self._pipeline.codec.decode_as(InferenceReply, message.value())
                    if reply.request_id in sent:
                        self.waits_s.append(monotonic() - sent.pop(reply.request_id))
                        assert reply.outcome == Outcome.OK, reply
            assert not sent, f"{len(sent)} requests of the neighbour were not answered"
        except BaseException as error:  # noqa: BLE001 - raised again where the test waits
            self._failure = error
        finally:
            reader.close()
