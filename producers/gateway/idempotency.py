"""``Idempotency-Key``: a repeated call runs once and gets the reply of the first.

A key belongs to a tenant and a route. It is claimed before the request is published, with a digest of the body and the
request id. A repeated call gets 409 while the request is in flight, 422 if its body differs, else the same reply.

A rejected or expired request was not run, and releases its key. A claim whose publish was never confirmed, because the
process died in between, is taken over after a while with the *same* request id: the dispatcher runs an id once, however
often it was published.

Claims are kept in Redis, shared by all instances, or in local memory.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from time import monotonic

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fairlane.clock import ClockMs, now_ms
from fairlane.outcomes import Code
from fairlane.records import InferenceReply
from fairlane.settings import IDEMPOTENCY_TTL_S
from fairlane_server.redis.availability import RedisAvailability, RedisCaller
from fairlane_server.redis.keys import KeyFamily, redis_key
from fairlane_server.redis.state import (
    TENANT_COUNTER_FUNCTIONS,
    RefusedWrite,
    StateKind,
    count_refusal_of,
    count_refusals,
)
from producers.gateway.tenant_bounds import TenantMap
from producers.openai_api.errors import GatewayError, was_not_run

MOST_LOCAL_CLAIMS = 20_000

# '' means no claim; a claim is never empty. Returns the claim stored now, and 'memory' or 'tenant_bound' where the new
# one could not be written.
_SWAP = (
    TENANT_COUNTER_FUNCTIONS
    + """
local there, ttl_s = redis.call('GET', KEYS[1]) or '', tonumber(ARGV[3])
if there ~= ARGV[1] or (there == '' and ARGV[2] == '') then
  return {there, ''}
end
local room = room_in(KEYS[2], tonumber(ARGV[4]), ttl_s)
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
  room.added = -1
elseif there == '' and room.left <= 0 then
  return {there, 'tenant_bound'}
elseif not set_or_refuse(KEYS[1], ARGV[2], ttl_s) then
  return {there, 'memory'}
elseif there == '' then
  room.added = 1
end
take_room(room)
return {ARGV[2], ''}
"""
)


class LocalClaims:
    """Claims in the memory of this process. Beyond ``most``, the tenant with the most claims loses its oldest."""

    def __init__(
        self, ttl_s: float = IDEMPOTENCY_TTL_S, most: int = MOST_LOCAL_CLAIMS, clock_s: Callable[[], float] = monotonic
    ) -> None:
        self._ttl_s = ttl_s
        self._clock_s = clock_s
        self._claims: TenantMap[tuple[float, str]] = TenantMap(most)

    async def swap(self, tenant: str, name: str, expected: str | None, new: str | None) -> str | None:
        """Compare and swap in one step: if the stored claim is ``expected``, store ``new``; None means no claim.

        Names must be unique over all tenants. Returns the claim stored afterwards.
        """
        there = self.get(name)
        if there != expected:
            return there
        self.put(tenant, name, new)
        return new

    def put(self, tenant: str, name: str, claim: str | None) -> None:
        """Store the claim unconditionally; None deletes it."""
        if claim is None:
            self._claims.pop(name)
        else:
            self._claims.put(tenant, name, (self._clock_s() + self._ttl_s, claim))

    def get(self, name: str) -> str | None:
        """The stored claim; None if there is none or it has expired."""
        ends_at, claim = self._claims.get(name) or (0.0, None)
        if claim is not None and ends_at <= self._clock_s():
            self._claims.pop(name)
            return None
        return claim


class RedisClaims:
    """Claims shared by all instances. While Redis does not answer, this instance uses the claims it has seen itself.

    No call raises because of Redis. ``timeout_s`` bounds one command; a swap runs at most two. Redis keeps at most
    ``most`` claims of a tenant at a time; further ones are known to their own instance alone. For one event loop.
    """

    def __init__(
        self,
        redis: "Redis",
        watch: RedisAvailability,
        timeout_s: float,
        most: int,
        ttl_s: int = IDEMPOTENCY_TTL_S,
    ) -> None:
        self._script = redis.register_script(_SWAP)
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._most = most
        self._turns = RedisCaller(watch, "idempotency_unavailable")
        self._seen = LocalClaims(ttl_s)
        self._own = LocalClaims(ttl_s)
        """Subset of ``_seen`` that this instance wrote: only this instance releases it."""

    async def swap(self, tenant: str, name: str, expected: str | None, new: str | None) -> str | None:
        """As ``LocalClaims.swap``."""
        own, seen = self._own.get(name), self._seen.get(name)
        if own is not None and expected is None:
            # Redis may have lost it, or been unavailable when it was written; it still counts here.
            return own
        there = await self._ask(tenant, name, expected, new)
        if there is None and new is not None and seen is not None and seen == expected:
            there = await self._ask(tenant, name, None, new)
        self._seen.put(tenant, name, there)
        self._own.put(tenant, name, there if there == new else None)
        return there

    async def _ask(self, tenant: str, name: str, expected: str | None, new: str | None) -> str | None:
        if not self._turns.may_ask():
            return await self._seen.swap(tenant, name, expected, new)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer, refusal = await self._script(
                    keys=[
                        redis_key(KeyFamily.IDEMPOTENCY_CLAIMS, name),
                        redis_key(KeyFamily.IDEMPOTENCY_COUNTS, tenant),
                    ],
                    args=[expected or "", new or "", self._ttl_s, self._most],
                )
        except (RedisError, OSError, TimeoutError) as error:
            count_refusal_of(StateKind.IDEMPOTENCY_KEYS, error)
            self._turns.failed(error)
            return await self._seen.swap(tenant, name, expected, new)
        self._turns.succeeded()
        if refusal:
            count_refusals(StateKind.IDEMPOTENCY_KEYS, RefusedWrite(refusal.decode()))
            return await self._seen.swap(tenant, name, expected, new)
        return (answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)) or None


HEADER = "Idempotency-Key"
MOST_KEY_CHARS = 255
IN_FLIGHT = "request_in_flight"
OTHER_BODY = "idempotency_key_reused"

_UNCONFIRMED_MS = 120_000
"""Longer than a publish may take: a claim not confirmed by then never will be."""
_AGAIN_MS = 1_000
_MOST_ROUNDS = 4
_MOST_TIME_DIGITS = 15
_SENT_AGAIN = "again"


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """The value stored under a key.

    Attributes:
        digest: of the body, salted with tenant, route and key.
        request_id: id that the request is published with.
        claimed_at_ms: by the claimant's clock; 0: it is unknown whether the request was published.
        confirmed: the publish was acknowledged.
        is_again: the same id may have been published before; a rejection then says nothing about the first publish.
    """

    digest: str
    request_id: str
    claimed_at_ms: int
    confirmed: bool = False
    is_again: bool = False

    def packed(self) -> str:
        """The stored form."""
        packed = f"{self.digest}|{self.request_id}|{self.claimed_at_ms}|{int(self.confirmed)}"
        return f"{packed}|{_SENT_AGAIN}" if self.is_again else packed

    @classmethod
    def unpacked(cls, stored: str) -> "KeyClaim | None":
        """Inverse of ``packed``; None for any other text."""
        digest, _, rest = stored.partition("|")
        request_id, _, rest = rest.partition("|")
        claimed_at, _, rest = rest.partition("|")
        confirmed, _, again = rest.partition("|")
        is_number = claimed_at.isascii() and claimed_at.isdigit() and len(claimed_at) <= _MOST_TIME_DIGITS
        if not is_number or confirmed not in ("0", "1") or again not in ("", _SENT_AGAIN):
            return None
        return cls(digest, request_id, int(claimed_at), confirmed == "1", again == _SENT_AGAIN)


class IdempotentCall:
    """One call under a key; without a key nothing is stored. It has the id to publish with, or the reply to the earlier
    call: then nothing must be published. ``swap`` compares and swaps ``claim``, which this call wrote to the store."""

    def __init__(
        self,
        request_id: str,
        reply: InferenceReply | None = None,
        claim: KeyClaim | None = None,
        swap: Callable[[str, str | None], Awaitable[str | None]] | None = None,
    ) -> None:
        self.request_id = request_id
        self.reply = reply
        self._claim = claim
        self._swap = swap

    @property
    def has_key(self) -> bool:
        """Whether the caller can repeat the call and get the same answer."""
        return self._claim is not None or self.reply is not None

    async def confirm(self) -> None:
        """Mark the claim confirmed: the request was accepted and is not published again."""
        if self._claim is not None:
            confirmed = replace(self._claim, confirmed=True)
            await self._store(confirmed)
            self._claim = confirmed

    async def doubt(self) -> None:
        """Mark the publish as uncertain: the next call with this key publishes again under the same id."""
        if self._claim is not None:
            await self._store(replace(self._claim, claimed_at_ms=0, confirmed=False))

    async def give_back(self) -> None:
        """Release the key after a failed publish, unless an earlier publish may have succeeded."""
        if self._claim is not None and self._claim.is_again:
            await self.doubt()
        else:
            await self._store(None)

    async def settle(self, reply: InferenceReply) -> None:
        """Release the key if the reply says that nothing was run, unless an earlier publish may have succeeded."""
        if was_not_run(reply):
            await self.give_back()

    async def _store(self, claim: KeyClaim | None) -> None:
        """Replace this call's claim, if it is still stored; None deletes it."""
        if self._claim is not None and self._swap is not None:
            await self._swap(self._claim.packed(), None if claim is None else claim.packed())


class Idempotency:
    """Deduplication of calls by key, for all tenants. ``find_reply`` finds the reply to the earlier call by tenant and
    request id; ``clock_ms``, since the epoch, is about the same at all instances that share a store."""

    def __init__(
        self,
        store: LocalClaims | RedisClaims,
        find_reply: Callable[[str, str], Awaitable[InferenceReply | None]],
        clock_ms: ClockMs = now_ms,
    ) -> None:
        self._store = store
        self._find_reply = find_reply
        self._clock_ms = clock_ms

    async def begin(self, tenant: str, route: str, key: str | None, body: bytes, new_request_id: str) -> IdempotentCall:
        """Claim a key for a call, or find the reply of the call that holds it.

        ``route`` is the path template, ``body`` the raw bytes: the same JSON spelled differently is another body.

        Raises:
            GatewayError: 400 for an invalid key, 409 while the key's request is in flight, 422 for a key used with
                another body; also what ``find_reply`` raises.
        """
        key = checked_key(key)
        if key is None:
            return IdempotentCall(new_request_id)
        name = _digest(tenant, route, key)
        mine = KeyClaim(_digest(tenant, route, key, body=body), new_request_id, self._clock_ms())
        expected: str | None = None
        for _ in range(_MOST_ROUNDS):
            there = await self._store.swap(tenant, name, expected, mine.packed())
            if there == mine.packed():
                return IdempotentCall(mine.request_id, None, mine, partial(self._store.swap, tenant, name))
            theirs = None if there is None else KeyClaim.unpacked(there)
            if theirs is None:
                # The claim is gone, or not in our format.
                expected = there
                continue
            if theirs.digest != mine.digest:
                raise other_body()
            reply = await self._find_reply(tenant, theirs.request_id)
            if reply is not None and not was_not_run(reply):
                return IdempotentCall(theirs.request_id, reply)
            if reply is not None and not theirs.is_again:
                mine = replace(mine, request_id=new_request_id, is_again=False)
            else:
                age_ms = mine.claimed_at_ms - theirs.claimed_at_ms
                if reply is None if theirs.confirmed else age_ms < _UNCONFIRMED_MS:
                    raise in_flight(theirs.request_id)
                # A rejection of a repeated publish says nothing about the first one.
                mine = replace(mine, request_id=theirs.request_id, is_again=True)
            expected = there
        raise in_flight(None)


def checked_key(key: str | None) -> str | None:
    """The key, or None without one. Raises GatewayError: 400 for an invalid key."""
    if key is None or (1 <= len(key) <= MOST_KEY_CHARS and key.isascii() and key.isprintable()):
        return key
    raise GatewayError(
        400, Code.INVALID, f"must have from 1 to {MOST_KEY_CHARS} printable ASCII characters", field=HEADER
    )


def other_body() -> GatewayError:
    """422: the key was used with another body."""
    return GatewayError(422, OTHER_BODY, "this key was used with another body", field=HEADER)


def in_flight(request_id: str | None) -> GatewayError:
    """409: the request with this key has no reply yet."""
    which = "" if request_id is None else f": {request_id}"
    message = f"the request with this key is in flight{which}"
    return GatewayError(409, IN_FLIGHT, message, field=HEADER, retry_after_ms=_AGAIN_MS, request_id=request_id)


def _digest(*parts: str, body: bytes = b"") -> str:
    digest = blake2b(digest_size=16)
    for part in (*(part.encode() for part in parts), body):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
