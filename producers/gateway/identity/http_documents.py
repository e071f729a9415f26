"""Calls to an issuer of tokens: to configured addresses only, bounded in size and time, without redirects."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

import httpx

TIMEOUT_S = 5.0
MOST_BYTES = 262_144
_CONNECTIONS = 16


class DocumentError(Exception):
    """There is no usable answer. The message names no address and quotes nothing of it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body."""

    status: int
    body: bytes


def checked_url(url: str, setting: str) -> httpx.URL:
    """The URL: https, or http of this machine. Raises ValueError, without quoting it."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        raise ValueError(f"{setting}: this is no URL") from None
    if not parsed.host or parsed.userinfo:
        raise ValueError(f"{setting}: must name a host, and no user or password")
    if parsed.scheme != "https" and not (parsed.scheme == "http" and is_this_machine(parsed.host)):
        raise ValueError(f"{setting}: must begin with https://, or be on this machine")
    return parsed


def is_this_machine(host: str) -> bool:
    """Whether this is a name or an address of the loopback interface."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def issuer_client(timeout_s: float = TIMEOUT_S) -> httpx.AsyncClient:
    """A client for ``exchange``; no proxy and no certificate comes from the environment. Making one takes some 60 ms,
    which load the certificates of all authorities."""
    return httpx.AsyncClient(trust_env=False, timeout=2 * timeout_s, limits=httpx.Limits(max_connections=_CONNECTIONS))


async def exchange(
    client: httpx.AsyncClient,
    method: str,
    url: httpx.URL,
    headers: Mapping[str, str] | None = None,
    content: bytes | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    most_bytes: int = MOST_BYTES,
) -> Answer:
    """One call. Raises DocumentError: no complete answer in time, or a larger one."""
    sent = {**(headers or {}), "Accept-Encoding": "identity"}
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream(method, url, headers=sent, content=content, follow_redirects=False) as response,
        ):
            body = b""
            async for part in response.aiter_raw():
                body += part
                if len(body) > most_bytes:
                    raise DocumentError(f"it has more than {most_bytes} bytes")
    except (httpx.HTTPError, TimeoutError, OSError) as error:
        raise DocumentError(type(error).__name__) from None
    return Answer(response.status_code, body)
