"""Rights on Redis, as the lines of ACL files: each user has its own families of keys and commands, and no others."""

import re
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.redis.keys import KeyFamily, redis_key
from fairlane_server.redis.rights import (
    DEFAULT_USER_OFF,
    RIGHTS,
    RedisRole,
    RedisServer,
    acl_line,
    hashed,
    redis_user,
)
from tests.kit.cache_strategies import hostile, tenants
from tests.kit.redis_rights import READS, USERS, WRITES
from tests.kit.topic_prefix import topic_prefix

prefixes = st.sampled_from(["", "staging.", "staging.eu-", "seen-", "x"])
FORBIDDEN = re.compile(
    r"\+(@|all|keys|scan|flush|config|debug|eval$|eval_ro|function|fcall|monitor|shutdown|save|bgsave|replicaof|slaveof"
    r"|module|client|cluster|migrate|restore|dump|rename|copy|move|select|swapdb|randomkey|dbsize|object|memory|publish"
    r"|subscribe|psubscribe|acl$|acl\|(setuser|deluser|getuser|list|users|genpass|cat|save)|script$|script\|(flush|kill))"
)


def key_rules(line: str) -> Iterator[tuple[str, str]]:
    """What a line says about keys: ``R``, ``W`` or both, and how the keys begin."""
    for kind, pattern in re.findall(r"(?<= )(~|%R~|%W~)(\S+)", line):
        # The one sign with a meaning, and at the end: it stands for any text.
        assert re.fullmatch(r"[a-z0-9.:-]+:\*", pattern), pattern
        yield kind.strip("%~") or "RW", pattern.removesuffix("*")


def may(line: str, way: str, key: str) -> bool:
    return any(way in ways and key.startswith(begin) for ways, begin in key_rules(line))


@given(prefixes, prefixes, tenants, hostile)
def test_no_user_may_touch_a_key_of_a_family_that_it_has_no_right_on(
    own: str, other: str, tenant: str, last: str
) -> None:
    with topic_prefix(own):
        lines = {user: acl_line(*user, ["#0"]) for user in USERS}
    # Every user and family, whatever texts are tried.
    for prefix, (user, line), family in product({own, other}, lines.items(), KeyFamily):
        with topic_prefix(prefix):
            key = redis_key(family, tenant, last)
        assert may(line, "R", key) is (prefix == own and family in READS[user]), (user, key)
        assert may(line, "W", key) is (prefix == own and family in WRITES[user]), (user, key)


@pytest.mark.parametrize("user", USERS)
def test_where_reading_cannot_be_told_from_writing_a_right_is_for_both(user: tuple[RedisServer, RedisRole]) -> None:
    line = acl_line(*user, ["#0"], reads_apart=False)
    assert "%" not in line
    assert {begin for _, begin in key_rules(line)} == {f"{family}:" for family in READS[user] | WRITES[user]}
    assert re.sub(r"%[RW]~", "~", acl_line(*user, ["#0"])) == line


@pytest.mark.parametrize("user", USERS)
def test_a_line_begins_with_nothing_and_adds_single_commands(user: tuple[RedisServer, RedisRole]) -> None:
    words = acl_line(*user, [hashed("one"), hashed("other")]).split()
    assert words[:8] == [
        *("user", f"fairlane_{user[1]}", "reset", "on", hashed("one"), hashed("other"), "resetchannels", "-@all")
    ]
    rest = [word for word in words[8:] if not word.startswith(("~", "%"))]
    assert all(re.fullmatch(r"\+[a-z]+(\|[a-z]+)?", word) for word in rest), rest
    assert not [word for word in rest if FORBIDDEN.match(word)]
    assert len({*rest}) == len(rest)


def test_a_password_is_hashed_as_redis_does() -> None:
    # Of `ACL SETUSER u >secret` and `ACL LIST`.
    assert hashed("secret") == "#2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"


def test_users_of_two_pipelines_differ() -> None:
    assert redis_user(RedisRole.GATEWAY) == "fairlane_gateway"
    with topic_prefix("staging."):
        assert redis_user(RedisRole.GATEWAY) == "staging.fairlane_gateway"
        assert acl_line(RedisServer.STATE, RedisRole.GATEWAY, []).startswith("user staging.fairlane_gateway reset on ")


def test_the_user_without_a_name_may_do_nothing() -> None:
    assert DEFAULT_USER_OFF.split()[:3] == ["user", "default", "off"]
    assert {(server, role) for server, users in RIGHTS.items() for role in users} == {*USERS}
