"""Keys in Redis: which family and which pipeline a key belongs to follows from how it begins."""

from itertools import permutations

from hypothesis import assume, given
from hypothesis import strategies as st

from fairlane import names
from fairlane_server.caching.entries import CacheName, cache_key
from fairlane_server.redis.keys import KeyFamily, redis_key
from tests.kit.cache_strategies import hostile, tenants
from tests.kit.topic_prefix import topic_prefix


def is_valid(prefix: str) -> bool:
    try:
        return names.valid_topic_prefix(prefix) == prefix
    except ValueError:
        return False


families = st.sampled_from(KeyFamily)
# Also what a family begins or ends with.
prefixes = st.one_of(
    st.from_regex(r"[a-z0-9.-]{0,40}", fullmatch=True),
    st.builds(
        "{}{}".format, st.sampled_from([family.partition(":")[0] for family in KeyFamily]), st.sampled_from("-.")
    ),
    st.sampled_from(["", "staging.", "staging.eu-", "seen-", "idempotency-"]),
).filter(is_valid)


def test_a_key_is_its_prefix_its_family_and_its_parts() -> None:
    assert redis_key(KeyFamily.SEEN_IDS, "acme", "id-1") == "seen:acme:id-1"
    with topic_prefix("staging."):
        assert redis_key(KeyFamily.SEEN_IDS, "acme", "id-1") == "staging.seen:acme:id-1"
        assert KeyFamily.SEEN_IDS.prefix == "staging.seen:"
        assert cache_key(CacheName.RESPONSE, "acme", "x").name.startswith("staging.cache:response:acme:")


@given(prefixes, prefixes, families, families, tenants, hostile)
def test_no_key_begins_as_those_of_another_family_or_pipeline(
    one: str, other: str, family: KeyFamily, other_family: KeyFamily, tenant: str, last: str
) -> None:
    assume((one, family) != (other, other_family))
    with topic_prefix(one):
        key = redis_key(family, tenant, last)
    with topic_prefix(other):
        assert not key.startswith(other_family.prefix)


def test_no_first_part_of_a_family_ends_with_that_of_another() -> None:
    """Else a prefix could make a key of one from the other."""
    firsts = {family.partition(":")[0] for family in KeyFamily}
    assert not [(one, other) for one, other in permutations(firsts, 2) if one.endswith(other)]


def test_every_cache_has_a_family() -> None:
    prefixes_of_caches = {cache_key(cache, "acme", "x").name.rpartition("acme:")[0] for cache in CacheName}
    assert prefixes_of_caches == {family.prefix for family in KeyFamily if family.startswith("cache:")}
