"""Incremental fetch sessions (KIP-227).

Broker and reader remember which partitions are fetched, from which offsets. A request then names only what changed, and
the response only partitions with data or with a changed state: the cost of a fetch does not grow with the number of
tenants. aiokafka has no sessions, and encodes and decodes field by field; the messages here are version 11 of the
protocol (Kafka 2.3), packed by ``struct``.
"""

import io
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.fetch import FetchRequest_v11
from aiokafka.structs import TopicPartition

_NO_SESSION: Final = 0
_FIRST_EPOCH: Final = 0
_LAST_EPOCH: Final = 2**31 - 1

_REQUEST: Final = struct.Struct(">iiiibii")
"""Replica id, longest wait (ms), least bytes, most bytes, isolation level, session id, epoch."""
_ASKED: Final = struct.Struct(">iiqqi")
"""Partition, leader epoch, offset, log start offset, most bytes."""
_RESPONSE: Final = struct.Struct(">ihii")
"""Throttle time (ms), error, session id, number of topics."""
_ANSWER: Final = struct.Struct(">ihqqqi")
"""Partition, error, high watermark, last stable offset, log start offset, number of aborted transactions."""
_ABORTED: Final = struct.Struct(">qq")
_RECORDS: Final = struct.Struct(">ii")
"""Preferred replica, size of the records in bytes; -1 without any."""
_COUNT: Final = struct.Struct(">i")
_LENGTH: Final = struct.Struct(">h")


class SessionChange(NamedTuple):
    """Content of a session's next request: ``changed`` offsets by partition, and ``forgotten`` partitions."""

    session_id: int
    epoch: int
    changed: Mapping[TopicPartition, int]
    forgotten: Sequence[TopicPartition]


class FetchSession:
    """The session with one broker, one request at a time: ``next_request``, then ``answered`` or ``end``. Pure."""

    def __init__(self) -> None:
        self._id = _NO_SESSION
        self._epoch = _FIRST_EPOCH
        self._asked: Mapping[TopicPartition, int] = {}

    @property
    def asked(self) -> Mapping[TopicPartition, int]:
        """The offsets that the last request asked for, by partition."""
        return self._asked

    def next_request(self, wanted: Mapping[TopicPartition, int]) -> SessionChange:
        """The request that makes the broker fetch exactly ``wanted``: offsets by partition."""
        before, self._asked = self._asked, wanted
        if self._epoch == _FIRST_EPOCH:
            return SessionChange(self._id, self._epoch, wanted, ())
        changed = {tp: offset for tp, offset in wanted.items() if before.get(tp) != offset}
        return SessionChange(self._id, self._epoch, changed, [tp for tp in before if tp not in wanted])

    def answered(self, session_id: int) -> None:
        """Note a response without error. Id 0: the broker has no room for a session."""
        self._id = session_id
        self._epoch = _FIRST_EPOCH if session_id == _NO_SESSION else self._epoch % _LAST_EPOCH + 1

    def end(self) -> None:
        """The session failed, or it is unknown what the broker remembers: the next request replaces it."""
        self._epoch = _FIRST_EPOCH


class Answer(NamedTuple):
    """A response's data of one partition."""

    tp: TopicPartition
    error_code: int
    high_watermark: int
    last_stable_offset: int
    aborted: Sequence[tuple[int, int]]
    """Producer ids and first offsets."""
    records: bytes


class FetchResponse:
    """A decoded response."""

    def __init__(self, error_code: int, session_id: int, answers: Sequence[Answer]) -> None:
        self.error_code = error_code
        self.session_id = session_id
        self.answers = answers

    @classmethod
    def decode(cls, body: io.BytesIO) -> "FetchResponse":
        """Decode from the position of ``body`` on."""
        data, at = body.getvalue(), body.tell()
        _, error_code, session_id, topics = _RESPONSE.unpack_from(data, at)
        at += _RESPONSE.size
        answers: list[Answer] = []
        for _ in range(topics):
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            topic = data[at : at + length].decode()
            (partitions,) = _COUNT.unpack_from(data, at + length)
            at += length + _COUNT.size
            for _ in range(partitions):
                answer, at = _answer(topic, data, at)
                answers.append(answer)
        return cls(error_code, session_id, answers)


def _answer(topic: str, data: bytes, at: int) -> tuple[Answer, int]:
    """The answer at ``at``, and where the next one begins."""
    partition, error_code, high_watermark, last_stable_offset, _, aborted_count = _ANSWER.unpack_from(data, at)
    at += _ANSWER.size
    aborted = [_ABORTED.unpack_from(data, at + number * _ABORTED.size) for number in range(aborted_count)]
    at += len(aborted) * _ABORTED.size
    _, size = _RECORDS.unpack_from(data, at)
    at += _RECORDS.size
    end = at + max(0, size)
    tp = TopicPartition(topic, partition)
    return Answer(tp, error_code, high_watermark, last_stable_offset, aborted, data[at:end]), end


class FetchRequest(FetchRequest_v11):  # type: ignore[misc]  # aiokafka has no types
    """A request that aiokafka's client sends. Raises IncompatibleBrokerVersion at ``prepare`` for an older broker.

    Args:
        change: content of the session's request.
        max_wait_ms, max_bytes, max_partition_bytes: bounds of the response; a batch larger than them comes alone.
        isolation_level: as in the protocol, 1 for committed records alone.
    """

    RESPONSE_TYPE = FetchResponse

    def __init__(
        self, change: SessionChange, max_wait_ms: int, max_bytes: int, max_partition_bytes: int, isolation_level: int
    ) -> None:
        self.change = change
        self.max_wait_ms = max_wait_ms
        self._max_bytes = max_bytes
        self._max_partition_bytes = max_partition_bytes
        self._isolation_level = isolation_level

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> "FetchRequest":
        """This request, if the broker knows its version."""
        least, most = versions.get(self.API_KEY, (-1, -1))
        if not least <= self.API_VERSION <= most:
            raise IncompatibleBrokerVersion(f"fetch versions {least} to {most}, needed is {self.API_VERSION}")
        return self

    def encode(self) -> bytes:
        change = self.change
        parts = [
            _REQUEST.pack(
                -1, self.max_wait_ms, 1, self._max_bytes, self._isolation_level, change.session_id, change.epoch
            )
        ]
        changed = _by_topic(change.changed)
        parts.append(_COUNT.pack(len(changed)))
        for topic, tps in changed.items():
            parts += (_text(topic), _COUNT.pack(len(tps)))
            parts += [_ASKED.pack(tp.partition, -1, change.changed[tp], -1, self._max_partition_bytes) for tp in tps]
        forgotten = _by_topic(change.forgotten)
        parts.append(_COUNT.pack(len(forgotten)))
        for topic, tps in forgotten.items():
            parts += (_text(topic), struct.pack(f">i{len(tps)}i", len(tps), *(tp.partition for tp in tps)))
        parts.append(_text(""))  # no rack
        return b"".join(parts)

    def __repr__(self) -> str:
        return f"FetchRequest({self.change!r})"


def _by_topic(tps: Any) -> dict[str, list[TopicPartition]]:
    """Grouped by topic, in order."""
    groups: dict[str, list[TopicPartition]] = {}
    for tp in tps:
        groups.setdefault(tp.topic, []).append(tp)
    return groups


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _LENGTH.pack(len(encoded)) + encoded
