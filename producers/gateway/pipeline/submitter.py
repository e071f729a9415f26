"""Submit requests to Kafka, and wait for their replies."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from uuid import uuid4

from fairlane import cloud_events, metrics
from fairlane.backoff import Backoff
from fairlane.client.connector import KafkaHeaders
from fairlane.client.reassembly import TextDelta
from fairlane.client.requests import check_request
from fairlane.clock import ClockMs, now_ms
from fairlane.codec import Codec
from fairlane.logs import get_logger
from fairlane.names import GATEWAY_REPLIES, is_request_id, requests_topic
from fairlane.outcomes import Code
from fairlane.record_bounds import MAX_REQUEST_VALUE_BYTES
from fairlane.records import CancelRequest, InferenceReply, InferenceRequest
from fairlane_server.kafka.reply_partition import new_request_id, partition_of
from producers.gateway.limited_log import LimitedLog
from producers.gateway.pipeline.call_context import CallContext, present
from producers.gateway.pipeline.chunk_reader import Chunk, ChunkReader
from producers.gateway.pipeline.early_rejection import LatestLoad, RegistrySnapshot, reject_early
from producers.gateway.pipeline.pending import Pending, WaitingCall
from producers.gateway.pipeline.publisher import AsyncPublisher, draining
from producers.openai_api.errors import GatewayError

log = get_logger(__name__)

LOOK_UPS = 8
"""Concurrent look-ups of all calls of a process."""

_LOOK_UP_TIMEOUT_S = 3.0


class PendingReply:
    """An accepted request: its publish was acknowledged."""

    def __init__(self, call: WaitingCall, submitter: "Submitter", caller: CallContext | None) -> None:
        self._call = call
        self._submitter = submitter
        self._caller = caller
        self._backoff = Backoff(first_s=0.1, longest_s=3.0)
        self._look_ups = 0

    @property
    def request_id(self) -> str:
        return self._call.request_id

    async def reply(self, timeout_s: float) -> InferenceReply:
        """The final reply; may be called again. Raises TimeoutError: the request goes on and can be looked up."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self._call.reply is None:
            await self._news(deadline_s)
        self._note(self._call.reply)
        return self._call.reply

    async def deltas(self, timeout_s: float) -> AsyncIterator[TextDelta]:
        """Text deltas of a request with ``parameters.stream``; ends when the final reply has arrived.

        Raises TimeoutError: no delta for ``timeout_s``; the request goes on. Together the deltas are the reply's whole
        text, whatever chunks were lost.
        """
        if self._call.text is None:
            raise ValueError("parameters.stream: the request did not ask for a stream")
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + timeout_s
        while True:
            if (delta := self._call.take()) is not None:
                yield delta
                deadline_s = now_s() + timeout_s
            elif self._call.reply is not None:
                self._note(self._call.reply)
                return
            else:
                try:
                    await self._news(deadline_s)
                except TimeoutError:
                    if self._call.is_given_up or not self._call.still_comes():
                        raise
                    deadline_s = now_s() + timeout_s

    async def cancel(self) -> None:
        """Cancel the request. Its one final reply still comes."""
        if self._call.reply is None:
            try:
                await self._submitter.cancel(self._call.tenant, self.request_id)
            except GatewayError as error:
                self._submitter.lines.warning("cancel_not_published", request_id=self.request_id, code=error.code)

    def forget(self) -> None:
        """Stop waiting; the request goes on. Must be called in the end, and may be called again."""
        self._submitter.leave(self._call)

    async def _news(self, deadline_s: float) -> None:
        """Return when something has changed, or may have. Raises TimeoutError: past the deadline, or given up."""
        # Taken before anything is awaited, so that no news is missed.
        news = self._call.news
        left_s = deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0 or self._call.is_given_up:
            raise TimeoutError
        if self._call.is_lost:
            await self._look_up(min(left_s, _LOOK_UP_TIMEOUT_S))
            left_s = min(left_s, self._backoff.delay_s(self._look_ups, random.random()))  # noqa: S311 - jitter
        if self._call.reply is None and not self._call.is_given_up:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await news.wait()

    async def _look_up(self, timeout_s: float) -> None:
        """Look up the recorded reply: it may be in a partition that this instance does not read."""
        self._look_ups += 1
        try:
            async with asyncio.timeout(timeout_s) as bound:
                self._call.look_up = bound
                async with self._submitter.look_ups:
                    found = await self._submitter.find_reply(self._call.tenant, self.request_id)
        except Exception as error:  # noqa: BLE001 - of whatever kind: it is asked again until the caller's time is over
            metrics.GATEWAY_LOOK_UPS.labels(result="failed").inc()
            kind = type(error).__name__
            self._submitter.lines.warning("reply_look_up_failed", request_id=self.request_id, error=kind)
            return
        finally:
            self._call.look_up = None
        metrics.GATEWAY_LOOK_UPS.labels(result="missing" if found is None else "found").inc()
        if found is not None and found.tenant == self._call.tenant:
            self._call.settle(found)

    def _note(self, reply: InferenceReply) -> None:
        if self._caller is not None:
            self._caller.reply = reply


@dataclass(slots=True)
class Submitter:
    """Submits requests from one event loop. Also the sink of the reply reader. ``find_reply`` finds replies that this
    instance has not read, by tenant and request id; it may raise GatewayError."""

    codec: Codec
    publisher: AsyncPublisher
    chunks: ChunkReader
    pending: Pending
    registry: Callable[[], RegistrySnapshot]
    load: LatestLoad
    find_reply: Callable[[str, str], Awaitable[InferenceReply | None]]
    clock: ClockMs = now_ms
    look_ups: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LOOK_UPS))
    lines: LimitedLog = field(default_factory=lambda: LimitedLog(log))
    is_draining: bool = False
    _owned: frozenset[int] = frozenset()
    _partition_count: int = 0

    # For routes

    def new_request_id(self) -> str:
        """A new request id whose reply is routed to this instance."""
        if not self._owned:
            # No partition to route to: the reply is looked up where it is recorded.
            return str(uuid4())
        return new_request_id(self._owned, self._partition_count)

    async def submit(self, tenant: str, request: InferenceRequest) -> PendingReply:
        """Publish to the tenant's request topic and return when the publish is acknowledged.

        The request's ``request_id`` must come from ``new_request_id``: it routes the reply.

        Raises:
            GatewayError: the request is invalid or would be rejected anyway, too much is in flight here (429, 503), or
                Kafka does not take it (503). Nothing was accepted, unless the code is ``UNCERTAIN``.
        """
        if self.is_draining:
            raise draining()
        refusal = reject_early(tenant, request, self.registry(), self.load, self.clock())
        if refusal is not None:
            metrics.GATEWAY_REFUSED_EARLY.labels(code=refusal.code).inc()
            raise refusal
        value = self._encoded(replace(request, tenant=tenant, reply_to=GATEWAY_REPLIES), tenant)
        caller = present.get()
        call = self._open(tenant, request)
        try:
            if request.parameters.stream:
                call.follows_chunks = await self.chunks.follow(tenant)
            trace = () if caller is None else caller.trace
            headers: KafkaHeaders = [*cloud_events.of_request(tenant, request.request_id), *trace]
            await self.publisher.publish(requests_topic(tenant), request.request_id, value, headers)
        except BaseException:
            self.leave(call)
            raise
        if caller is not None:
            caller.request_id = request.request_id
        return PendingReply(call, self, caller)

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Cancel a request by its id, whichever instance accepted it. Raises GatewayError: 400, 503."""
        if not is_request_id(request_id):
            raise GatewayError(400, Code.INVALID, "must be the id of a request", field="request_id")
        value = self.codec.encode(CancelRequest(request_id, tenant))
        headers: KafkaHeaders = list(cloud_events.of_cancellation(tenant, request_id))
        await self.publisher.publish(requests_topic(tenant), request_id, value, headers)

    def end_waiting(self) -> None:
        """Reject new requests and end all waits. Accepted requests go on, as the error of their callers says."""
        self.is_draining = True
        self.pending.end_waiting()

    # For calls that wait

    def leave(self, call: WaitingCall) -> None:
        self.pending.close(call)
        metrics.GATEWAY_WAITING.set(len(self.pending))
        if call.follows_chunks:
            call.follows_chunks = False
            self.chunks.leave(call.tenant)

    # For the readers

    def owned(self, partitions: frozenset[int], partition_count: int) -> None:
        """Exactly these of ``partition_count`` partitions are read from now on; may be empty."""
        self._owned, self._partition_count = partitions, partition_count
        metrics.GATEWAY_REPLY_PARTITIONS.set(len(partitions))

    def lost(self, partitions: frozenset[int]) -> None:
        """Replies in these may be missed from now on. Called before the ``owned`` without them."""
        self._owned -= partitions
        if calls := self.pending.lose(partitions):
            log.warning("calls_look_up_their_reply", calls=calls, partitions=sorted(partitions))

    def replies(self, replies: list[InferenceReply]) -> None:
        for reply in replies:
            self.pending.settle(reply)

    def add(self, chunks: list[Chunk]) -> None:
        for tenant, chunk in chunks:
            self.pending.add(tenant, chunk)

    @property
    def owns_partitions(self) -> bool:
        """Whether replies can arrive at this instance."""
        return bool(self._owned)

    def _encoded(self, request: InferenceRequest, tenant: str) -> bytes:
        try:
            check_request(request, tenant)
            value = self.codec.encode(request)
        except ValueError as error:
            name, _, reason = str(error).partition(": ")
            raise GatewayError(400, Code.INVALID, reason or name, field=name if reason else None) from None
        except (TypeError, AttributeError, OverflowError):
            raise GatewayError(400, Code.INVALID, "a field has the wrong type") from None
        if len(value) > MAX_REQUEST_VALUE_BYTES:
            raise GatewayError(
                413, Code.INVALID, f"{len(value)} bytes are more than {MAX_REQUEST_VALUE_BYTES}", field="input"
            )
        return value

    def _open(self, tenant: str, request: InferenceRequest) -> WaitingCall:
        partition = partition_of(request.request_id, self._partition_count) if self._partition_count else -1
        call = self.pending.open(
            tenant,
            request.request_id,
            partition,
            # The id was made elsewhere, or before its partition was reassigned.
            is_lost=partition not in self._owned,
            streamed=request.parameters.stream,
        )
        metrics.GATEWAY_WAITING.set(len(self.pending))
        return call
