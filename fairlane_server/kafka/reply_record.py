"""Build the Kafka record of a final reply, the same in all services."""

from fairlane import cloud_events
from fairlane.records import InferenceReply
from fairlane.trace_context import TraceHeaders
from fairlane_server.kafka.settlement import OutputRecord


def reply_record(topic: str, reply: InferenceReply, value: bytes, trace: TraceHeaders = ()) -> OutputRecord:
    """The record of a reply encoded as ``value``: keyed by request id, with the headers of the event and of the
    request's trace."""
    return OutputRecord(topic, reply.request_id.encode(), value, (*cloud_events.of_reply(reply), *trace))
