"""The issuer's signing keys, fetched on demand and kept while the issuer is unavailable."""

import asyncio
from collections.abc import Mapping
from ipaddress import ip_address
from random import random

import httpx
from jwt import PyJWK

from fairlane.backoff import Backoff
from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from producers.gateway.identity.signing_keys import KeySetError, parse_key_set

log = get_logger(__name__)

MOST_BYTES = 262_144
TIMEOUT_S = 5.0
REFRESH_MS = 300_000
"""Age at which keys are fetched again, while the cached ones stay in use."""

REST_MS = 10_000
"""Minimum interval between two fetches, however many unknown key ids tokens name."""

LONGEST_STALE_MS = 3_600_000
"""How long keys count after the last successful fetch, so that a withdrawn key does not live for ever."""

_AGAIN = Backoff(first_s=1.0, longest_s=30.0)


class KeySetSource:
    """Source of the published key set: https, or http from this machine; bounded in size and time, without redirects
    and proxies from the environment.

    Raises ValueError for any other URL, without quoting it.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, most_bytes: int = MOST_BYTES) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            raise ValueError("JWT_JWKS_URL: this is no URL") from None
        if not parsed.host or parsed.userinfo:
            raise ValueError("JWT_JWKS_URL: must name a host, and no user or password")
        if parsed.scheme != "https" and not (parsed.scheme == "http" and _is_this_machine(parsed.host)):
            raise ValueError("JWT_JWKS_URL: must begin with https://, or be on this machine")
        self._url = parsed
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes

    async def fetch(self) -> bytes:
        """The published document. Raises KeySetError, whose message names no address."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                httpx.AsyncClient(trust_env=False, timeout=2 * self._timeout_s) as client,
                client.stream("GET", self._url, headers={"Accept-Encoding": "identity"}) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    raise KeySetError(f"the answer is {response.status_code}")
                document = b""
                async for part in response.aiter_raw():
                    document += part
                    if len(document) > self._most_bytes:
                        raise KeySetError(f"it has more than {self._most_bytes} bytes")
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            raise KeySetError(type(error).__name__) from None
        return document


class KeySet:
    """Cached key set of one issuer; ``clock`` gives monotonic milliseconds. For one event loop."""

    def __init__(self, source: KeySetSource, clock: ClockMs) -> None:
        self._source = source
        self._clock = clock
        self._keys: Mapping[str, PyJWK] = {}
        self._fetched_at_ms: int | None = None
        self._next_fetch_at_ms = clock()
        self._failures = 0
        self._fetch: asyncio.Task[None] | None = None

    async def key(self, key_id: str) -> PyJWK | None:
        """The key with this id; None if the issuer has none. The id is only compared.

        Raises KeySetError: no keys were ever fetched, or the id is unknown and the last fetch failed.
        """
        known = self._known(key_id)
        if known is not None:
            if self._age_ms() >= REFRESH_MS:
                self._begin()
            return known
        # It may be a new key.
        if (fetch := self._begin()) is not None:
            await asyncio.wait((fetch,))
            known = self._known(key_id)
        if known is None and (self._failures or self._fetched_at_ms is None):
            raise KeySetError("the issuer's keys cannot be had")
        return known

    async def close(self) -> None:
        if self._fetch is not None:
            self._fetch.cancel()
            await asyncio.wait((self._fetch,))

    def _age_ms(self) -> int:
        return LONGEST_STALE_MS if self._fetched_at_ms is None else self._clock() - self._fetched_at_ms

    def _known(self, key_id: str) -> PyJWK | None:
        return self._keys.get(key_id) if self._age_ms() < LONGEST_STALE_MS else None

    def _begin(self) -> "asyncio.Task[None] | None":
        """The fetch in flight, or a new one; None while it is too soon."""
        if self._fetch is not None:
            return self._fetch
        if self._clock() < self._next_fetch_at_ms:
            return None
        self._fetch = asyncio.create_task(self._refresh(), name="key set")
        self._fetch.add_done_callback(self._ended)
        return self._fetch

    async def _refresh(self) -> None:
        begun_at_ms = self._clock()
        try:
            keys = parse_key_set(await self._source.fetch())
        except KeySetError as error:
            self._failures += 1
            delay_s = _AGAIN.delay_s(self._failures, random())  # noqa: S311 - jitter, no secret
            self._next_fetch_at_ms = self._clock() + round(1_000 * delay_s)
            log.warning("key_set_unavailable", error=str(error), failures=self._failures)
            return
        self._keys, self._fetched_at_ms, self._failures = keys, begun_at_ms, 0
        self._next_fetch_at_ms = begun_at_ms + REST_MS
        log.info("key_set_fetched", keys=len(keys))

    def _ended(self, fetch: "asyncio.Task[None]") -> None:
        self._fetch = None
        if not fetch.cancelled() and (error := fetch.exception()) is not None:
            self._failures += 1
            self._next_fetch_at_ms = self._clock() + REST_MS
            log.error("key_set_fetch_failed", kind=type(error).__name__)


def _is_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
