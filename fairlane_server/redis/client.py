"""Clients of Redis as the services use them: short timeouts, and nothing is tried twice.

A client sends no command of its own choice: the rights of a service cover those that the service sends
(``fairlane_server/redis/rights.py``).
"""

from collections.abc import Mapping
from ssl import SSLContext
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry as BlockingRetry

from fairlane.file_text import FileText


def redis_client(url: SecretStr | None, timeout_s: float) -> "Redis | None":
    """A client for the event loop; None without a URL. ``timeout_s`` bounds a connection, and each answer. Raises
    ValueError: not a URL of Redis, or its certificates cannot be read."""
    if url is None:
        return None
    address, credentials = _address_of(url)
    client = Redis.from_url(address, retry=Retry(NoBackoff(), 0), **credentials, **_options(timeout_s))
    pool = client.connection_pool
    if pool.connection_class is SSLConnection:
        pool.connection_kwargs["tls"] = _tls_context(pool.connection_kwargs)
        pool.connection_class = _SharedTlsConnection
    return client


def blocking_redis_client(url: SecretStr, timeout_s: float) -> BlockingRedis:
    """The same for a thread."""
    address, credentials = _address_of(url)
    return BlockingRedis.from_url(address, retry=BlockingRetry(NoBackoff(), 0), **credentials, **_options(timeout_s))


class _FileCredentials(CredentialProvider):
    """User and password of a URL in a file, as it is when a connection is opened; the rest is that of the start."""

    def __init__(self, url: FileText) -> None:
        self._url = url

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        parts = urlsplit(self._url.now())
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        return (user, password) if user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def _address_of(url: SecretStr) -> tuple[str, dict[str, Any]]:
    text = url.get_secret_value()
    parts = urlsplit(text)
    if not isinstance(text, FileText) or parts.password is None:
        return text, {}
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return address, {"credential_provider": _FileCredentials(text)}


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
