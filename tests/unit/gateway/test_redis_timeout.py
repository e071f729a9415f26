"""How long a gateway waits for a Redis that is there and says nothing: as long as its one setting says, wherever it
asks."""

import asyncio

from fairlane.settings import Settings
from producers.gateway.app import Gateway
from producers.gateway.limits.rate_buckets import RatePolicy
from tests.kit.waiting import PATIENCE_S, eventually_async

SILENCE_S = 1.0
"""Longer than the product waits where the setting does not say otherwise."""


def test_whoever_asks_waits_as_long_as_the_setting_says() -> None:
    async def run() -> None:
        open_connections: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(lambda _, writer: open_connections.append(writer), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        gateway = Gateway(
            Settings(
                redis_url=f"redis://127.0.0.1:{port}",
                redis_cache_url=f"redis://127.0.0.1:{port}",
                gateway_redis_timeout_s=PATIENCE_S,
            )
        )
        assert gateway._redis is not None
        asking = [
            asyncio.create_task(asked)
            for asked in (
                gateway._results.find_seen("acme", "r-1"),
                gateway._native.idempotency.begin("acme", "/v1/requests", "k", b"", "r-1"),
                gateway._authenticator._limits._limits.take(["acme"], RatePolicy(1.0, 1)),
                gateway._redis.watch._answers(),
            )
        ]
        await eventually_async(lambda: len(open_connections) == len(asking), what="all of them at Redis")
        gave_up, _ = await asyncio.wait(asking, timeout=SILENCE_S)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert not gave_up
        await gateway._redis.close()
        assert gateway._cache is not None
        await gateway._cache.aclose()
        for writer in open_connections:
            writer.close()
        server.close()

    asyncio.run(run())
