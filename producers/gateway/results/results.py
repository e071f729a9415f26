"""Look-up of requests that any gateway instance sent: replies, status, and ended requests."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from random import random
from threading import Lock
from typing import TypeVar

from cachetools import TTLCache

from fairlane.backoff import Backoff, jittered_ms
from fairlane.clock import ClockMs, monotonic_ms, now_ms
from fairlane.logs import get_logger
from fairlane.outcomes import Code
from fairlane.records import InferenceReply, InferenceRequest
from fairlane_server.caching.entries import CacheName, request_key
from fairlane_server.circuit_breaker import BreakerPolicy, CircuitBreaker
from fairlane_server.costs.daily_sums import SumQuery, UsageSum
from fairlane_server.postgres.request_timeline import History, RecordedReply
from fairlane_server.redis.cache import RedisCache
from fairlane_server.store_error import StoreError
from producers.gateway.results.cache_entries import (
    AcceptedRequest,
    Arrivals,
    WriteQueue,
    decode_accepted,
    decode_reply,
    encode_reply,
    encoder,
    size_of_reply,
)
from producers.gateway.results.request_status import RequestStatus, as_erased, may_be_erased, status_of
from producers.gateway.results.request_store import EndedCursor, EndedFilter, RequestStore
from producers.gateway.tenant_bounds import TenantMap, TenantSlots
from producers.openai_api.errors import UNAVAILABLE, GatewayError, was_not_run

log = get_logger(__name__)

T = TypeVar("T")

MOST_ACCEPTED = 20_000
"""Accepted requests in memory; beyond this, the tenant with the most loses its oldest."""

RECENT_MS = 5_000
"""By then replies just read are in Redis or Postgres."""
RECENT_BYTES = 4_194_304

# Below the store's limit of waiting callers: a full pool would count as a failure of Postgres, for all tenants.
MOST_LOOK_UPS, MOST_LOOK_UPS_OF_TENANT = 48, 16
MOST_PAGES, MOST_PAGES_OF_TENANT = 24, 6

_BREAKER = BreakerPolicy(failures=5, rest=Backoff(first_s=0.5, longest_s=2.0))
_RETRY_AFTER_MS = 1_000
_ACCEPTED_BYTES = 256
_NOBODY, _NOTHING = "nobody", "00000000-0000-0000-0000-000000000000"


class Results:
    """Looks up in memory, then Redis, then Postgres, which keeps replies for ``kept_s`` seconds. For one event loop,
    except ``remember``."""

    def __init__(
        self, cache: RedisCache, store: RequestStore, clock_ms: ClockMs = now_ms, kept_s: int = 86_400
    ) -> None:
        self.cache = cache
        self._writes = WriteQueue(cache)
        self._recent: TTLCache[tuple[str, str], tuple[RecordedReply, int]] = TTLCache(
            RECENT_BYTES, RECENT_MS, timer=clock_ms, getsizeof=itemgetter(1)
        )
        """Replies just read, with their sizes."""
        self._recent_lock = Lock()
        self._store = store
        self._clock_ms = clock_ms
        self.kept_ms = 1_000 * kept_s
        """Retention of replies in Postgres."""
        self._look_ups, self._pages = CircuitBreaker(_BREAKER), CircuitBreaker(_BREAKER)
        self._look_up_slots = TenantSlots(MOST_LOOK_UPS, MOST_LOOK_UPS_OF_TENANT, _busy)
        self._page_slots = TenantSlots(MOST_PAGES, MOST_PAGES_OF_TENANT, _busy)
        self._was_answered = True
        """Whether Postgres answered the last check."""
        self._accepted: TenantMap[AcceptedRequest] = TenantMap(MOST_ACCEPTED)
        self.arrivals = Arrivals()
        """Waiters for replies that arrive at this instance."""

    async def open(self) -> None:
        """Start; Redis and Postgres may be unavailable."""
        await self._store.open()
        self._writes.start()

    async def close(self) -> None:
        """Write queued entries and close the store. The caller closes Redis."""
        await self._writes.close()
        await self._store.close()

    @property
    def is_store_available(self) -> bool:
        """Whether Postgres answered recently."""
        return self._was_answered and not self._look_ups.is_open

    async def check_store(self) -> None:
        """Look up a request that does not exist, to keep ``is_store_available`` current without traffic."""
        try:
            await self._ask(self._look_ups, lambda: self._store.reply(_NOBODY, _NOTHING))
        except GatewayError:
            self._was_answered = False
        else:
            self._was_answered = True

    def remember(self, replies: Iterable[InferenceReply]) -> None:
        """Resolve the waiters of replies just read, and keep the replies for a while.

        Never blocks and never raises. What exceeds the bounds is dropped, and found in Postgres. Thread-safe.
        """
        at_ms = self._clock_ms()
        for reply in replies:
            recorded, size_bytes = RecordedReply(reply, at_ms), size_of_reply(reply)
            # Stored first: a waiter may ask for it at once.
            is_news = self._keep(recorded, size_bytes)
            self.arrivals.came(recorded)
            if is_news:
                key = request_key(CacheName.RESULT, reply.tenant, reply.request_id)
                self._writes.put(key, size_bytes, partial(encode_reply, recorded))

    def accepted(self, tenant: str, request: InferenceRequest) -> None:
        """Remember a request that was published, or may have been: its id is known before anything is recorded."""
        request_id = request.request_id
        accepted = AcceptedRequest(request_id, request.model, request.task, self._clock_ms())
        self._accepted.put(tenant, (tenant, request_id), accepted)
        key = request_key(CacheName.ACCEPTED, tenant, request_id)
        self._writes.put(key, _ACCEPTED_BYTES, partial(encoder.encode, accepted))

    async def find_reply(self, tenant: str, request_id: str) -> InferenceReply | None:
        """As ``find``, without the time."""
        found = await self.find(tenant, request_id)
        return None if found is None else found.reply

    async def find(self, tenant: str, request_id: str) -> RecordedReply | None:
        """Final reply to a request of this tenant; None if there is none yet, or no such request. If an id was sent
        again, the reply of a run takes precedence over a rejection.

        Raises GatewayError: 503: neither memory nor Redis has a reply, and Postgres does not answer.
        """
        seen = await self.find_seen(tenant, request_id)
        if seen is not None and not was_not_run(seen.reply):
            return seen
        try:
            recorded = await self._look_up(tenant, lambda: self._store.reply(tenant, request_id))
        except GatewayError:
            if seen is None:
                raise
            return seen
        # The rejection seen may be of an id sent again: a reply of the first run is in Postgres.
        return recorded if seen is None or (recorded is not None and not was_not_run(recorded.reply)) else seen

    async def find_seen(self, tenant: str, request_id: str) -> RecordedReply | None:
        """As ``find``, in memory and Redis only: cheap, but None does not mean that there is no reply."""
        with self._recent_lock:
            recent = self._recent.get((tenant, request_id))
        if recent is not None:
            return recent[0]
        key = request_key(CacheName.RESULT, tenant, request_id)
        return await self.cache.get(key, lambda payload: decode_reply(key, request_id, payload))

    async def status(self, tenant: str, request_id: str) -> RequestStatus | None:
        """Status of a request of this tenant; None if there is none. Raises GatewayError as ``find``."""
        seen = await self.find_seen(tenant, request_id)
        try:
            history = await self._look_up(tenant, lambda: self._store.history(tenant, request_id))
        except GatewayError:
            if seen is None:
                raise
            # The reply alone is enough.
            history = History()
        accepted = self._accepted.get((tenant, request_id))
        if accepted is None and seen is None and not (history.decisions or history.replies):
            key = request_key(CacheName.ACCEPTED, tenant, request_id)
            accepted = await self.cache.get(key, lambda payload: decode_accepted(request_id, payload))
        kept_since_ms = self._clock_ms() - self.kept_ms
        found = status_of(request_id, history, seen, accepted, kept_since_ms)
        if found is None or not may_be_erased(found):
            return found
        is_erased = await self._look_up(tenant, lambda: self._store.is_erased(tenant, request_id))
        return as_erased(found) if is_erased else found

    async def forget(self, tenant: str, request_ids: Sequence[str]) -> bool:
        """Delete what is remembered of these requests, in memory and in Redis. Returns False if Redis does not answer.

        What other instances read within the last ``RECENT_MS`` stays in their memory for as long.
        """
        for request_id in request_ids:
            with self._recent_lock:
                self._recent.pop((tenant, request_id), None)
            self._accepted.pop((tenant, request_id))
        names = (CacheName.RESULT, CacheName.ACCEPTED)
        return await self.cache.forget([request_key(name, tenant, one) for one in request_ids for name in names])

    async def ended(
        self, tenant: str, wanted: EndedFilter, behind: EndedCursor | None, most: int
    ) -> Sequence[RecordedReply]:
        """A page of the tenant's ended requests, see ``RequestStore``. Raises GatewayError: 503."""
        with self._page_slots.taken(tenant):
            return await self._ask(self._pages, lambda: self._store.ended(tenant, wanted, behind, most))

    async def usage(self, tenant: str, query: SumQuery, behind: Sequence[str] | None, most: int) -> Sequence[UsageSum]:
        """A page of the tenant's sums of usage, see ``RequestStore``. Raises GatewayError: 503."""
        with self._page_slots.taken(tenant):
            return await self._ask(self._pages, lambda: self._store.usage(tenant, query, behind, most))

    def _keep(self, recorded: RecordedReply, size_bytes: int) -> bool:
        """Keep a reply for a while, unless it is too large. Returns False if an earlier one takes precedence: the later
        was not run, and the earlier was."""
        key = recorded.reply.tenant, recorded.reply.request_id
        with self._recent_lock:
            there = self._recent.get(key)
            if there is not None and was_not_run(recorded.reply) and not was_not_run(there[0].reply):
                return False
            self._recent.pop(key, None)
            if size_bytes <= RECENT_BYTES:
                self._recent[key] = recorded, size_bytes
        return True

    async def _look_up(self, tenant: str, ask: Callable[[], Awaitable[T]]) -> T:
        with self._look_up_slots.taken(tenant):
            return await self._ask(self._look_ups, ask)

    async def _ask(self, breaker: CircuitBreaker, ask: Callable[[], Awaitable[T]]) -> T:
        if not breaker.lets_through(monotonic_ms()):
            raise _unavailable()
        try:
            answer = await ask()
        except (StoreError, TimeoutError) as error:
            was_open = breaker.is_open
            breaker.failed(monotonic_ms(), random())  # noqa: S311 - jitter, no secret
            if breaker.is_open and not was_open:
                # One line per outage, without values of any row.
                log.warning("results_unavailable", error=type(error).__name__, reason=str(error))
            raise _unavailable() from error
        except BaseException:
            breaker.abandoned()
            raise
        breaker.succeeded()
        return answer


def _unavailable() -> GatewayError:
    return GatewayError(503, UNAVAILABLE, "results cannot be looked up now", retry_after_ms=_retry_after_ms())


def _busy() -> GatewayError:
    message = "as many results are being looked up as may be"
    return GatewayError(503, Code.OVERLOADED, message, retry_after_ms=_retry_after_ms())


def _retry_after_ms() -> int:
    return jittered_ms(_RETRY_AFTER_MS, 0.5, str(random()))  # noqa: S311 - jitter, no secret
