"""`rediss://`: every client of the services takes TLS with the right certificate, and nothing else."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr
from redis.exceptions import RedisError

from deploy.local import probes
from deploy.local.certificates import prepare_certificates
from fairlane_server.redis.client import blocking_redis_client, redis_client
from tests.kit.gateway_kit import LONG_MS, Served, serving
from tests.kit.gateway_traffic import degraded
from tests.kit.own_redis import OwnRedis, own_redis_server
from tests.kit.stack import PostgresServer
from tests.kit.tls_front import tls_front
from tests.kit.waiting import eventually

TIMEOUT_S = 5.0
ELSEWHERE = "127.0.0.2"
"""An address of this machine that is not in the certificate."""


@dataclass(frozen=True, slots=True)
class TlsRedis:
    """A Redis behind TLS."""

    port: int
    other_port: int
    ca_file: Path
    other_ca_file: Path

    def url(
        self, scheme: str = "rediss", host: str = "127.0.0.1", port: int | None = None, ca_file: Path | None = None
    ) -> str:
        verified = "" if scheme == "redis" else f"?ssl_ca_certs={ca_file or self.ca_file}"
        return f"{scheme}://{host}:{self.port if port is None else port}/0{verified}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRedis]:
    with own_redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def redis(plain: OwnRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRedis]:
    own, other = (prepare_certificates(tmp_path_factory.mktemp(name)) for name in ("own", "other"))
    with (
        tls_front(plain.port, own.server_file) as port,
        tls_front(plain.port, own.server_file, ELSEWHERE) as other_port,
    ):
        yield TlsRedis(port, other_port, own.ca_file, other.ca_file)


def by_event_loop(url: str) -> str | None:
    """Why the client of dispatchers and gateways is not answered."""

    async def ask() -> None:
        client = redis_client(SecretStr(url), TIMEOUT_S)
        assert client is not None
        async with client:
            await client.ping()

    try:
        asyncio.run(ask())
    except (RedisError, OSError) as error:
        return str(error) or type(error).__name__
    return None


def by_thread(url: str) -> str | None:
    """Why the client of consumers is not answered."""
    try:
        with blocking_redis_client(SecretStr(url), TIMEOUT_S) as client:
            client.ping()
    except (RedisError, OSError) as error:
        return str(error) or type(error).__name__
    return None


each_client = pytest.mark.parametrize("ask", [by_event_loop, by_thread, probes.redis])
Ask = Callable[[str], str | None]


@each_client
def test_whoever_knows_the_authority_is_answered(redis: TlsRedis, ask: Ask) -> None:
    assert ask(redis.url()) is None


@each_client
def test_nobody_is_answered_without_tls(redis: TlsRedis, ask: Ask) -> None:
    assert ask(redis.url("redis")) is not None


@each_client
def test_a_certificate_of_another_authority_is_refused(redis: TlsRedis, ask: Ask) -> None:
    assert "certificate verify failed" in (ask(redis.url(ca_file=redis.other_ca_file)) or "")
    without = redis.url().partition("?")[0]
    assert "certificate verify failed" in (ask(without) or ""), "the system's authorities are not ours"


@each_client
def test_a_certificate_for_another_address_is_refused(redis: TlsRedis, ask: Ask) -> None:
    assert "certificate verify failed" in (ask(redis.url(host=ELSEWHERE, port=redis.other_port)) or "")


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis: TlsRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(broker, postgres, tmp_path_factory.mktemp("pipeline"), redis_url=redis.url()) as served:
        yield served


@pytest.mark.full
@pytest.mark.broker
def test_the_whole_pipeline_reaches_redis_over_tls_alone(served: Served) -> None:
    assert degraded(served) == set()
    with served.client() as client:
        body = served.chat("over tls", temperature=0, fairlane={"timeout_ms": LONG_MS, "cache": "exact"})
        key = {"Idempotency-Key": "one"}
        first = client.post("/v1/chat/completions", json=body, headers=key)
        assert first.status_code == httpx.codes.OK, first.text
        again = client.post("/v1/chat/completions", json=body, headers=key)
        assert again.json()["id"] == first.json()["id"], "the key is known"
    consumer, dispatcher = served.consumer, served.pipeline.processes["dispatcher-1"]
    eventually(lambda: consumer.metric("fairlane_cache_writes_total", result="stored"), what="a cached answer")
    assert consumer.metric("fairlane_cache_writes_total", result="unavailable") == 0
    assert dispatcher.metric("fairlane_cache_lookups_total", result="miss") >= 1
    assert dispatcher.metric("fairlane_cache_lookups_total", result="unavailable") == 0
