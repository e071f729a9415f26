"""Input of the transaction loop: source records and the output records that follow from them."""

from collections.abc import Container, Sequence

from fairlane import cloud_events
from fairlane.frozen import frozen_dataclass
from fairlane.ownership import Claim
from fairlane.records import InferenceReply
from fairlane.trace_context import TraceHeaders

__all__ = ["OutputRecord", "Settlement"]


@frozen_dataclass(frozen=True, slots=True)
class OutputRecord:
    """A record to write in a transaction. Without ``partition``, its key decides. One that ``is_optional`` is left out
    if its topic refuses it, so that what it is committed with does not wait."""

    topic: str
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]] = ()
    partition: int | None = None
    is_optional: bool = False


@frozen_dataclass(frozen=True, slots=True)
class Settlement:
    """One source record and its output records: all are committed, or none."""

    claim: Claim
    outputs: tuple[OutputRecord, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(len(record.value) for record in self.outputs)

    def without_optional(self, topics: Container[str]) -> "Settlement":
        """Without its optional records for these topics; the same object if it has none."""
        kept = tuple(record for record in self.outputs if not (record.is_optional and record.topic in topics))
        return self if len(kept) == len(self.outputs) else Settlement(self.claim, kept)

    def goes_to(self, topic: str) -> bool:
        return any(record.topic == topic for record in self.outputs)


def reply_record(topic: str, reply: InferenceReply, value: bytes, trace: TraceHeaders = ()) -> OutputRecord:
    """The record of a reply encoded as ``value``: keyed by request id, with the headers of the event and of the
    request's trace."""
    return OutputRecord(topic, reply.request_id.encode(), value, (*cloud_events.of_reply(reply), *trace))
