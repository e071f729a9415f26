"""POST /v1/feedback: what users say of an output."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from fairlane.feedback import fault_of
from fairlane.outcomes import Code
from fairlane.record_bounds import MAX_COMMENT_CHARS, MAX_CORRECTION_CHARS, MAX_FEEDBACK_BYTES, MAX_TAGS
from fairlane.records import Feedback
from producers.gateway import openapi
from producers.gateway.identity.identity import Identity, Permission, require
from producers.gateway.native.deps import NativeDeps, checked_id, result_gone, unknown_request
from producers.gateway.native.response_bodies import FeedbackAnswer, answered
from producers.gateway.openapi import EXAMPLE_ID, TAKING_FEEDBACK, taking
from producers.gateway.results.request_status import RequestState
from producers.gateway.sending import body_of
from producers.openai_api.body import parse
from producers.openai_api.errors import GatewayError
from producers.openai_api.request_models import ClosedBody


class NewFeedback(ClosedBody):
    """What a user says of the output of a request. One field besides the id is needed."""

    request_id: str = Field(description="The request, of the caller's tenant")
    thumb: Literal["up", "down"] | None = Field(None, description="A verdict without degrees; or `score`")
    score: float | None = Field(None, ge=0, le=1, description="From 0, useless, to 1, perfect; or `thumb`")
    correction: str | None = Field(
        None, min_length=1, max_length=MAX_CORRECTION_CHARS, description="The text or label it should have been"
    )
    tags: list[str] = Field(
        default_factory=list, max_length=MAX_TAGS, description="Such as `wrong-fact`; `flagged` asks for a review"
    )
    comment: str | None = Field(None, min_length=1, max_length=MAX_COMMENT_CHARS, description="Free text")

    def to_feedback(self, caller: Identity) -> Feedback:
        """The record made from this body. Raises GatewayError: 400."""
        given = Feedback(
            request_id=self.request_id,
            tenant=caller.tenant,
            thumb=self.thumb,
            score=self.score,
            correction=self.correction,
            tags=tuple(self.tags),
            comment=self.comment,
            given_by=caller.requested_by,
        )
        fault = fault_of(given)
        if fault is not None:
            field, reason = fault
            raise GatewayError(400, Code.INVALID, reason, field=field)
        return given


_TAKING = taking(
    NewFeedback,
    {
        "A thumb": {"request_id": EXAMPLE_ID, "thumb": "up"},
        "A correction": {
            "request_id": EXAMPLE_ID,
            "score": 0.25,
            "correction": "The capital of Australia is Canberra.",
            "tags": ["wrong-fact"],
        },
    },
    has_key=False,
)


def add_feedback_route(router: APIRouter, deps: NativeDeps) -> None:
    """POST /v1/feedback."""
    Caller = Annotated[Identity, Depends(require(deps.authenticate, Permission.FEEDBACK_GIVE))]  # noqa: N806 - a type
    accepted = openapi.answered(openapi.FEEDBACK, "In the log; it counts within a second", 202)

    @router.post(
        "/v1/feedback",
        status_code=202,
        responses=accepted | TAKING_FEEDBACK,
        openapi_extra=_TAKING,
        tags=["requests"],
    )
    async def give_feedback(request: Request, caller: Caller) -> Response:
        """Rate, correct or flag the output of a request. The latest of each caller about a request counts."""
        raw = await body_of(request)
        if len(raw) > MAX_FEEDBACK_BYTES:
            raise GatewayError(413, Code.INVALID, f"{len(raw)} bytes are more than {MAX_FEEDBACK_BYTES}", field="body")
        body = parse(NewFeedback, raw)
        known = await deps.results.status(caller.tenant, checked_id(body.request_id))
        if known is None:
            raise unknown_request()
        if known.status is RequestState.DONE and known.reply is None:
            raise result_gone(deps, body.request_id, is_erased=known.is_erased)
        await deps.submitter.give_feedback(body.to_feedback(caller))
        return answered(FeedbackAnswer(request_id=body.request_id), 202)
