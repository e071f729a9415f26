"""Input of the transaction loop: source records and the output records that follow from them."""

from collections.abc import Sequence

from fairlane import cloud_events
from fairlane.frozen import frozen_dataclass
from fairlane.ownership import Claim
from fairlane.records import InferenceReply
from fairlane.trace_context import TraceHeaders

__all__ = ["OutputRecord", "Settlement"]


@frozen_dataclass(frozen=True, slots=True)
class OutputRecord:
    """A record to write in a transaction. Without ``partition``, its key decides."""

    topic: str
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]] = ()
    partition: int | None = None


@frozen_dataclass(frozen=True, slots=True)
class Settlement:
    """One source record and its output records: all are committed, or none."""

    claim: Claim
    outputs: tuple[OutputRecord, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(len(record.value) for record in self.outputs)

    def goes_to(self, topic: str) -> bool:
        return any(record.topic == topic for record in self.outputs)


def reply_record(topic: str, reply: InferenceReply, value: bytes, trace: TraceHeaders = ()) -> OutputRecord:
    """The record of a reply encoded as ``value``: keyed by request id, with the headers of the event and of the
    request's trace."""
    return OutputRecord(topic, reply.request_id.encode(), value, (*cloud_events.of_reply(reply), *trace))
