"""Recorded requests: by id, and pages of ended ones, newest first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from fairlane.names import is_name
from fairlane.outcomes import Outcome
from fairlane.records import Output
from fairlane_server.costs.daily_sums import Group, SumQuery, UsageSum, sum_of, sum_question
from fairlane_server.postgres.pool import DeadlinePool, Question, rows_for
from fairlane_server.postgres.request_history import (
    DECISIONS,
    REPLIES,
    REPLY_COLUMNS,
    USAGE,
    history_of,
    recorded_reply,
)
from fairlane_server.postgres.request_timeline import History, RecordedReply
from fairlane_server.store_error import StoreError
from producers.openai_api.errors import NOT_RUN

LOOK_UP_TIMEOUT_S = 2.0
PAGE_TIMEOUT_S = 5.0
MOST_ROWS = 100
"""Rows per table for one id; an id sent more often is described by its newest rows."""

_NAME = "fairlane-gateway"
_LOOK_UP_CONNECTIONS = 4
_PAGE_CONNECTIONS = 2

# All names are constants; values from outside are parameters. One row is enough: copies of a reply are equal, and
# replies of requests that ran sort before the rejection of a repeated id.
_REPLY = f"""
SELECT {REPLY_COLUMNS}, output FROM results WHERE tenant = %s AND request_id = %s
ORDER BY outcome IN ({", ".join(f"'{outcome}'" for outcome in NOT_RUN)}), replied_at_ms DESC, source_offset DESC LIMIT 1
""".encode()  # noqa: S608 - our own names
_ENDED = f"SELECT {REPLY_COLUMNS} FROM results WHERE tenant = %s"  # noqa: S608 - our own names
_ERASED = b"SELECT request_is_erased(%s)"
_NEWEST_FIRST = """
ORDER BY replied_at_ms DESC, request_id DESC, source_topic DESC, source_partition DESC, source_offset DESC LIMIT %s
"""
_BEHIND = """
AND replied_at_ms <= %s
AND (replied_at_ms, request_id, source_topic, source_partition, source_offset) < (%s, %s, %s, %s, %s)
"""


# Non-finite numbers are stored as text.
_OUTPUT = TypeAdapter(Output)


@dataclass(frozen=True, slots=True)
class EndedCursor:
    """Position of an ended request in the order of its tenant's; unique."""

    replied_at_ms: int
    request_id: str
    source_topic: str
    source_partition: int
    source_offset: int


@dataclass(frozen=True, slots=True)
class EndedFilter:
    """Filter of ended requests; None matches any. End times from ``since_ms`` on, and before ``until_ms``."""

    outcome: str | None = None
    model: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None


class RequestStore:
    """Requests in the recorder's tables, of one tenant at a time. Every query raises StoreError and TimeoutError. Pages
    have connections of their own, so that a long search does not block look-ups by id."""

    def __init__(self, dsn: str) -> None:
        self._look_ups = DeadlinePool(dsn, _NAME, _LOOK_UP_CONNECTIONS)
        self._pages = DeadlinePool(dsn, f"{_NAME}-pages", _PAGE_CONNECTIONS)

    async def open(self) -> None:
        """Start to connect; Postgres may be unavailable."""
        await self._look_ups.open()
        await self._pages.open()

    async def close(self) -> None:
        await self._look_ups.close()
        await self._pages.close()

    async def reply(self, tenant: str, request_id: str) -> RecordedReply | None:
        """Newest reply to an id, with its output; replies of requests that ran come first."""
        (rows,) = await self._ask(tenant, [(_REPLY, (tenant, request_id))])
        if not rows:
            return None
        *columns, output = rows[0]
        return recorded_reply(tuple(columns), None if output is None else _OUTPUT.validate_python(output))

    async def history(self, tenant: str, request_id: str) -> History:
        """Everything recorded of an id, without outputs."""
        # Replies are read first: the decisions before a reply are recorded by the time they are read.
        of_id = request_id, MOST_ROWS
        asks = [(REPLIES, of_id), (USAGE, of_id), (DECISIONS, of_id)]
        replies, usage, decisions = await self._ask(tenant, asks)
        return history_of(decisions, usage, replies)

    async def is_erased(self, tenant: str, request_id: str) -> bool:
        """Whether the tenant erased the request."""
        (rows,) = await self._ask(tenant, [(_ERASED, (request_id,))])
        return bool(rows[0][0])

    async def ended(
        self, tenant: str, wanted: EndedFilter, behind: EndedCursor | None, most: int
    ) -> Sequence[RecordedReply]:
        """A page of ended requests, newest first, without outputs: the first page, or the one after ``behind``."""
        question = ended_question(tenant, wanted, behind, most)
        (rows,) = await rows_for(self._pages, _checked(tenant), [question], PAGE_TIMEOUT_S)
        return [recorded_reply(row) for row in rows]

    async def usage(self, tenant: str, query: SumQuery, behind: Sequence[str] | None, most: int) -> Sequence[UsageSum]:
        """A page of sums of usage, in the order of their groups: the first page, or the one after ``behind``."""
        # The policies of the table restrict it too; with the tenant in the query its index is used.
        own = replace(query, only={**query.only, Group.TENANT: tenant})
        question = sum_question(own, behind, most)
        (rows,) = await rows_for(self._pages, _checked(tenant), [question], PAGE_TIMEOUT_S)
        return [sum_of(row, len(query.by)) for row in rows]

    async def _ask(self, tenant: str, questions: Sequence[Question]) -> list[list[tuple[Any, ...]]]:
        return await rows_for(self._look_ups, _checked(tenant), questions, LOOK_UP_TIMEOUT_S)


def ended_question(tenant: str, wanted: EndedFilter, behind: EndedCursor | None, most: int) -> Question:
    """SQL statement of a page, and its parameters."""
    parts, parameters = [_ENDED], [tenant]  # type: tuple[list[str], list[str | int]]
    for condition, value in (
        ("AND model = %s", wanted.model),
        ("AND replied_at_ms >= %s", wanted.since_ms),
        ("AND replied_at_ms < %s", wanted.until_ms),
        ("AND outcome = %s", wanted.outcome),
    ):
        if value is not None:
            parts.append(condition)
            parameters.append(value)
    if wanted.outcome not in (None, Outcome.OK):
        # Redundant, so that the partial index is used.
        parts.append("AND outcome <> 'ok'")
    if behind is not None:
        parts.append(_BEHIND)
        place = (behind.source_topic, behind.source_partition, behind.source_offset)
        parameters += [behind.replied_at_ms, behind.replied_at_ms, behind.request_id, *place]
    return " ".join([*parts, _NEWEST_FIRST]).encode(), (*parameters, most)


def _checked(tenant: str) -> str:
    if not is_name(tenant):
        raise StoreError("this is no tenant's name")
    return tenant
