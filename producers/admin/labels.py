"""Routes of the labelling queues of tenants."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from fairlane.record_bounds import MAX_CORRECTION_CHARS
from fairlane_server.administration.labels import TenantLabels
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.labelling.decisions import MOST_LABEL_CHARS, ItemState
from producers.admin.blocking import Serial
from producers.admin.deps import AT_MS, AdminDeps, Cursor, Limit
from producers.admin.problems import CHANGING, answered_errors
from producers.admin.tenants import Name
from producers.gateway.identity.identity import Identity
from producers.gateway.native.cursors import Cursors
from producers.gateway.native.response_bodies import ResponseBody
from producers.gateway.native.response_bodies import answered as answer
from producers.gateway.openapi import EXAMPLE_ID, answered, taking
from producers.gateway.sending import body_of
from producers.openai_api.body import parse

MOST_REVIEWER_CHARACTERS = 64


class LabelBody(BaseModel):
    """What a reviewer says of an item."""

    model_config = ConfigDict(extra="forbid")

    label: str = Field(min_length=1, max_length=MOST_LABEL_CHARS, description="Of a text good or bad, else the class")
    correction: str | None = Field(None, min_length=1, max_length=MAX_CORRECTION_CHARS)


class GoldBody(BaseModel):
    """The known answer of an item; null: it is not known any more."""

    model_config = ConfigDict(extra="forbid")

    label: str | None = Field(min_length=1, max_length=MOST_LABEL_CHARS)


class LabelItemAnswer(ResponseBody):
    """An item to be judged."""

    request_id: str
    task: str
    model: str
    model_version: str
    arm: str | None = None
    input: dict[str, Any]
    output: dict[str, Any]
    correction: str | None = Field(None, description="What the output should have been, by the feedback")
    lease_until_ms: int


class LeaseAnswer(ResponseBody):
    """The next item; left out if there is none now."""

    item: LabelItemAnswer | None = None


class LabelOutcomeAnswer(ResponseBody):
    """What became of an item."""

    request_id: str
    state: ItemState
    label: str | None = None


class GoldAnswer(ResponseBody):
    """An item whose answer is known, or not any more."""

    request_id: str
    is_gold: bool


class ReviewerAnswer(ResponseBody):
    """How one reviewer works."""

    reviewer: str
    labelled: int
    skipped: int
    gold: int
    gold_right: int
    settled: int
    agreed: int


class LabelStatisticsAnswer(ResponseBody):
    """Items by state, and the reviewers."""

    items: dict[str, int]
    reviewers: tuple[ReviewerAnswer, ...]


class ExportAnswer(ResponseBody):
    """A page of an export; with `format=chat` each line has its `example` and its `provenance`."""

    data: tuple[dict[str, Any], ...]
    left_out: int = Field(description="Items of this page that are no examples")
    has_more: bool
    next_cursor: str | None = None


Item = Annotated[
    str, Path(max_length=200, pattern=r"^[^\x00]+$", description="The request of the item", examples=[EXAMPLE_ID])
]
Reviewer = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=MOST_REVIEWER_CHARACTERS,
        pattern=r"^[!-~]+$",
        description="One of several people behind this key; without it, the caller is the reviewer",
    ),
]
Chat = Annotated[
    str, Query(alias="format", pattern=r"^(evaluation|chat)$", description="An evaluation set, or OpenAI's chat format")
]
Model = Annotated[str | None, Query(max_length=128, pattern=r"^[^\x00]*$", description="Only of this model")]

_ITEM = LabelItemAnswer(
    request_id=EXAMPLE_ID,
    task="generate",
    model="words",
    model_version="2",
    input={"prompt": "The capital of Australia?"},
    output={"text": "Sydney"},
    lease_until_ms=AT_MS,
)
_OUTCOME = LabelOutcomeAnswer(request_id=EXAMPLE_ID, state=ItemState.AGREED, label="bad")
_STATISTICS = LabelStatisticsAnswer(
    items={"agreed": 12, "open": 3},
    reviewers=(
        ReviewerAnswer(reviewer="user:u-17", labelled=14, skipped=1, gold=2, gold_right=2, settled=11, agreed=10),
    ),
)
_EXPORT = ExportAnswer(
    data=({"id": EXAMPLE_ID, "input": {"prompt": "The capital of Australia?"}, "expected": "Canberra"},),
    left_out=0,
    has_more=False,
)
_cursors = Cursors(tuple[int, str])


def router(deps: AdminDeps, labels: TenantLabels, calls: Serial) -> APIRouter:
    """All routes of labels. ``calls`` is the thread that uses ``labels``."""
    api = APIRouter(tags=["labels"])
    _add_reading(api, deps, labels, calls)
    Judge = Annotated[Identity, deps.caller(Permission.LABELS_JUDGE)]  # noqa: N806 - a type

    @api.post(
        "/labels/{tenant}/lease",
        responses=answered(LeaseAnswer(item=_ITEM), "The next item, or none") | CHANGING,
    )
    async def lease_item(tenant: Name, caller: Judge, reviewer: Reviewer = None) -> Response:
        """Lease the next item of a tenant, for 15 minutes, with what was asked and answered. The audit says who got
        it."""
        who = _reviewer(caller, reviewer)
        with answered_errors():
            task = await calls.run(partial(labels.lease, tenant, who, caller.requested_by))
        return answer(LeaseAnswer(item=None if task is None else LabelItemAnswer.model_validate(task)))

    @api.post(
        "/labels/{tenant}/items/{request_id}/label",
        responses=answered(_OUTCOME, "What became of it") | CHANGING,
        openapi_extra=taking(
            LabelBody, {"A bad answer": {"label": "bad", "correction": "The capital is Canberra."}}, has_key=False
        ),
    )
    async def label_item(
        request: Request, tenant: Name, request_id: Item, caller: Judge, reviewer: Reviewer = None
    ) -> Response:
        """Judge the leased item. The same label again changes nothing; without a lease 409."""
        body = parse(LabelBody, await body_of(request))
        who = _reviewer(caller, reviewer)
        with answered_errors():
            outcome = await calls.run(partial(labels.submit, tenant, who, request_id, body.label, body.correction))
        return answer(LabelOutcomeAnswer(request_id=request_id, state=outcome.state, label=outcome.label))

    @api.post("/labels/{tenant}/items/{request_id}/skip", responses=answered(_OUTCOME, "What became of it") | CHANGING)
    async def skip_item(tenant: Name, request_id: Item, caller: Judge, reviewer: Reviewer = None) -> Response:
        """Leave the leased item to other reviewers."""
        with answered_errors():
            outcome = await calls.run(partial(labels.skip, tenant, _reviewer(caller, reviewer), request_id))
        return answer(LabelOutcomeAnswer(request_id=request_id, state=outcome.state, label=outcome.label))

    @api.put(
        "/labels/{tenant}/items/{request_id}/gold",
        responses=answered(GoldAnswer(request_id=EXAMPLE_ID, is_gold=True), "The item") | CHANGING,
        openapi_extra=taking(GoldBody, {"A known answer": {"label": "bad"}}, has_key=False),
    )
    async def set_gold(request: Request, tenant: Name, request_id: Item, caller: Judge) -> Response:
        """Make the answer of an item known: reviewers get it now and then, and are measured by it."""
        label = parse(GoldBody, await body_of(request)).label
        with answered_errors():
            await calls.run(partial(labels.set_gold, tenant, request_id, label, caller.requested_by))
        return answer(GoldAnswer(request_id=request_id, is_gold=label is not None))

    return api


def _add_reading(api: APIRouter, deps: AdminDeps, labels: TenantLabels, calls: Serial) -> None:
    Reader = Annotated[Identity, deps.caller(Permission.LABELS_READ)]  # noqa: N806 - a type
    Judge = Annotated[Identity, deps.caller(Permission.LABELS_JUDGE)]  # noqa: N806 - a type

    @api.get("/labels/{tenant}/statistics", responses=answered(_STATISTICS, "The statistics") | CHANGING)
    async def get_statistics(tenant: Name, caller: Reader) -> Response:  # noqa: ARG001 - its permission
        """Items by state, and how reviewers agree with gold items and with each other."""
        with answered_errors():
            items, reviewers = await calls.run(partial(labels.statistics, tenant))
        data = tuple(map(ReviewerAnswer.model_validate, reviewers))
        return answer(LabelStatisticsAnswer(items=items, reviewers=data))

    @api.get("/labels/{tenant}/export", responses=answered(_EXPORT, "A page") | CHANGING)
    async def export_labels(
        tenant: Name,
        caller: Judge,
        export_format: Chat = "evaluation",
        model: Model = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """What was agreed on, with its texts and its provenance, the first first. A page may be short, and have a next
        one. The audit says who exported."""
        query = (caller.tenant, tenant, export_format, model)
        after = _cursors.decode(query, cursor) or (0, "")
        is_chat = export_format == "chat"
        with answered_errors():
            page = await calls.run(
                partial(labels.export, tenant, model, after, limit, caller.requested_by, is_chat=is_chat)
            )
        following = None if page.following is None else _cursors.encode(query, page.following)
        return answer(
            ExportAnswer(
                data=tuple(page.lines),
                left_out=page.left_out,
                has_more=following is not None,
                next_cursor=following,
            )
        )


def _reviewer(caller: Identity, reviewer: str | None) -> str:
    """An opaque name of who judges: the caller, or one of those behind its key."""
    return caller.requested_by if reviewer is None else f"{caller.requested_by} {reviewer}"
