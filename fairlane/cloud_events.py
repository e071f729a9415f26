"""CloudEvents 1.0 headers, Kafka binary mode, for requests, cancellations, feedback and replies. Pure.

https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/kafka-protocol-binding.md. `ce_time` is omitted:
the record's timestamp is the time of the event; the broker sets that of a request.
"""

from fairlane import headers
from fairlane.dead_letters import position_name
from fairlane.records import InferenceReply

EventHeaders = tuple[tuple[str, bytes], ...]

REQUEST = (headers.CE_TYPE, b"fairlane.InferenceRequest")
CANCEL = (headers.CE_TYPE, b"fairlane.CancelRequest")
FEEDBACK = (headers.CE_TYPE, b"fairlane.Feedback")
REPLY = (headers.CE_TYPE, b"fairlane.InferenceReply")

_EVERYWHERE = ((headers.CE_SPEC_VERSION, b"1.0"), (headers.CONTENT_TYPE, b"application/avro"))


def of_request(tenant: str, request_id: str) -> EventHeaders:
    """Headers of a request. A request published again under its id is the same event."""
    return ((headers.CE_ID, request_id.encode()), _source(tenant), REQUEST, *_EVERYWHERE)


def of_cancellation(tenant: str, request_id: str) -> EventHeaders:
    """Headers of a cancellation request."""
    return ((headers.CE_ID, f"{request_id}/cancel".encode()), _source(tenant), CANCEL, *_EVERYWHERE)


def of_feedback(tenant: str, request_id: str, event_id: str) -> EventHeaders:
    """Headers of feedback. ``event_id`` tells one record about a request from another."""
    event = (headers.CE_ID, f"{request_id}/feedback/{event_id}".encode())
    return (event, _source(tenant), FEEDBACK, *_EVERYWHERE)


def of_reply(reply: InferenceReply) -> EventHeaders:
    """Headers of a reply. The event id is the log position of the request, because one request id may be rejected, sent
    again and then answered. A copy of a reply for a duplicate request is the same event as the original."""
    answered = reply.request_id if reply.source is None else position_name(reply.source)
    return ((headers.CE_ID, answered.encode()), _source(reply.tenant), REPLY, *_EVERYWHERE)


def _source(tenant: str) -> tuple[str, bytes]:
    return headers.CE_SOURCE, f"/fairlane/tenants/{tenant}".encode()
