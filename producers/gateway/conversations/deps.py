"""Dependencies of the routes of conversations and erasures, and their errors."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar

from starlette.concurrency import run_in_threadpool

from fairlane.logs import get_logger
from fairlane.outcomes import Code
from fairlane_server.conversations.conversations import ConversationNotFoundError, Conversations
from fairlane_server.erasure.erasures import (
    MOST_ERASED_NAMES,
    Erasure,
    ErasureKind,
    Erasures,
    TooManyErasuresError,
    unfinished,
)
from fairlane_server.erasure.expiry import Expiry, Lifetimes, expiries, kept, tombstone_ms
from fairlane_server.store_error import StoreError
from fairlane_server.topics.families import TopicFamily
from producers.gateway.identity.identity import Authenticate, Identity, Permission, require
from producers.gateway.openapi import ErrorDocs
from producers.gateway.pipeline.call_context import current
from producers.gateway.results.results import Results
from producers.gateway.tenant_bounds import TenantSlots
from producers.openai_api.errors import UNAVAILABLE, GatewayError

log = get_logger(__name__)

T = TypeVar("T")

UNKNOWN_CONVERSATION, UNKNOWN_ERASURE = "unknown_conversation", "unknown_erasure"
"""The gateway's own codes."""
QUOTA_REACHED = "insufficient_quota"

_RETRY_AFTER_MS = 2_000
_BUSY_RETRY_AFTER_MS = 30_000
_RESUME_S = 10.0
_AT_A_TIME_S = 10.0
"""How long one erasure is gone on with: then its caller is answered, and others have their turn."""
_IDLE_S = 10
"""An erasure without a step for so long is taken over: its gateway was killed, or has no Redis."""
_MOST_RESUMED = 20


@dataclass(frozen=True, slots=True)
class ConversationDeps:
    """Dependencies of the routes.

    Attributes:
        authenticate: FastAPI dependency that returns the caller's identity; raises GatewayError.
        postgres_dsn: database of conversations and erasures.
        results: whose memory and Redis an erasure reaches.
        calls: slots of short calls, shared with other routes that hold a thread.
        transfers: slots of exports.
        families: of the topics.
        lives: how long copies live.
        most_erased: most conversations and requests that the kept erasures of a tenant name.
        export_s: longest time of an export, in seconds.
    """

    authenticate: Authenticate
    postgres_dsn: str
    results: Results
    calls: TenantSlots
    transfers: TenantSlots
    families: tuple[TopicFamily, ...]
    lives: Lifetimes
    most_erased: int = MOST_ERASED_NAMES
    export_s: float = 3_600.0
    _in_flight: set[str] = field(default_factory=set, init=False)

    def permitted(self, permission: Permission) -> Authenticate:
        """FastAPI dependency: the caller, if it has the permission."""
        return require(self.authenticate, permission)

    async def of_conversations(self, identity: Identity, use: Callable[[Conversations], T]) -> T:
        """What comes of this use of the tenant's conversations, in a thread. Raises GatewayError: 404, 429, 503."""
        with self.calls.taken(identity.tenant), _answered():
            return await run_in_threadpool(self._conversations, identity.tenant, use)

    async def of_erasures(self, identity: Identity, use: Callable[[Erasures], T]) -> T:
        """The same for its erasures."""
        with self.calls.taken(identity.tenant), _answered():
            return await run_in_threadpool(self._erasures, identity.tenant, use)

    async def erase(self, identity: Identity, kind: ErasureKind, names: Sequence[str]) -> Erasure:
        """Record an erasure and go on with it for a while. It holds a slot until then, whatever ends the call. Raises
        GatewayError: 429, 503."""
        return await asyncio.shield(self._erase(identity, kind, names))

    async def _erase(self, identity: Identity, kind: ErasureKind, names: Sequence[str]) -> Erasure:
        with self.calls.taken(identity.tenant), _answered(), self._opened(identity.tenant) as erasures:
            erasure_id = await run_in_threadpool(erasures.request, kind, names, identity.requested_by)
            current().object_id = erasure_id
            found: Erasure | None = None
            # It is recorded: what fails now is tried again later.
            with suppress(StoreError):
                found = await self._carry_out(erasures, identity.tenant, erasure_id)
            if found is None:
                found = await run_in_threadpool(erasures.get, erasure_id)
        if found is None:
            raise unknown_erasure()
        return found

    async def carry_out(self, tenant: str, erasure_id: str) -> Erasure | None:
        """Go on with an erasure: for a while, to its end unless Redis does not answer. Returns how far it is. Raises
        StoreError."""
        with self._opened(tenant) as erasures:
            return await self._carry_out(erasures, tenant, erasure_id)

    async def _carry_out(self, erasures: Erasures, tenant: str, erasure_id: str) -> Erasure | None:
        self._in_flight.add(erasure_id)
        try:
            return await self._steps(erasures, tenant, erasure_id)
        finally:
            self._in_flight.discard(erasure_id)

    async def _steps(self, erasures: Erasures, tenant: str, erasure_id: str) -> Erasure | None:
        until_s = monotonic() + _AT_A_TIME_S
        found = await run_in_threadpool(erasures.get, erasure_id)
        if found is None or found.is_done:
            return found
        uncached: Sequence[str] = found.uncached
        while await self.results.forget(tenant, uncached):
            uncached = await run_in_threadpool(erasures.step, erasure_id)
            if not uncached or monotonic() >= until_s:
                break
        found = await run_in_threadpool(erasures.get, erasure_id)
        if found is not None and found.is_done:
            log.info("erased", erasure=erasure_id, tenant=tenant, turns=found.turns, results=found.results)
        return found

    async def resume(self) -> None:
        """Go on with erasures that a killed process left, of any tenant, for ever."""
        while True:
            await asyncio.sleep(_RESUME_S)
            try:
                left = await run_in_threadpool(unfinished, self.postgres_dsn, _IDLE_S, _MOST_RESUMED)
                for tenant, erasure_id in left:
                    if erasure_id not in self._in_flight:
                        await self.carry_out(tenant, erasure_id)
            except StoreError as error:
                log.warning("erasures_not_resumed", reason=str(error))

    @property
    def kept_ms(self) -> int:
        """How long a tombstone is kept."""
        return tombstone_ms(self.families)

    def expires(self, tenant: str, erasure: Erasure) -> tuple[Expiry, ...]:
        """Where copies may still be, and until when."""
        return expiries(erasure.requested_at_ms, tenant, self.families, self.lives)

    def keeps(self, erasure: Erasure) -> tuple[Expiry, ...]:
        """What is kept, without text."""
        return kept(erasure.requested_at_ms, self.lives)

    def _conversations(self, tenant: str, use: Callable[[Conversations], T]) -> T:
        with Conversations(self.postgres_dsn, tenant) as conversations:
            return use(conversations)

    def _erasures(self, tenant: str, use: Callable[[Erasures], T]) -> T:
        with self._opened(tenant) as erasures:
            return use(erasures)

    def _opened(self, tenant: str) -> Erasures:
        return Erasures(self.postgres_dsn, tenant, self.kept_ms, self.most_erased)


@contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except ConversationNotFoundError:
        raise unknown_conversation() from None
    except TooManyErasuresError as error:
        if error.is_lasting:
            raise GatewayError(429, QUOTA_REACHED, str(error)) from None
        raise GatewayError(429, Code.OVERLOADED, str(error), retry_after_ms=_BUSY_RETRY_AFTER_MS) from None
    except StoreError as error:
        log.warning("conversations_unavailable", reason=str(error))
        message = "conversations cannot be reached now"
        raise GatewayError(503, UNAVAILABLE, message, retry_after_ms=_RETRY_AFTER_MS) from None


def unknown_conversation() -> GatewayError:
    """404: no such conversation, or another tenant's; the error does not say which."""
    return GatewayError(404, UNKNOWN_CONVERSATION, "there is no such conversation", field="conversation_id")


def unknown_erasure() -> GatewayError:
    """404: no such erasure."""
    return GatewayError(404, UNKNOWN_ERASURE, "there is no erasure with this id", field="erasure_id")


ERRORS: ErrorDocs = {
    400: (Code.INVALID, "A field is invalid; `field` names it"),
    404: (UNKNOWN_CONVERSATION, "No such conversation, or no such erasure"),
    429: (Code.OVERLOADED, "A limit is reached; retry after `retry-after`"),
    503: (UNAVAILABLE, "Conversations are unavailable; retry after `retry-after`"),
}
"""Documented errors of all routes."""
