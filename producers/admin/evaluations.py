"""Routes of evaluation sets, runs, schedules and calibrations of judges."""

import asyncio
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from fairlane.clock import now_ms
from fairlane.outcomes import Code
from fairlane_server.administration.evaluations import TenantEvaluations
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.evaluation.evaluation_set import EvaluationSet, EvaluationSetError, read_evaluation_set
from fairlane_server.evaluation.schedules import EvaluationSchedule
from fairlane_server.evaluation.set_store import SET_NAME_PATTERN, StoredSet
from producers.admin.blocking import BUSY, Serial
from producers.admin.deps import AdminDeps, Cursor, Limit
from producers.admin.evaluation_answers import (
    EXAMPLE_CALIBRATION,
    EXAMPLE_COMPARISON,
    EXAMPLE_EXAMPLES,
    EXAMPLE_RUN,
    EXAMPLE_SCHEDULE,
    EXAMPLE_SET,
    CalibrationAnswer,
    CalibrationsAnswer,
    ComparisonAnswer,
    ExamplesAnswer,
    RemovedAnswer,
    RunAnswer,
    ScheduleAnswer,
    ScheduleBody,
    SchedulesAnswer,
    SetAnswer,
    run_answer,
)
from producers.admin.models import ModelName
from producers.admin.problems import CHANGING, READING, READING_ONE, answered_errors
from producers.admin.tenants import Name
from producers.gateway.identity.identity import Identity
from producers.gateway.native.cursors import Cursors
from producers.gateway.native.response_bodies import Page, page_of
from producers.gateway.native.response_bodies import answered as answer
from producers.gateway.openapi import answered, taking
from producers.gateway.sending import body_of
from producers.openai_api.body import parse
from producers.openai_api.errors import GatewayError

MOST_EXAMPLES_OF_PAGE = 20
"""Each may have a megabyte."""
_MOST_UPLOADS = 2
_RETRY_AFTER_MS = 2_000


SetName = Annotated[
    str, Path(pattern=rf"^{SET_NAME_PATTERN.pattern}$", description="Name of the set", examples=["holdout"])
]
SetVersion = Annotated[int, Path(ge=1, le=2**31, description="Version of the set", examples=[1])]
RunId = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$", description="Id of the run", examples=["0123456789abcdef"])]
Baseline = Annotated[str, Query(pattern=r"^[0-9a-f]{16}$", description="Id of the run to compare with")]
OfSet = Annotated[
    str | None, Query(alias="set", pattern=rf"^{SET_NAME_PATTERN.pattern}$", description="Only on this set")
]
OfModel = Annotated[str | None, Query(max_length=128, pattern=r"^[^\x00]*$", description="Only of this model")]
FewExamples = Annotated[int, Query(ge=1, le=MOST_EXAMPLES_OF_PAGE, description="Most examples of a page")]

_LINE = '{"id": "a", "input": {"prompt": "2 + 2 = ?"}, "expected": "4"}\n'
_UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The set, as JSON Lines; see docs/evaluation.md",
        "content": {"text/plain": {"schema": {"type": "string", "minLength": 1}, "example": _LINE}},
    }
}
_set_cursors = Cursors(tuple[str, int])
_place_cursors = Cursors(int)
_run_cursors = Cursors(tuple[int, str])


def router(deps: AdminDeps, evaluations: TenantEvaluations, calls: Serial) -> APIRouter:
    """All routes of evaluations. ``calls`` is the thread that uses ``evaluations``."""
    api = APIRouter(tags=["evaluations"])
    _add_sets(api, deps, evaluations, calls)
    _add_runs(api, deps, evaluations, calls)
    _add_schedules(api, deps, evaluations, calls)
    return api


def _add_sets(api: APIRouter, deps: AdminDeps, evaluations: TenantEvaluations, calls: Serial) -> None:
    Reader = Annotated[Identity, deps.caller(Permission.EVALUATIONS_READ)]  # noqa: N806 - a type
    Writer = Annotated[Identity, deps.caller(Permission.EVALUATIONS_WRITE)]  # noqa: N806 - a type
    page = Page[SetAnswer](data=(EXAMPLE_SET,), has_more=False)
    # Their bodies are in memory, and are not part of the budget of others.
    uploads = asyncio.Semaphore(_MOST_UPLOADS)
    version_path = "/evaluations/{tenant}/sets/{name}/versions/{version}"

    @api.get("/evaluations/{tenant}/sets", responses=answered(page, "A page") | READING)
    async def list_sets(
        tenant: Name, caller: Reader, name: OfSet = None, limit: Limit = 50, cursor: Cursor = None
    ) -> Response:
        """The versions of the evaluation sets of a tenant, by name."""
        query = (caller.tenant, tenant, name)
        after = _set_cursors.decode(query, cursor) or ("", 0)
        with answered_errors():
            found = await calls.run(partial(evaluations.sets, tenant, name, after, limit + 1))
        return page_of(
            *(Page[SetAnswer], found, limit, SetAnswer.model_validate),
            lambda last: _set_cursors.encode(query, (last.name, last.version)),
        )

    @api.post(
        "/evaluations/{tenant}/sets/{name}",
        responses=answered(EXAMPLE_SET, "It was there") | answered(EXAMPLE_SET, "The new version", 201) | CHANGING,
        openapi_extra=_UPLOAD,
    )
    async def add_set(request: Request, tenant: Name, name: SetName, caller: Writer) -> Response:
        """Store a set as the next version of this name. The same content again changes nothing."""
        if uploads.locked():
            message = "as many sets are uploaded as may be at once"
            raise GatewayError(503, BUSY, message, retry_after_ms=_RETRY_AFTER_MS)
        async with uploads:
            examples = await calls.run(partial(_read, await body_of(request)))
            add = partial(evaluations.add_set, tenant, name, examples, caller.requested_by)
            with answered_errors():
                made: tuple[StoredSet, bool] = await calls.run(add)
        return answer(SetAnswer.model_validate(made[0]), 201 if made[1] else 200)

    @api.get(version_path, responses=answered(EXAMPLE_SET, "The version") | READING_ONE)
    async def get_set(tenant: Name, name: SetName, version: SetVersion, caller: Reader) -> Response:  # noqa: ARG001
        """One version of a set, without its examples."""
        with answered_errors():
            found = await calls.run(partial(evaluations.find_set, tenant, name, version))
        return answer(SetAnswer.model_validate(found))

    @api.get(f"{version_path}/examples", responses=answered(EXAMPLE_EXAMPLES, "A page") | READING_ONE)
    async def list_examples(
        tenant: Name,
        name: SetName,
        version: SetVersion,
        caller: Writer,
        limit: FewExamples = MOST_EXAMPLES_OF_PAGE,
        cursor: Cursor = None,
    ) -> Response:
        """The examples of a version, with their texts, in their order. The audit says who read them."""
        query = (caller.tenant, tenant, name, version)
        place = _place_cursors.decode(query, cursor)
        read = partial(
            evaluations.examples, tenant, name, version, -1 if place is None else place, limit + 1, caller.requested_by
        )
        with answered_errors():
            found = await calls.run(read)
        shown, has_more = found[:limit], len(found) > limit
        following = _place_cursors.encode(query, shown[-1][0]) if has_more else None
        data = tuple(line for _, line in shown)
        return answer(ExamplesAnswer(data=data, has_more=has_more, next_cursor=following))

    @api.delete(version_path, responses=answered(EXAMPLE_SET, "It is removed") | CHANGING)
    async def remove_set(tenant: Name, name: SetName, version: SetVersion, caller: Writer) -> Response:
        """Delete the examples of a version. Runs on it keep their scores."""
        with answered_errors():
            found = await calls.run(partial(evaluations.remove_set, tenant, name, version, caller.requested_by))
        return answer(SetAnswer.model_validate(found))


def _add_runs(api: APIRouter, deps: AdminDeps, evaluations: TenantEvaluations, calls: Serial) -> None:
    Reader = Annotated[Identity, deps.caller(Permission.EVALUATIONS_READ)]  # noqa: N806 - a type
    page = Page[RunAnswer](data=(EXAMPLE_RUN,), has_more=False)

    @api.get("/evaluations/{tenant}/runs", responses=answered(page, "A page") | READING)
    async def list_runs(
        tenant: Name,
        caller: Reader,
        model: OfModel = None,
        name: OfSet = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """The evaluation runs of a tenant, the latest first."""
        query = (caller.tenant, tenant, model, name)
        before = _run_cursors.decode(query, cursor)
        with answered_errors():
            found = await calls.run(partial(evaluations.runs, tenant, model, name, before, limit + 1))
        return page_of(
            *(Page[RunAnswer], found, limit, run_answer),
            lambda last: _run_cursors.encode(query, (last.started_at_ms, last.run_id)),
        )

    @api.get("/evaluations/{tenant}/runs/{run_id}", responses=answered(EXAMPLE_RUN, "The run") | READING_ONE)
    async def get_run(tenant: Name, run_id: RunId, caller: Reader) -> Response:  # noqa: ARG001 - its permission
        """One run."""
        with answered_errors():
            found = await calls.run(partial(evaluations.find_run, tenant, run_id))
        return answer(run_answer(found))

    @api.get(
        "/evaluations/{tenant}/runs/{run_id}/comparison",
        responses=answered(EXAMPLE_COMPARISON, "The comparison") | READING_ONE,
    )
    async def compare_runs(tenant: Name, run_id: RunId, baseline: Baseline, caller: Reader) -> Response:  # noqa: ARG001
        """A run beside another one of the same set and scorer, example by example."""
        with answered_errors():
            found = await calls.run(partial(evaluations.comparison, tenant, baseline, run_id))
        return answer(ComparisonAnswer() if found is None else ComparisonAnswer.model_validate(found))

    @api.get(
        "/evaluations/{tenant}/judges",
        responses=answered(CalibrationsAnswer(data=(EXAMPLE_CALIBRATION,)), "The calibrations") | READING,
    )
    async def list_calibrations(tenant: Name, caller: Reader, limit: Limit = 50) -> Response:  # noqa: ARG001
        """Calibrations of judges, the newest first."""
        with answered_errors():
            found = await calls.run(partial(evaluations.calibrations, tenant, limit))
        return answer(CalibrationsAnswer(data=tuple(map(CalibrationAnswer.model_validate, map(asdict, found)))))


def _add_schedules(api: APIRouter, deps: AdminDeps, evaluations: TenantEvaluations, calls: Serial) -> None:
    Reader = Annotated[Identity, deps.caller(Permission.EVALUATIONS_READ)]  # noqa: N806 - a type
    Writer = Annotated[Identity, deps.caller(Permission.EVALUATIONS_WRITE)]  # noqa: N806 - a type

    @api.get(
        "/evaluations/{tenant}/schedules",
        responses=answered(SchedulesAnswer(data=(EXAMPLE_SCHEDULE,)), "The schedules") | READING,
    )
    async def list_schedules(tenant: Name, caller: Reader) -> Response:  # noqa: ARG001 - its permission
        """What is measured by itself, by model."""
        with answered_errors():
            found = await calls.run(partial(evaluations.schedules, tenant))
        return answer(SchedulesAnswer(data=tuple(map(ScheduleAnswer.model_validate, found))))

    @api.put(
        "/evaluations/{tenant}/schedules/{model}",
        responses=answered(EXAMPLE_SCHEDULE, "The schedule") | CHANGING,
        openapi_extra=taking(
            ScheduleBody,
            {"Every day": {"set": "holdout", "scorer": "accuracy", "every_hours": 24}},
            has_key=False,
        ),
    )
    async def set_schedule(request: Request, tenant: Name, model: ModelName, caller: Writer) -> Response:
        """Have the champion of a model and its candidate measured again and again, by `fairlane evaluation due`.
        Schedules with a judge are set by command, which has its rubric."""
        body = parse(ScheduleBody, await body_of(request))
        given = {"top": body.top, "max_tokens": body.max_tokens, "priority": body.priority}
        made = EvaluationSchedule(
            model=model,
            set_name=body.set,
            scorer=body.scorer,
            parameters={name: value for name, value in given.items() if value is not None},
            judge=None,
            every_hours=body.every_hours,
            every_requests=body.every_requests,
            created_at_ms=now_ms(),
            created_by=caller.requested_by,
        )
        with answered_errors():
            stored = await calls.run(partial(evaluations.set_schedule, tenant, made, caller.requested_by))
        return answer(ScheduleAnswer.model_validate(stored))

    @api.delete(
        "/evaluations/{tenant}/schedules/{model}",
        responses=answered(RemovedAnswer(name="digits"), "It is removed") | CHANGING,
    )
    async def remove_schedule(tenant: Name, model: ModelName, caller: Writer) -> Response:
        """Measure a model no longer. Its runs stay."""
        with answered_errors():
            await calls.run(partial(evaluations.remove_schedule, tenant, model, caller.requested_by))
        return answer(RemovedAnswer(name=model))


def _read(raw: bytes) -> EvaluationSet:
    try:
        return read_evaluation_set(raw.split(b"\n"))
    except EvaluationSetError as error:
        raise GatewayError(400, Code.INVALID, str(error), field="body") from None
