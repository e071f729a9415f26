"""Where a request stands, by what is recorded of it."""

from dataclasses import replace

import pytest

from fairlane.outcomes import Decision, Outcome
from fairlane.records import SourceCoordinate
from fairlane_server.postgres.request_timeline import History
from producers.gateway.results.request_status import RequestState, as_erased, may_be_erased, status_of
from tests.kit.native_kit import ID, decided, recorded

WAITS = decided(Decision.ACCEPTED, 10)
OF_OTHER_RECORDS = {Decision.CANCEL_REFUSED, Decision.FEEDBACK_REFUSED}
ELSEWHERE = SourceCoordinate("requests.acme", 0, 99)


def test_nothing_is_known_of_nothing() -> None:
    assert status_of(ID, History()) is None


@pytest.mark.parametrize(
    ("decision", "status"),
    [
        (Decision.ACCEPTED, RequestState.QUEUED),
        (Decision.DEGRADED, RequestState.QUEUED),
        (Decision.DISPATCHED, RequestState.RUNNING),
        (Decision.HANDED_BACK, RequestState.QUEUED),
        (Decision.GUARDED, RequestState.FINISHING),
        (Decision.REFUSED, RequestState.FINISHING),
        (Decision.EXPIRED, RequestState.FINISHING),
        (Decision.CANCELLED, RequestState.FINISHING),
        (Decision.DEAD_LETTERED, RequestState.FINISHING),
        (Decision.CACHED, RequestState.FINISHING),
    ],
)
def test_the_last_decision_says_it(decision: Decision, status: RequestState) -> None:
    found = status_of(ID, History((WAITS, decided(decision, 20))))
    assert found is not None
    assert (found.status, found.submitted_at_ms, found.reply) == (status, 10, None)


def test_a_decided_request_whose_reply_was_erased_is_done() -> None:
    found = status_of(ID, History((WAITS, decided(Decision.CACHED, 20))))
    assert found is not None
    assert may_be_erased(found)
    erased = as_erased(found)
    assert (erased.status, erased.is_erased, erased.ended_at_ms) == (RequestState.DONE, True, 20)
    assert erased.events == found.events


@pytest.mark.parametrize("decision", [Decision.ACCEPTED, Decision.DISPATCHED])
def test_an_erased_request_that_still_runs_says_so(decision: Decision) -> None:
    found = status_of(ID, History((WAITS, decided(decision, 20))))
    assert found is not None
    assert not may_be_erased(found)


def test_every_decision_has_a_status() -> None:
    for decision in set(Decision) - OF_OTHER_RECORDS:
        assert status_of(ID, History((decided(decision, 20),))) is not None


@pytest.mark.parametrize("decision", sorted(OF_OTHER_RECORDS))
def test_invalid_feedback_and_cancels_change_nothing_of_the_request_that_they_name(decision: Decision) -> None:
    refused = replace(decided(decision, 30), source=ELSEWHERE)
    assert status_of(ID, History((refused,))) is None, "no request, no status"
    waiting = status_of(ID, History((WAITS, refused)))
    assert waiting == status_of(ID, History((WAITS,)))
    history = History((WAITS,), replies=(recorded(1, request_id=ID),))
    answered = status_of(ID, replace(history, decisions=(WAITS, refused)))
    assert answered == status_of(ID, history)
    assert answered is not None
    assert answered.status is RequestState.DONE


def test_a_reply_ends_it_wherever_it_was_seen() -> None:
    reply = recorded(1, request_id=ID, outcome=Outcome.REJECTED, code="overloaded", model=None)
    history = History((WAITS,))
    for found in (status_of(ID, History((WAITS,), replies=(reply,))), status_of(ID, history, reply)):
        assert found is not None
        assert (found.status, found.ended_at_ms) == (RequestState.DONE, reply.replied_at_ms)
        assert found.reply == reply.reply


def test_a_reply_that_was_seen_and_recorded_counts_once() -> None:
    reply = recorded(1, request_id=ID)
    found = status_of(ID, History((WAITS,), replies=(reply,)), reply)
    assert found is not None
    assert [event.event for event in found.events] == ["accepted", "replied"]


def test_a_request_that_was_sent_again_stands_where_it_stands_now() -> None:
    refused = recorded(1, request_id=ID, at_ms=30, outcome=Outcome.REJECTED, code="overloaded")
    again = replace(decided(Decision.ACCEPTED, 50), source=ELSEWHERE)
    found = status_of(ID, History((decided(Decision.REFUSED, 20), again), replies=(refused,)))
    assert found is not None
    assert (found.status, found.submitted_at_ms) == (RequestState.QUEUED, 50)


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.EXPIRED])
def test_what_ran_counts_whatever_was_refused_under_its_id_later(outcome: Outcome) -> None:
    ran = recorded(1, request_id=ID, at_ms=30)
    refused = recorded(99, request_id=ID, at_ms=60, outcome=outcome, source=ELSEWHERE, output=None)
    decision = replace(decided(Decision.REFUSED, 50), source=ELSEWHERE)
    for history in (
        History((WAITS,), replies=(ran, refused)),
        History((WAITS, decision), replies=(ran, refused)),
        History((WAITS, decision), replies=(ran,)),
    ):
        found = status_of(ID, history)
        assert found is not None
        assert (found.status, found.reply, found.ended_at_ms) == (RequestState.DONE, ran.reply, 30)
    found = status_of(ID, History((), replies=(ran,)), refused)
    assert found is not None
    assert found.reply == ran.reply


def test_a_record_that_was_dropped_as_a_repetition_changes_nothing() -> None:
    copy = replace(decided(Decision.DUPLICATE, 50), source=ELSEWHERE)
    found = status_of(ID, History((WAITS, decided(Decision.DISPATCHED, 20), copy)))
    assert found is not None
    assert found.status is RequestState.RUNNING
