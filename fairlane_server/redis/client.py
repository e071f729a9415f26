"""Clients of Redis as the services use them: short timeouts, and nothing is tried twice.

A client sends no command of its own choice: the rights of a service cover those that the service sends
(``fairlane_server/redis/rights.py``).
"""

from typing import Any

from pydantic import SecretStr
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry as BlockingRetry


def redis_client(url: SecretStr | None, timeout_s: float) -> "Redis | None":
    """A client for the event loop; None without a URL. ``timeout_s`` bounds a connection, and each answer. Raises
    ValueError: not a URL of Redis."""
    if url is None:
        return None
    return Redis.from_url(url.get_secret_value(), retry=Retry(NoBackoff(), 0), **_options(timeout_s))


def blocking_redis_client(url: SecretStr, timeout_s: float) -> BlockingRedis:
    """The same for a thread."""
    return BlockingRedis.from_url(url.get_secret_value(), retry=BlockingRetry(NoBackoff(), 0), **_options(timeout_s))


def _options(timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # Both are CLIENT commands at every connection: refusals would fill the server's ACL LOG.
        "driver_info": None,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
