"""Redis entries of a request: its acceptance and its reply. Pure."""

from dataclasses import replace

import msgspec

from fairlane.records import InferenceReply
from fairlane_server.caching.entries import UNREADABLE
from fairlane_server.caching.keys import CacheKey
from fairlane_server.postgres.request_timeline import RecordedReply

MOST_ENTRY_BYTES = 1_048_576
"""Larger replies are in Postgres only."""

_ENTRY_BYTES, _NUMBER_BYTES, _ITEM_BYTES = 512, 9, 48


class AcceptedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that was published, or may have been. It is known by this entry until the recorder stores it.

    Tens of thousands are kept; they hold only strings and numbers, so the garbage collector does not track them.
    """

    request_id: str
    model: str
    task: str
    accepted_at_ms: int


class _Replied(msgspec.Struct, frozen=True, array_like=True):
    replied_at_ms: int
    reply: InferenceReply


_encoder = msgspec.msgpack.Encoder()
_reply_decoder = msgspec.msgpack.Decoder(_Replied)
_accepted_decoder = msgspec.msgpack.Decoder(AcceptedRequest)


def size_of_reply(reply: InferenceReply) -> int:
    """Approximate size of its entry in bytes, without encoding it."""
    output = reply.output
    if output is None:
        return _ENTRY_BYTES
    numbers = len(output.scores or ()) + sum(map(len, output.embeddings or ()))
    items = len(output.labels or ()) + sum(1 + len(token.top) for token in output.logprobs or ())
    return _ENTRY_BYTES + len(output.text or "") + _NUMBER_BYTES * numbers + _ITEM_BYTES * items


def encode_reply(recorded: RecordedReply) -> bytes:
    """Payload of a reply's entry. Omits the conversation turn, which holds text of the request."""
    return _encoder.encode(_Replied(recorded.replied_at_ms, replace(recorded.reply, turn=None)))


def decode_reply(key: CacheKey, request_id: str, payload: bytes) -> RecordedReply | None:
    """Inverse of ``encode_reply``; None if the payload is unreadable, or of another request or tenant."""
    try:
        found = _reply_decoder.decode(payload)
    except UNREADABLE:
        return None
    if (found.reply.tenant, found.reply.request_id) != (key.tenant, request_id):
        return None
    return RecordedReply(found.reply, found.replied_at_ms)


def encode_accepted(accepted: AcceptedRequest) -> bytes:
    """Payload of an acceptance entry."""
    return _encoder.encode(accepted)


def decode_accepted(request_id: str, payload: bytes) -> AcceptedRequest | None:
    """Inverse of ``encode_accepted``; None if the payload is unreadable or of another request."""
    try:
        found = _accepted_decoder.decode(payload)
    except UNREADABLE:
        return None
    return found if found.request_id == request_id else None
