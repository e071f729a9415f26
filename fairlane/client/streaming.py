"""Streams of the sync and asyncio clients: open answers, and the reader that fills them."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic

from confluent_kafka import KafkaException

from fairlane.client.handle import Handle, successful
from fairlane.client.ports import ReaderPort, log
from fairlane.client.reader import TopicReader
from fairlane.client.reassembly import Reassembly, TextDelta
from fairlane.clock import ClockMs
from fairlane.cluster import reason_of
from fairlane.codec import Codec
from fairlane.errors import FairlaneError
from fairlane.records import InferenceReply, ReplyChunk

_START_TIMEOUT_S = 3.0
_START_AGAIN_S = 30.0
_THREAD_TIMEOUT_S = 5.0


class StreamedAnswer:
    """One answer between the client's threads, which fill it, and the stream that empties it.

    Args:
        request_id: of the request, which is not published before this listens.
        wake: called, on any thread, when there may be something to take. It must be short and never raise.
        forget: called, on any thread, when no more chunks are wanted.
    """

    def __init__(self, request_id: str, wake: Callable[[], None], forget: "Callable[[StreamedAnswer], None]") -> None:
        self.request_id = request_id
        self.over = False
        self._wake = wake
        self._forget = forget
        self._lock = threading.Lock()
        self._text = Reassembly()
        self._handle: Handle | None = None
        self._reply: InferenceReply | None = None

    @property
    def handle(self) -> Handle | None:
        """The request's; None while it is not published."""
        return self._handle

    @property
    def text(self) -> str:
        """The text taken so far."""
        with self._lock:
            return self._text.text

    def follow(self, handle: Handle) -> None:
        """The request was handed to the producer."""
        self._handle = handle
        handle.replied.when_done(self.stop)

    def add(self, chunk: ReplyChunk) -> None:
        """A chunk of this request came."""
        with self._lock:
            new = self._text.add(chunk)
        if new:
            self._wake()

    def take(self) -> TextDelta | None:
        """Text that arrived since the last call; None if none did or, if ``over``, at the end.

        Raises:
            The same as ``Handle.result``, once all text was taken.
        """
        handle = self._handle
        with self._lock:
            if self._reply is None and handle is not None and handle.done():
                self._reply = handle.replied.get()
                self._text.finish(self._reply)
            delta = self._text.take()
            reply = self._reply
        if delta is None and reply is not None:
            successful(reply)
            self.over = True
        return delta

    def stop(self) -> None:
        """Stop collecting chunks: the reply has arrived, or the stream was closed."""
        self._forget(self)
        self._wake()


class ChunkHub:
    """Reads a tenant's chunk topic on one thread, from the first stream on, for all streams of a client. Thread-safe.

    Chunks only make an answer come sooner. So whatever goes wrong here is logged, and the answers come in one piece,
    with their replies; a later stream tries again.

    Args:
        topic: of the chunks.
        consumer: makes the consumer that reads it.
        cancel: cancels a request; raises a FairlaneError if it cannot.
        clock: the time.
    """

    def __init__(
        self, topic: str, consumer: Callable[[], ReaderPort], cancel: Callable[[Handle], None], clock: ClockMs
    ) -> None:
        # Answers whose stream was dropped rather than closed. Finalizers fill it, which must take no lock.
        self.dropped: SimpleQueue[StreamedAnswer] = SimpleQueue()
        self._topic = topic
        self._make_consumer = consumer
        self._cancel = cancel
        self._clock = clock
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._stopping = threading.Event()
        # Tuples, so that the reading thread needs no lock to go through one.
        self._answers: dict[str, tuple[StreamedAnswer, ...]] = {}
        self._thread: threading.Thread | None = None
        self._running = False
        self._not_before = 0.0

    @property
    def running(self) -> bool:
        """Whether chunks are being read."""
        return self._running

    def start(self, codec: Codec) -> None:
        """Read from here on: a chunk that is written after this returns is seen. May be called again; never raises."""
        if self.running:
            return
        with self._starting:
            if self._running or self._stopping.is_set() or monotonic() < self._not_before:
                return
            try:
                reader = self._reader(codec)
            except (FairlaneError, KafkaException) as error:
                self._give_up(error)
                return
            self._running = True
            self._thread = threading.Thread(target=self._run, args=(reader,), name="fairlane-chunks", daemon=True)
            self._thread.start()

    def open(self, request_id: str, wake: Callable[[], None]) -> StreamedAnswer:
        """Begin to collect the chunks of a request that is about to be published."""
        answer = StreamedAnswer(request_id, wake, self._forget)
        with self._lock:
            self._answers[request_id] = (*self._answers.get(request_id, ()), answer)
        return answer

    def leave(self, answer: StreamedAnswer) -> None:
        """Close an answer and cancel its request if it has no reply yet. Never raises."""
        answer.stop()
        handle = answer.handle
        if handle is None or handle.done():
            return
        try:
            self._cancel(handle)
        except FairlaneError as error:
            log.warning("cancel_not_published request_id=%s reason=%s", handle.request_id, error)

    def leave_dropped(self) -> None:
        """Leave the answers in ``dropped``."""
        while True:
            try:
                answer = self.dropped.get_nowait()
            except Empty:
                return
            self.leave(answer)

    def leave_all(self) -> None:
        """Leave every answer that is not complete."""
        self.leave_dropped()
        with self._lock:
            answers = [answer for same_id in self._answers.values() for answer in same_id]
        for answer in answers:
            self.leave(answer)

    def stop(self) -> None:
        """Read no more. Takes a few seconds at most."""
        self._stopping.set()
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join(_THREAD_TIMEOUT_S)

    def _reader(self, codec: Codec) -> TopicReader[ReplyChunk]:
        consumer = self._make_consumer()
        is_wanted = self._answers.__contains__
        reader = TopicReader(consumer, self._topic, ReplyChunk, codec, is_wanted, self._deliver, self._clock)
        try:
            reader.seek_to_end(_START_TIMEOUT_S)
        except BaseException:
            reader.close()
            raise
        return reader

    def _run(self, reader: TopicReader[ReplyChunk]) -> None:
        try:
            reader.run(self._stopping)
        except Exception as error:  # noqa: BLE001 - the answers come without chunks
            self._give_up(error)
        finally:
            self._running = False
            reader.close()

    def _give_up(self, error: Exception) -> None:
        self._not_before = monotonic() + _START_AGAIN_S
        log.warning("chunks_not_read topic=%s reason=%s: answers come in one piece", self._topic, reason_of(error))

    def _deliver(self, chunk: ReplyChunk, _received_at_ms: int) -> None:
        for answer in self._answers.get(chunk.request_id, ()):
            answer.add(chunk)

    def _forget(self, answer: StreamedAnswer) -> None:
        with self._lock:
            others = tuple(other for other in self._answers.get(answer.request_id, ()) if other is not answer)
            if others:
                self._answers[answer.request_id] = others
            else:
                self._answers.pop(answer.request_id, None)
