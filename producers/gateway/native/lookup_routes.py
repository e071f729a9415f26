"""Routes of one request by its id: status, result, cancellation."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path
from starlette.responses import Response

from producers.gateway.identity.identity import Identity
from producers.gateway.native import openapi
from producers.gateway.native.deps import NativeDeps, checked_id, require_read, require_send
from producers.gateway.native.errors import RESULT_EXPIRED, unknown_request
from producers.gateway.native.response_bodies import (
    AcceptedAnswer,
    ResultAnswer,
    StatusAnswer,
    accepted_answer,
    answered,
    not_yet,
    result_answer,
    status_answer,
)
from producers.gateway.openapi import EXAMPLE_ID
from producers.gateway.results.request_status import RequestState
from producers.openai_api.errors import GatewayError

RequestId = Annotated[str, Path(description="Id of the request", examples=[EXAMPLE_ID])]

_RESULT = {
    **openapi.answers(200, ResultAnswer, "The final reply, whatever its outcome"),
    **openapi.answers(202, AcceptedAnswer, "No final reply so far"),
    **openapi.READING,
}
_STATUS = openapi.answers(200, StatusAnswer, "Its status") | openapi.READING
_CANCEL = {
    **openapi.answers(200, StatusAnswer, "The request had ended; nothing was cancelled"),
    **openapi.answers(202, AcceptedAnswer, "The cancellation was sent; the final reply follows"),
    **openapi.READING,
}


def add_lookup_routes(router: APIRouter, deps: NativeDeps) -> None:
    """GET and DELETE /v1/requests/{id}, GET /v1/results/{id} with its alias."""
    Caller = Annotated[Identity, Depends(deps.authenticate)]  # noqa: N806 - a type

    @router.get("/v1/requests/{request_id}", responses=_STATUS, tags=["requests"])
    async def get_request(request_id: RequestId, caller: Caller) -> Response:
        """The status of a request, when it passed each stage, and every decision about it with its reasons."""
        found = await deps.results.status(require_read(caller), checked_id(request_id))
        if found is None:
            raise unknown_request()
        return answered(status_answer(found))

    @router.get("/results/{request_id}", responses=_RESULT, tags=["aliases"])
    @router.get("/v1/results/{request_id}", responses=_RESULT, tags=["requests"])
    async def get_result(request_id: RequestId, caller: Caller) -> Response:
        """The final reply to a request, by default for 24 hours from its end; 202 while there is none yet."""
        tenant = require_read(caller)
        found = await deps.results.find(tenant, checked_id(request_id))
        if found is not None:
            if deps.clock_ms() - found.replied_at_ms > deps.results.kept_ms:
                raise _expired(deps, request_id)
            return answered(result_answer(found))
        known = await deps.results.status(tenant, request_id)
        if known is None:
            raise unknown_request()
        if known.status is RequestState.DONE and known.reply is None:
            raise _expired(deps, request_id)
        return not_yet(request_id, known.status)

    @router.delete("/v1/requests/{request_id}", status_code=202, responses=_CANCEL, tags=["requests"])
    async def cancel_request(request_id: RequestId, caller: Caller) -> Response:
        """Cancel a request. Its final reply still comes: `cancelled`, unless it ended sooner."""
        tenant = require_send(caller)
        try:
            known = await deps.results.status(tenant, checked_id(request_id))
        except GatewayError as error:
            if error.status != 503:
                raise
            # The request may exist. Cancelling an unknown id has no effect, and a cancel reaches only this tenant's.
            await deps.submitter.cancel(tenant, request_id)
            return answered(accepted_answer(request_id), 202)
        if known is None:
            raise unknown_request()
        if known.status is RequestState.DONE:
            return answered(status_answer(known))
        await deps.submitter.cancel(tenant, request_id)
        return answered(accepted_answer(request_id, known.status), 202)


def _expired(deps: NativeDeps, request_id: str) -> GatewayError:
    hours = deps.results.kept_ms / 3_600_000
    return GatewayError(404, RESULT_EXPIRED, f"results are kept for {hours:g} hours", request_id=request_id)
