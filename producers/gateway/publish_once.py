"""Publishing a request unless its idempotency key says that this was done before."""

from dataclasses import dataclass, replace

from fairlane.records import InferenceReply, InferenceRequest
from producers.gateway.errors import GatewayError
from producers.gateway.idempotency import Call, Idempotency
from producers.gateway.reply_errors import UNCERTAIN
from producers.gateway.seams import Submitter, Waiting


@dataclass(frozen=True, slots=True)
class Published:
    """A request that was accepted now, or under its key before.

    Attributes:
        call: what its key keeps.
        request: under the id that it was published with.
        source: of its reply: what waits for it, to be forgotten in the end, or the reply of before.
    """

    call: Call
    request: InferenceRequest
    source: Waiting | InferenceReply


async def publish_once(
    submitter: Submitter,
    idempotency: Idempotency,
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
        return Published(call, request, call.reply)
    try:
        waiting = await submitter.submit(tenant, request)
    except GatewayError as error:
        await (call.doubt() if error.code == UNCERTAIN else call.give_back())
        raise
    try:
        await call.confirm()
    except BaseException:
        waiting.forget()
        raise
    return Published(call, request, waiting)
