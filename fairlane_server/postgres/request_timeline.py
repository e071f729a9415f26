"""Timeline of one request, built from its recorded events. Pure.

Each process writes times by its own clock: events of different machines may be off by the difference. A timeline holds
no text of prompts or answers, only decisions, coordinates, times and counts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fairlane.names import is_returned
from fairlane.outcomes import Decision
from fairlane.records import AuditEvent, InferenceReply, SourceCoordinate, UsageEvent
from fairlane_server.admission_rule import cost_tokens

# Order of events within one millisecond; events not named here come in the middle.
_RANK: Mapping[str, int] = {
    Decision.REPLAYED: -1,
    "arrived": 0,
    Decision.ACCEPTED: 1,
    Decision.DEGRADED: 2,
    Decision.DISPATCHED: 3,
    Decision.CACHED: 3,
    "received": 4,
    "engine_started": 5,
    "engine_finished": 7,
    "settled": 8,
    Decision.HANDED_BACK: 9,
    Decision.CANCELLED: 9,
    Decision.GUARDED: 9,
    "replied": 10,
}
_MIDDLE = 6
_OF_OTHER_RECORDS = frozenset({Decision.CANCEL_REFUSED, Decision.FEEDBACK_REFUSED})
"""Decisions about records that only name the request: they are no publication of it."""


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A final reply as recorded; ``replied_at_ms`` is the record's own timestamp."""

    reply: InferenceReply
    replied_at_ms: int
    replies_seen: int = 1
    replays_seen: int = 0


@dataclass(frozen=True, slots=True)
class History:
    """Everything recorded under one request id, each part in chronological order."""

    decisions: tuple[AuditEvent, ...] = ()
    usage: tuple[UsageEvent, ...] = ()
    replies: tuple[RecordedReply, ...] = ()


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One event of a timeline. Keys of ``details`` end in their units (``_ms``, ``_tokens``, ``_at_ms``)."""

    at_ms: int
    event: str
    actor: str | None = None
    code: str | None = None
    message: str | None = None
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """One publication of the request id: a tenant may send an id again, and other tenants may use it too.

    ``state`` is the outcome once it was answered; before, it is waiting, dispatched, handed_back, settled, or the last
    decision.
    """

    tenant: str
    source: SourceCoordinate
    state: str
    events: tuple[TimelineEvent, ...]

    @property
    def began_at_ms(self) -> int:
        return self.events[0].at_ms


@dataclass(slots=True)
class _Gathered:
    """The records of one publication."""

    decisions: list[AuditEvent] = field(default_factory=list)
    usage: list[UsageEvent] = field(default_factory=list)
    reply: RecordedReply | None = None

    @property
    def began_at_ms(self) -> int:
        times = [decision.occurred_at_ms for decision in self.decisions]
        if self.reply is not None:
            times.append(self.reply.reply.timings.submitted_at_ms or self.reply.replied_at_ms)
        return min(times)

    @property
    def dispatched_at_ms(self) -> int | None:
        times = [event.occurred_at_ms for event in self.decisions if event.decision == Decision.DISPATCHED]
        if self.reply is not None and self.reply.reply.timings.dispatched_at_ms is not None:
            times.append(self.reply.reply.timings.dispatched_at_ms)
        return min(times, default=None)


def tell(history: History) -> tuple[RequestTimeline, ...]:
    """The timeline of every publication of the id, earliest first; empty when nothing is recorded."""
    places = _gather(history)
    timelines = [_place(tenant, source, gathered) for (tenant, source), gathered in places.items()]
    return tuple(sorted(timelines, key=lambda place: (place.began_at_ms, place.source.offset)))


def _gather(history: History) -> dict[tuple[str, SourceCoordinate], _Gathered]:
    places: dict[tuple[str, SourceCoordinate], _Gathered] = {}
    for reply in history.replies:
        source = reply.reply.source or SourceCoordinate("", -1, -1)
        places.setdefault((reply.reply.tenant, source), _Gathered()).reply = reply
    returned = []
    for decision in history.decisions:
        if decision.decision in _OF_OTHER_RECORDS:
            continue
        if is_returned(decision.source.topic):
            returned.append(decision)
        else:
            places.setdefault((decision.tenant, decision.source), _Gathered()).decisions.append(decision)
    # A decision about requeued work names a record of the requeue topic; assign it to the request's publication.
    for decision in returned:
        home = _latest(places, decision.tenant, decision.occurred_at_ms)
        gathered = home or places.setdefault((decision.tenant, decision.source), _Gathered())
        gathered.decisions.append(decision)
    for usage in history.usage:
        home = _home_of(usage, places)
        gathered = home or places.setdefault((usage.tenant, usage.work), _Gathered())
        gathered.usage.append(usage)
    return places


def _home_of(usage: UsageEvent, places: Mapping[tuple[str, SourceCoordinate], _Gathered]) -> _Gathered | None:
    """The publication that this usage belongs to.

    Usage names the work item, not the request's record, so times decide among several publications. A cached answer had
    no work item: its usage names the request's record.
    """
    if usage.cached:
        return places.get((usage.tenant, usage.work))
    own = [gathered for (tenant, _), gathered in places.items() if tenant == usage.tenant]
    for gathered in own:
        if gathered.reply is not None and usage.outcome == gathered.reply.reply.outcome:
            timings = gathered.reply.reply.timings
            if usage.occurred_at_ms in {timings.engine_finished_at_ms, timings.received_at_ms}:
                return gathered
    sent = [
        (at_ms, gathered)
        for gathered in own
        if (at_ms := gathered.dispatched_at_ms) is not None and at_ms <= usage.occurred_at_ms
    ]
    if sent:
        return max(sent, key=lambda entry: entry[0])[1]
    return own[0] if len(own) == 1 else _latest(places, usage.tenant, usage.occurred_at_ms)


def _latest(places: Mapping[tuple[str, SourceCoordinate], _Gathered], tenant: str, before_ms: int) -> _Gathered | None:
    """The tenant's publication that began last before ``before_ms``."""
    known = [
        gathered
        for (owner, _), gathered in places.items()
        if owner == tenant and (gathered.decisions or gathered.reply) and gathered.began_at_ms <= before_ms
    ]
    return max(known, key=lambda gathered: gathered.began_at_ms, default=None)


def _place(tenant: str, source: SourceCoordinate, gathered: _Gathered) -> RequestTimeline:
    final = _final_usage(gathered)
    events = [_decided(decision) for decision in gathered.decisions]
    events += [_settled(usage) for usage in gathered.usage if usage is not final]
    if gathered.reply is not None:
        decided = {decision.decision for decision in gathered.decisions}
        said = {decision.message for decision in gathered.decisions}
        events += _stages(gathered.reply.reply, decided)
        events.append(_replied(gathered.reply, final, said))
    else:
        # Until there is a reply, only the accepted decision holds the time of arrival.
        events += _arrivals(gathered.decisions)
    ordered = sorted(events, key=lambda event: (event.at_ms, _RANK.get(event.event, _MIDDLE)))
    return RequestTimeline(tenant, source, _state(gathered), tuple(ordered))


def _final_usage(gathered: _Gathered) -> UsageEvent | None:
    """Usage of the run that was answered; earlier runs were requeued."""
    if gathered.reply is None:
        return None
    outcome = gathered.reply.reply.outcome
    same = [usage for usage in gathered.usage if usage.outcome == outcome]
    return max(same, key=lambda usage: usage.occurred_at_ms, default=None)


def _state(gathered: _Gathered) -> str:
    if gathered.reply is not None and gathered.reply.replies_seen > 0:
        return gathered.reply.reply.outcome
    # A replay of its dead letter does not change the state of this request.
    decided = [decision for decision in gathered.decisions if decision.decision != Decision.REPLAYED]
    decisions = sorted(decided, key=lambda decision: decision.occurred_at_ms)
    if not decisions:
        return "settled" if gathered.usage else "replayed"
    last = decisions[-1].decision
    # Each time that work is handed back settles it once, under its place of then.
    handed_back = sum(decision.decision == Decision.HANDED_BACK for decision in decisions)
    if last == Decision.DISPATCHED and len(gathered.usage) > handed_back:
        # It ended; its reply is not here yet, or not any more.
        return "settled"
    return "waiting" if last in {Decision.ACCEPTED, Decision.DEGRADED} else last


def _arrivals(decisions: Iterable[AuditEvent]) -> list[TimelineEvent]:
    for decision in decisions:
        submitted = decision.inputs.get("submitted_at_ms", "")
        if submitted.isdecimal():
            return [TimelineEvent(int(submitted), "arrived")]
    return []


def _decided(decision: AuditEvent) -> TimelineEvent:
    return TimelineEvent(
        decision.occurred_at_ms,
        decision.decision,
        decision.actor,
        decision.code,
        decision.message,
        {name: value for name, value in decision.inputs.items() if name != "submitted_at_ms"},
    )


def _stages(reply: InferenceReply, decided: set[str]) -> list[TimelineEvent]:
    """Events from the reply's timings, without those that a recorded decision already gives."""
    timings = reply.timings
    ran_ms = _difference(timings.engine_started_at_ms, timings.engine_finished_at_ms)
    stages: tuple[tuple[int | None, str, dict[str, object]], ...] = (
        (timings.submitted_at_ms, "arrived", {"task": reply.task, "model": reply.model}),
        (None if Decision.ACCEPTED in decided else timings.admitted_at_ms, Decision.ACCEPTED, {}),
        (None if Decision.DISPATCHED in decided else timings.dispatched_at_ms, Decision.DISPATCHED, {}),
        (timings.received_at_ms, "received", {}),
        (timings.engine_started_at_ms, "engine_started", {"engine": reply.engine, "batch_size": reply.batch_size}),
        (timings.engine_finished_at_ms, "engine_finished", {"engine_ms": ran_ms}),
    )
    return [
        TimelineEvent(at_ms, name, details=_details(details)) for at_ms, name, details in stages if at_ms is not None
    ]


def _settled(usage: UsageEvent) -> TimelineEvent:
    return TimelineEvent(
        usage.occurred_at_ms,
        "settled",
        code=usage.code,
        details=_details({"outcome": usage.outcome, "pool": usage.pool, **_costs(usage)}),
    )


def _replied(recorded: RecordedReply, usage: UsageEvent | None, said: set[str | None]) -> TimelineEvent:
    reply = recorded.reply
    details: dict[str, object] = {
        "outcome": reply.outcome,
        "field": reply.field,
        "retry_after_ms": reply.retry_after_ms,
        "finish_reason": reply.finish_reason,
        "replay_of": reply.replay_of,
        "attempts": reply.attempts if reply.attempts != 1 else None,
        "model_version": reply.model_version,
        "degradations": ", ".join(reply.degradations),
        "passages": len(reply.passages) or None,
        "guardrails": ", ".join(map(str, reply.guardrails)),
        "answer_of": None if reply.cache_use is None else reply.cache_use.request_id,
    }
    if usage is not None:
        details |= {"pool": usage.pool, **_costs(usage)}
    elif reply.usage.prompt_tokens or reply.usage.completion_tokens:
        tokens = reply.usage
        details |= {"prompt_tokens": tokens.prompt_tokens, "completion_tokens": tokens.completion_tokens}
    if recorded.replies_seen != 1:
        details["final_replies_seen"] = recorded.replies_seen
    details["copies_sent"] = recorded.replays_seen or None
    message = None if reply.message in said else reply.message
    return TimelineEvent(recorded.replied_at_ms, "replied", None, reply.code, message, _details(details))


def _costs(usage: UsageEvent) -> dict[str, object]:
    cost = usage.cost
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens or None,
        "estimated_cost_tokens": usage.cost_tokens,
        "spent_cost_tokens": 0 if usage.cached else cost_tokens(usage.prompt_tokens, usage.completion_tokens),
        "cost": None if cost is None else f"{cost.amount} {cost.currency}",
        "requested_by": usage.requested_by,
    }


def _details(values: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None and value != ""}


def _difference(start_ms: int | None, end_ms: int | None) -> int | None:
    return None if start_ms is None or end_ms is None else end_ms - start_ms
