"""Calls that wait for a reply, with their streamed text. For one event loop."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from fairlane.client.reassembly import Reassembly, TextDelta
from fairlane.records import InferenceReply, ReplyChunk
from producers.gateway.pipeline.publisher import busy, busy_with_tenant
from producers.gateway.tenant_bounds import TenantSlots

MOST_UNTAKEN_CHARS = 65_536
"""Bound on streamed text that the call has not taken; the rest comes with the reply."""


@dataclass(slots=True, eq=False)
class WaitingCall:
    """One call that waits for the reply to a request.

    Attributes:
        partition: reply partition of the request.
        is_lost: this instance may miss the reply, so it must be looked up elsewhere as well.
        text: streamed text, if the request streams.
        follows_chunks: whether its tenant's chunks are read for it.
        reply: final reply, once it has arrived.
        news: event that is set, and replaced by a new one, whenever any of this changes.
        look_up: timeout of the reply look-up in progress.
        is_given_up: the wait has ended without a reply.
    """

    tenant: str
    request_id: str
    partition: int
    is_lost: bool
    text: Reassembly | None
    is_given_up: bool
    follows_chunks: bool = False
    reply: InferenceReply | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    look_up: asyncio.Timeout | None = None
    _untaken_chars: int = 0
    _is_cut: bool = False
    _left_out: bool = False

    def add(self, chunk: ReplyChunk) -> None:
        """Add a chunk of text. Once the untaken text exceeds ``MOST_UNTAKEN_CHARS``, this chunk and all later ones are
        dropped: the reply has them."""
        if self.text is None or self.reply is not None:
            return
        if self._is_cut:
            self._left_out = True
            return
        self._untaken_chars += len(chunk.text)
        if self._untaken_chars > MOST_UNTAKEN_CHARS:
            self._is_cut = self._left_out = True
        elif self.text.add(chunk):
            self.tell()

    def take(self) -> TextDelta | None:
        """Text that arrived since the last call; None if there is none."""
        self._untaken_chars = 0
        return None if self.text is None else self.text.take()

    def still_comes(self) -> bool:
        """Whether chunks were dropped since the last call: the answer goes on, though there is nothing to take."""
        left_out, self._left_out = self._left_out, False
        return left_out

    def settle(self, reply: InferenceReply) -> None:
        """Set the reply. Only the first one counts."""
        if self.reply is None:
            self.reply = reply
            if self.text is not None:
                self.text.finish(reply)
            self.tell()

    def give_up(self) -> None:
        """End the wait."""
        self.is_given_up = True
        if self.look_up is not None and not self.look_up.expired():
            self.look_up.reschedule(0)
        self.tell()

    def tell(self) -> None:
        """Wake all waiters of ``news``."""
        told, self.news = self.news, asyncio.Event()
        told.set()


class Pending:
    """Waiting calls of this instance: at most ``max_calls``, and half of them per tenant.

    Replies and chunks of any request may be passed in. They are ignored if no call waits for them, or only calls of
    another tenant. The tenant of a reply was set from the topic of its request.
    """

    def __init__(self, max_calls: int) -> None:
        self._slots = TenantSlots(max_calls, max(1, max_calls // 2), busy, busy_with_tenant)
        self._calls: dict[str, list[WaitingCall]] = {}
        self._has_ended = False

    def __len__(self) -> int:
        return self._slots.total

    def __contains__(self, request_id: str) -> bool:
        """Whether a call waits for this request. Thread-safe."""
        return request_id in self._calls

    def open(
        self, tenant: str, request_id: str, partition: int, *, is_lost: bool = False, streamed: bool = False
    ) -> WaitingCall:
        """Add a call that waits for the reply, before its request is published.

        Raises GatewayError: 429 at the tenant's limit, 503 at the limit of the instance.
        """
        self._slots.take(tenant)
        text = Reassembly() if streamed else None
        call = WaitingCall(tenant, request_id, partition, is_lost, text, self._has_ended)
        self._calls.setdefault(request_id, []).append(call)
        return call

    def close(self, call: WaitingCall) -> None:
        """Remove a call. Idempotent."""
        same_id = self._calls.get(call.request_id)
        if same_id is None or call not in same_id:
            return
        same_id.remove(call)
        self._slots.give_back(call.tenant)
        if not same_id:
            del self._calls[call.request_id]

    def settle(self, reply: InferenceReply) -> bool:
        """Deliver a reply; returns whether a call of its tenant waited for it."""
        waiting = [call for call in self._calls.get(reply.request_id, ()) if call.tenant == reply.tenant]
        for call in waiting:
            call.settle(reply)
        return bool(waiting)

    def add(self, tenant: str, chunk: ReplyChunk) -> None:
        """Deliver a chunk from the chunk topic of this tenant."""
        for call in self._calls.get(chunk.request_id, ()):
            if call.tenant == tenant:
                call.add(chunk)

    def end_waiting(self) -> None:
        """Give up all calls, also those opened later."""
        self._has_ended = True
        for same_id in self._calls.values():
            for call in same_id:
                call.give_up()

    def lose(self, partitions: Collection[int]) -> int:
        """Mark the calls of these partitions, whose replies this instance may miss; returns how many were marked."""
        lost = [call for same_id in self._calls.values() for call in same_id if call.partition in partitions]
        lost = [call for call in lost if not call.is_lost]
        for call in lost:
            call.is_lost = True
            call.tell()
        return len(lost)
