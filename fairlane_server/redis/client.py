"""Clients of Redis as the services use them: short timeouts, and nothing is tried twice.

A client sends no command of its own choice: the rights of a service cover those that the service sends
(``fairlane_server/redis/rights.py``).
"""

from collections.abc import Mapping
from ssl import SSLContext
from typing import Any

from pydantic import SecretStr
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry as BlockingRetry


def redis_client(url: SecretStr | None, timeout_s: float) -> "Redis | None":
    """A client for the event loop; None without a URL. ``timeout_s`` bounds a connection, and each answer. Raises
    ValueError: not a URL of Redis, or its certificates cannot be read."""
    if url is None:
        return None
    client = Redis.from_url(url.get_secret_value(), retry=Retry(NoBackoff(), 0), **_options(timeout_s))
    pool = client.connection_pool
    if pool.connection_class is SSLConnection:
        pool.connection_kwargs["tls"] = _tls_context(pool.connection_kwargs)
        pool.connection_class = _SharedTlsConnection
    return client


def blocking_redis_client(url: SecretStr, timeout_s: float) -> BlockingRedis:
    """The same for a thread."""
    return BlockingRedis.from_url(url.get_secret_value(), retry=BlockingRetry(NoBackoff(), 0), **_options(timeout_s))


class _SharedTlsConnection(SSLConnection):
    """One TLS context for all connections of a client. By default each loads the certificates of all authorities, which
    takes the event loop some 60 ms, several times the time that a look-up has."""

    def __init__(self, *, tls: SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context.context = tls


def _tls_context(options: Mapping[str, Any]) -> SSLContext:
    try:
        return SSLConnection(**options).ssl_context.get()
    except OSError as error:
        raise ValueError(f"the certificates for Redis cannot be read: {error}") from None


def _options(timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # Both are CLIENT commands at every connection: refusals would fill the server's ACL LOG.
        "driver_info": None,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
