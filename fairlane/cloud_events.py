"""CloudEvents 1.0 in Kafka headers, binary mode: what a client publishes and every reply is an event. Pure.

https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/kafka-protocol-binding.md. There is no `ce_time`:
the record's own timestamp is the time, and that of a request is the broker's.
"""

from fairlane import headers
from fairlane.letter import place_name
from fairlane.records import InferenceReply

EventHeaders = tuple[tuple[str, bytes], ...]

REQUEST = (headers.CE_TYPE, b"fairlane.InferenceRequest")
CANCEL = (headers.CE_TYPE, b"fairlane.CancelRequest")
REPLY = (headers.CE_TYPE, b"fairlane.InferenceReply")

_EVERYWHERE = ((headers.CE_SPEC_VERSION, b"1.0"), (headers.CONTENT_TYPE, b"application/avro"))


def of_request(tenant: str, request_id: str) -> EventHeaders:
    """Of a request; published again under its id, it is the same event."""
    return ((headers.CE_ID, request_id.encode()), _source(tenant), REQUEST, *_EVERYWHERE)


def of_cancellation(tenant: str, request_id: str) -> EventHeaders:
    """Of the wish that a request be cancelled."""
    return ((headers.CE_ID, f"{request_id}/cancel".encode()), _source(tenant), CANCEL, *_EVERYWHERE)


def of_reply(reply: InferenceReply) -> EventHeaders:
    """Of a reply. Its id is the place of the request that it answers, because one id may be refused, sent again and
    then answered; a copy for a repeated id is the same event as the first."""
    answered = reply.request_id if reply.source is None else place_name(reply.source)
    return ((headers.CE_ID, answered.encode()), _source(reply.tenant), REPLY, *_EVERYWHERE)


def _source(tenant: str) -> tuple[str, bytes]:
    return headers.CE_SOURCE, f"/fairlane/tenants/{tenant}".encode()
