"""The record of a final reply, the same whoever writes it."""

from fairlane import cloud_events
from fairlane.records import InferenceReply
from fairlane.trace_context import TraceHeaders
from fairlane_server.kafka.settlement import OutRecord


def reply_record(topic: str, reply: InferenceReply, value: bytes, trace: TraceHeaders = ()) -> OutRecord:
    """The record of a reply that is encoded as ``value``: its key is the request id, its headers those of the event and
    the trace of its request."""
    return OutRecord(topic, reply.request_id.encode(), value, (*cloud_events.of_reply(reply), *trace))
