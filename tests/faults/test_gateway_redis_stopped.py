"""Redis hangs, or goes away, under calls of the gateway: none fails because of it, limits and keys are those of the
instance, results come from Postgres, and nothing is lost or done twice."""

from collections.abc import Callable, Iterator
from uuid import uuid4

import httpx
import pytest

from fairlane.clock import now_ms
from fairlane.settings import Settings
from tests.kit.gateway_kit import LONG_MS, Served, serving
from tests.kit.gateway_traffic import Traffic, check_promise, degraded, until_taken, wait_found
from tests.kit.own_redis import OwnRedis, own_redis_server
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually, until_ms

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(900)]

AROUND = 20
"""Calls of each kind that succeed before the outage, in it, and after it."""
BOTH_SERVERS = {"redis", "redis-cache"}
"""State and caches are on one server here."""


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRedis]:
    with own_redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis: OwnRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    # The product's own: an outage costs as much.
    default = {"GATEWAY_REDIS_TIMEOUT_S": str(Settings().gateway_redis_timeout_s)}
    folder = tmp_path_factory.mktemp("pipeline")
    with serving(broker, postgres, folder, redis_url=redis.url, gateway_env=default) as served:
        yield served


@pytest.mark.parametrize("fault", ["hung", "gone"])
@pytest.mark.parametrize("outage_ms", [2_000, pytest.param(30_000, marks=pytest.mark.long)])
def test_no_call_fails_because_redis_does(
    served: Served, redis: OwnRedis, say: Callable[[str], None], fault: str, outage_ms: int
) -> None:
    gateway = served.pipeline.processes["gateway-1"]
    pid = gateway.pid
    with Traffic(served) as traffic, served.client() as client:
        traffic.wait_more(AROUND, "calls before the outage")
        before = traffic.ids
        key_of_before = Key(served, client)
        redis.hang() if fault == "hung" else redis.kill()
        began_ms = now_ms()
        say(f"Redis {fault} after {len(before)} requests")
        try:
            eventually(lambda: degraded(served) == BOTH_SERVERS, what="that it says what is missing")
            assert key_of_before.send() == key_of_before.request_id
            key_of_now = Key(served, client)
            assert key_of_now.send() == key_of_now.request_id
            traffic.wait_more(AROUND, "calls without Redis")
            say(f"without Redis {len(traffic.ids)} requests")
            until_ms(began_ms + outage_ms)
            # What the gateway has in its memory it forgets after 5 s.
            wait_found(served, found := before | traffic.ids)
            assert degraded(served) == BOTH_SERVERS
            say(f"found, of {len(found)}")
        finally:
            redis.go_on() if fault == "hung" else redis.start()
        say("Redis is back")
        eventually(lambda: degraded(served) == set(), what="that nothing is missing")
        assert key_of_now.send() == key_of_now.request_id
        traffic.wait_more(AROUND, "calls after the outage")
    assert gateway.pid == pid
    say(f"{len(traffic.ids)} requests, {len(traffic.refused)} refused for a while")
    check_promise(served, traffic.ids | {key_of_before.request_id, key_of_now.request_id})


class Key:
    """A request that is sent under one key whenever ``send`` is called, and was when this was made."""

    def __init__(self, served: Served, client: httpx.Client) -> None:
        self._body = {**served.question(), "timeout_ms": LONG_MS}
        self._headers = {"Idempotency-Key": str(uuid4())}
        self._client = client
        self.request_id = self.send()

    def send(self) -> str:
        """The id of the request, which is in flight or was answered."""
        answer = until_taken(lambda: self._client.post("/v1/requests", json=self._body, headers=self._headers))
        assert answer.status_code in (202, 409), answer.text
        # Who may be called so often is said by whoever decides it just now.
        assert int(answer.headers["x-ratelimit-remaining-requests"]) > 0
        body = answer.json()
        found = body["id"] if answer.status_code == 202 else body["error"]["request_id"]
        assert isinstance(found, str)
        return found
