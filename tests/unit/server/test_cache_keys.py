"""No text can be asked for in a way that finds what belongs to another question, or to another tenant."""

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fairlane_server.caching.entries import (
    MOST_ENTRY_BYTES,
    CacheKey,
    CacheName,
    cache_key,
    canonical,
    embedding_key,
    jittered_ttl_ms,
    request_key,
    retrieval_key,
    seal,
    unseal,
)
from tests.kit.cache_strategies import hostile, tenants

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), hostile, st.binary())
nested = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
caches = st.sampled_from(CacheName)


def typed(value: object) -> object:
    """The value with its types, which alone tell 1 from True and 1.0."""
    if isinstance(value, list):
        return [typed(one) for one in value]
    return type(value), value


@given(nested, nested)
def test_only_the_same_value_has_the_same_bytes(one: Any, other: Any) -> None:
    assert (canonical(one) == canonical(other)) == (typed(one) == typed(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c"), ("a", "bc")),
        (("a", ""), ("", "a")),
        (("a", ("b",)), (("a",), "b")),
        ((), ((),)),
        (("a\0b",), ("a", "b")),
        (("1",), (1,)),
        ((1,), (True,)),
        ((b"a",), ("a",)),
        ((None,), ()),
        (("a", None), ("a",)),
    ],
)
def test_parts_do_not_run_into_one_another(one: Any, other: Any) -> None:
    assert cache_key(CacheName.RETRIEVAL, "acme", *one) != cache_key(CacheName.RETRIEVAL, "acme", *other)


def test_the_two_zeros_are_one_and_nan_is_none() -> None:
    assert canonical(-0.0) == canonical(0.0)
    with pytest.raises(ValueError, match="NaN"):
        canonical(math.nan)
    with pytest.raises(TypeError):
        canonical({1, 2})  # type: ignore[arg-type]  # what it must refuse
    with pytest.raises(ValueError, match="tenant"):
        cache_key(CacheName.RETRIEVAL, "", "text")


def test_a_request_is_known_by_cache_tenant_and_id() -> None:
    caches, tenants, ids = (CacheName.RESULT, CacheName.ACCEPTED), ("acme", "globex"), ("id-1", "id-2")
    keys = [request_key(cache, tenant, one) for cache in caches for tenant in tenants for one in ids]
    assert len({key.name for key in keys}) == len({key.digest for key in keys}) == 8
    with pytest.raises(ValueError, match="tenant"):
        request_key(CacheName.RESULT, "", "id-1")


def test_a_key_stays_what_it_was() -> None:
    """Dispatchers and consumers of different versions share one Redis."""
    key = retrieval_key("acme", "manuals", 7, "static", "hybrid", 4, "Which wire?")
    assert key.name == f"cache:retrieval:acme:{key.digest.hex()}"
    assert key.digest.hex() == "75718659be8832ccf719541e0d69f292556a2c40166a23d8e1b44bf80c093fae"


@given(tenants, tenants, hostile, hostile, st.integers(0, 2**40))
def test_two_tenants_have_no_key_in_common(one: str, other: str, collection: str, text: str, version: int) -> None:
    assume(one != other)
    for mine, theirs in (
        (embedding_key(one, "static", text), embedding_key(other, "static", text)),
        (
            retrieval_key(one, collection, version, "static", "hybrid", 4, text),
            retrieval_key(other, collection, version, "static", "hybrid", 4, text),
        ),
        (cache_key(CacheName.RESPONSE, one, text), cache_key(CacheName.RESPONSE, other, text)),
    ):
        assert mine.digest != theirs.digest
        assert mine.name != theirs.name
        assert mine.name.startswith(f"cache:{mine.cache}:{one}:")


@given(tenants, tenants, hostile, hostile, caches, caches)
def test_names_differ_whatever_is_in_them(
    one: str, other: str, text: str, other_text: str, cache: CacheName, other_cache: CacheName
) -> None:
    assume((one, text, cache) != (other, other_text, other_cache))
    assert cache_key(cache, one, text).name != cache_key(other_cache, other, other_text).name


def test_every_part_of_a_retrieval_counts() -> None:
    parts: dict[str, Any] = {
        "collection": "manuals",
        "collection_version": 7,
        "embedder": "static",
        "mode": "hybrid",
        "width": 4,
        "query": "Which wire?",
    }
    others: dict[str, Any] = {
        "collection": "manual",
        "collection_version": 8,
        "embedder": "pool",
        "mode": "vector",
        "width": 5,
        "query": "Which wire",
    }
    made = [retrieval_key("acme", **parts), *(retrieval_key("acme", **parts | {name: others[name]}) for name in parts)]
    assert len(set(made)) == len(parts) + 1


# --- entries

keys = st.builds(cache_key, caches, tenants, hostile)


@given(keys, st.binary(max_size=200))
def test_what_is_sealed_is_read_back(key: CacheKey, payload: bytes) -> None:
    entry = seal(key, payload)
    assert entry is not None
    assert unseal(key, entry) == payload


@given(keys, keys, st.binary(max_size=200))
def test_an_entry_under_another_key_is_none(mine: CacheKey, theirs: CacheKey, payload: bytes) -> None:
    assume(mine != theirs)
    entry = seal(mine, payload)
    assert entry is not None
    assert unseal(theirs, entry) is None


@given(tenants, tenants, hostile, st.binary(max_size=200))
def test_an_entry_of_another_tenant_is_none(one: str, other: str, text: str, payload: bytes) -> None:
    assume(one != other)
    entry = seal(cache_key(CacheName.RESPONSE, one, text), payload)
    assert entry is not None
    assert unseal(cache_key(CacheName.RESPONSE, other, text), entry) is None
    # Nor with the digest of the one and the name of the other.
    mixed = CacheKey(CacheName.RESPONSE, other, cache_key(CacheName.RESPONSE, one, text).digest)
    assert unseal(mixed, entry) is None


@given(keys, st.binary(max_size=100), st.data())
def test_a_damaged_entry_is_none(key: CacheKey, payload: bytes, data: st.DataObject) -> None:
    entry = seal(key, payload)
    assert entry is not None
    at = data.draw(st.integers(0, len(entry) - 1))
    flipped = data.draw(st.integers(1, 255))
    assert unseal(key, entry[:at]) is None
    assert unseal(key, entry + entry[: at + 1]) is None
    assert unseal(key, entry[:at] + bytes((entry[at] ^ flipped,)) + entry[at + 1 :]) is None


@given(keys, st.binary(max_size=300))
def test_anything_else_is_none(key: CacheKey, entry: bytes) -> None:
    assert unseal(key, entry) is None
    assert unseal(key, b"\x01" + entry) is None


def test_what_is_too_large_is_neither_written_nor_read() -> None:
    key = cache_key(CacheName.RESPONSE, "acme", "text")
    assert seal(key, bytes(MOST_ENTRY_BYTES)) is None
    large = seal(key, bytes(1_000))
    assert large is not None
    assert unseal(key, large, len(large)) == bytes(1_000)
    assert unseal(key, large, len(large) - 1) is None


def test_entries_that_were_stored_together_do_not_go_together() -> None:
    lives = [jittered_ttl_ms(300, chance / 10) for chance in range(10)]
    assert len(set(lives)) == 10
    assert 270_000 <= min(lives) < max(lives) == 300_000
    assert jittered_ttl_ms(0.0001, 0.5) == 1
