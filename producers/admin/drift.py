"""Routes of drift, which change nothing."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.responses import Response

from fairlane.names import MODEL_PATTERN
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.postgres.drift_findings import DriftFindings, DriftSample, StatisticState
from producers.admin.blocking import Serial
from producers.admin.deps import AT_MS, AdminDeps, Cursor, Limit, Owner
from producers.admin.problems import READING, READING_ONE, answered_errors, not_found
from producers.gateway.identity.identity import Identity
from producers.gateway.native.cursors import Cursors
from producers.gateway.native.response_bodies import Page, ResponseBody, page_of
from producers.gateway.native.response_bodies import answered as answer
from producers.gateway.openapi import answered

MOST_STATISTICS = 1_000


class DriftAnswer(ResponseBody):
    """A change of the requests or answers of one tenant and model."""

    finding_id: str
    tenant: str
    model: str
    task: str
    version: str = Field(description="Whose answers changed; empty for the requests")
    statistic: str
    effect: float = Field(description="How much; the unit depends on the statistic")
    log_evidence: float = Field(description="Natural logarithm of the evidence")
    log_needed: float = Field(description="What it had to reach")
    since_ms: int = Field(description="Estimated time of the change")
    until_ms: int
    blocks: int = Field(description="Blocks of requests since then")
    before: dict[str, float] = Field(description="Quantiles of numbers, parts of categories")
    now: dict[str, float]
    found_at_ms: int


class DriftFindingAnswer(ResponseBody):
    """A finding, and requests that show it, the strangest first."""

    finding: DriftAnswer
    samples: tuple[DriftSample, ...]


class StatisticsAnswer(ResponseBody):
    """Statistics, those with the most evidence first; at most 1,000."""

    data: tuple[StatisticState, ...]


FindingId = Annotated[
    str, Path(pattern=r"^drift-[0-9a-f]{16}$", description="Id of the finding", examples=["drift-0123456789abcdef"])
]
OfModel = Annotated[str | None, Query(pattern=rf"^{MODEL_PATTERN.pattern}$", description="Of this model")]

_FINDING = DriftAnswer(
    finding_id="drift-0123456789abcdef",
    tenant="acme",
    model="smollm2-135m-instruct",
    task="generate",
    version="1",
    statistic="output_tokens",
    effect=0.21,
    log_evidence=14.2,
    log_needed=13.8,
    since_ms=AT_MS - 3_600_000,
    until_ms=AT_MS - 60_000,
    blocks=7,
    before={"p5": 8.0, "p50": 61.0, "p95": 240.0},
    now={"p5": 12.0, "p50": 96.0, "p95": 255.0},
    found_at_ms=AT_MS,
)
_SAMPLE = DriftSample("0b0f1b52-6a3f-4f0e-9a55-0c6f6f5d8a11", 3.4, AT_MS - 120_000)
_STATE = StatisticState("acme", "smollm2-135m-instruct", "generate", "", "prompt_tokens", "watching", 310, AT_MS, 0.4)
_cursors = Cursors(tuple[int, str])


def router(deps: AdminDeps, findings: DriftFindings, calls: Serial) -> APIRouter:
    """GET /drift and its parts. ``calls`` is a thread for reads that may take seconds."""
    api = APIRouter(tags=["drift"])
    Reader = Annotated[Identity, deps.caller(Permission.LOADS_READ)]  # noqa: N806 - a type
    page = Page[DriftAnswer](data=(_FINDING,), has_more=False)

    @api.get("/drift", responses=answered(page, "A page") | READING)
    async def list_findings(
        caller: Reader, tenant: Owner = None, model: OfModel = None, limit: Limit = 50, cursor: Cursor = None
    ) -> Response:
        """What was found, the latest first."""
        query = (caller.tenant, tenant, model)
        behind = _cursors.decode(query, cursor)
        with answered_errors():
            found = await calls.run(partial(findings.page, tenant, model, behind, limit + 1))
        return page_of(
            *(Page[DriftAnswer], found, limit, DriftAnswer.model_validate),
            lambda last: _cursors.encode(query, (last.found_at_ms, last.finding_id)),
        )

    @api.get("/drift/statistics", responses=answered(StatisticsAnswer(data=(_STATE,)), "The statistics") | READING)
    async def list_statistics(
        caller: Reader,  # noqa: ARG001 - its permission
        tenant: Owner = None,
        model: OfModel = None,
    ) -> Response:
        """How far every statistic is: what has a reference and is watched, and what needs more requests."""
        with answered_errors():
            found = await calls.run(partial(findings.statistics, tenant, model, MOST_STATISTICS))
        return answer(StatisticsAnswer(data=tuple(found)))

    @api.get(
        "/drift/{finding_id}",
        responses=answered(DriftFindingAnswer(finding=_FINDING, samples=(_SAMPLE,)), "The finding") | READING_ONE,
    )
    async def get_finding(finding_id: FindingId, caller: Reader) -> Response:  # noqa: ARG001 - its permission
        """One finding, with requests that show it."""
        with answered_errors():
            found = await calls.run(partial(findings.get, finding_id))
        if found is None:
            raise not_found(f"there is no finding {finding_id}")
        finding, samples = found
        return answer(DriftFindingAnswer(finding=DriftAnswer.model_validate(finding), samples=tuple(samples)))

    return api
