"""What cached things are called. Pure: the tenant comes first, and all that counts is in a digest that cannot be forged
by joining texts in another way."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from math import isnan

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


@dataclass(frozen=True, slots=True)
class CacheKey:
    """One entry of one cache of one tenant. ``digest`` covers the cache's name and the tenant as well."""

    cache: CacheName
    tenant: str
    digest: bytes

    @property
    def name(self) -> str:
        """The key in Redis."""
        return f"cache:{self.tenant}:{self.cache}:{self.digest.hex()}"


def cache_key(cache: CacheName, tenant: str, *parts: Canonical) -> CacheKey:
    """The key of whatever these parts describe. Raises ValueError for a tenant without a name and for NaN."""
    if not tenant:
        raise ValueError("what is cached belongs to a tenant")
    digest = blake2b(canonical((cache.value, tenant, parts)), digest_size=DIGEST_BYTES, person=_DOMAIN)
    return CacheKey(cache, tenant, digest.digest())


def embedding_key(tenant: str, embedder: str, text: str) -> CacheKey:
    """The vector of one query, as one embedder makes it."""
    return cache_key(CacheName.EMBEDDING, tenant, embedder, text)


def retrieval_key(
    tenant: str, collection: str, collection_version: int, embedder: str, mode: str, width: int, query: str
) -> CacheKey:
    """The passages found for one query; ``width`` is how many were looked for. A change of the collection, its deletion
    included, changes its version, and what was found before is never asked for again."""
    return cache_key(CacheName.RETRIEVAL, tenant, collection, collection_version, embedder, mode, width, query)


def request_key(cache: CacheName, tenant: str, request_id: str) -> CacheKey:
    """What is known of one request by its id alone. An id is no text of anybody's: it stands there as it is."""
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
