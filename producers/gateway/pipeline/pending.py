"""The calls that wait for a reply, and the texts that are being streamed. Of one event loop; no I/O."""

import asyncio
from collections.abc import Collection

from fairlane.client.reassembly import Reassembly, TextDelta
from fairlane.records import InferenceReply, ReplyChunk
from producers.gateway.pipeline.refusals import busy, busy_with_tenant
from producers.gateway.tenant_slots import TenantSlots

MOST_UNTAKEN_CHARS = 65_536
"""Of a streamed text that nobody takes; the rest comes with the reply."""


class Call:
    """One call that waits for the reply to a request.

    Attributes:
        partition: where its reply will stand.
        is_lost: the reply may stand where this instance has not read, so it must be looked for elsewhere as well.
        follows_chunks: whether its tenant's chunks are read for it.
        text: what came of it, if it is streamed.
        reply: the final one, once it is here.
        news: set, and replaced by another, whenever any of this changes.
        look_up: bounds the look-up of its reply that is under way.
        is_given_up: it is not waited for any more, though no reply is here.
    """

    __slots__ = (
        "_is_cut",
        "_left_out",
        "_untaken_chars",
        "follows_chunks",
        "is_given_up",
        "is_lost",
        "look_up",
        "news",
        "partition",
        "reply",
        "request_id",
        "tenant",
        "text",
    )

    def __init__(self, tenant: str, request_id: str, partition: int, *, is_lost: bool, streamed: bool) -> None:
        self.tenant = tenant
        self.request_id = request_id
        self.partition = partition
        self.is_lost = is_lost
        self.follows_chunks = False
        self.text = Reassembly() if streamed else None
        self.reply: InferenceReply | None = None
        self.news = asyncio.Event()
        self.look_up: asyncio.Timeout | None = None
        self.is_given_up = False
        self._untaken_chars = 0
        self._is_cut = False
        self._left_out = False

    def add(self, chunk: ReplyChunk) -> None:
        """A piece of its text came. What nobody takes is left out beyond a bound, and all that comes after it: the
        reply has it."""
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
        """The text that came since the last time; None if there is none."""
        self._untaken_chars = 0
        return None if self.text is None else self.text.take()

    def still_comes(self) -> bool:
        """Whether text came since this was last asked that is left out: there is none to take, and it goes on."""
        left_out, self._left_out = self._left_out, False
        return left_out

    def settle(self, reply: InferenceReply) -> None:
        """The reply is here. The first one counts."""
        if self.reply is None:
            self.reply = reply
            if self.text is not None:
                self.text.finish(reply)
            self.tell()

    def give_up(self) -> None:
        """Let whoever waits wait no longer."""
        self.is_given_up = True
        if self.look_up is not None and not self.look_up.expired():
            self.look_up.reschedule(0)
        self.tell()

    def tell(self) -> None:
        """Wake whoever waits for news."""
        told, self.news = self.news, asyncio.Event()
        told.set()


class Pending:
    """Every call that waits at this instance, at most ``max_calls``, and of one tenant half of them.

    Replies and chunks of any request may be handed in: those that nobody waits for are ignored, and so is what names
    another tenant than the one that waits. The tenant of a reply was set from the topic that its request stood on.
    """

    def __init__(self, max_calls: int) -> None:
        self._slots = TenantSlots(max_calls, max(1, max_calls // 2), busy, busy_with_tenant)
        self._calls: dict[str, list[Call]] = {}
        self._has_ended = False

    def __len__(self) -> int:
        return self._slots.total

    def __contains__(self, request_id: str) -> bool:
        """Whether somebody waits for this request. May be asked on any thread."""
        return request_id in self._calls

    def open(
        self, tenant: str, request_id: str, partition: int, *, is_lost: bool = False, streamed: bool = False
    ) -> Call:
        """Wait for the reply to a request, before it is published.

        Raises GatewayError: 429 as many calls of this tenant wait as may, 503 as many of all.
        """
        self._slots.take(tenant)
        call = Call(tenant, request_id, partition, is_lost=is_lost, streamed=streamed)
        call.is_given_up = self._has_ended
        self._calls.setdefault(request_id, []).append(call)
        return call

    def close(self, call: Call) -> None:
        """Nobody waits there any more. May be called again."""
        same_id = self._calls.get(call.request_id)
        if same_id is None or call not in same_id:
            return
        same_id.remove(call)
        self._slots.give_back(call.tenant)
        if not same_id:
            del self._calls[call.request_id]

    def settle(self, reply: InferenceReply) -> bool:
        """A reply came; whether anybody of its tenant waited for it."""
        waiting = [call for call in self._calls.get(reply.request_id, ()) if call.tenant == reply.tenant]
        for call in waiting:
            call.settle(reply)
        return bool(waiting)

    def add(self, tenant: str, chunk: ReplyChunk) -> None:
        """A piece of text came on the chunk topic of this tenant."""
        for call in self._calls.get(chunk.request_id, ()):
            if call.tenant == tenant:
                call.add(chunk)

    def end_waiting(self) -> None:
        """Give all calls up, and those that are opened from here on."""
        self._has_ended = True
        for same_id in self._calls.values():
            for call in same_id:
                call.give_up()

    def lose(self, partitions: Collection[int]) -> int:
        """What stands in these partitions from now on is not read here for a while; how many calls that concerns."""
        lost = [call for same_id in self._calls.values() for call in same_id if call.partition in partitions]
        lost = [call for call in lost if not call.is_lost]
        for call in lost:
            call.is_lost = True
            call.tell()
        return len(lost)
