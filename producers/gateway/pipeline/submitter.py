"""Submit requests to Kafka."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from uuid import uuid4

from fairlane import cloud_events, metrics
from fairlane.client.connector import KafkaHeaders
from fairlane.client.requests import check_request
from fairlane.clock import ClockMs, now_ms
from fairlane.codec import Codec
from fairlane.names import GATEWAY_REPLIES, is_request_id, requests_topic
from fairlane.outcomes import Code
from fairlane.record_bounds import MAX_REQUEST_VALUE_BYTES
from fairlane.records import CancelRequest, Feedback, InferenceRequest
from producers.gateway.pipeline.call_context import current
from producers.gateway.pipeline.early_rejection import LatestLoad, RegistrySnapshot, reject_early
from producers.gateway.pipeline.pending import Pending, PendingReply
from producers.gateway.pipeline.publisher import AsyncPublisher, draining
from producers.gateway.pipeline.spent_budgets import SpentBudgets
from producers.openai_api.errors import GatewayError


@dataclass(slots=True)
class Submitter:
    """Submits requests from one event loop."""

    codec: Codec
    publisher: AsyncPublisher
    pending: Pending
    registry: Callable[[], RegistrySnapshot]
    load: LatestLoad
    spent: SpentBudgets = field(default_factory=SpentBudgets)
    clock: ClockMs = now_ms
    is_draining: bool = False

    def new_request_id(self) -> str:
        """A new request id whose reply is routed to this instance."""
        return self.pending.new_request_id()

    async def submit(self, tenant: str, request: InferenceRequest) -> PendingReply:
        """Publish to the tenant's request topic and return when the publish is acknowledged.

        The request's ``request_id`` must come from ``new_request_id``: it routes the reply.

        Raises:
            GatewayError: the request is invalid or would be rejected anyway, too much is in flight here (429, 503), or
                Kafka does not take it (503). Nothing was accepted, unless the code is ``UNCERTAIN``.
        """
        if self.is_draining:
            raise draining()
        request_id, caller = request.request_id, current()
        refusal = self._refusal(tenant, request, caller.requested_by)
        if refusal is not None:
            metrics.GATEWAY_REFUSED_EARLY.labels(code=refusal.code).inc()
            raise refusal
        published = replace(request, tenant=tenant, reply_to=GATEWAY_REPLIES, requested_by=caller.requested_by)
        value = self._encoded(published, tenant)
        streamed = request.parameters.stream
        waiting = self.pending.open(tenant, request_id, streamed=streamed)
        try:
            if streamed:
                waiting.follows_chunks = await self.pending.chunks.follow(tenant)
            headers: KafkaHeaders = [*cloud_events.of_request(tenant, request_id), *caller.trace]
            await self.publisher.publish(requests_topic(tenant), request_id, value, headers)
        except BaseException:
            waiting.forget()
            raise
        caller.request_id = request_id
        return waiting

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Cancel a request by its id, whichever instance accepted it; its one final reply still comes. Raises
        GatewayError: 400, 503."""
        if not is_request_id(request_id):
            raise GatewayError(400, Code.INVALID, "must be the id of a request", field="request_id")
        value = self.codec.encode(CancelRequest(request_id, tenant))
        headers: KafkaHeaders = list(cloud_events.of_cancellation(tenant, request_id))
        await self.publisher.publish(requests_topic(tenant), request_id, value, headers)

    async def give_feedback(self, feedback: Feedback) -> None:
        """Publish valid feedback of its tenant and return when the publish is acknowledged. Raises GatewayError: 429,
        503."""
        tenant, request_id = feedback.tenant or "", feedback.request_id
        headers: KafkaHeaders = [*cloud_events.of_feedback(tenant, request_id, str(uuid4())), *current().trace]
        await self.publisher.publish(requests_topic(tenant), request_id, self.codec.encode(feedback), headers)

    def _refusal(self, tenant: str, request: InferenceRequest, caller: str | None) -> GatewayError | None:
        registry, now_ms = self.registry(), self.clock()
        refusal = reject_early(tenant, request, registry, self.load, now_ms)
        spec = None if registry.tenants is None else registry.tenants.get(tenant)
        return refusal if refusal is not None or spec is None else self.spent.refusal(spec, request, caller, now_ms)

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
