"""GET /v1/usage: what the caller's tenant used, and what it cost, by day, model, caller and more."""

from collections.abc import Mapping
from datetime import date
from enum import StrEnum
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from fairlane.outcomes import Code, Priority
from fairlane_server.costs.daily_sums import Group, SumQuery, UsageSum
from fairlane_server.text import NUL
from producers.gateway import openapi
from producers.gateway.identity.identity import Identity, Permission, require
from producers.gateway.native.cursors import MOST_CURSOR_CHARS, Cursors, not_a_cursor
from producers.gateway.native.deps import NativeDeps
from producers.gateway.native.response_bodies import UsageAnswer, UsagePage, page_of
from producers.gateway.openapi import READING
from producers.openai_api.errors import GatewayError

MOST_OF_PAGE = 1_000


class UsageGroup(StrEnum):
    """What usage can be summed up by."""

    DAY = "day"
    MONTH = "month"
    MODEL = "model"
    VERSION = "model_version"
    POOL = "pool"
    PRIORITY = "priority"
    CALLER = "requested_by"


_GROUPS: Mapping[UsageGroup, Group] = {
    UsageGroup.DAY: Group.DAY,
    UsageGroup.MONTH: Group.MONTH,
    UsageGroup.MODEL: Group.MODEL,
    UsageGroup.VERSION: Group.VERSION,
    UsageGroup.POOL: Group.POOL,
    UsageGroup.PRIORITY: Group.CLASS,
    UsageGroup.CALLER: Group.CALLER,
}
_cursors = Cursors(tuple[str, ...])

By = Annotated[list[UsageGroup], Query(max_length=len(UsageGroup), description="What to sum up by; repeat it for more")]
Since = Annotated[date | None, Query(description="From this day on, in UTC")]
Until = Annotated[date | None, Query(description="Before this day, in UTC")]
Name = Annotated[str | None, Query(min_length=1, max_length=300)]
Limit = Annotated[int, Query(ge=1, le=MOST_OF_PAGE, description="Most sums of a page")]
Cursor = Annotated[
    str | None, Query(max_length=MOST_CURSOR_CHARS, description="`next_cursor` of the page before; same parameters")
]


def add_usage_route(router: APIRouter, deps: NativeDeps) -> None:
    """GET /v1/usage."""
    Caller = Annotated[Identity, Depends(require(deps.authenticate, Permission.USAGE_READ))]  # noqa: N806 - a type

    @router.get("/v1/usage", responses=openapi.answered(openapi.USAGE, "A page") | READING, tags=["usage"])
    async def get_usage(
        caller: Caller,
        by: By = [UsageGroup.DAY],  # noqa: B006 - FastAPI copies it
        since: Since = None,
        until: Until = None,
        model: Name = None,
        model_version: Name = None,
        pool: Name = None,
        priority: Priority | None = None,
        requested_by: Name = None,
        limit: Limit = 100,
        cursor: Cursor = None,
    ) -> Response:
        """What was used and what it cost, by whole days in UTC, in the order of the groups; one sum per currency."""
        tenant = caller.tenant
        only = {
            Group.MODEL: model,
            Group.VERSION: model_version,
            Group.POOL: pool,
            Group.CLASS: None if priority is None else priority.value,
            Group.CALLER: requested_by,
        }
        query = _query(by, since, until, {group: value for group, value in only.items() if value is not None})
        parts = (
            tenant,
            *by,
            "",
            *map(str, (since, until)),
            *(f"{group}={value}" for group, value in query.only.items()),
        )
        place = _cursors.decode(parts, cursor)
        behind = None if place is None else _place(query, place)
        found = await deps.results.usage(tenant, query, behind, limit + 1)
        return page_of(
            *(UsagePage, found, limit), partial(_answer, by), lambda last: _cursors.encode(parts, last.place)
        )


def _query(by: list[UsageGroup], since: date | None, until: date | None, only: Mapping[Group, str]) -> SumQuery:
    """Raises GatewayError: 400."""
    for group, value in only.items():
        if NUL in value:
            raise GatewayError(400, Code.INVALID, "holds a NUL character", field=group.value)
    if len(set(by)) < len(by):
        raise GatewayError(400, Code.INVALID, "names one twice", field="by")
    try:
        return SumQuery(tuple(_GROUPS[group] for group in by), since, until, only)
    except ValueError as error:
        raise GatewayError(400, Code.INVALID, str(error), field="by") from None


def _place(query: SumQuery, place: tuple[str, ...]) -> tuple[str, ...]:
    """The place, if it can be one of this query. Raises GatewayError: 400."""
    if len(place) != len(query.by) + 1:
        raise not_a_cursor()
    for group, part in zip(query.by, place, strict=False):
        if group in (Group.DAY, Group.MONTH):
            try:
                date.fromisoformat(part)
            except ValueError:
                raise not_a_cursor() from None
    return place


def _answer(by: list[UsageGroup], one: UsageSum) -> UsageAnswer:
    keys = {
        group.value: str(key)[: len("2026-01")] if group is UsageGroup.MONTH else str(key)
        for group, key in zip(by, one.keys, strict=True)
    }
    return UsageAnswer.of(one, keys)
