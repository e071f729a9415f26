"""Response bodies of the native API."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from fairlane.guardrail_records import GuardrailVerdict
from fairlane.outcomes import Outcome
from fairlane.records import CacheUse, Cost, InferenceReply, LabelScore, Output, PassageReference, Timings, TokenUsage
from fairlane_server.costs.daily_sums import SUMS, UsageSum
from fairlane_server.postgres.request_timeline import RecordedReply, TimelineEvent
from producers.gateway.results.request_status import RequestState, RequestStatus
from producers.openai_api.errors import GatewayError

PREFIX = "/v1"

ItemT = TypeVar("ItemT")
FoundT = TypeVar("FoundT")


class ResponseBody(BaseModel):
    """Base of responses made from records; None is left out."""

    model_config = ConfigDict(from_attributes=True, frozen=True)

    def as_json(self) -> bytes:
        """The body. NaN and infinity become null."""
        return self.model_dump_json(exclude_none=True).encode()


class Page(ResponseBody, Generic[ItemT]):
    """A page of a list; `next_cursor` is that of the next one."""

    data: tuple[ItemT, ...]
    has_more: bool
    next_cursor: str | None = Field(None, description="For the page behind this one; none: there is no more")


class FeedbackAnswer(ResponseBody):
    """Feedback that is in the log."""

    request_id: str
    status: str = "accepted"


class Links(ResponseBody):
    """Paths of the request, its result and its events."""

    self: str
    result: str
    events: str


class CostAnswer(ResponseBody):
    """What was charged. Left out where no price was known."""

    amount: str = Field(description="In units of the currency, exactly, as a decimal number")
    currency: str = Field(description="ISO 4217")


class BudgetAnswer(ResponseBody):
    """The soft budget that was reached, or the hard one that the request was refused for. Amounts are in billionths of
    one unit of the currency, as known at admission."""

    limit: str = Field(description="soft or hard")
    of: str = Field(description="tenant, each_key, each_user, or the name of one caller")
    caller: str | None = Field(None, description="The caller, for a budget that is not the tenant's")
    period: str = Field(description="day or month, in UTC")
    currency: str = Field(description="ISO 4217")
    limit_nanos: int
    spent_nanos: int
    reserved_nanos: int = Field(description="Estimated for requests that were admitted and were not done")
    renews_at_ms: int


class RetrievalAnswer(ResponseBody):
    """Retrieval as performed; `reason` says why it differs from the request."""

    collection: str
    mode: str
    reason: str | None = None
    took_ms: int = 0


class EndedAnswer(ResponseBody):
    """A request that ended, without its output."""

    id: str
    status: RequestState = RequestState.DONE
    outcome: str = Field(description=f"How it ended: {', '.join(Outcome)}")
    code: str | None = Field(None, description="Why it was refused or failed")
    field: str | None = Field(None, description="The field at fault")
    message: str | None = None
    retry_after_ms: int | None = Field(None, description="When trying again makes sense")
    model: str | None = None
    model_version: str | None = None
    task: str | None = None
    finish_reason: str | None = None
    usage: TokenUsage
    cost: CostAnswer | None = None
    budget: BudgetAnswer | None = None
    timings: Timings
    degradations: tuple[str, ...] = Field((), description="What was taken from it so that it could be served")
    guardrails: tuple[GuardrailVerdict, ...] = Field(
        (), description="Checks of its input and output, and post-processing, in order; never the text"
    )
    attempts: int = Field(1, description="Runs of an engine that it took part in")
    ended_at_ms: int


class ResultAnswer(EndedAnswer):
    """The final reply to a request."""

    output: Output | None = Field(
        None,
        description="With the outcome ok: `text` of generate, with `logprobs` for each token; `embeddings` of embed, "
        "one for each text; `scores` of rank, one for each document in their order; `labels` of classify, the "
        "likeliest first. A number that is not finite is null.",
    )
    passages: tuple[PassageReference, ...] = ()
    retrieval: RetrievalAnswer | None = None
    cache: CacheUse | None = None


_REPLY_FIELDS = tuple(ResultAnswer.model_fields.keys() & {field.name for field in fields(InferenceReply)})


class StatusAnswer(ResponseBody):
    """Status of a request."""

    id: str
    status: RequestState
    outcome: str | None = Field(None, description="Of one that is done, while its result is kept")
    is_erased: bool = Field(False, description="Its result was erased")
    code: str | None = None
    message: str | None = None
    model: str | None = None
    task: str | None = None
    submitted_at_ms: int | None = None
    ended_at_ms: int | None = None
    links: Links
    events: tuple[TimelineEvent, ...] = Field(
        (), description="What happened, in order: decisions with their reasons, stages, costs; no text of the request"
    )


class AcceptedAnswer(ResponseBody):
    """A durable request: it gets exactly one final reply."""

    id: str
    status: RequestState
    links: Links


class HistoryAnswer(Page[EndedAnswer]):
    """A page of ended requests, newest first."""


class UsageAnswer(ResponseBody):
    """Sums of one group, in one currency; of its groups those that were asked for."""

    day: str | None = None
    month: str | None = None
    model: str | None = None
    model_version: str | None = None
    pool: str | None = None
    priority: str | None = None
    requested_by: str | None = Field(
        None, description="Caller: `key:` and the id of a key, `user:` and the subject of a token; empty: not known"
    )
    requests: int
    cached_answers: int = Field(description="Those of them that an earlier answer was reused for")
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    images: int
    engine_ms: int
    cost: CostAnswer | None = None

    @classmethod
    def of(cls, one: UsageSum, keys: Mapping[str, str]) -> Self:
        """The sums, with the names of their group."""
        cost = None
        if one.amount is not None and one.currency is not None:
            cost = CostAnswer(amount=one.amount, currency=one.currency)
        return cls(**{name: getattr(one, name) for name in SUMS if name != "cost_nanos"}, cost=cost, **keys)


class UsagePage(Page[UsageAnswer]):
    """A page of sums, in the order of the groups."""


class BudgetState(ResponseBody):
    """One budget. Amounts are in units of the currency, exactly, as decimal numbers."""

    of: str = Field(description="tenant, each_key, each_user, or the name of one caller")
    caller: str | None = Field(None, description="The caller, for a budget that is not the tenant's")
    period: str = Field(description="day or month, in UTC")
    currency: str = Field(description="ISO 4217")
    soft: str | None = Field(None, description="Requests are served with a notice from here on")
    hard: str | None = Field(None, description="Requests are refused from here on")
    at_soft: str = Field(description="warn or degrade")
    spent: str = Field(description="In this period, as far as it is recorded")
    reserved: str | None = Field(None, description="Estimated for requests that are not done; left out if not known")
    renews_at_ms: int


class BudgetPage(ResponseBody):
    """The budgets of a tenant."""

    data: tuple[BudgetState, ...]


class RankedDocument(ResponseBody):
    """The index of a document in the given list, and its score."""

    index: int
    score: float | None


class RankAnswer(ResponseBody):
    """Documents, best first."""

    id: str
    model: str | None = None
    results: tuple[RankedDocument, ...]
    usage: TokenUsage
    cost: CostAnswer | None = None


class ClassifyAnswer(ResponseBody):
    """Classes, likeliest first."""

    id: str
    model: str | None = None
    labels: tuple[LabelScore, ...]
    usage: TokenUsage
    cost: CostAnswer | None = None


class NativeErrorDetail(ResponseBody):
    """Code, field and message of an error."""

    code: str = Field(description="One word for programs")
    message: str
    field: str | None = Field(None, description="The field at fault")
    retry_after_ms: int | None = Field(None, description="When trying again makes sense; also in Retry-After")
    request_id: str | None = Field(None, description="The request it is about; ask for its result")


class ErrorAnswer(ResponseBody):
    """Body of every error."""

    error: NativeErrorDetail

    @classmethod
    def of(cls, error: GatewayError) -> Self:
        """The body of this error."""
        return cls(error=NativeErrorDetail.model_validate(error))


def links_of(request_id: str) -> Links:
    own = f"{PREFIX}/requests/{request_id}"
    return Links(self=own, result=f"{PREFIX}/results/{request_id}", events=f"{own}/events")


def accepted_answer(request_id: str, status: RequestState = RequestState.QUEUED) -> AcceptedAnswer:
    return AcceptedAnswer(id=request_id, status=status, links=links_of(request_id))


def ended_fields(recorded: RecordedReply) -> dict[str, Any]:
    """Fields of a ``ResultAnswer``, and of an ``EndedAnswer`` among them."""
    reply = recorded.reply
    fields = {name: getattr(reply, name) for name in _REPLY_FIELDS}
    return fields | {
        "id": reply.request_id,
        "retrieval": reply.retrieval_use,
        "cache": reply.cache_use,
        "ended_at_ms": recorded.replied_at_ms,
    }


def result_answer(recorded: RecordedReply) -> ResultAnswer:
    """The final reply."""
    return ResultAnswer.model_validate(ended_fields(recorded))


def status_answer(status: RequestStatus) -> StatusAnswer:
    """The status, with the request's events."""
    reply = status.reply
    return StatusAnswer(
        id=status.request_id,
        status=status.status,
        outcome=reply and reply.outcome,
        is_erased=status.is_erased,
        code=reply and reply.code,
        message=reply and reply.message,
        model=status.model,
        task=status.task,
        submitted_at_ms=status.submitted_at_ms,
        ended_at_ms=status.ended_at_ms,
        links=links_of(status.request_id),
        events=status.events,
    )


def rank_answer(reply: InferenceReply, top_n: int | None) -> RankAnswer:
    """The ranked documents of an ``ok`` reply. NaN scores come last."""
    scores = () if reply.output is None or reply.output.scores is None else reply.output.scores
    order = sorted(range(len(scores)), key=lambda index: (scores[index] != scores[index], -scores[index], index))
    results = tuple(RankedDocument(index=index, score=scores[index]) for index in order[:top_n])
    return RankAnswer(
        id=reply.request_id, model=reply.model, results=results, usage=reply.usage, cost=_cost(reply.cost)
    )


def classify_answer(reply: InferenceReply, top_n: int | None) -> ClassifyAnswer:
    """The classes of an ``ok`` reply."""
    labels = () if reply.output is None or reply.output.labels is None else reply.output.labels
    return ClassifyAnswer(
        id=reply.request_id, model=reply.model, labels=labels[:top_n], usage=reply.usage, cost=_cost(reply.cost)
    )


def _cost(cost: Cost | None) -> CostAnswer | None:
    return None if cost is None else CostAnswer.model_validate(cost)


_ASK_AGAIN_S = 1


def answered(body: ResponseBody, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """The body as JSON, marked ``no-store``."""
    return _response(body.as_json(), status, headers or {})


def page_of(
    page: type[Page[ItemT]],
    found: Sequence[FoundT],
    limit: int,
    to_answer: Callable[[FoundT], ItemT],
    cursor_of: Callable[[FoundT], str],
) -> Response:
    """The first ``limit`` items as a page; a further one means that there is another page."""
    shown, has_more = found[:limit], len(found) > limit
    following = cursor_of(shown[-1]) if has_more else None
    return answered(page(data=tuple(map(to_answer, shown)), has_more=has_more, next_cursor=following))


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


def _response(body: bytes, status: int, headers: dict[str, str]) -> Response:
    return Response(body, status, {"cache-control": "no-store", **headers}, "application/json")
