"""Core of the sync and asyncio clients: admission, publishing, open handles, two threads."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from time import monotonic
from uuid import uuid4

from confluent_kafka import KafkaException

from fairlane import cloud_events
from fairlane.client.connector import KafkaConnector, KafkaHeaders, log
from fairlane.client.handle import BaseHandle, HandleT
from fairlane.client.publisher import EncodedRequest, OpenHandles, RequestPublisher
from fairlane.client.reader import TopicReader
from fairlane.client.requests import check_request
from fairlane.client.retry_policies import RetryPolicy
from fairlane.client.text_stream import ChunkHub
from fairlane.client.window import Window
from fairlane.clock import ClockMs, monotonic_ms
from fairlane.cluster import reason_of
from fairlane.codec import Codec
from fairlane.errors import Backpressure, ClientClosed, FairlaneError, Unavailable
from fairlane.names import chunks_topic, replies_topic, tenant_group
from fairlane.records import InferenceReply, InferenceRequest
from fairlane.trace_context import current_trace


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """The bounds of one client, and whether its requests are offline ones; see
    :class:`fairlane.client.base.BaseClient`."""

    max_in_flight: int
    max_buffered_bytes: int
    max_request_bytes: int
    submit_timeout_ms: int
    start_timeout_ms: int
    close_timeout_ms: int
    offline: bool = False


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counts since the client was made.

    Attributes:
        submitted: requests handed to the producer.
        published: requests the log acknowledged.
        publish_failed: requests that did not get into the log.
        retried: publications beyond the first of a request.
        answered: handles that got a reply.
        in_flight: requests submitted and not answered at this moment.
        ignored_replies: replies on the topic to requests that are not open here.
        undecodable_replies: records on the topic that are no reply.
    """

    submitted: int
    published: int
    publish_failed: int
    retried: int
    answered: int
    in_flight: int
    ignored_replies: int
    undecodable_replies: int


_POLL_S = 0.1
_PURGE_TIMEOUT_S = 1.0
_THREAD_TIMEOUT_S = 5.0
# librdkafka counts a message until its report was served; this keeps its own bounds from ever being met first, by
# requests and as many cancellations.
_SPARE_MESSAGES = 1_000
_SPARE_BYTES = 16 * 1024 * 1024


class ClientCore:
    """One connection of one tenant. Thread-safe; starts at the first need."""

    def __init__(
        self,
        tenant: str,
        service: str | None,
        connector: KafkaConnector,
        codec: Callable[[], Codec],
        limits: ClientLimits,
        retries: RetryPolicy,
        clock: ClockMs,
    ) -> None:
        self.tenant = tenant
        self.limits = limits
        self.retries = retries
        self.reply_topic = replies_topic(tenant, service)
        self.window = Window(limits.max_in_flight, limits.max_buffered_bytes)
        self.chunks = ChunkHub(chunks_topic(tenant), lambda: connector.chunk_reader(self._group_id()), clock)
        # Requests whose reply is not wanted any more. Finalizers fill it, which must take no lock.
        self.unwanted: SimpleQueue[BaseHandle] = SimpleQueue()
        self._default_reply_to = None if service is None else self.reply_topic
        self._connector = connector
        self._make_codec = codec
        self._codec: Codec | None = None
        self._clock = clock
        self._starting = threading.Lock()
        # Reentrant: a callback at the end of a request may close the client.
        self._cancelling = threading.RLock()
        self._stopping = threading.Event()
        self.handles = OpenHandles(self.reply_topic, self.window, monotonic_ms, random.random)
        self._publisher: RequestPublisher | None = None
        self._reader: TopicReader[InferenceReply] | None = None
        self._threads: list[threading.Thread] = []

    @property
    def started(self) -> bool:
        return self._publisher is not None

    @property
    def stats(self) -> ClientStats:
        reader, publisher = self._reader, self._publisher
        return ClientStats(
            submitted=0 if publisher is None else publisher.submitted,
            published=0 if publisher is None else publisher.published,
            publish_failed=0 if publisher is None else publisher.publish_failed,
            retried=self.handles.retried,
            answered=self.handles.answered,
            in_flight=self.window.in_flight,
            ignored_replies=0 if reader is None else reader.ignored,
            undecodable_replies=0 if reader is None else reader.undecodable,
        )

    def start(self) -> None:
        """Find where the reply topic ends, then start reading and publishing. May be called again.

        Raises:
            Unavailable: no broker answers, or the reply topic is not there. Trying again is allowed.
            ClientClosed: the client was closed.
        """
        if not self.started:
            with self._starting:
                self.handles.raise_if_ended()
                if self._publisher is None:
                    self._connect()

    def encode(self, request: InferenceRequest) -> EncodedRequest:
        """Check and encode a request; sends nothing. Only after ``start``.

        Raises:
            ValueError: the request has an obvious mistake; the message begins with the field.
        """
        assert self._codec is not None  # noqa: S101 - a mistake in this package, not of a caller
        check_request(request, self.tenant)
        if request.reply_to is None and self._default_reply_to is not None:
            request = replace(request, reply_to=self._default_reply_to)
        try:
            value = self._codec.encode(request)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            # The error's own text may quote the value.
            raise ValueError(f"request: a field has the wrong type ({type(error).__name__})") from None
        if len(value) > self.limits.max_request_bytes:
            raise ValueError(
                f"input: the request takes {len(value)} bytes, the limit is {self.limits.max_request_bytes}"
            )
        trace = current_trace()
        headers: KafkaHeaders = [*cloud_events.of_request(self.tenant, request.request_id), *trace]
        return EncodedRequest(request, request.reply_to or self.reply_topic, value, headers, trace)

    def no_room(self) -> Backpressure:
        """The error for a submit that found no room in time."""
        return Backpressure(
            f"{self.window.in_flight} requests under way (limit {self.limits.max_in_flight}), "
            f"{self.window.buffered_bytes} bytes not acknowledged (limit {self.limits.max_buffered_bytes}): "
            f"no room within {self.limits.submit_timeout_ms} ms"
        )

    def publish(self, encoded: EncodedRequest, retries: RetryPolicy | None, handle_type: type[HandleT]) -> HandleT:
        """Hand a request to the producer; ``retries`` instead of the client's own. Only after ``start``."""
        return self.publisher.publish(encoded, self.retries if retries is None else retries, handle_type)

    @property
    def publisher(self) -> RequestPublisher:
        """Only after ``start``."""
        assert self._publisher is not None  # noqa: S101 - a mistake in this package, not of a caller
        return self._publisher

    def start_chunks(self) -> None:
        """Read chunks, too; a chunk that is written after this returns is seen. The first call may take seconds.

        Raises:
            The same as ``start``. That chunks cannot be read is no error.
        """
        self.start()
        assert self._codec is not None  # noqa: S101 - a mistake in this package, not of a caller
        self.chunks.start(self._codec)

    def flush(self, timeout_s: float) -> int:
        """Wait until all requests are acknowledged or refused; how many are not yet after ``timeout_s``."""
        return 0 if self._publisher is None else self._publisher.flush(timeout_s)

    def close(self) -> None:
        """Flush, stop, and fail what is still open. Takes at most the close timeout and a few seconds; repeatable."""
        deadline = monotonic() + self.limits.close_timeout_ms / 1_000
        with self._cancelling:
            self.chunks.leave_all()
        while not self._cancel_unwanted() and monotonic() < deadline:
            self.flush(_POLL_S)
        closed = ClientClosed("the client is closed")
        self.handles.end(closed)
        with self._starting:
            publisher, reader, threads = self._publisher, self._reader, self._threads
            self._threads = []
        if publisher is not None and threads:
            publisher.close_retries()
            if publisher.flush(max(0.0, deadline - monotonic())):
                publisher.purge(_PURGE_TIMEOUT_S)
            self._stopping.set()
            for thread in threads:
                thread.join(_THREAD_TIMEOUT_S)
            if reader is not None:
                reader.close()
        self.chunks.stop()
        self.handles.fail_all(ClientClosed("the client was closed before the reply came"))

    def _connect(self) -> None:
        codec = self._make_codec()
        consumer = self._connector.reader(self._group_id())
        handles = self.handles
        reader = TopicReader(
            consumer, self.reply_topic, InferenceReply, codec, handles.__contains__, handles.settle, self._clock
        )
        try:
            reader.seek_to_end(self.limits.start_timeout_ms / 1_000)
            producer = self._connector.producer(
                2 * self.limits.max_in_flight + _SPARE_MESSAGES, self.limits.max_buffered_bytes + _SPARE_BYTES
            )
        except KafkaException as error:
            consumer.poll(0)  # serves the error callback
            reader.close()
            raise Unavailable(f"no broker answers: {self._connector.last_error() or reason_of(error)}") from error
        except BaseException:
            reader.close()
            raise
        publisher = RequestPublisher(
            *(producer, codec, self.tenant, handles, self.window, self._clock), offline=self.limits.offline
        )
        self._codec, self._reader, self._publisher = codec, reader, publisher
        self._threads = [
            self._thread("replies", partial(reader.run, self._stopping)),
            self._thread("publisher", partial(self._publish, publisher)),
        ]

    def _group_id(self) -> str:
        """Of a consumer that joins no group; one of the tenant's, so that a grant on their prefix covers it."""
        return tenant_group(self.tenant, f"client-{uuid4()}")

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guard, args=(name, work), name=f"fairlane-{name}", daemon=True)
        thread.start()
        return thread

    def _guard(self, name: str, work: Callable[[], None]) -> None:
        """Run a thread's work; if it fails, fail everything that waits for it."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - handed to every open handle and to every later submit
            log.error("client_thread_died thread=%s reason=%s", name, reason_of(error))
            unavailable = Unavailable(f"the client's {name} thread died: {reason_of(error)}")
            self.handles.end(unavailable)
            self.handles.fail_all(unavailable)

    def _publish(self, publisher: RequestPublisher) -> None:
        while not self._stopping.is_set():
            publisher.work(_POLL_S)
            with self._cancelling:
                self.chunks.leave_dropped()
            self._cancel_unwanted()

    def _cancel_unwanted(self) -> bool:
        """Cancel the handles in ``unwanted``; False when the producer has no room for the rest, which stays there."""
        # Under the lock: none may be taken here and cancelled only after `close` has ended the handles.
        with self._cancelling:
            while not self.unwanted.empty():
                handle = self.unwanted.get_nowait()
                try:
                    handle.cancel()
                except Backpressure:
                    self.unwanted.put(handle)
                    return False
                except FairlaneError as error:
                    log.warning("cancel_not_published request_id=%s reason=%s", handle.request_id, error)
        return True
