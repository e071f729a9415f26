"""State of a request, from what is recorded of it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from fairlane.outcomes import Decision, Outcome
from fairlane.records import InferenceReply
from fairlane_server.postgres.request_timeline import History, RecordedReply, RequestTimeline, TimelineEvent, tell
from producers.gateway.results.cache_entries import AcceptedRequest
from producers.openai_api.errors import NOT_RUN


class RequestState(StrEnum):
    """State of a request."""

    QUEUED = "queued"
    RUNNING = "running"
    """Dispatched to an engine: it runs, or is next."""
    FINISHING = "finishing"
    """Decided; its reply is on its way."""
    DONE = "done"
    """Replied; the outcome says how it ended."""


_STATUS_OF_STATE: Mapping[str, RequestState] = {
    "waiting": RequestState.QUEUED,
    "settled": RequestState.FINISHING,
    Decision.DUPLICATE: RequestState.QUEUED,
    Decision.DISPATCHED: RequestState.RUNNING,
    Decision.HANDED_BACK: RequestState.QUEUED,
    Decision.REFUSED: RequestState.FINISHING,
    Decision.DEAD_LETTERED: RequestState.FINISHING,
    Decision.EXPIRED: RequestState.FINISHING,
    Decision.CANCELLED: RequestState.FINISHING,
    Decision.CACHED: RequestState.FINISHING,
    Decision.GUARDED: RequestState.FINISHING,
}


_NOT_RUN_STATES = frozenset({*NOT_RUN, Decision.REFUSED, Decision.EXPIRED})
_RAN_STATES = frozenset(Outcome) - frozenset(NOT_RUN)


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """State of one request.

    Attributes:
        reply: once done, while it is retained; without its output if that was not looked up.
        submitted_at_ms: when the broker took it, or its first recorded event; None before anything is recorded.
        ended_at_ms: when it was answered.
        model: model requested or, once done, the one that answered; None if neither is known.
        task: likewise.
        is_erased: its reply was erased.
        events: timeline in order: decisions with their reasons, stages and costs. No text of the request.
    """

    request_id: str
    status: RequestState
    reply: InferenceReply | None = None
    submitted_at_ms: int | None = None
    ended_at_ms: int | None = None
    model: str | None = None
    task: str | None = None
    events: tuple[TimelineEvent, ...] = ()
    is_erased: bool = False


def status_of(
    request_id: str,
    history: History,
    seen: RecordedReply | None = None,
    accepted: AcceptedRequest | None = None,
    kept_since_ms: int = 0,
) -> RequestStatus | None:
    """State of a request; None if nothing is known of it. ``seen`` is its reply and ``accepted`` its acceptance, if
    known from elsewhere. Replies older than ``kept_since_ms`` have been removed, while decisions and costs are retained
    longer."""
    if seen is not None and all(one.reply.source != seen.reply.source for one in history.replies):
        history = replace(history, replies=(*history.replies, seen))
    places = tell(history)
    asked_model, asked_task = (None, None) if accepted is None else (accepted.model, accepted.task)
    if not places:
        if accepted is None:
            return None
        return RequestStatus(request_id, RequestState.QUEUED, model=asked_model, task=asked_task)
    place = _telling(places)
    recorded = next((reply for reply in history.replies if reply.reply.source == place.source), None)
    events = place.events
    submitted = next((event.at_ms for event in events if event.event == "arrived"), events[0].at_ms)
    if recorded is None:
        status = _STATUS_OF_STATE.get(place.state, RequestState.QUEUED)
        # Its reply has been removed: decisions and costs show that it ended.
        ended_at_ms = (
            events[-1].at_ms if status is RequestState.FINISHING and events[-1].at_ms < kept_since_ms else None
        )
        if ended_at_ms is not None:
            status = RequestState.DONE
        return RequestStatus(request_id, status, None, submitted, ended_at_ms, asked_model, asked_task, events)
    reply = recorded.reply
    model, task = reply.model or asked_model, reply.task or asked_task
    return RequestStatus(request_id, RequestState.DONE, reply, submitted, recorded.replied_at_ms, model, task, events)


def may_be_erased(found: RequestStatus) -> bool:
    """Whether a reply is missing that may be on its way, or erased."""
    return found.status is RequestState.FINISHING and found.reply is None


def as_erased(found: RequestStatus) -> RequestStatus:
    """The status of a request whose reply was erased: done, without a reply."""
    return replace(found, status=RequestState.DONE, ended_at_ms=found.events[-1].at_ms, is_erased=True)


def _telling(places: tuple[RequestTimeline, ...]) -> RequestTimeline:
    """The publication that describes the request: the newest, except that duplicates are skipped, and a rejected or
    expired one does not hide an earlier one that ran."""
    newest_first = [place for place in reversed(places) if place.state != Decision.DUPLICATE] or [places[-1]]
    newest = newest_first[0]
    if newest.state not in _NOT_RUN_STATES:
        return newest
    return next((place for place in newest_first if place.state in _RAN_STATES), newest)
