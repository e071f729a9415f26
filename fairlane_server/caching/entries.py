"""What is stored under a key says itself whose it is and what it answers: anything else that stands there is a miss.

An entry is a version byte, a checksum of all the rest, and in MessagePack the tenant, the key's whole digest and the
payload. The checksum finds accidents and careless hands. Whoever may write to Redis with care can make an entry of
their own: like Kafka and Postgres it belongs behind a password.
"""

from hashlib import blake2b

import msgspec

from fairlane_server.caching.keys import CacheKey

MOST_ENTRY_BYTES = 262_144
"""Larger entries are neither written nor read."""

UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""What reading hostile MessagePack may raise."""

_VERSION = b"\x01"
_CHECKSUM_BYTES = 16


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tenant: str
    digest: bytes
    payload: bytes


_decoder = msgspec.msgpack.Decoder(_Entry)


def seal(key: CacheKey, payload: bytes, most_bytes: int = MOST_ENTRY_BYTES) -> bytes | None:
    """The bytes to store under this key; None when they would be more than these."""
    body = msgspec.msgpack.encode(_Entry(key.tenant, key.digest, payload))
    entry = _VERSION + _checksum(body) + body
    return entry if len(entry) <= most_bytes else None


def unseal(key: CacheKey, entry: bytes, most_bytes: int = MOST_ENTRY_BYTES) -> bytes | None:
    """The payload that was stored under this very key; None for bytes that are anything else."""
    if len(entry) > most_bytes or not entry.startswith(_VERSION):
        return None
    begin = len(_VERSION) + _CHECKSUM_BYTES
    checksum, body = entry[len(_VERSION) : begin], entry[begin:]
    if checksum != _checksum(body):
        return None
    try:
        found = _decoder.decode(body)
    except UNREADABLE:
        return None
    return found.payload if found.tenant == key.tenant and found.digest == key.digest else None


def jittered_ttl_ms(ttl_s: float, chance: float) -> int:
    """How long an entry lives, in milliseconds: shorter by up to a tenth, so that what was stored together does not go
    together. ``chance`` is a random number in [0, 1)."""
    return max(1, round(1_000 * ttl_s * (1 - 0.1 * chance)))


def _checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=_CHECKSUM_BYTES, person=b"fairlane-entry-1").digest()
