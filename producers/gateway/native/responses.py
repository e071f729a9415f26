"""Answers on their way out."""

from starlette.responses import Response

from producers.gateway.native.answer_bodies import Answer, accepted_answer, links_of
from producers.gateway.reply_errors import CLIENT_CLOSED_REQUEST
from producers.gateway.results.request_status import Status

_ASK_AGAIN_S = 1


def answered(body: Answer, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """The body as JSON, which nobody in between may keep."""
    return Response(body.as_json(), status, {"cache-control": "no-store", **(headers or {})}, "application/json")


def accepted(request_id: str, status: Status = Status.QUEUED) -> Response:
    """A request was taken: its id, and where to ask for it."""
    return answered(accepted_answer(request_id, status), 202, {"location": links_of(request_id).self})


def not_yet(request_id: str, status: Status) -> Response:
    """There is no reply to it yet."""
    return answered(accepted_answer(request_id, status), 202, {"retry-after": str(_ASK_AGAIN_S)})


def gone() -> Response:
    """For nobody: the caller has gone away."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
