"""Cache entries: keys that name cache and tenant, and a stored form that embeds tenant and key digest. Pure.

An entry is a version byte, a checksum of all the rest, and in MessagePack the tenant, the key's whole digest and the
payload. The checksum detects accidents. A process that may write a cache can forge its entries:
``fairlane_server/redis/rights.py`` says which one may.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from math import isnan

import msgspec

from fairlane_server.redis.keys import KeyFamily, redis_key

Canonical = bool | int | float | str | bytes | Sequence["Canonical"] | None
"""What a key can be made of; sequences nest."""

DIGEST_BYTES = 32

# Raise it when a key's parts change their meaning: nobody reads what was stored under the old ones.
_DOMAIN = b"fairlane-cache-1"
_LENGTH = struct.Struct(">Q")
_FLOAT = struct.Struct(">d")


class CacheName(StrEnum):
    """The caches; also the label of their metrics."""

    EMBEDDING = "embedding"
    RETRIEVAL = "retrieval"
    RESPONSE = "response"
    SEMANTIC = "semantic"
    RESULT = "result"
    """Replies that the gateway saw."""
    ACCEPTED = "accepted"
    """Requests that the gateway took."""


_FAMILIES = {cache: KeyFamily(f"cache:{cache}") for cache in CacheName}


@dataclass(frozen=True, slots=True)
class CacheKey:
    """One entry of one cache of one tenant. ``digest`` covers the cache's name and the tenant as well."""

    cache: CacheName
    tenant: str
    digest: bytes

    @property
    def name(self) -> str:
        return redis_key(_FAMILIES[self.cache], self.tenant, self.digest.hex())


def cache_key(cache: CacheName, tenant: str, *parts: Canonical) -> CacheKey:
    """The key of whatever these parts describe. Raises ValueError for a tenant without a name and for NaN."""
    if not tenant:
        raise ValueError("what is cached belongs to a tenant")
    digest = blake2b(canonical((cache.value, tenant, parts)), digest_size=DIGEST_BYTES, person=_DOMAIN)
    return CacheKey(cache, tenant, digest.digest())


def embedding_key(tenant: str, embedder: str, text: str) -> CacheKey:
    return cache_key(CacheName.EMBEDDING, tenant, embedder, text)


def retrieval_key(
    tenant: str, collection: str, collection_version: int, embedder: str, mode: str, width: int, query: str
) -> CacheKey:
    """The passages found for one query; ``width`` is how many were looked for. A change of the collection, its deletion
    included, changes its version, and what was found before is never asked for again."""
    return cache_key(CacheName.RETRIEVAL, tenant, collection, collection_version, embedder, mode, width, query)


def request_key(cache: CacheName, tenant: str, request_id: str) -> CacheKey:
    """Key of the entries of one request, by its id. Ids contain no text of a tenant, so they are not hashed."""
    if not tenant:
        raise ValueError("what is cached belongs to a tenant")
    return CacheKey(cache, tenant, f"{cache}:{tenant}:{request_id}".encode())


def canonical(value: Canonical) -> bytes:
    """Bytes that are the same for the same value alone: each part with its type and its length before it.

    Raises:
        ValueError: NaN, which is not even the same as itself.
        TypeError: of no such type.
    """
    match value:
        case None:
            return b"n"
        case bool():
            return b"t" if value else b"f"
        case int():
            return _framed(b"i", b"%d" % value)
        case float():
            if isnan(value):
                raise ValueError("NaN cannot be part of a key")
            # -0.0 is 0.0.
            return b"d" + _FLOAT.pack(value + 0.0)
        case str():
            # Text that was cut in the middle of a character is text of a tenant like any other.
            return _framed(b"s", value.encode("utf-8", "surrogatepass"))
        case bytes():
            return _framed(b"b", value)
        case list() | tuple():
            return b"l" + _LENGTH.pack(len(value)) + b"".join(map(canonical, value))
        case _:
            raise TypeError(f"{type(value).__name__} cannot be part of a key")


def _framed(kind: bytes, data: bytes) -> bytes:
    return kind + _LENGTH.pack(len(data)) + data


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
    """Time to live of an entry in milliseconds, shortened by up to a tenth, so that entries stored together do not
    expire together. ``chance`` is a random number in [0, 1)."""
    return max(1, round(1_000 * ttl_s * (1 - 0.1 * chance)))


def _checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=_CHECKSUM_BYTES, person=b"fairlane-entry-1").digest()
