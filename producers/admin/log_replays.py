"""Routes of replays of the log."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from fairlane.clock import now_ms
from fairlane.names import MODEL_PATTERN, TENANT_PATTERN, priority_topic
from fairlane_server.administration.log_replays import LogReplayOffice, checked_against
from fairlane_server.administration.model_routes import ModelRoutes
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.log_replay.plan import MOST_TENANTS, LogReplayAction, LogReplayPlan, LogReplayState
from fairlane_server.log_replay.progress import ReplayCounts, ReplayRange
from fairlane_server.log_replay.store import LogReplay, ReplayProgress
from fairlane_server.log_replay.verdict import ReplayReport, ReplayVerdict
from fairlane_server.models.routes import VERSION_PATTERN
from producers.admin.blocking import Serial
from producers.admin.deps import AT_MS, AdminDeps, Cursor, Limit, ms_of
from producers.admin.fields import TimeField
from producers.admin.models import MOST_REASON_CHARACTERS, Reason
from producers.admin.problems import CHANGING, READING, READING_ONE, answered_errors
from producers.gateway.identity.identity import Identity
from producers.gateway.native.cursors import Cursors
from producers.gateway.native.response_bodies import Page, ResponseBody, page_of
from producers.gateway.native.response_bodies import answered as answer
from producers.gateway.openapi import answered, taking
from producers.gateway.sending import body_of
from producers.openai_api.body import parse

_Version = Annotated[str, Field(pattern=rf"^{VERSION_PATTERN.pattern}$")]
_Tenant = Annotated[str, Field(pattern=rf"^{TENANT_PATTERN.pattern}$")]


class LogReplayBody(BaseModel):
    """What to replay."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(pattern=rf"^{MODEL_PATTERN.pattern}$")
    candidate: _Version = Field(description="The version to try")
    against: _Version | None = Field(None, description="The version whose work is replayed; by default the champion")
    since: TimeField = Field(alias="from", description="Work dispatched then or later")
    until: TimeField | None = Field(None, alias="to", description="Work dispatched before then; by default now")
    tenants: tuple[_Tenant, ...] = Field((), max_length=MOST_TENANTS, description="By default all that allow it")
    sample: float = Field(0.1, gt=0, le=1, description="Part of the requests")
    max_requests: int | None = Field(None, ge=1, le=2**53)
    max_outstanding: int = Field(200, ge=2, le=100_000, description="Most copies that wait or run at a time")
    name: str | None = Field(None, pattern=rf"^{TENANT_PATTERN.pattern}$", description="A name for it; unique")
    reason: str = Field("", max_length=MOST_REASON_CHARACTERS, pattern=r"^[^\x00]*$")


class LogReplayAnswer(ResponseBody):
    """A replay. Its report has a route of its own."""

    replay: str
    name: str | None = None
    model: str
    candidate: str
    against: str = Field(description="The version whose work is replayed, and which runs it again")
    tenants: tuple[str, ...]
    from_ms: int
    until_ms: int
    sample: float
    most_requests: int | None = None
    most_outstanding: int
    ranges: tuple[ReplayRange, ...] | None = Field(None, description="Offsets of the log; none before it is begun")
    state: LogReplayState
    trouble: str | None = Field(None, description="Why it makes no progress now, or why it failed")
    created_by: str
    reason: str
    created_at_ms: int
    started_at_ms: int | None = None
    ended_at_ms: int | None = None
    progress: ReplayProgress


class LogReplayReportAnswer(ResponseBody):
    """The verdict of a replay, and the figures of each task. Figures alone: no text of a tenant."""

    replay: str
    state: LogReplayState
    is_final: bool = Field(description="Of a finished replay; else of what has a result now, up to a bound")
    report: ReplayReport


ReplayName = Annotated[
    str,
    Path(
        pattern=rf"^{TENANT_PATTERN.pattern}$",
        description="Id or name of the replay",
        examples=["replay-0123456789abcdef"],
    ),
]

_REPLAY = LogReplay(
    replay="replay-0123456789abcdef",
    name="yesterday",
    model="digits",
    candidate="2",
    against="1",
    tenants=("acme",),
    from_ms=AT_MS - 86_400_000,
    until_ms=AT_MS,
    sample=0.1,
    most_requests=None,
    most_outstanding=200,
    ranges=(ReplayRange(priority_topic("classify", "normal"), 0, 100, 10_100),),
    state=LogReplayState.RUNNING,
    trouble=None,
    created_by="user:u-17",
    reason="trained on the new forms",
    created_at_ms=AT_MS,
    started_at_ms=AT_MS + 900,
    ended_at_ms=None,
    progress=ReplayProgress(
        ReplayCounts(read=4_000, sampled=400, copied=398, erased=2), 4_100, 10_000, {"candidate": 390, "champion": 388}
    ),
    report=None,
)
_PRESENT = LogReplayAnswer.model_validate(_REPLAY)
_REPORT = LogReplayReportAnswer(
    replay=_REPLAY.replay,
    state=LogReplayState.FINISHED,
    is_final=True,
    report=ReplayReport(ReplayVerdict.UNDECIDED, "classify: distance: 40 pairs are fewer than 50", ()),
)
_WISH: dict[str, Any] = {"model": "digits", "candidate": "2", "from": "2026-01-31T12:00:00Z", "sample": 0.1}
_cursors = Cursors(tuple[int, str])


def router(deps: AdminDeps, office: LogReplayOffice, calls: Serial, routes: ModelRoutes) -> APIRouter:
    """All routes of replays. ``calls`` is the thread that uses the office."""
    api = APIRouter(tags=["replays of the log"])
    _add_reading(api, deps, office, calls)
    _add_changing(api, deps, office, calls, routes)
    return api


def _add_reading(api: APIRouter, deps: AdminDeps, office: LogReplayOffice, calls: Serial) -> None:
    Reader = Annotated[Identity, deps.caller(Permission.REGISTRY_READ)]  # noqa: N806 - a type
    page = Page[LogReplayAnswer](data=(_PRESENT,), has_more=False)

    @api.get("/replays", responses=answered(page, "A page") | READING)
    async def list_replays(caller: Reader, limit: Limit = 50, cursor: Cursor = None) -> Response:
        """The replays of the log, the newest first."""
        behind = _cursors.decode(caller.tenant, cursor)
        with answered_errors():
            found = await calls.run(partial(office.page, behind, limit + 1))
        return page_of(
            *(Page[LogReplayAnswer], found, limit),
            LogReplayAnswer.model_validate,
            lambda last: _cursors.encode(caller.tenant, (last.created_at_ms, last.replay)),
        )

    @api.get("/replays/{replay}", responses=answered(_PRESENT, "The replay") | READING_ONE)
    async def get_replay(replay: ReplayName, caller: Reader) -> Response:  # noqa: ARG001 - its permission
        """A replay and how far it is."""
        with answered_errors():
            found = await calls.run(partial(office.get, replay))
        return _answer(found)

    @api.get("/replays/{replay}/report", responses=answered(_REPORT, "The report") | READING_ONE)
    async def get_report(replay: ReplayName, caller: Reader) -> Response:  # noqa: ARG001 - its permission
        """Whether the candidate differs from the earlier answers by more than the champion itself does."""
        with answered_errors():
            found, report = await calls.run(partial(office.report, replay))
        is_final = found.report is not None
        return answer(
            LogReplayReportAnswer.model_validate(
                {"replay": found.replay, "state": found.state, "is_final": is_final, "report": report}
            )
        )


def _add_changing(api: APIRouter, deps: AdminDeps, office: LogReplayOffice, calls: Serial, routes: ModelRoutes) -> None:
    Starter = Annotated[Identity, deps.caller(Permission.REGISTRY_WRITE)]  # noqa: N806 - a type
    Steerer = Annotated[Identity, deps.caller(Permission.ROLLOUTS_STEER)]  # noqa: N806 - a type

    @api.post(
        "/replays",
        status_code=201,
        responses=answered(_PRESENT, "The planned replay", 201) | CHANGING,
        openapi_extra=taking(LogReplayBody, {"A tenth of a day": _WISH}, has_key=False),
    )
    async def create_replay(request: Request, caller: Starter) -> Response:
        """Plan a replay, which this process or another one like it carries out. Nobody gets an answer of it."""
        plan = _plan(parse(LogReplayBody, await body_of(request)))
        with answered_errors():
            against = await deps.kafka_calls.run(partial(checked_against, plan, routes))
            made = await calls.run(partial(office.create, plan, against, caller.requested_by))
        return _answer(made, 201)

    async def steered(replay: str, action: LogReplayAction, caller: Identity, reason: str) -> Response:
        with answered_errors():
            found = await calls.run(partial(office.steer, replay, action, caller.requested_by, reason))
        return _answer(found)

    changed = answered(_PRESENT, "The replay") | CHANGING

    @api.post("/replays/{replay}/pause", responses=changed)
    async def pause_replay(replay: ReplayName, caller: Steerer, reason: Reason = "") -> Response:
        """Write no more copies. Those that wait or run are finished."""
        return await steered(replay, LogReplayAction.PAUSE, caller, reason)

    @api.post("/replays/{replay}/resume", responses=changed)
    async def resume_replay(replay: ReplayName, caller: Steerer, reason: Reason = "") -> Response:
        """Let a paused replay go on."""
        return await steered(replay, LogReplayAction.RESUME, caller, reason)

    @api.post("/replays/{replay}/cancel", responses=changed)
    async def cancel_replay(replay: ReplayName, caller: Steerer, reason: Reason = "") -> Response:
        """End a replay. Copies that wait or run are finished."""
        return await steered(replay, LogReplayAction.CANCEL, caller, reason)


def _plan(body: LogReplayBody) -> LogReplayPlan:
    until_ms = ms_of(body.until)
    since_ms = ms_of(body.since)
    return LogReplayPlan(
        model=body.model,
        candidate=body.candidate,
        against=body.against,
        from_ms=0 if since_ms is None else since_ms,
        until_ms=now_ms() if until_ms is None else until_ms,
        tenants=body.tenants,
        sample=body.sample,
        most_requests=body.max_requests,
        most_outstanding=body.max_outstanding,
        name=body.name,
        reason=body.reason,
    )


def _answer(found: LogReplay, status: int = 200) -> Response:
    return answer(LogReplayAnswer.model_validate(found), status)
