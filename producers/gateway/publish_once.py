"""Publish a request unless its idempotency key was used before."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fairlane.records import InferenceReply, InferenceRequest
from producers.gateway.idempotency import Idempotency, IdempotentCall
from producers.gateway.pipeline.call_context import present
from producers.gateway.ports import PendingReply, Submitter
from producers.openai_api.gateway_error import GatewayError
from producers.openai_api.reply_errors import UNCERTAIN

OnAccepted = Callable[[str, InferenceRequest], None]
"""Called with tenant and request for every request that is, or may be, in the log, so that its id is known."""


@dataclass(frozen=True, slots=True)
class Published:
    """A request accepted now, or earlier under the same key.

    Attributes:
        call: state of its idempotency key.
        request_id: id it was published with.
        model: model it asks for. The request itself is not kept: it may be large, and its answer far off.
        source: of the reply: a waiter, which must be forgotten in the end, or the earlier reply.
    """

    call: IdempotentCall
    request_id: str
    model: str
    source: PendingReply | InferenceReply


async def publish_once(
    submitter: Submitter,
    idempotency: Idempotency,
    on_accepted: OnAccepted,
    tenant: str,
    route: str,
    key: str | None,
    body: bytes,
    request: InferenceRequest,
) -> Published:
    """Publish a request whose id comes from ``submitter``, once per idempotency key.

    Args:
        submitter: publishes to Kafka.
        idempotency: deduplicates calls by key.
        on_accepted: called for a request accepted now, and for an uncertain publish: its caller has the id and may ask
            for it.
        tenant: of the identity.
        route: path template.
        key: idempotency key of the call, if any.
        body: raw bytes.
        request: the request made from the body.

    Raises:
        GatewayError: nothing was accepted, or that is uncertain (code ``UNCERTAIN``); 400, 409 or 422 because of the
            key.
    """
    call = await idempotency.begin(tenant, route, key, body, request.request_id)
    if call.request_id != request.request_id:
        request = replace(request, request_id=call.request_id)
    if call.reply is not None:
        if (caller := present.get()) is not None:
            caller.request_id, caller.reply, caller.is_repeat = call.request_id, call.reply, True
        return Published(call, request.request_id, request.model, call.reply)
    try:
        waiting = await submitter.submit(tenant, request)
    except GatewayError as error:
        if error.code != UNCERTAIN:
            await call.give_back()
            raise
        on_accepted(tenant, request)
        await call.doubt()
        raise
    on_accepted(tenant, request)
    try:
        await call.confirm()
    except BaseException:
        waiting.forget()
        raise
    return Published(call, request.request_id, request.model, waiting)
