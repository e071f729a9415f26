"""Reading topics as the tenants and operators do: with ``read_committed``, and everything that was ever there."""

from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from uuid import uuid4

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from fairlane.codec import Codec, DecodeError
from fairlane.kafka_config import read_committed_consumer
from fairlane.records import InferenceReply
from fairlane.settings import KafkaSettings
from tests.kit.waiting import PATIENCE_S

_METADATA_TIMEOUT_S = 10.0


class LogReader:
    """Follows topics and keeps every committed record, in the order it came."""

    def __init__(self, settings: KafkaSettings, topics: Iterable[str], *, from_beginning: bool = True) -> None:
        """Begins at the first record, or at those that are committed after this returns."""
        config = read_committed_consumer(settings, f"reader-{uuid4()}") | {"enable.partition.eof": True}
        self._consumer = Consumer(config)
        self.records: list[Message] = []
        start = [
            TopicPartition(topic, partition, self._first(topic, partition, from_beginning))
            for topic in topics
            for partition in self._consumer.list_topics(topic, timeout=_METADATA_TIMEOUT_S).topics[topic].partitions
        ]
        self._read_up_to = {(partition.topic, partition.partition): partition.offset for partition in start}
        self._consumer.assign(start)

    def poll(self, timeout_s: float = 0.1) -> list[Message]:
        """The records that arrived, at once when there are any."""
        first = self._consumer.poll(timeout_s)
        arrived = [] if first is None else [first, *self._consumer.consume(10_000, 0)]
        return [message for message in arrived if self._take(message)]

    def wait(self, condition: Callable[[], object], timeout_s: float = PATIENCE_S, what: str = "the records") -> None:
        """Read until ``condition()`` is true. Raises AssertionError if it is not within ``timeout_s``."""
        deadline = monotonic() + timeout_s
        while not condition():
            left = deadline - monotonic()
            assert left > 0, f"{what} did not come within {timeout_s:g} s; {len(self.records)} records came"
            self.poll(min(0.1, left))

    def read_to_end(self, timeout_s: float = PATIENCE_S) -> None:
        """Read everything that is committed now. An open transaction hides what lies behind it."""
        ends = {
            place: self._consumer.get_watermark_offsets(TopicPartition(*place), timeout=_METADATA_TIMEOUT_S)[1]
            for place in self._read_up_to
        }
        self.wait(
            lambda: all(self._read_up_to[place] >= end for place, end in ends.items()),
            timeout_s,
            "the end of the topics",
        )

    def close(self) -> None:
        self._consumer.close()

    def _first(self, topic: str, partition: int, from_beginning: bool) -> int:
        if from_beginning:
            return OFFSET_BEGINNING
        return self._consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=_METADATA_TIMEOUT_S)[1]

    def _take(self, message: Message) -> bool:
        error, place, offset = message.error(), (str(message.topic()), message.partition() or 0), message.offset() or 0
        if error is None:
            self.records.append(message)
            self._read_up_to[place] = offset + 1
            return True
        if error.code() == KafkaError._PARTITION_EOF:
            # It counts the markers of transactions, which no record's offset does.
            self._read_up_to[place] = offset
        elif error.fatal() or not error.retriable():
            raise KafkaException(error)
        return False


class Replies:
    """The committed replies of some reply topics, by request id."""

    def __init__(self, reader: LogReader, codec: Codec) -> None:
        self.reader = reader
        self._codec = codec
        self._seen = 0
        self.by_id: dict[str, list[InferenceReply]] = {}
        self.topic_of: dict[str, str] = {}
        """The topic a request was answered on."""

    def wait(self, request_ids: Iterable[str], timeout_s: float = PATIENCE_S) -> dict[str, InferenceReply]:
        """The one reply to each of these. Raises AssertionError when one is missing or came twice."""
        wanted = set(request_ids)
        deadline = monotonic() + timeout_s
        while wanted - self.by_id.keys():
            if monotonic() > deadline:
                missing = wanted - self.by_id.keys()
                raise AssertionError(
                    f"{len(missing)} of {len(wanted)} requests were not answered within {timeout_s:g} s: "
                    f"{sorted(missing)[:5]}"
                )
            self.reader.poll(0.1)
            self._index()
        return self.exactly_once(wanted)

    def read_to_end(self, timeout_s: float = PATIENCE_S) -> None:
        """Take in everything that is committed now, a second reply included that nobody waits for."""
        self.reader.read_to_end(timeout_s)
        self._index()

    def exactly_once(self, request_ids: Iterable[str]) -> dict[str, InferenceReply]:
        """The one final reply to each, of what was read. A replayed copy is no second reply."""
        found = {}
        for request_id in request_ids:
            final = [reply for reply in self.by_id.get(request_id, ()) if not reply.replayed]
            assert len(final) == 1, f"{request_id} has {len(final)} final replies"
            found[request_id] = final[0]
        return found

    @property
    def counts(self) -> Mapping[str, int]:
        """Replies per request id."""
        return {request_id: len(replies) for request_id, replies in self.by_id.items()}

    def close(self) -> None:
        self.reader.close()

    def _index(self) -> None:
        records, self._seen = self.reader.records[self._seen :], len(self.reader.records)
        for record in records:
            try:
                reply = self._codec.decode_as(InferenceReply, record.value())
            except DecodeError as error:
                raise AssertionError(f"{record.topic()}@{record.offset()} holds no reply: {error}") from error
            self.by_id.setdefault(reply.request_id, []).append(reply)
            self.topic_of[reply.request_id] = str(record.topic())
