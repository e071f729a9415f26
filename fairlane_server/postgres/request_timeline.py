"""What became of one request, as a timeline. Pure: what is recorded in, events in order out.

Times are those that each process wrote by its own clock; events of different machines may be off by their difference.
Nothing here holds text of a prompt or of an answer: decisions, coordinates, times and counts are all there is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fairlane.names import is_returned
from fairlane.outcomes import Decision
from fairlane.records import AuditEvent, InferenceReply, SourceCoordinate, UsageEvent

OUTPUT_TOKEN_COST = 2
"""Cost tokens of one token that a model wrote; one that it read costs 1."""

# How events of the same millisecond follow one another; what is not named here comes in the middle.
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
    "replied": 10,
}
_MIDDLE = 6


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A final reply as it was recorded, without its output; ``replied_at_ms`` is the record's own time."""

    reply: InferenceReply
    replied_at_ms: int
    replies_seen: int = 1
    replays_seen: int = 0


@dataclass(frozen=True, slots=True)
class History:
    """Everything that is recorded under one request id, each part in the order in which it happened."""

    decisions: tuple[AuditEvent, ...] = ()
    usage: tuple[UsageEvent, ...] = ()
    replies: tuple[RecordedReply, ...] = ()


@dataclass(frozen=True, slots=True)
class StoryEvent:
    """One thing that happened. The names of ``details`` end in their units (``_ms``, ``_tokens``, ``_at_ms``)."""

    at_ms: int
    event: str
    actor: str | None = None
    code: str | None = None
    message: str | None = None
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """One publication of the request id: a tenant may send an id again, and other tenants may use it too.

    ``state`` is the outcome when it was answered, else where it stands: waiting, dispatched, handed_back, or what the
    last decision says.
    """

    tenant: str
    source: SourceCoordinate
    state: str
    events: tuple[StoryEvent, ...]

    @property
    def began_at_ms(self) -> int:
        """The time of the first event."""
        return self.events[0].at_ms


@dataclass(slots=True)
class _Gathered:
    """What belongs to one place."""

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
        """When it was first on its way to an engine; None when it never was."""
        times = [event.occurred_at_ms for event in self.decisions if event.decision == Decision.DISPATCHED]
        if self.reply is not None and self.reply.reply.timings.dispatched_at_ms is not None:
            times.append(self.reply.reply.timings.dispatched_at_ms)
        return min(times, default=None)


def tell(history: History) -> tuple[Place, ...]:
    """The story of every publication of the id, the earliest first; empty when nothing is recorded."""
    places = _gather(history)
    told = [_place(tenant, source, gathered) for (tenant, source), gathered in places.items()]
    return tuple(sorted(told, key=lambda place: (place.began_at_ms, place.source.offset)))


def _gather(history: History) -> dict[tuple[str, SourceCoordinate], _Gathered]:
    places: dict[tuple[str, SourceCoordinate], _Gathered] = {}
    for reply in history.replies:
        source = reply.reply.source or SourceCoordinate("", -1, -1)
        places.setdefault((reply.reply.tenant, source), _Gathered()).reply = reply
    returned = []
    for decision in history.decisions:
        if is_returned(decision.source.topic):
            returned.append(decision)
        else:
            places.setdefault((decision.tenant, decision.source), _Gathered()).decisions.append(decision)
    # A decision about work that came back names the place it came back to; it belongs to where the request came from.
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
    """Usage names the work, not the request's place: times tell which of several it belongs to. Only an answer that was
    given again had no work: there it is the place."""
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
    """The tenant's place that began last before a time."""
    known = [
        gathered
        for (owner, _), gathered in places.items()
        if owner == tenant and (gathered.decisions or gathered.reply) and gathered.began_at_ms <= before_ms
    ]
    return max(known, key=lambda gathered: gathered.began_at_ms, default=None)


def _place(tenant: str, source: SourceCoordinate, gathered: _Gathered) -> Place:
    final = _final_usage(gathered)
    events = [_decided(decision) for decision in gathered.decisions]
    events += [_settled(usage) for usage in gathered.usage if usage is not final]
    if gathered.reply is not None:
        decided = {decision.decision for decision in gathered.decisions}
        said = {decision.message for decision in gathered.decisions}
        events += _stages(gathered.reply.reply, decided)
        events.append(_replied(gathered.reply, final, said))
    else:
        # Nothing but an accepted decision knows when the request arrived before its reply does.
        events += _arrivals(gathered.decisions)
    ordered = sorted(events, key=lambda event: (event.at_ms, _RANK.get(event.event, _MIDDLE)))
    return Place(tenant, source, _state(gathered), tuple(ordered))


def _final_usage(gathered: _Gathered) -> UsageEvent | None:
    """The usage of the run that was answered; what came before it was handed back."""
    if gathered.reply is None:
        return None
    outcome = gathered.reply.reply.outcome
    same = [usage for usage in gathered.usage if usage.outcome == outcome]
    return max(same, key=lambda usage: usage.occurred_at_ms, default=None)


def _state(gathered: _Gathered) -> str:
    if gathered.reply is not None and gathered.reply.replies_seen > 0:
        return gathered.reply.reply.outcome
    # That its letter was sent again says nothing of where this one stands.
    decided = [decision for decision in gathered.decisions if decision.decision != Decision.REPLAYED]
    decisions = sorted(decided, key=lambda decision: decision.occurred_at_ms)
    if not decisions:
        return "settled" if gathered.usage else "replayed"
    last = decisions[-1].decision
    return "waiting" if last in {Decision.ACCEPTED, Decision.DEGRADED} else last


def _arrivals(decisions: Iterable[AuditEvent]) -> list[StoryEvent]:
    for decision in decisions:
        submitted = decision.inputs.get("submitted_at_ms", "")
        if submitted.isdecimal():
            return [StoryEvent(int(submitted), "arrived")]
    return []


def _decided(decision: AuditEvent) -> StoryEvent:
    return StoryEvent(
        decision.occurred_at_ms,
        decision.decision,
        decision.actor,
        decision.code,
        decision.message,
        {name: value for name, value in decision.inputs.items() if name != "submitted_at_ms"},
    )


def _stages(reply: InferenceReply, decided: set[str]) -> list[StoryEvent]:
    """The stages that the reply's timings name; a decision that was recorded itself is not told twice."""
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
    return [StoryEvent(at_ms, name, details=_details(details)) for at_ms, name, details in stages if at_ms is not None]


def _settled(usage: UsageEvent) -> StoryEvent:
    return StoryEvent(
        usage.occurred_at_ms,
        "settled",
        code=usage.code,
        details=_details({"outcome": usage.outcome, "pool": usage.pool, **_costs(usage)}),
    )


def _replied(recorded: RecordedReply, usage: UsageEvent | None, said: set[str | None]) -> StoryEvent:
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
    return StoryEvent(recorded.replied_at_ms, "replied", None, reply.code, message, _details(details))


def _costs(usage: UsageEvent) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens or None,
        "estimated_cost_tokens": usage.cost_tokens,
        "spent_cost_tokens": 0 if usage.cached else usage.prompt_tokens + OUTPUT_TOKEN_COST * usage.completion_tokens,
    }


def _details(values: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None and value != ""}


def _difference(start_ms: int | None, end_ms: int | None) -> int | None:
    return None if start_ms is None or end_ms is None else end_ms - start_ms
