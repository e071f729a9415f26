"""Calls that wait for a reply, with their streamed text, and the reply partitions of this instance."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import uuid4

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.client.reassembly import Reassembly, TextDelta
from fairlane.logs import get_logger
from fairlane.records import InferenceReply, ReplyChunk
from fairlane_server.kafka.reply_partition import new_request_id, partition_of
from producers.gateway.limited_log import LimitedLog
from producers.gateway.pipeline.call_context import CallContext, current
from producers.gateway.pipeline.chunk_reader import Chunk, ChunkReader
from producers.gateway.pipeline.publisher import busy, busy_with_tenant
from producers.gateway.tenant_bounds import TenantSlots

log = get_logger(__name__)

MOST_UNTAKEN_CHARS = 65_536
"""Bound on streamed text that the call has not taken; the rest comes with the reply."""

LOOK_UPS = 8
"""Concurrent look-ups of all calls of a process."""

_LOOK_UP_TIMEOUT_S = 3.0
_LOOK_UP_BACKOFF = Backoff(first_s=0.1, longest_s=3.0)


@dataclass(slots=True, eq=False)
class PendingReply:
    """One call that waits for the reply to its request.

    Attributes:
        is_lost: this instance may miss the reply, so it must be looked up elsewhere as well.
        text: streamed text, if the request streams.
        is_given_up: the wait has ended without a reply.
        follows_chunks: whether its tenant's chunks are read for it.
        answer: final reply, once it has arrived.
        news: event that is set, and replaced by a new one, whenever any of this changes.
        look_up: timeout of the reply look-up in progress.
    """

    pending: "Pending"
    tenant: str
    request_id: str
    partition: int
    is_lost: bool
    text: Reassembly | None
    caller: CallContext
    is_given_up: bool
    follows_chunks: bool = False
    answer: InferenceReply | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    look_up: asyncio.Timeout | None = None
    _look_ups: int = 0
    _untaken_chars: int = 0
    _is_cut: bool = False
    _left_out: bool = False

    # For the call

    async def reply(self, timeout_s: float) -> InferenceReply:
        """The final reply; may be called again. Raises TimeoutError: the request goes on and can be looked up."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self.answer is None:
            await self._news(deadline_s)
        self.caller.reply = self.answer
        return self.answer

    async def deltas(self, timeout_s: float) -> AsyncIterator[TextDelta]:
        """Text deltas of a request with ``parameters.stream``; ends when the final reply has arrived.

        Raises TimeoutError: no delta for ``timeout_s``; the request goes on. Together the deltas are the reply's whole
        text, whatever chunks were lost.
        """
        if self.text is None:
            raise ValueError("parameters.stream: the request did not ask for a stream")
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + timeout_s
        while True:
            if (delta := self.take()) is not None:
                yield delta
                deadline_s = now_s() + timeout_s
            elif self.answer is not None:
                self.caller.reply = self.answer
                return
            else:
                try:
                    await self._news(deadline_s)
                except TimeoutError:
                    if self.is_given_up or not self.still_comes():
                        raise
                    deadline_s = now_s() + timeout_s

    def forget(self) -> None:
        """Stop waiting; the request goes on. Must be called in the end, and may be called again."""
        self.pending.close(self)

    # For ``Pending``

    def add(self, chunk: ReplyChunk) -> None:
        """Add a chunk of text. Once the untaken text exceeds ``MOST_UNTAKEN_CHARS``, this chunk and all later ones are
        dropped: the reply has them."""
        if self.text is None or self.answer is not None:
            return
        if self._is_cut:
            self._left_out = True
            return
        self._untaken_chars += len(chunk.text)
        if self._untaken_chars > MOST_UNTAKEN_CHARS:
            self._is_cut = self._left_out = True
        elif self.text.add(chunk):
            self.tell()

    def settle(self, reply: InferenceReply) -> None:
        """Set the reply. Only the first one counts."""
        if self.answer is None:
            self.answer = reply
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

    def take(self) -> TextDelta | None:
        """Text that arrived since the last call; None if there is none."""
        self._untaken_chars = 0
        return None if self.text is None else self.text.take()

    def still_comes(self) -> bool:
        """Whether chunks were dropped since the last call: the answer goes on, though there is nothing to take."""
        left_out, self._left_out = self._left_out, False
        return left_out

    async def _news(self, deadline_s: float) -> None:
        """Return when something has changed, or may have. Raises TimeoutError: past the deadline, or given up."""
        # Taken before anything is awaited, so that no news is missed.
        news = self.news
        left_s = deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0 or self.is_given_up:
            raise TimeoutError
        if self.is_lost:
            await self._look_up(min(left_s, _LOOK_UP_TIMEOUT_S))
            delay_s = _LOOK_UP_BACKOFF.delay_s(self._look_ups, random.random())  # noqa: S311 - jitter
            left_s = min(left_s, delay_s)
        if self.answer is None and not self.is_given_up:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await news.wait()

    async def _look_up(self, timeout_s: float) -> None:
        """Look up the recorded reply: it may be in a partition that this instance does not read."""
        self._look_ups += 1
        try:
            async with asyncio.timeout(timeout_s) as bound:
                self.look_up = bound
                async with self.pending.look_ups:
                    found = await self.pending.find_reply(self.tenant, self.request_id)
        except Exception as error:  # noqa: BLE001 - of whatever kind: it is asked again until the caller's time is over
            metrics.GATEWAY_LOOK_UPS.labels(result="failed").inc()
            kind = type(error).__name__
            self.pending.lines.warning("reply_look_up_failed", request_id=self.request_id, error=kind)
            return
        finally:
            self.look_up = None
        metrics.GATEWAY_LOOK_UPS.labels(result="missing" if found is None else "found").inc()
        if found is not None and found.tenant == self.tenant:
            self.settle(found)


class Pending:
    """Waiting calls of this instance: at most ``max_calls``, and half of them per tenant. Also the sink of the readers.
    For one event loop.

    Replies and chunks of any request may be passed in. They are ignored if no call waits for them, or only calls of
    another tenant. The tenant of a reply was set from the topic of its request.

    ``find_reply`` finds replies that this instance has not read, by tenant and request id; it may raise GatewayError.
    """

    def __init__(
        self,
        max_calls: int,
        chunks: ChunkReader,
        find_reply: Callable[[str, str], Awaitable[InferenceReply | None]],
    ) -> None:
        self._slots = TenantSlots(max_calls, max(1, max_calls // 2), busy, busy_with_tenant)
        self.chunks = chunks
        self.find_reply = find_reply
        self.look_ups = asyncio.Semaphore(LOOK_UPS)
        self.lines = LimitedLog(log)
        self._calls: dict[str, list[PendingReply]] = {}
        self._has_ended = False
        self._owned: frozenset[int] = frozenset()
        self._partition_count = 0

    def __len__(self) -> int:
        return self._slots.total

    def __contains__(self, request_id: str) -> bool:
        """Whether a call waits for this request. Thread-safe."""
        return request_id in self._calls

    @property
    def owns_partitions(self) -> bool:
        """Whether replies can arrive at this instance."""
        return bool(self._owned)

    def new_request_id(self) -> str:
        """A new request id whose reply is routed to this instance."""
        if not self._owned:
            # No partition to route to: the reply is looked up where it is recorded.
            return str(uuid4())
        return new_request_id(self._owned, self._partition_count)

    def open(self, tenant: str, request_id: str, *, streamed: bool = False) -> PendingReply:
        """Add a call that waits for the reply, before its request is published.

        Raises GatewayError: 429 at the tenant's limit, 503 at the limit of the instance.
        """
        self._slots.take(tenant)
        partition = partition_of(request_id, self._partition_count) if self._partition_count else -1
        # Lost if the id was made elsewhere, or before its partition was reassigned.
        is_lost = partition not in self._owned
        text = Reassembly() if streamed else None
        call = PendingReply(self, tenant, request_id, partition, is_lost, text, current(), self._has_ended)
        self._calls.setdefault(request_id, []).append(call)
        metrics.GATEWAY_WAITING.set(len(self))
        return call

    def close(self, call: PendingReply) -> None:
        """Remove a call. Idempotent."""
        same_id = self._calls.get(call.request_id)
        if same_id is None or call not in same_id:
            return
        same_id.remove(call)
        self._slots.give_back(call.tenant)
        if not same_id:
            del self._calls[call.request_id]
        metrics.GATEWAY_WAITING.set(len(self))
        if call.follows_chunks:
            self.chunks.leave(call.tenant)

    def end_waiting(self) -> None:
        """Give up all calls, also those opened later."""
        self._has_ended = True
        for same_id in self._calls.values():
            for call in same_id:
                call.give_up()

    # For the readers

    def settle(self, replies: list[InferenceReply]) -> None:
        """Deliver replies."""
        for reply in replies:
            for call in self._calls.get(reply.request_id, ()):
                if call.tenant == reply.tenant:
                    call.settle(reply)

    def add(self, chunks: list[Chunk]) -> None:
        """Deliver chunks, each with the tenant of its topic."""
        for tenant, chunk in chunks:
            for call in self._calls.get(chunk.request_id, ()):
                if call.tenant == tenant:
                    call.add(chunk)

    def owned(self, partitions: frozenset[int], partition_count: int) -> None:
        """Exactly these of ``partition_count`` partitions are read from now on; may be empty."""
        self._owned, self._partition_count = partitions, partition_count
        metrics.GATEWAY_REPLY_PARTITIONS.set(len(partitions))

    def lost(self, partitions: frozenset[int]) -> None:
        """Replies in these may be missed from now on. Called before the ``owned`` without them."""
        self._owned -= partitions
        calls = [call for same_id in self._calls.values() for call in same_id if call.partition in partitions]
        newly = [call for call in calls if not call.is_lost]
        for call in newly:
            call.is_lost = True
            call.tell()
        if newly:
            log.warning("calls_look_up_their_reply", calls=len(newly), partitions=sorted(partitions))
