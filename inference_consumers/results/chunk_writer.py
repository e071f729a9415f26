"""Chunk writer: streamed text to the tenant, outside the transactions, dropped when it is late.

The final reply is authoritative; a chunk that is lost costs its reader a pause, and nothing else.
"""

from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from fairlane import metrics, names
from fairlane.codec import Codec
from fairlane.frozen import frozen_dataclass
from fairlane.logs import get_logger
from fairlane.records import ReplyChunk
from inference_consumers.batching.received_work import ReceivedWork

log = get_logger(__name__)

_FLUSH_TIMEOUT_S = 1.0


@frozen_dataclass(frozen=True, slots=True)
class StreamedText:
    """A piece of an item's answer; ``number`` counts the pieces of one run of it, from 0. The last one is empty."""

    work: ReceivedWork
    number: int
    text: str
    last: bool = False


class ChunkWriter:
    """Writes chunks to ``chunks.<tenant>``. Never blocks and never fails: what does not get through is counted."""

    def __init__(self, producer: Producer, codec: Codec) -> None:
        self._producer = producer
        self._codec = codec
        self._losing = False

    def write(self, texts: Sequence[StreamedText]) -> None:
        """Send them now, in order."""
        for one in texts:
            self._write(one)
        self._producer.poll(0)

    def close(self) -> None:
        """Wait a moment for what is on its way."""
        self._producer.flush(_FLUSH_TIMEOUT_S)

    def _write(self, one: StreamedText) -> None:
        try:
            chunk = chunk_of(one)
            self._producer.produce(
                names.chunks_topic(chunk.tenant),
                value=self._codec.encode(chunk),
                key=chunk.request_id.encode(),
                on_delivery=self._delivered,
            )
        except BufferError:
            self._lost("queue_full")
        except KafkaException as error:
            self._lost(error.args[0].name())

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is None:
            self._losing = False
        else:
            self._lost(error.name())

    def _lost(self, reason: str) -> None:
        metrics.CHUNKS_LOST.labels(reason=reason).inc()
        if not self._losing:
            log.warning("chunk_lost", reason=reason)
        self._losing = True


def chunk_of(one: StreamedText) -> ReplyChunk:
    """The record. Of two deliveries of a request the later has the larger generation: what was handed back comes again
    by any partition of any pool, whose group may be younger; otherwise it is the group's, when it was delivered."""
    work = one.work
    return ReplyChunk(
        request_id=work.request_id,
        tenant=work.item.tenant,
        generation=(work.item.handed_back << 32) + work.generation,
        attempt=work.runs,
        seq=one.number,
        text=one.text,
        last=one.last,
    )
