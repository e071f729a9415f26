"""Kafka implementation of ``producers.gateway.ports.Submitter``."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol
from uuid import uuid4

from fairlane import cloud_events, metrics
from fairlane.client.ports import KafkaHeaders
from fairlane.client.requests import check_request
from fairlane.clock import ClockMs, now_ms
from fairlane.codec import Codec
from fairlane.logs import get_logger
from fairlane.names import GATEWAY_REPLIES, is_request_id, requests_topic
from fairlane.outcomes import Code
from fairlane.record_bounds import MAX_REQUEST_VALUE_BYTES
from fairlane.records import CancelRequest, InferenceReply, InferenceRequest
from fairlane.trace_context import TraceHeaders
from fairlane_server.kafka.reply_partition import new_request_id, partition_of
from producers.gateway.limited_log import LimitedLog
from producers.gateway.pipeline.call_context import present
from producers.gateway.pipeline.chunk_reader import Chunk
from producers.gateway.pipeline.early_rejection import LatestLoad, RegistrySnapshot, reject_early
from producers.gateway.pipeline.pending import LOOK_UPS, FindReply, KafkaPendingReply, Pending, WaitingCall
from producers.gateway.pipeline.publisher import draining
from producers.openai_api.errors import GatewayError

log = get_logger(__name__)


class RecordPublisher(Protocol):
    """The part of ``Publisher`` used here."""

    async def publish(self, topic: str, request_id: str, value: bytes, headers: KafkaHeaders) -> None: ...


class TenantChunks(Protocol):
    """The part of ``ChunkReader`` used here."""

    async def follow(self, tenant: str) -> bool: ...

    def leave(self, tenant: str) -> None: ...


@dataclass(slots=True)
class KafkaSubmitter:
    """Submits requests from one event loop. Also the sink of the reply reader.

    Args:
        registry: returns the current tenants and models.
        load: latest load.
        find_reply: finds replies that this instance has not read.
    """

    codec: Codec
    publisher: RecordPublisher
    chunks: TenantChunks
    pending: Pending
    registry: Callable[[], RegistrySnapshot]
    load: LatestLoad
    find_reply: FindReply
    clock: ClockMs = now_ms
    look_ups: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LOOK_UPS))
    lines: LimitedLog = field(default_factory=lambda: LimitedLog(log))
    is_draining: bool = False
    _owned: frozenset[int] = frozenset()
    _partition_count: int = 0

    # For routes

    def new_request_id(self) -> str:
        if not self._owned:
            # No partition to route to: the reply is looked up where it is recorded.
            return str(uuid4())
        return new_request_id(self._owned, self._partition_count)

    async def submit(self, tenant: str, request: InferenceRequest) -> KafkaPendingReply:
        if self.is_draining:
            raise draining()
        refusal = reject_early(tenant, request, self.registry(), self.load, self.clock())
        if refusal is not None:
            metrics.GATEWAY_REFUSED_EARLY.labels(code=refusal.code).inc()
            raise GatewayError(
                refusal.status,
                refusal.code,
                refusal.message,
                field=refusal.field,
                retry_after_ms=refusal.retry_after_ms,
            )
        value = self._encoded(replace(request, tenant=tenant, reply_to=GATEWAY_REPLIES), tenant)
        caller = present.get()
        call = self._open(tenant, request)
        try:
            if request.parameters.stream:
                call.follows_chunks = await self.chunks.follow(tenant)
            await self._publish(tenant, request.request_id, value, () if caller is None else caller.trace)
        except BaseException:
            self.leave(call)
            raise
        if caller is not None:
            caller.request_id = request.request_id
        return KafkaPendingReply(call, self, caller)

    async def cancel(self, tenant: str, request_id: str) -> None:
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
        self._owned, self._partition_count = partitions, partition_count
        metrics.GATEWAY_REPLY_PARTITIONS.set(len(partitions))

    def lost(self, partitions: frozenset[int]) -> None:
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

    async def _publish(self, tenant: str, request_id: str, value: bytes, trace: TraceHeaders) -> None:
        headers: KafkaHeaders = [*cloud_events.of_request(tenant, request_id), *trace]
        await self.publisher.publish(requests_topic(tenant), request_id, value, headers)
