"""Publishing a request unless its idempotency key says that this was done before."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fairlane.records import InferenceReply, InferenceRequest
from producers.gateway.errors import GatewayError
from producers.gateway.idempotency import Call, Idempotency
from producers.gateway.pipeline.caller import present
from producers.gateway.reply_errors import UNCERTAIN
from producers.gateway.seams import Submitter, Waiting

OnAccepted = Callable[[str, InferenceRequest], None]
"""Told the tenant and the request of every call that is, or may be, in the log, so that its id is known."""


@dataclass(frozen=True, slots=True)
class Published:
    """A request that was accepted now, or under its key before.

    Attributes:
        call: what its key keeps.
        request_id: that it was published with.
        model: that it asked for. The request itself is not kept: it may be large, and its answer far off.
        source: of its reply: what waits for it, to be forgotten in the end, or the reply of before.
    """

    call: Call
    request_id: str
    model: str
    source: Waiting | InferenceReply


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
    """Publish a request whose id comes from ``submitter``.

    Args:
        submitter: the way into the log.
        idempotency: knows the keys.
        on_accepted: told what is accepted now, and what nobody knows of: its caller has the id and asks for it.
        tenant: of the identity.
        route: the path's template.
        key: of the call, if it has one.
        body: as it came.
        request: that it says.

    Raises:
        GatewayError: nothing was accepted, or nobody knows (its code says so); 400, 409 or 422 because of the key.
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
