"""Where a request stands, from what is recorded of it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from fairlane.outcomes import Decision, Outcome
from fairlane.records import InferenceReply
from fairlane_server.postgres.request_timeline import History, Place, RecordedReply, StoryEvent, tell
from producers.gateway.reply_errors import NOT_RUN
from producers.gateway.results.entries import Accepted


class Status(StrEnum):
    """Where a request stands."""

    QUEUED = "queued"
    RUNNING = "running"
    """It was sent to an engine: it runs there, or is next."""
    FINISHING = "finishing"
    """It was decided, and its reply is on its way here."""
    DONE = "done"
    """There is a reply; its outcome says how it ended."""


_STATUS_OF_STATE: Mapping[str, Status] = {
    "waiting": Status.QUEUED,
    "settled": Status.FINISHING,
    Decision.DUPLICATE: Status.QUEUED,
    Decision.DISPATCHED: Status.RUNNING,
    Decision.HANDED_BACK: Status.QUEUED,
    Decision.REFUSED: Status.FINISHING,
    Decision.DEAD_LETTERED: Status.FINISHING,
    Decision.EXPIRED: Status.FINISHING,
    Decision.CANCELLED: Status.FINISHING,
    Decision.CACHED: Status.FINISHING,
}


_NOT_RUN_STATES = frozenset({*NOT_RUN, Decision.REFUSED, Decision.EXPIRED})
_RAN_STATES = frozenset(Outcome) - frozenset(NOT_RUN)


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """One request.

    Attributes:
        request_id: of the request.
        status: where it stands.
        reply: once it is done and as long as it is kept, without its output where that was not looked up.
        submitted_at_ms: when the broker took it, as far as that is known; None before anything is recorded.
        ended_at_ms: when it was answered.
        model: that was asked for or, of one that is done, that answered; None where neither is known.
        task: likewise.
        events: what happened, in order: decisions with their reasons, stages and costs. No text of it.
    """

    request_id: str
    status: Status
    reply: InferenceReply | None = None
    submitted_at_ms: int | None = None
    ended_at_ms: int | None = None
    model: str | None = None
    task: str | None = None
    events: tuple[StoryEvent, ...] = ()


def status_of(
    request_id: str,
    history: History,
    seen: RecordedReply | None = None,
    accepted: Accepted | None = None,
    kept_since_ms: int = 0,
) -> RequestStatus | None:
    """None when nothing is known of it.

    Args:
        request_id: of the request.
        history: what is recorded of it, for one tenant.
        seen: its reply, if it is known from elsewhere.
        accepted: that the gateway took it.
        kept_since_ms: replies from before this are removed, while decisions and costs are kept longer.
    """
    if seen is not None and all(_source(reply) != _source(seen) for reply in history.replies):
        history = replace(history, replies=(*history.replies, seen))
    places = tell(history)
    asked_model, asked_task = (None, None) if accepted is None else (accepted.model, accepted.task)
    if not places:
        if accepted is None:
            return None
        return RequestStatus(request_id, Status.QUEUED, model=asked_model, task=asked_task)
    place = _telling(places)
    recorded = next((reply for reply in history.replies if reply.reply.source == place.source), None)
    events = place.events
    submitted = next((event.at_ms for event in events if event.event == "arrived"), events[0].at_ms)
    if recorded is None:
        status = _STATUS_OF_STATE.get(place.state, Status.QUEUED)
        # Its reply was removed: that it ended is known from its decisions and costs.
        ended_at_ms = events[-1].at_ms if status is Status.FINISHING and events[-1].at_ms < kept_since_ms else None
        if ended_at_ms is not None:
            status = Status.DONE
        return RequestStatus(request_id, status, None, submitted, ended_at_ms, asked_model, asked_task, events)
    reply = recorded.reply
    model, task = reply.model or asked_model, reply.task or asked_task
    return RequestStatus(request_id, Status.DONE, reply, submitted, recorded.replied_at_ms, model, task, events)


def _telling(places: tuple[Place, ...]) -> Place:
    """The newest; but a record that was dropped because the id had been there already says nothing of the request, and
    one that was refused or expired nothing of what was run before it."""
    newest_first = [place for place in reversed(places) if place.state != Decision.DUPLICATE] or [places[-1]]
    newest = newest_first[0]
    if newest.state not in _NOT_RUN_STATES:
        return newest
    return next((place for place in newest_first if place.state in _RAN_STATES), newest)


def _source(recorded: RecordedReply) -> object:
    return recorded.reply.source
