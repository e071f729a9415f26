"""Opaque pagination cursor of the history, validated when it comes back. Pure."""

import base64
import binascii
from hashlib import blake2b

import msgspec

from fairlane.outcomes import Code
from fairlane_server.caching.entries import UNREADABLE
from fairlane_server.caching.keys import canonical
from fairlane_server.text import NUL
from producers.gateway.results.request_store import EndedCursor, EndedFilter
from producers.openai_api.gateway_error import GatewayError

MOST_CURSOR_CHARS = 4_096

_FILTER_BYTES = 8
_LARGEST_INT = 2**63 - 1


class _Cursor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    filter: bytes
    place: EndedCursor


_decoder = msgspec.msgpack.Decoder(_Cursor)


def cursor_of(tenant: str, wanted: EndedFilter, place: EndedCursor) -> str:
    """Cursor of the page after this place, for the same tenant and filter."""
    raw = msgspec.msgpack.encode(_Cursor(_digest(tenant, wanted), place))
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def place_of(tenant: str, wanted: EndedFilter, cursor: str) -> EndedCursor:
    """The place in a cursor. It is not signed: it gives access to nothing that its caller could not ask for anyway.

    Raises GatewayError: 400 for an invalid cursor, or one of another filter.
    """
    if len(cursor) > MOST_CURSOR_CHARS:
        raise _refusal("is no cursor")
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        found = _decoder.decode(raw)
    except (binascii.Error, *UNREADABLE):
        raise _refusal("is no cursor") from None
    place = found.place
    numbers = place.replied_at_ms, place.source_partition, place.source_offset
    if any(abs(number) > _LARGEST_INT for number in numbers) or NUL in place.request_id + place.source_topic:
        raise _refusal("is no cursor")
    if found.filter != _digest(tenant, wanted):
        raise _refusal("belongs to another query: leave the other parameters as they were")
    return place


def _digest(tenant: str, wanted: EndedFilter) -> bytes:
    parts = (tenant, wanted.outcome, wanted.model, wanted.since_ms, wanted.until_ms)
    return blake2b(canonical(parts), digest_size=_FILTER_BYTES).digest()


def _refusal(message: str) -> GatewayError:
    return GatewayError(400, Code.INVALID, message, field="cursor")
