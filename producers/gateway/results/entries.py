"""What the gateway keeps of a request in Redis: that it was taken, and its reply. Pure."""

from dataclasses import replace

import msgspec

from fairlane.records import InferenceReply
from fairlane_server.caching.entries import UNREADABLE
from fairlane_server.caching.keys import CacheKey
from fairlane_server.postgres.request_timeline import RecordedReply

MOST_ENTRY_BYTES = 1_048_576
"""Larger replies are found in Postgres alone."""

_ENTRY_BYTES, _NUMBER_BYTES, _ITEM_BYTES = 512, 9, 48


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """A request that was published, or may have been; it is known by this until the recorder knows it.

    Tens of thousands are kept, of texts and numbers alone: the garbage collector does not look at them.
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
_accepted_decoder = msgspec.msgpack.Decoder(Accepted)


def size_of_reply(reply: InferenceReply) -> int:
    """About how many bytes its entry takes, told at a glance."""
    output = reply.output
    if output is None:
        return _ENTRY_BYTES
    numbers = len(output.scores or ()) + sum(map(len, output.embeddings or ()))
    items = len(output.labels or ()) + sum(1 + len(token.top) for token in output.logprobs or ())
    return _ENTRY_BYTES + len(output.text or "") + _NUMBER_BYTES * numbers + _ITEM_BYTES * items


def encode_reply(recorded: RecordedReply) -> bytes:
    """The payload of an entry. Without what its conversation is to remember, which is text of the request."""
    return _encoder.encode(_Replied(recorded.replied_at_ms, replace(recorded.reply, turn=None)))


def decode_reply(key: CacheKey, request_id: str, payload: bytes) -> RecordedReply | None:
    """What ``encode_reply`` made of the reply to this request of the key's tenant; None for anything else."""
    try:
        found = _reply_decoder.decode(payload)
    except UNREADABLE:
        return None
    if (found.reply.tenant, found.reply.request_id) != (key.tenant, request_id):
        return None
    return RecordedReply(found.reply, found.replied_at_ms)


def encode_accepted(accepted: Accepted) -> bytes:
    """The payload of an entry."""
    return _encoder.encode(accepted)


def decode_accepted(request_id: str, payload: bytes) -> Accepted | None:
    """What ``encode_accepted`` made of this request; None for anything else."""
    try:
        found = _accepted_decoder.decode(payload)
    except UNREADABLE:
        return None
    return found if found.request_id == request_id else None
