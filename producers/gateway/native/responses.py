"""HTTP responses of the native routes."""

from starlette.responses import Response

from producers.gateway.native.response_bodies import PREFIX, ResponseBody, accepted_answer
from producers.gateway.pipeline.call_context import note_error
from producers.gateway.results.request_status import RequestState
from producers.openai_api.reply_errors import CLIENT_CLOSED_REQUEST, client_gone

_ASK_AGAIN_S = 1


def answered(body: ResponseBody, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """The body as JSON, marked ``no-store``."""
    return _response(body.as_json(), status, headers or {})


def accepted(request_id: str, status: RequestState = RequestState.QUEUED) -> Response:
    """202 for an accepted request: its id, a UUID, and its links."""
    # The body of ``accepted_answer`` at a fifth of the time: most answers of a busy gateway are this one.
    own = f"{PREFIX}/requests/{request_id}"
    links = f'{{"self":"{own}","result":"{PREFIX}/results/{request_id}","events":"{own}/events"}}'
    body = f'{{"id":"{request_id}","status":"{status}","links":{links}}}'
    return _response(body.encode(), 202, {"location": own})


def not_yet(request_id: str, status: RequestState) -> Response:
    """202 for a request without a reply so far, with Retry-After."""
    return answered(accepted_answer(request_id, status), 202, {"retry-after": str(_ASK_AGAIN_S)})


def gone() -> Response:
    """499 for a client that has disconnected; it is only logged."""
    note_error(client_gone(None))
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _response(body: bytes, status: int, headers: dict[str, str]) -> Response:
    return Response(body, status, {"cache-control": "no-store", **headers}, "application/json")
