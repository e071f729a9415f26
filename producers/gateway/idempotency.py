"""``Idempotency-Key``: a call that is sent again is done once, and answered with what was answered before.

A key belongs to a tenant and a route. It is claimed before the request is published, with a digest of the body and the
request's id. Whoever sends it again is told: in flight (409), used for another body (422), or the same reply.

A request that was refused or expired was not run, and gives its key back. A claim whose publish was never confirmed,
because the process died in between, is taken over after a while with the *same* request id: the dispatcher runs an id
once, however often it was published.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol

from fairlane.clock import ClockMs, now_ms
from fairlane.outcomes import Code
from fairlane.records import InferenceReply
from producers.gateway.errors import GatewayError
from producers.gateway.reply_errors import was_not_run

HEADER = "Idempotency-Key"
MOST_KEY_CHARS = 255
IN_FLIGHT = "request_in_flight"
OTHER_BODY = "idempotency_key_reused"

_UNCONFIRMED_MS = 120_000
"""Longer than a publish may take, so that whoever has not confirmed by then never will."""
_AGAIN_MS = 1_000
_MOST_ROUNDS = 4
_MOST_TIME_DIGITS = 15
_SENT_AGAIN = "again"

FindReply = Callable[[str, str], Awaitable[InferenceReply | None]]
"""The reply to a request of this tenant with this id, if it is recorded. May raise GatewayError."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What is kept under a key.

    Attributes:
        digest: of the body; it says nothing without tenant, route and key.
        request_id: of the request.
        claimed_at_ms: by the clock of who claimed it; 0: nobody knows whether it was published.
        confirmed: it was published.
        is_again: under the same id it may have been published before. What refuses it says nothing of the first.
    """

    digest: str
    request_id: str
    claimed_at_ms: int
    confirmed: bool = False
    is_again: bool = False

    def packed(self) -> str:
        """As it is stored."""
        packed = f"{self.digest}|{self.request_id}|{self.claimed_at_ms}|{int(self.confirmed)}"
        return f"{packed}|{_SENT_AGAIN}" if self.is_again else packed

    @classmethod
    def unpacked(cls, stored: str) -> "Claim | None":
        """What ``packed`` made; None for anything else."""
        digest, _, rest = stored.partition("|")
        request_id, _, rest = rest.partition("|")
        claimed_at, _, rest = rest.partition("|")
        confirmed, _, again = rest.partition("|")
        is_number = claimed_at.isascii() and claimed_at.isdigit() and len(claimed_at) <= _MOST_TIME_DIGITS
        if not is_number or confirmed not in ("0", "1") or again not in ("", _SENT_AGAIN):
            return None
        return cls(digest, request_id, int(claimed_at), confirmed == "1", again == _SENT_AGAIN)


class ClaimStore(Protocol):
    """Where claims are kept, each for its time."""

    async def swap(self, tenant: str, name: str, expected: str | None, new: str | None) -> str | None:
        """Put ``new`` there, or nothing, if what is there is ``expected``; all in one step.

        No two tenants may have the same name. Returns what is there after it.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Kept:
    """A claim that this call put into the store."""

    store: ClaimStore
    tenant: str
    name: str
    claim: Claim

    async def become(self, claim: Claim) -> "_Kept":
        """Another one in its place, if it is still there."""
        await self.store.swap(self.tenant, self.name, self.claim.packed(), claim.packed())
        return replace(self, claim=claim)

    async def end(self) -> None:
        """None in its place."""
        await self.store.swap(self.tenant, self.name, self.claim.packed(), None)


class Call:
    """One call under a key; or under none, then nothing is kept.

    Attributes:
        request_id: the id that the request is to be published with.
        reply: of the earlier call; if it is there, nothing is to be published.
    """

    def __init__(
        self,
        request_id: str,
        reply: InferenceReply | None = None,
        kept: "_Kept | None" = None,
    ) -> None:
        self.request_id = request_id
        self.reply = reply
        self._kept = kept

    @property
    def has_key(self) -> bool:
        """Whether the caller can come back for the same answer."""
        return self._kept is not None or self.reply is not None

    async def confirm(self) -> None:
        """The request was accepted: nobody publishes it again."""
        if self._kept is None:
            return
        self._kept = await self._kept.become(replace(self._kept.claim, confirmed=True))

    async def give_back(self) -> None:
        """It was not published: the key is free for another try, unless an earlier one may have been."""
        await self._free()

    async def doubt(self) -> None:
        """Nobody knows whether it was published: whoever sends the key again publishes it under the same id."""
        if self._kept is not None:
            await self._kept.become(replace(self._kept.claim, claimed_at_ms=0, confirmed=False))

    async def settle(self, reply: InferenceReply) -> None:
        """The reply is here. One that says that nothing was run frees the key, unless an earlier try may have been."""
        if was_not_run(reply):
            await self._free()

    async def _free(self) -> None:
        if self._kept is None:
            return
        if self._kept.claim.is_again:
            await self.doubt()
        else:
            await self._kept.end()


class Idempotency:
    """The calls of all tenants.

    Args:
        store: keeps the claims.
        find_reply: finds what was answered.
        clock_ms: milliseconds since the epoch; of instances that share a store, about the same.
    """

    def __init__(self, store: ClaimStore, find_reply: FindReply, clock_ms: ClockMs = now_ms) -> None:
        self._store = store
        self._find_reply = find_reply
        self._clock_ms = clock_ms

    async def begin(self, tenant: str, route: str, key: str | None, body: bytes, new_request_id: str) -> Call:
        """Claim a key for a call, or find what became of the one that has it.

        Args:
            tenant: of the identity.
            route: the path's template.
            key: the header; None: the call is by itself.
            body: as it came; another spelling of the same JSON is another body.
            new_request_id: for the request, if it is the key's first.

        Raises:
            GatewayError: 400 for a key that is none, 409 for one whose request is in flight, 422 for one that was used
                with another body.
        """
        key = checked_key(key)
        if key is None:
            return Call(new_request_id)
        name = _digest(tenant, route, key)
        mine = Claim(_digest(tenant, route, key, body=body), new_request_id, self._clock_ms())
        expected: str | None = None
        for _ in range(_MOST_ROUNDS):
            there = await self._store.swap(tenant, name, expected, mine.packed())
            if there == mine.packed():
                return Call(mine.request_id, kept=_Kept(self._store, tenant, name, mine))
            theirs = None if there is None else Claim.unpacked(there)
            if theirs is None:
                # Nothing any more, or nothing that this program wrote.
                expected = there
                continue
            if theirs.digest != mine.digest:
                raise other_body()
            reply = await self._find_reply(tenant, theirs.request_id)
            if reply is not None and not was_not_run(reply):
                return Call(theirs.request_id, reply)
            if reply is not None and not theirs.is_again:
                mine = replace(mine, request_id=new_request_id, is_again=False)
            else:
                age_ms = mine.claimed_at_ms - theirs.claimed_at_ms
                if reply is None if theirs.confirmed else age_ms < _UNCONFIRMED_MS:
                    raise _in_flight(theirs.request_id)
                # A refusal of what was sent again says nothing of what was published before it.
                mine = replace(mine, request_id=theirs.request_id, is_again=True)
            expected = there
        raise _in_flight(None)


def is_key(key: str) -> bool:
    """Whether this can be a key."""
    return 1 <= len(key) <= MOST_KEY_CHARS and key.isascii() and key.isprintable()


def checked_key(key: str | None) -> str | None:
    """The key, if there is one. Raises GatewayError: 400, it can be none."""
    if key is None or is_key(key):
        return key
    raise GatewayError(
        400, Code.INVALID, f"must have from 1 to {MOST_KEY_CHARS} printable ASCII characters", field=HEADER
    )


def other_body() -> GatewayError:
    """The key was used, and for something else."""
    return GatewayError(422, OTHER_BODY, "this key was used with another body", field=HEADER)


def _in_flight(request_id: str | None) -> GatewayError:
    which = "" if request_id is None else f": {request_id}"
    message = f"the request with this key is in flight{which}"
    return GatewayError(409, IN_FLIGHT, message, field=HEADER, retry_after_ms=_AGAIN_MS, request_id=request_id)


def _digest(*parts: str, body: bytes = b"") -> str:
    digest = blake2b(digest_size=16)
    for part in (*(part.encode() for part in parts), body):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
