"""Cursors of pages: a place in an order, for one query. They are not signed: a cursor gives access to nothing that its
caller could not ask for anyway."""

import base64
import binascii
from hashlib import blake2b
from typing import Generic, TypeVar

import msgspec

from fairlane.outcomes import Code
from fairlane_server.caching.entries import UNREADABLE, Canonical, canonical
from fairlane_server.text import NUL
from producers.openai_api.errors import GatewayError

MOST_CURSOR_CHARS = 4_096

_QUERY_BYTES = 8
_LARGEST_INT = 2**63 - 1

PlaceT = TypeVar("PlaceT")


class _Cursor(msgspec.Struct, Generic[PlaceT], frozen=True, array_like=True, forbid_unknown_fields=True):
    query: bytes
    place: PlaceT


class Cursors(Generic[PlaceT]):
    """Cursors with places of one type, which MessagePack can hold."""

    def __init__(self, place_type: type[PlaceT]) -> None:
        self._decoder = msgspec.msgpack.Decoder(_Cursor[place_type])  # type: ignore[valid-type]  # as msgspec documents it

    def encode(self, query: Canonical, place: PlaceT) -> str:
        """The cursor of the page behind this place, for the same query."""
        raw = msgspec.msgpack.encode(_Cursor(_digest(query), place))
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")

    def decode(self, query: Canonical, cursor: str | None) -> PlaceT | None:
        """The place in a cursor, whose texts and numbers Postgres can be asked with; None without a cursor. Raises
        GatewayError: 400 for an invalid cursor, or one of another query."""
        if cursor is None:
            return None
        if len(cursor) > MOST_CURSOR_CHARS:
            raise not_a_cursor()
        try:
            raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
            found = self._decoder.decode(raw)
        except (binascii.Error, *UNREADABLE):
            raise not_a_cursor() from None
        if found.query != _digest(query):
            raise _refusal("belongs to another query: leave the other parameters as they were")
        if not _fits(msgspec.to_builtins(found.place)):
            raise not_a_cursor()
        return found.place


def not_a_cursor() -> GatewayError:
    """400: it was not made here."""
    return _refusal("is no cursor")


def _fits(part: object) -> bool:
    """Whether Postgres can hold this: texts without NUL, and numbers of 64 bits."""
    match part:
        case str():
            return NUL not in part
        case int():
            return abs(part) <= _LARGEST_INT
        case dict():
            return all(map(_fits, part.values()))
        case list() | tuple():
            return all(map(_fits, part))
    return part is None


def _digest(query: Canonical) -> bytes:
    return blake2b(canonical(query), digest_size=_QUERY_BYTES).digest()


def _refusal(message: str) -> GatewayError:
    return GatewayError(400, Code.INVALID, message, field="cursor")
