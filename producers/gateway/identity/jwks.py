"""The issuer's signing keys, fetched on demand and kept while the issuer is unavailable."""

import asyncio
from collections.abc import Mapping
from random import random

import httpx
from jwt import PyJWK

from fairlane.backoff import Backoff
from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from producers.gateway.identity.http_documents import (
    MOST_BYTES,
    TIMEOUT_S,
    DocumentError,
    checked_url,
    exchange,
    issuer_client,
)
from producers.gateway.identity.signing_keys import KeySetError, parse_key_set

log = get_logger(__name__)

REFRESH_MS = 300_000
"""Age at which keys are fetched again, while the cached ones stay in use."""

REST_MS = 10_000
"""Minimum interval between two fetches, however many unknown key ids tokens name."""

LONGEST_STALE_MS = 3_600_000
"""How long keys count after the last successful fetch, so that a withdrawn key does not live for ever."""

_AGAIN = Backoff(first_s=1.0, longest_s=30.0)


class KeySetSource:
    """Source of the published key set: https, or http from this machine; bounded in size and time, without redirects
    and proxies from the environment. ``setting`` names the URL in errors.

    Raises ValueError for any other URL, without quoting it.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = TIMEOUT_S,
        most_bytes: int = MOST_BYTES,
        setting: str = "JWT_JWKS_URL",
    ) -> None:
        self._url = checked_url(url, setting)
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes

    async def fetch(self) -> bytes:
        """The published document. Raises KeySetError, whose message names no address."""
        try:
            async with issuer_client(self._timeout_s) as client:
                answer = await exchange(
                    client, "GET", self._url, timeout_s=self._timeout_s, most_bytes=self._most_bytes
                )
        except DocumentError as error:
            raise KeySetError(str(error)) from None
        if answer.status != httpx.codes.OK:
            raise KeySetError(f"the answer is {answer.status}")
        return answer.body


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
