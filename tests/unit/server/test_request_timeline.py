"""The story of one request from what is recorded of it: order, places, and what is told of each stage."""

from dataclasses import replace

from fairlane.outcomes import Decision
from fairlane.records import AuditEvent, Cost, InferenceReply, SourceCoordinate, Timings, TokenUsage, UsageEvent
from fairlane_server.cli.explain import with_unit
from fairlane_server.postgres.request_timeline import History, RecordedReply, RequestTimeline, TimelineEvent, tell

SOURCE = SourceCoordinate("requests.acme", 0, 7)
RETURNED = SourceCoordinate("returned.generate", 0, 0)


def decided(decision: str, at_ms: int, source: SourceCoordinate = SOURCE, **inputs: str) -> AuditEvent:
    return AuditEvent("id", "acme", decision, "dispatcher-1", at_ms, source, inputs=inputs)


def spent(at_ms: int, outcome: str = "ok", code: str | None = None, offset: int = 3) -> UsageEvent:
    return UsageEvent(
        *("id", "acme", "generate", "words", "1", "normal", outcome, code),
        *(30, 10, 0, 70, 25, at_ms),
        SourceCoordinate("priority.generate.normal", 1, offset),
    )


def answered(
    timings: Timings, at_ms: int, source: SourceCoordinate = SOURCE, outcome: str = "ok", seen: int = 1
) -> RecordedReply:
    reply = InferenceReply("id", "acme", outcome, usage=TokenUsage(30, 10), timings=timings, source=source)
    return RecordedReply(replace(reply, engine="simulated", batch_size=8), at_ms, seen)


def names_of(place: RequestTimeline) -> list[str]:
    return [event.event for event in place.events]


def event(place: RequestTimeline, name: str) -> TimelineEvent:
    (found,) = [one for one in place.events if one.event == name]
    return found


def test_nothing_recorded_is_no_story() -> None:
    assert tell(History()) == ()


def test_a_request_that_was_answered_is_told_from_arrival_to_reply() -> None:
    history = History(
        (
            decided(Decision.ACCEPTED, 1_003, predicted_wait_ms="35"),
            decided(Decision.DEGRADED, 1_003, steps="fewer_passages"),
            decided(Decision.DISPATCHED, 1_003, waited_ms="0"),
        ),
        (spent(1_060),),
        (answered(Timings(1_000, 1_003, 1_003, 1_010, 1_020, 1_060), 1_062),),
    )
    (place,) = tell(history)
    assert names_of(place) == [
        *("arrived", "accepted", "degraded", "dispatched"),
        *("received", "engine_started", "engine_finished", "replied"),
    ]
    assert (place.tenant, place.source, place.state, place.began_at_ms) == ("acme", SOURCE, "ok", 1_000)
    assert event(place, "accepted").details == {"predicted_wait_ms": "35"}
    assert event(place, "engine_finished").details == {"engine_ms": "40"}
    replied = event(place, "replied").details
    assert (replied["estimated_cost_tokens"], replied["spent_cost_tokens"]) == ("70", "50")
    assert (replied["prompt_tokens"], replied["completion_tokens"]) == ("30", "10")


def test_the_cost_and_who_asked_are_told_where_they_are_known() -> None:
    usage = replace(spent(1_060), cost=Cost(153_600, "XTS"), requested_by="key:0123456789abcdef")
    replied = [
        event(tell(History(usage=(one,), replies=(answered(Timings(1_000), 1_062),)))[0], "replied").details
        for one in (usage, spent(1_060))
    ]
    assert (replied[0]["cost"], replied[0]["requested_by"]) == ("0.0001536 XTS", "key:0123456789abcdef")
    assert replied[1].keys().isdisjoint({"cost", "requested_by"})


def test_decisions_that_were_not_recorded_are_taken_from_the_reply() -> None:
    (place,) = tell(History(replies=(answered(Timings(1_000, 1_003, 1_040), 1_062, outcome="expired"),)))
    assert names_of(place) == ["arrived", "accepted", "dispatched", "replied"]
    assert place.state == "expired"


def test_where_a_request_stands_that_was_not_answered() -> None:
    accepted = decided(Decision.ACCEPTED, 1_003, submitted_at_ms="1000", rank_at_most="4")
    steps = (
        ((accepted,), "waiting"),
        ((accepted, decided(Decision.DEGRADED, 1_003)), "waiting"),
        ((accepted, decided(Decision.DISPATCHED, 1_050)), "dispatched"),
        ((accepted, decided(Decision.DISPATCHED, 1_050), decided(Decision.HANDED_BACK, 1_060)), "handed_back"),
        ((decided(Decision.DEAD_LETTERED, 1_003),), "dead_lettered"),
        ((decided("something new", 1_003),), "something new"),
    )
    for decisions, state in steps:
        assert tell(History(decisions))[0].state == state
    ran = History((accepted, decided(Decision.DISPATCHED, 1_050)), (spent(1_060),))
    assert tell(ran)[0].state == "settled", "its reply is not recorded yet, or was erased"
    (place,) = tell(History((accepted,)))
    assert names_of(place) == ["arrived", "accepted"]
    assert event(place, "accepted").details == {"rank_at_most": "4"}, "the arrival says it already"


def test_work_that_was_handed_back_is_one_story_with_both_runs() -> None:
    history = History(
        (
            decided(Decision.ACCEPTED, 1_003),
            decided(Decision.DISPATCHED, 1_010),
            decided(Decision.HANDED_BACK, 1_030),
            decided(Decision.DEGRADED, 1_032, RETURNED, steps="shorter_context"),
            decided(Decision.DISPATCHED, 1_040, RETURNED),
        ),
        (spent(1_030, "rejected", "overloaded", 1), spent(1_090, offset=2)),
        (answered(Timings(1_000, 1_003, 1_040, 1_050, 1_060, 1_090), 1_091),),
    )
    (place,) = tell(history)
    assert names_of(place) == [
        *("arrived", "accepted", "dispatched", "settled", "handed_back", "degraded", "dispatched"),
        *("received", "engine_started", "engine_finished", "replied"),
    ]
    assert (event(place, "settled").code, event(place, "settled").details["outcome"]) == ("overloaded", "rejected")
    assert place.state == "ok"
    runs_again, ended = (tell(replace(history, usage=history.usage[:count], replies=())) for count in (1, 2))
    assert (runs_again[0].state, ended[0].state) == ("dispatched", "settled")


def test_an_id_that_was_sent_again_has_a_story_for_each_place() -> None:
    again, duplicate, other = (replace(SOURCE, offset=offset) for offset in (8, 9, 10))
    refused = replace(decided(Decision.REFUSED, 1_002), code="overloaded", message="the queue is full")
    refusal = answered(Timings(1_000), 1_002, outcome="rejected")
    said = replace(refusal.reply, code="overloaded", message="the queue is full", retry_after_ms=500)
    foreign = replace(decided(Decision.ACCEPTED, 1_500, SourceCoordinate("requests.globex", 0, 1)), tenant="globex")
    history = History(
        (
            refused,
            decided(Decision.ACCEPTED, 2_003, again),
            decided(Decision.DISPATCHED, 2_010, again),
            decided(Decision.DUPLICATE, 2_020, duplicate),
            decided(Decision.ACCEPTED, 3_003, other),
            decided(Decision.DISPATCHED, 3_010, other),
            foreign,
        ),
        (spent(2_090, offset=1), spent(3_090, "failed", "poison", offset=2)),
        (
            replace(refusal, reply=said),
            answered(Timings(2_000, 2_003, 2_010, 2_020, 2_030, 2_090), 2_091, again, seen=2),
        ),
    )
    first, of_globex, second, third, fourth = tell(history)
    assert [place.state for place in (first, second, third, fourth)] == ["rejected", "ok", "duplicate", "settled"]
    assert (of_globex.tenant, of_globex.state) == ("globex", "waiting")
    assert event(first, "refused").message == "the queue is full"
    assert event(first, "replied").message is None, "said once"
    assert event(first, "replied").details["retry_after_ms"] == "500"
    assert event(second, "replied").details["final_replies_seen"] == "2"
    assert event(second, "replied").details["spent_cost_tokens"] == "50"
    assert event(fourth, "settled").code == "poison"
    assert names_of(third) == ["duplicate"]


def test_a_copy_of_a_reply_whose_original_is_not_recorded_yet_is_no_outcome() -> None:
    (place,) = tell(History(replies=(replace(answered(Timings(1_000), 1_050), replies_seen=0, replays_seen=1),)))
    assert place.state == "replayed"
    assert event(place, "replied").details["copies_sent"] == "1"


def test_usage_alone_is_told_at_its_own_place() -> None:
    (place,) = tell(History(usage=(spent(1_000),)))
    assert (place.state, place.source.topic, names_of(place)) == ("settled", "priority.generate.normal", ["settled"])


def test_units_come_from_the_names() -> None:
    said = {
        ("predicted_wait_ms", "1234"): "predicted wait 1,234 ms",
        ("cost_tokens", "240"): "cost 240 tokens",
        ("capacity_tokens_per_s", "2000.0"): "capacity 2,000 tokens/s",
        ("requests_per_s", "0.5"): "requests 0.5/s",
        ("deadline_at_ms", "31000"): "deadline +30,000 ms",
        ("own_waiting_requests", "12"): "own waiting 12 requests",
        ("pressure", "0.8251"): "pressure 0.825",
        ("share", "1"): "share 1",
        ("steps", "fewer_passages"): "steps fewer_passages",
        ("replayed", "true"): "replayed true",
        ("capacity_tokens_per_s", "nan"): "capacity nan tokens/s",
    }
    for (name, value), text in said.items():
        assert with_unit(name, value, 1_000) == text


def test_a_replay_names_what_it_replays_and_how_often_it_ran() -> None:
    first = answered(Timings(1_000, 1_003, 1_003, 1_010, 1_020, 1_060), 1_062)
    (plain,) = tell(History(replies=(first,)))
    assert not {"replay_of", "attempts"} & event(plain, "replied").details.keys()
    (place,) = tell(History(replies=(replace(first, reply=replace(first.reply, replay_of="id-0", attempts=3)),)))
    told = event(place, "replied").details
    assert (told["replay_of"], told["attempts"]) == ("id-0", "3")


def test_a_cancelled_request_says_who_carried_it_out_before_its_reply() -> None:
    """Of one that waited the dispatcher does, and nothing was spent; of a running one its consumer does."""
    waited = History(
        (
            decided(Decision.ACCEPTED, 1_003, submitted_at_ms="1000"),
            decided(Decision.CANCELLED, 1_040, waited_ms="40", requested_at_ms="1038"),
        ),
        (),
        (answered(Timings(1_000, 1_003), 1_040, outcome="cancelled"),),
    )
    (place,) = tell(waited)
    assert (names_of(place), place.state) == (["arrived", "accepted", "cancelled", "replied"], "cancelled")
    assert event(place, "cancelled").details == {"waited_ms": "40", "requested_at_ms": "1038"}
    (place,) = tell(History(waited.decisions))
    assert place.state == "cancelled", "also before its reply is recorded"

    timings = Timings(1_000, 1_003, 1_004, 1_010, 1_020, 1_060)
    ran = History(
        (decided(Decision.DISPATCHED, 1_004), decided(Decision.CANCELLED, 1_060)),
        (spent(1_060, "cancelled"),),
        (answered(timings, 1_062, outcome="cancelled"),),
    )
    (place,) = tell(ran)
    assert names_of(place)[-3:] == ["engine_finished", "cancelled", "replied"]
    assert event(place, "replied").details["spent_cost_tokens"] == "50"


def test_a_replay_is_told_at_both_ids() -> None:
    accepted, dispatched = decided(Decision.ACCEPTED, 1_003), decided(Decision.DISPATCHED, 1_010)
    again = decided(Decision.REPLAYED, 9_000, replayed_as="id-2", letter="dead-letter.work-0@12")
    failed = answered(Timings(1_000, 1_003, 1_010, 1_020, 1_030, 1_060), 1_062, outcome="failed")
    (old,) = tell(History((accepted, dispatched, again), (spent(1_060, "failed", "poison"),), (failed,)))
    assert (names_of(old)[-2:], old.state) == (["replied", "replayed"], "failed"), "the first reply stands"
    assert event(old, "replayed").details["replayed_as"] == "id-2"

    sent = decided(Decision.REPLAYED, 1_000, replay_of="id-1")
    assert tell(History((sent,)))[0].state == "replayed"
    late_clock = decided(Decision.REPLAYED, 2_000, replay_of="id-1")
    (new,) = tell(History((decided(Decision.ACCEPTED, 1_003, submitted_at_ms="1000"), late_clock)))
    assert new.state == "waiting"
    (new,) = tell(History((decided(Decision.ACCEPTED, 1_003, submitted_at_ms="1000"), sent)))
    assert names_of(new) == ["replayed", "arrived", "accepted"]
