"""Sessions and unfinished logins: one behaviour of the stores in memory and in Redis, and what Redis alone does."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pydantic import SecretStr
from redis import Redis

from fairlane_server.api_keys.api_key import Role
from fairlane_server.redis.availability import RedisAvailability
from fairlane_server.redis.client import redis_client
from fairlane_server.redis.keys import KeyFamily, redis_key
from fairlane_server.redis.rights import RedisRole, RedisServer
from fairlane_server.sessions.pending_logins import RedisLogins
from fairlane_server.sessions.session import PendingLogin, Session, SessionLimits, digest_of, new_secret
from fairlane_server.sessions.store import MOST_OF_USER, RedisSessions
from fairlane_server.store_error import StoreError
from tests.kit.identity_kit import Clock
from tests.kit.own_redis import own_redis_server
from tests.kit.redis_users import RedisUsers
from tests.kit.session_kit import LIMITS, MemoryLogins, MemorySessions
from tests.kit.waiting import eventually

TIMEOUT_S = 10.0
STATE = RedisServer.STATE


def session(tenant: str, clock: Clock, subject: str = "u-17") -> Session:
    return Session(tenant, subject, Role.VIEWER, clock(), clock())


class Stores:
    """Both stores on one server, as the gateway's user."""

    def __init__(self, url: str, clock: Clock, limits: SessionLimits, most_logins: int = 10_000) -> None:
        client = redis_client(SecretStr(url), TIMEOUT_S)
        assert client is not None
        self.redis = client
        self._watch = RedisAvailability(client, TIMEOUT_S)
        self.sessions = RedisSessions(client, self._watch, TIMEOUT_S, limits, clock)
        self.logins = RedisLogins(client, self._watch, TIMEOUT_S, clock, most_logins)

    async def close(self) -> None:
        await self._watch.close()
        await self.redis.aclose()


def with_redis(
    url: str, use: Callable[[Stores], Awaitable[None]], clock: Clock, limits: SessionLimits = LIMITS, most: int = 10_000
) -> None:
    async def run() -> None:
        stores = Stores(url, clock, limits, most)
        try:
            await use(stores)
        finally:
            await stores.close()

    asyncio.run(run())


async def behaves(sessions: RedisSessions, logins: RedisLogins, clock: Clock, tenant: str) -> None:
    """What both kinds of store do."""
    first, second = new_secret(), new_secret()
    await sessions.create(first, session(tenant, clock))
    assert await sessions.find(first, is_use=False) == session(tenant, clock)
    assert await sessions.find(second, is_use=True) is None
    # Used, but not so often that it would be recorded each time.
    began = session(tenant, clock)
    clock.now_ms += LIMITS.touch_ms - 1
    assert await sessions.find(first, is_use=True) == began
    clock.now_ms += 1
    used = await sessions.find(first, is_use=True)
    assert used is not None
    assert used.seen_ms == clock()
    clock.now_ms += LIMITS.idle_ms - 1
    assert await sessions.find(first, is_use=False) == used
    clock.now_ms += 1
    assert await sessions.find(first, is_use=True) is None

    ids = [new_secret() for _ in range(MOST_OF_USER + 1)]
    for session_id in ids:
        clock.now_ms += 1
        await sessions.create(session_id, session(tenant, clock))
    await sessions.create(second, session(tenant, clock, "u-18"))
    assert await sessions.find(ids[0], is_use=False) is None
    for session_id in ids[1:]:
        assert await sessions.find(session_id, is_use=False) is not None
    await sessions.end(ids[1], session(tenant, clock))
    assert await sessions.find(ids[1], is_use=False) is None
    assert await sessions.end_all(tenant, "u-17") == MOST_OF_USER - 1
    assert await sessions.find(ids[2], is_use=False) is None
    assert await sessions.find(second, is_use=False) is not None

    state, login = new_secret(), PendingLogin("0" * 64, "nonce", "verifier", "/", clock() + 1_000)
    await logins.put(state, login)
    assert await logins.take(new_secret()) is None
    assert await logins.take(state) == login
    assert await logins.take(state) is None
    await logins.put(state, login)
    clock.now_ms += 1_000
    assert await logins.take(state) is None


def test_in_memory_as_tests_use_it(unique: str) -> None:
    clock = Clock()
    asyncio.run(behaves(MemorySessions(clock), MemoryLogins(clock), clock, unique))


def test_in_redis_with_the_rights_of_the_gateway(redis_url: str, unique: str) -> None:
    clock = Clock()
    with RedisUsers(redis_url, unique) as users:
        url = users.url(STATE, RedisRole.GATEWAY)
        with_redis(url, lambda stores: behaves(stores.sessions, stores.logins, clock, unique), clock)


def test_redis_forgets_a_session_that_has_ended_by_itself_and_holds_no_secret(redis_url: str, unique: str) -> None:
    clock, session_id, state = Clock(), new_secret(), new_secret()
    limits = SessionLimits(absolute_ms=3_000, idle_ms=200)

    async def use(stores: Stores) -> None:
        await stores.sessions.create(session_id, session(unique, clock))
        await stores.logins.put(state, PendingLogin("0" * 64, "nonce", "verifier", "/", clock() + 300))

    with_redis(redis_url, use, clock, limits)
    with Redis.from_url(redis_url) as redis:
        kept = [redis_key(KeyFamily.SESSIONS, digest_of(session_id)), redis_key(KeyFamily.LOGINS, digest_of(state))]
        dump = b" ".join(redis.keys("*session*") + redis.keys("*login*"))
        assert session_id.encode() not in dump
        assert state.encode() not in dump
        eventually(lambda: redis.exists(*kept) == 0, what="the end of both")
        tenant = redis_key(KeyFamily.TENANT_SESSIONS, unique)
        assert redis.zcard(tenant) == 1
        eventually(lambda: redis.exists(tenant) == 0, what="the end of the tenant's index")


def test_an_ended_session_does_not_come_back_by_its_last_use(redis_url: str, unique: str) -> None:
    clock, session_id = Clock(), new_secret()

    async def use(stores: Stores) -> None:
        await stores.sessions.create(session_id, session(unique, clock))
        clock.now_ms += LIMITS.touch_ms

        async def end_between(*_: Any, **__: Any) -> Any:
            await stores.sessions.end_all(unique, "u-17")
            return await set_value(*_, **__)

        set_value = stores.redis.set
        stores.redis.set = end_between  # type: ignore[method-assign]  # between the two commands of one call
        await stores.sessions.find(session_id, is_use=True)
        assert await stores.sessions.find(session_id, is_use=False) is None

    with_redis(redis_url, use, clock)


def test_beyond_the_bound_the_oldest_login_ends(redis_url: str, unique: str) -> None:
    # Its own server: the bound is of all logins.
    clock, states = Clock(), [new_secret() for _ in range(4)]

    async def use(stores: Stores) -> None:
        for number, state in enumerate(states):
            await stores.logins.put(state, PendingLogin("0" * 64, "n", "v", f"/{number}", clock() + 10_000 + number))
        assert await stores.logins.take(states[0]) is None
        found = [await stores.logins.take(state) for state in states[1:]]
        assert [login.return_to for login in found if login is not None] == ["/1", "/2", "/3"]

    with own_server() as url:
        with_redis(url, use, clock, most=3)


def test_a_redis_that_is_full_or_away_opens_no_session(unique: str) -> None:
    clock, session_id = Clock(), new_secret()

    async def use(stores: Stores) -> None:
        await stores.sessions.create(session_id, session(unique, clock))
        await stores.redis.config_set("maxmemory", "1")
        with pytest.raises(StoreError, match="memory"):
            await stores.sessions.create(new_secret(), session(unique, clock))
        # Sessions that are there go on.
        assert await stores.sessions.find(session_id, is_use=False) is not None
        await stores.redis.config_set("maxmemory", "0")
        await stores.sessions.create(new_secret(), session(unique, clock))
        await stores.redis.shutdown(nosave=True)
        with pytest.raises(StoreError, match="does not answer"):
            await stores.sessions.find(session_id, is_use=False)
        with pytest.raises(StoreError, match="is unavailable"):
            await stores.sessions.find(session_id, is_use=False)

    with own_server() as url:
        with_redis(url, use, clock)


def own_server() -> Any:
    from contextlib import contextmanager
    from pathlib import Path
    from tempfile import TemporaryDirectory

    @contextmanager
    def opened() -> Any:
        with TemporaryDirectory() as folder, own_redis_server(Path(folder) / "redis") as server:
            yield server.url

    return opened()


def test_commands_list_and_end_sessions_with_their_own_rights(redis_url: str, unique: str) -> None:
    from fairlane.clock import now_ms

    ids = {subject: [new_secret(), new_secret()] for subject in ("u-17", "u-18")}
    clock = Clock(now_ms())
    limits = SessionLimits(absolute_ms=43_200_000, idle_ms=1_800_000)

    async def fill(stores: Stores) -> None:
        for subject, session_ids in ids.items():
            for session_id in session_ids:
                await stores.sessions.create(session_id, session(unique, clock, subject))

    with RedisUsers(redis_url, unique) as users:
        with_redis(users.url(STATE, RedisRole.GATEWAY), fill, clock, limits)
        url = users.url(STATE, RedisRole.SESSIONS)

        def fairlane(*words: str, code: int = 0) -> Any:
            command = (sys.executable, "-m", "fairlane_server.cli", "sessions", *words, "--tenant", unique, "--json")
            env = {**os.environ, "REDIS_URL": url}
            done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=60)
            assert done.returncode == code, done.stderr
            assert not [1 for session_ids in ids.values() for text in session_ids if text in done.stdout + done.stderr]
            return json.loads(done.stdout) if code == 0 else done.stderr

        listed = fairlane("list")["sessions"]
        assert sorted(one["subject"] for one in listed) == ["u-17", "u-17", "u-18", "u-18"]
        handles = {digest_of(session_id)[:12] for session_ids in ids.values() for session_id in session_ids}
        assert {one["session"] for one in listed} == handles
        assert fairlane("revoke", listed[0]["session"]) == {"ended": 1}
        assert len(fairlane("list")["sessions"]) == 3
        assert "has no session" in fairlane("revoke", listed[0]["session"], code=1)
        assert "either" in fairlane("revoke", code=1)
        assert fairlane("revoke", "--subject", "u-18")["ended"] >= 1
        assert {one["subject"] for one in fairlane("list")["sessions"]} <= {"u-17"}
        assert fairlane("list", "--subject", "u-18") == {"sessions": []}
