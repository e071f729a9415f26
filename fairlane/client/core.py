"""What the sync and the asyncio client share: admission, publishing, the table of open handles, the two threads."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException, Message

from fairlane.client.handle import Handle
from fairlane.client.limits import ClientLimits
from fairlane.client.reader import ReplyReader
from fairlane.client.requests import check_request
from fairlane.client.seams import Connector, ProducerSeam, log
from fairlane.client.stats import ClientStats
from fairlane.client.window import Window
from fairlane.clock import ClockMs
from fairlane.cluster import reason_of
from fairlane.codec import Codec
from fairlane.errors import AnsweredElsewhere, Backpressure, ClientClosed, FairlaneError, PublishFailed, Unavailable
from fairlane.names import replies_topic, requests_topic
from fairlane.records import InferenceReply, InferenceRequest, SourceCoordinate

_POLL_S = 0.1
_PURGE_TIMEOUT_S = 1.0
_THREAD_TIMEOUT_S = 5.0
# librdkafka counts a message until its report was served; this keeps its own bounds from ever being met first.
_SPARE_MESSAGES = 1_000
_SPARE_BYTES = 16 * 1024 * 1024
_MAY_BE_PUBLISHED = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError._PURGE_INFLIGHT,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NETWORK_EXCEPTION,
    }
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was checked and encoded."""

    request_id: str
    reply_to: str
    value: bytes


class ClientCore:
    """One connection of one tenant. Thread-safe; starts at the first need."""

    def __init__(
        self,
        tenant: str,
        service: str | None,
        connector: Connector,
        codec: Callable[[], Codec],
        limits: ClientLimits,
        clock: ClockMs,
    ) -> None:
        self.tenant = tenant
        self.limits = limits
        self.reply_topic = replies_topic(tenant, service)
        self.window = Window(limits.max_in_flight, limits.max_buffered_bytes)
        self._default_reply_to = None if service is None else self.reply_topic
        self._topic = requests_topic(tenant)
        self._connector = connector
        self._make_codec = codec
        self._codec: Codec | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._promise_lock = threading.Lock()
        self._stopping = threading.Event()
        self._open: dict[str, list[Handle]] = {}
        self._ended: FairlaneError | None = None
        self._producer: ProducerSeam | None = None
        self._reader: ReplyReader | None = None
        self._threads: list[threading.Thread] = []
        self._submitted = 0
        self._published = 0
        self._publish_failed = 0
        self._answered = 0

    @property
    def started(self) -> bool:
        return self._producer is not None

    @property
    def stats(self) -> ClientStats:
        reader = self._reader
        return ClientStats(
            submitted=self._submitted,
            published=self._published,
            publish_failed=self._publish_failed,
            answered=self._answered,
            in_flight=self.window.in_flight,
            ignored_replies=0 if reader is None else reader.ignored,
            undecodable_replies=0 if reader is None else reader.undecodable,
        )

    def raise_if_ended(self) -> None:
        """Raises ClientClosed or Unavailable when the client takes no more work."""
        if self._ended is not None:
            raise self._ended

    def start(self) -> None:
        """Find where the reply topic ends, then start reading and publishing. May be called again.

        Raises:
            Unavailable: no broker answers, or the reply topic is not there. Trying again is allowed.
            ClientClosed: the client was closed.
        """
        if not self.started:
            with self._starting:
                self.raise_if_ended()
                if self._producer is None:
                    self._connect()

    def prepare(self, request: InferenceRequest) -> Prepared:
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
        return Prepared(request.request_id, request.reply_to or self.reply_topic, value)

    def no_room(self) -> Backpressure:
        """The error for a submit that found no room in time."""
        return Backpressure(
            f"{self.window.in_flight} requests under way (limit {self.limits.max_in_flight}), "
            f"{self.window.buffered_bytes} bytes not acknowledged (limit {self.limits.max_buffered_bytes}): "
            f"no room within {self.limits.submit_timeout_ms} ms"
        )

    def publish(self, prepared: Prepared) -> Handle:
        """Hand a request to the producer. The caller holds room for it in the window, which passes on to the handle.

        Raises:
            PublishFailed: the producer refused it at once.
            Backpressure: the producer's own queue is full.
            ClientClosed, Unavailable: the client ended.
        """
        size = len(prepared.value)
        handle = Handle(prepared.request_id, self._topic, prepared.reply_to, self._clock(), self._promise_lock)
        try:
            self._enter(handle)
        except FairlaneError:
            self.window.release(requests=1, buffered_bytes=size)
            raise
        assert self._producer is not None  # noqa: S101 - a mistake in this package, not of a caller
        try:
            self._producer.produce(
                self._topic,
                prepared.value,
                prepared.request_id.encode(),
                on_delivery=partial(self._on_delivery, handle, size),
            )
        except (BufferError, KafkaException) as error:
            self.window.release(requests=int(self._leave(handle)), buffered_bytes=size)
            if isinstance(error, BufferError):
                raise Backpressure("the producer's queue is full") from None
            with self._lock:
                self._publish_failed += 1
            raise PublishFailed(handle.request_id, self._topic, reason_of(error)) from error
        with self._lock:
            self._submitted += 1
        return handle

    def flush(self, timeout_s: float) -> int:
        """Wait until all requests are acknowledged or refused; how many are not yet after ``timeout_s``."""
        return 0 if self._producer is None else self._producer.flush(timeout_s)

    def close(self) -> None:
        """Flush, stop, and fail what is still open. Takes at most the close timeout and a few seconds; repeatable."""
        deadline = monotonic() + self.limits.close_timeout_ms / 1_000
        closed = ClientClosed("the client is closed")
        with self._lock:
            self._ended = self._ended or closed
        self.window.close(closed)
        with self._starting:
            producer, reader, threads = self._producer, self._reader, self._threads
            self._threads = []
        if producer is not None and threads:
            if producer.flush(max(0.0, deadline - monotonic())):
                producer.purge()
                producer.flush(_PURGE_TIMEOUT_S)
            self._stopping.set()
            for thread in threads:
                thread.join(_THREAD_TIMEOUT_S)
            if reader is not None:
                reader.close()
        self._fail_open(ClientClosed("the client was closed before the reply came"))

    def _connect(self) -> None:
        codec = self._make_codec()
        # The name begins with the tenant's and a dot, so that a grant on that prefix covers it.
        try:
            consumer = self._connector.reader(f"{self.tenant}.client-{uuid4()}")
        except KafkaException as error:
            raise Unavailable(f"the settings of the connection are wrong: {reason_of(error)}") from error
        reader = ReplyReader(consumer, self.reply_topic, codec, self._open.__contains__, self._settle, self._clock)
        try:
            reader.seek_to_end(self.limits.start_timeout_ms / 1_000)
            producer = self._connector.producer(
                self.limits.max_in_flight + _SPARE_MESSAGES, self.limits.max_buffered_bytes + _SPARE_BYTES
            )
        except KafkaException as error:
            consumer.poll(0)  # serves the error callback
            reader.close()
            raise Unavailable(f"no broker answers: {self._connector.last_error() or reason_of(error)}") from error
        except BaseException:
            reader.close()
            raise
        self._codec, self._reader, self._producer = codec, reader, producer
        self._threads = [
            self._thread("replies", partial(self._read, reader)),
            self._thread("publisher", partial(self._publish, producer)),
        ]

    def _enter(self, handle: Handle) -> None:
        with self._lock:
            self.raise_if_ended()
            self._open.setdefault(handle.request_id, []).append(handle)
        if handle.reply_to != self.reply_topic:
            # It stays in the table until it is published, so that it fails with the client if the client fails.
            handle.break_reply(AnsweredElsewhere(handle.request_id, handle.reply_to))

    def _leave(self, handle: Handle) -> bool:
        """Take a handle out of the table; False when somebody else did. Who takes it out releases its room."""
        with self._lock:
            same_id = self._open.get(handle.request_id, [])
            if handle not in same_id:
                return False
            same_id.remove(handle)
            if not same_id:
                del self._open[handle.request_id]
            return True

    def _on_delivery(self, handle: Handle, size: int, error: KafkaError | None, message: Message) -> None:
        # Runs inside the producer's poll or flush: an exception here would end the thread.
        if error is None:
            with self._lock:
                self._published += 1
            where = SourceCoordinate(self._topic, message.partition() or 0, message.offset() or 0)
            handle.keep_published(where, self._clock())
            over = handle.reply_to != self.reply_topic and self._leave(handle)
            self.window.release(requests=int(over), buffered_bytes=size)
            return
        if not self._leave(handle):
            self.window.release(buffered_bytes=size)
            handle.keep_published(None, None)  # the reply was there first: it is in the log
            return
        with self._lock:
            self._publish_failed += 1
        uncertain = error.code() in _MAY_BE_PUBLISHED
        handle.fail(PublishFailed(handle.request_id, self._topic, error.str(), uncertain=uncertain))
        self.window.release(requests=1, buffered_bytes=size)

    def _settle(self, reply: InferenceReply, received_at_ms: int) -> None:
        with self._lock:
            handles = self._open.pop(reply.request_id, ())
            self._answered += len(handles)
        for handle in handles:
            handle.keep_reply(reply, received_at_ms)
        self.window.release(requests=len(handles))

    def _fail_open(self, error: FairlaneError) -> None:
        with self._lock:
            handles = [handle for same_id in self._open.values() for handle in same_id]
            self._open.clear()
        for handle in handles:
            handle.fail(error)
        self.window.release(requests=len(handles))

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guard, args=(name, work), name=f"fairlane-{name}", daemon=True)
        thread.start()
        return thread

    def _guard(self, name: str, work: Callable[[], None]) -> None:
        """Run a thread's work; if it dies, nobody is left waiting for what it would have done."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - handed to every open handle and to every later submit
            log.error("client_thread_died thread=%s reason=%s", name, reason_of(error))
            unavailable = Unavailable(f"the client's {name} thread died: {reason_of(error)}")
            with self._lock:
                self._ended = self._ended or unavailable
            self.window.close(unavailable)
            self._fail_open(unavailable)

    def _read(self, reader: ReplyReader) -> None:
        reader.run(self._stopping)

    def _publish(self, producer: ProducerSeam) -> None:
        while not self._stopping.is_set():
            producer.poll(_POLL_S)
