"""Routes of dead letters."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from fairlane.dead_letters import position_name
from fairlane.names import requests_topic
from fairlane.outcomes import Code
from fairlane.records import SourceCoordinate
from fairlane_server.administration.dead_letters import DeadLetterOffice, Place, ReplayReport, ReplayWish
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.dead_letters.bulk import TOPICS, Cut, DeadLetters, ReplayResult
from fairlane_server.dead_letters.selection import OffsetRange, Selection
from producers.admin.blocking import Serial
from producers.admin.deps import AT_MS, AdminDeps, Cursor, Limit, Since, Until, ms_of
from producers.admin.fields import TimeField, TopicField
from producers.admin.problems import CHANGING, READING, READING_ONE, answered_errors, not_found
from producers.gateway.identity.identity import Identity
from producers.gateway.native.cursors import Cursors, not_a_cursor
from producers.gateway.native.response_bodies import Page, ResponseBody
from producers.gateway.native.response_bodies import answered as answer
from producers.gateway.openapi import EXAMPLE_ID, answered, taking
from producers.gateway.sending import body_of
from producers.openai_api.body import parse
from producers.openai_api.errors import GatewayError

_MOST_REPLAYED = 500
_LARGEST_OFFSET = 2**63 - 1
_TEXT = r"^[^\x00]+$"
_Filter = Annotated[str | None, Field(min_length=1, max_length=300, pattern=_TEXT)]
_Offset = Annotated[int | None, Field(ge=0, le=_LARGEST_OFFSET)]


class LetterAnswer(ResponseBody):
    """A dead letter without the text of its tenant."""

    topic: str
    partition: int
    offset: int
    died_at_ms: int
    bytes: int
    record: str | None = Field(None, description="The record in it, if it can be read")
    problem: str | None = Field(None, description="Why it cannot be read")
    request_id: str | None = None
    replay_of: str | None = None
    tenant: str | None = None
    model: str | None = None
    exception: str | None = None
    message: str | None = None
    original: dict[str, Any] | None = Field(None, description="Where the record stood")
    original_at_ms: int | None = None


class ListedLetterAnswer(LetterAnswer):
    """A letter of a list."""

    replayed_as: tuple[str, ...] = Field((), description="Replays, of those among the records that were read")


class WholeLetterAnswer(LetterAnswer):
    """One letter."""

    headers: dict[str, str]
    content: Any = Field(None, description="The record; text of the tenant only as its length, unless asked for")


class ReplayBody(BaseModel):
    """What to replay. Without a filter, `all` must be true."""

    model_config = ConfigDict(extra="forbid")

    dry_run: bool = Field(description="Only say what would be replayed")
    topic: TopicField | None = None
    partition: int | None = Field(None, ge=0, le=2**31 - 1)
    tenant: _Filter = None
    model: _Filter = None
    exception: _Filter = Field(None, description="A part of the class of the exception")
    request_id: _Filter = None
    since: TimeField | None = None
    until: TimeField | None = None
    first_offset: _Offset = Field(None, description="Needs `topic`")
    last_offset: _Offset = Field(None, description="Needs `topic`")
    limit: int = Field(100, ge=1, le=_MOST_REPLAYED)
    again: bool = Field(False, description="Also what was replayed before")
    all: bool = Field(False, description="Everything; needed when no filter is given")


class ReplayedAnswer(ResponseBody):
    """What became of one letter."""

    letter: str
    result: str = Field(description="`replayed`, `would be replayed`, `skipped` or `failed`")
    reason: str | None = None
    request_id: str | None = Field(None, description="Of the new request")
    replay_of: str | None = None
    place: str | None = Field(None, description="Where the new request stands")


class ReplayAnswer(ResponseBody):
    """A replay. Repeat it while `left` is above 0."""

    dry_run: bool
    results: tuple[ReplayedAnswer, ...]
    replayed_before: int
    left: int


class PurgeBody(BaseModel):
    """Which letters to delete: the oldest of a topic, before a time or up to an offset."""

    model_config = ConfigDict(extra="forbid")

    dry_run: bool = Field(description="Only say what would be deleted")
    topic: TopicField
    partition: int | None = Field(None, ge=0, le=2**31 - 1)
    until: TimeField | None = Field(None, description="Those that died before")
    last_offset: _Offset = Field(None, description="Up to and with this offset")


class CutAnswer(ResponseBody):
    """What is deleted of a partition."""

    topic: str
    partition: int
    before_offset: int
    letters: int
    replayed: int


class PurgeAnswer(ResponseBody):
    """A purge."""

    dry_run: bool
    cuts: tuple[CutAnswer, ...]


Topic = Annotated[DeadLetters, Path(description="`requests` or `work`", examples=["work"])]
OneTopic = Annotated[DeadLetters | None, Query(description="By default both")]
Partition = Annotated[int, Path(ge=0, le=2**31 - 1, examples=[0])]
Offset = Annotated[int, Path(ge=0, le=_LARGEST_OFFSET, examples=[12])]
Filter = Annotated[str | None, Query(min_length=1, max_length=300, pattern=_TEXT)]

_FACTS: dict[str, Any] = {
    "topic": TOPICS[DeadLetters.REQUESTS],
    "partition": 0,
    "offset": 12,
    "died_at_ms": AT_MS,
    "bytes": 412,
    "record": "InferenceRequest",
    "request_id": EXAMPLE_ID,
    "tenant": "acme",
    "exception": "builtins.ZeroDivisionError",
    "message": "float division by zero",
    "original": {"topic": requests_topic("acme"), "partition": 1, "offset": 77},
}
_LISTED = ListedLetterAnswer(**_FACTS)
_WHOLE = WholeLetterAnswer(**_FACTS, headers={"kafka_dlt-original-partition": "1"}, content={"tenant": "acme"})
_REPLAY = ReplayAnswer(
    dry_run=True,
    results=(ReplayedAnswer(letter="dead-letter.work-0@12", result="would be replayed", replay_of=EXAMPLE_ID),),
    replayed_before=0,
    left=0,
)
_PURGE = PurgeAnswer(
    dry_run=True,
    cuts=(CutAnswer(topic=TOPICS[DeadLetters.WORK], partition=0, before_offset=13, letters=9, replayed=2),),
)
_cursors = Cursors(tuple[str, int, int])


def router(deps: AdminDeps, office: DeadLetterOffice, calls: Serial) -> APIRouter:
    """All routes of dead letters. ``calls`` is the thread that uses the office."""
    api = APIRouter(tags=["dead letters"])
    _add_reading(api, deps, office, calls)
    _add_changing(api, deps, office, calls)
    return api


def _add_reading(api: APIRouter, deps: AdminDeps, office: DeadLetterOffice, calls: Serial) -> None:
    Reader = Annotated[Identity, deps.caller(Permission.DEAD_LETTERS_READ)]  # noqa: N806 - a type
    PayloadReader = Annotated[Identity, deps.caller(Permission.DEAD_LETTERS_PAYLOAD)]  # noqa: N806 - a type
    page = Page[ListedLetterAnswer](data=(_LISTED,), has_more=False)

    @api.get("/dead-letters", responses=answered(page, "A page") | READING)
    async def list_letters(
        caller: Reader,
        topic: OneTopic = None,
        tenant: Filter = None,
        model: Filter = None,
        exception: Filter = None,
        request_id: Filter = None,
        since: Since = None,
        until: Until = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """The dead letters, the oldest first, without text of tenants. A call reads at most 10,000 records and 10 s, so
        a page may be short, or empty, and have a next one."""
        selection = Selection(tenant, model, exception, request_id, ms_of(since), ms_of(until))
        query = (caller.tenant, topic, tenant, model, exception, request_id, selection.since_ms, selection.until_ms)
        place = _cursors.decode(query, cursor)
        begin = None if place is None else _place(place)
        with answered_errors():
            found = await calls.run(partial(office.page, topic, selection, begin, limit))
        following = None if found.following is None else _cursors.encode(query, found.following)
        data = tuple(map(ListedLetterAnswer.model_validate, found.letters))
        return answer(Page[ListedLetterAnswer](data=data, has_more=following is not None, next_cursor=following))

    @api.get("/dead-letters/{topic}/{partition}/{offset}", responses=answered(_WHOLE, "The letter") | READING_ONE)
    async def get_letter(topic: Topic, partition: Partition, offset: Offset, caller: Reader) -> Response:  # noqa: ARG001 - its permission
        """One dead letter: its headers, and of the record in it what is no text of the tenant."""
        with answered_errors():
            found = await calls.run(partial(office.letter, SourceCoordinate(TOPICS[topic], partition, offset)))
        return _whole(found)

    @api.get(
        "/dead-letters/{topic}/{partition}/{offset}/payload",
        responses=answered(_WHOLE, "The letter with its payload") | READING_ONE,
    )
    async def get_payload(topic: Topic, partition: Partition, offset: Offset, caller: PayloadReader) -> Response:
        """One dead letter with everything that its tenant wrote. The audit says who read it."""
        place = SourceCoordinate(TOPICS[topic], partition, offset)
        with answered_errors():
            found = await calls.run(partial(office.payload, place, caller.requested_by))
        return _whole(found)


def _add_changing(api: APIRouter, deps: AdminDeps, office: DeadLetterOffice, calls: Serial) -> None:
    Replaying = Annotated[Identity, deps.caller(Permission.DEAD_LETTERS_REPLAY)]  # noqa: N806 - a type
    Purging = Annotated[Identity, deps.caller(Permission.DEAD_LETTERS_PURGE)]  # noqa: N806 - a type

    @api.post(
        "/dead-letters/replay",
        responses=answered(_REPLAY, "What became of each letter") | CHANGING,
        openapi_extra=taking(
            ReplayBody,
            {"Look first": {"dry_run": True, "tenant": "acme"}, "Everything": {"dry_run": False, "all": True}},
            has_key=False,
        ),
    )
    async def replay(request: Request, caller: Replaying) -> Response:
        """Send dead letters again, each once, as new requests on the topics that their tenants sent them on."""
        body = parse(ReplayBody, await body_of(request))
        wish = _wish(body)
        with answered_errors():
            report: ReplayReport = await calls.run(
                partial(office.replay, wish, caller.requested_by, dry_run=body.dry_run)
            )
        results = tuple(map(_replayed, report.results))
        return answer(
            ReplayAnswer(
                dry_run=body.dry_run, results=results, replayed_before=report.replayed_before, left=report.left
            )
        )

    @api.post(
        "/dead-letters/purge",
        responses=answered(_PURGE, "What is deleted of each partition") | CHANGING,
        openapi_extra=taking(
            PurgeBody, {"Up to an offset": {"dry_run": True, "topic": "work", "last_offset": 12}}, has_key=False
        ),
    )
    async def purge(request: Request, caller: Purging) -> Response:
        """Delete the oldest dead letters of a topic, for good. Kafka deletes a partition only from its beginning."""
        body = parse(PurgeBody, await body_of(request))
        if body.until is None and body.last_offset is None:
            raise GatewayError(400, Code.INVALID, "say up to where: `until` or `last_offset`", field="until")
        with answered_errors():
            cuts: list[Cut] = await calls.run(
                partial(
                    office.purge,
                    *(body.topic, body.partition, ms_of(body.until), body.last_offset, caller.requested_by),
                    dry_run=body.dry_run,
                )
            )
        return answer(PurgeAnswer(dry_run=body.dry_run, cuts=tuple(map(CutAnswer.model_validate, cuts))))


def _wish(body: ReplayBody) -> ReplayWish:
    if (body.first_offset, body.last_offset) != (None, None) and body.topic is None:
        raise GatewayError(400, Code.INVALID, "each topic has its own offsets, so they need `topic`", field="topic")
    offsets = OffsetRange(body.first_offset or 0, body.last_offset)
    selection = Selection(
        *(body.tenant, body.model, body.exception, body.request_id),
        *(ms_of(body.since), ms_of(body.until)),
        offsets,
    )
    if selection == Selection() and body.topic is None and not body.all:
        raise GatewayError(400, Code.INVALID, "say what to replay with a filter, or `all`: true", field="all")
    return ReplayWish(body.topic, body.partition, selection, body.limit, body.again)


def _place(place: Place) -> Place:
    topic, partition, offset = place
    if topic not in TOPICS.values() or not 0 <= partition < 2**31 or not 0 <= offset <= _LARGEST_OFFSET:
        raise not_a_cursor()
    return place


def _whole(found: dict[str, Any] | None) -> Response:
    if found is None:
        raise not_found("no dead letter stands there")
    return answer(WholeLetterAnswer.model_validate(found))


def _replayed(one: ReplayResult) -> ReplayedAnswer:
    request = None if one.replay is None else one.replay.request
    is_sent = one.place is not None
    return ReplayedAnswer(
        letter=position_name(one.letter),
        result="would be replayed" if one.result == "replayed" and not is_sent else one.result,
        reason=one.reason,
        request_id=request.request_id if request and is_sent else None,
        replay_of=request.replay_of if request else None,
        place=None if one.place is None else position_name(one.place),
    )
