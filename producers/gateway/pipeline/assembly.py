"""Assembly of the Kafka pipeline, for the gateway's composition root."""

import asyncio
from collections.abc import Callable

from confluent_kafka import Consumer, Producer

from fairlane.client.connector import KafkaConnector
from fairlane.codec import Codec
from fairlane.names import gateway_chunks_group
from fairlane.records import InferenceReply
from fairlane.settings import Settings
from producers.gateway.pipeline.chunk_reader import ChunkReader
from producers.gateway.pipeline.early_rejection import LatestLoad
from producers.gateway.pipeline.load_watch import LoadWatch, RegistryFeeds
from producers.gateway.pipeline.pending import Pending
from producers.gateway.pipeline.publisher import Publisher, PublishLimits, producer_config
from producers.gateway.pipeline.reply_reader import ReplyReader
from producers.gateway.pipeline.submitter import FindReply, KafkaSubmitter

NO_PARTITIONS = "no partition of the reply topic is read here"
NOT_ACKNOWLEDGED = "the log does not acknowledge what is published"


class LogPipeline:
    """Publisher, readers and load watch of one gateway. Nothing is connected before ``start``.

    Args:
        find_reply: finds replies that this instance has not read, see ``KafkaSubmitter``.
        on_replies: called with every reply read, on a thread of the reader.
        on_failure: called in the event loop when a thread has died: the process must end.
    """

    def __init__(
        self,
        settings: Settings,
        codec: Codec,
        find_reply: FindReply,
        on_replies: Callable[[list[InferenceReply]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._on_failure = on_failure
        self._loop: asyncio.AbstractEventLoop | None = None
        latest_load, limits = LatestLoad(), PublishLimits()
        self.directory = RegistryFeeds(settings, codec, self._failed)
        self.pending = Pending(settings.gateway_max_in_flight)
        self.publisher = Publisher(
            lambda on_error: Producer(producer_config(settings, limits, on_error)), limits, self._failed
        )
        self._chunks = ChunkReader(
            lambda: _chunk_consumer(settings),
            codec,
            self.pending.__contains__,
            lambda chunks: self.submitter.add(chunks),  # noqa: PLW0108 - made below
            self._failed,
        )
        self.submitter = KafkaSubmitter(
            codec,
            self.publisher,
            self._chunks,
            self.pending,
            lambda: self.directory.registry,
            latest_load,
            find_reply,
        )
        self._replies = ReplyReader(settings, codec, self.submitter, on_replies, self._failed)
        self._load = LoadWatch(settings, codec, lambda view: self._soon(latest_load.look, view), self._failed)

    async def start(self) -> None:
        """Connect. Raises FeedUnavailableError: the control topics could not be read."""
        loop = self._loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.directory.start)
        self.publisher.start()
        self._chunks.start()
        self._replies.start()
        self._load.start()

    async def close(self) -> None:
        """Disconnect, after a short wait for records in flight."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            self.publisher.close(),
            self._replies.close(),
            self._chunks.close(),
            loop.run_in_executor(None, self._load.stop),
            loop.run_in_executor(None, self.directory.stop),
        )

    def end_waiting(self) -> None:
        """End the wait of every call now; the requests go on."""
        self.submitter.end_waiting()
        self.publisher.end_waiting()

    def trouble(self) -> str | None:
        """Why no request can be accepted at present; None if one can."""
        if not self.submitter.owns_partitions:
            return NO_PARTITIONS
        return None if self.publisher.is_available else NOT_ACKNOWLEDGED

    def _failed(self, error: BaseException) -> None:
        self._soon(self._on_failure, error)

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _chunk_consumer(settings: Settings) -> Consumer:
    """A consumer that joins no group, despite its group id."""
    consumer = KafkaConnector(settings).chunk_reader(gateway_chunks_group(settings.group_prefix))
    assert isinstance(consumer, Consumer)  # noqa: S101 - a mistake in this package, not of a caller
    return consumer
