"""Rows that were refused for now when a job's time is up, or it is cancelled: nothing of them is under way."""

from dataclasses import replace

import pytest

from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply, InferenceRequest
from producers.backfill.job import Status, Wanted
from tests.unit.backfill_kit import TENANT, KilledError, Trouble, World, good_rows, ok, world_of

GRACE_MS = 3_600_000


def refused(request: InferenceRequest) -> InferenceReply:
    """As a dispatcher refuses whose queue is longer than the time that is left."""
    return InferenceReply(request.request_id, TENANT, Outcome.REJECTED, Code.DEADLINE_UNMEETABLE, retry_after_ms=60_000)


def world(trouble: Trouble | None = None) -> World:
    return world_of(good_rows(6), trouble=trouble, answer=refused, chunk_rows=3, max_open_chunks=2)


def test_nobody_waits_for_rows_that_are_not_sent_again_when_the_window_ends() -> None:
    made = world()
    deadline_at_ms = made.now_ms + 10_000
    made.job = replace(made.job, deadline_at_ms=deadline_at_ms)

    assert made.take().runner(grace_ms=GRACE_MS).run() is Status.EXPIRED

    assert made.job.tally.expired == 6
    assert deadline_at_ms <= made.now_ms < deadline_at_ms + GRACE_MS
    assert made.output is not None
    assert [answer.row for answer in made.output] == list(range(6))


def test_nor_when_the_job_is_cancelled() -> None:
    made = world()
    member = made.take()

    def answer(request: InferenceRequest) -> InferenceReply:
        if len(made.replies) == 5:
            member.wanted = Wanted.CANCEL
        return refused(request)

    made.answer = answer
    begun_at_ms = made.now_ms

    assert member.runner(grace_ms=GRACE_MS).run() is Status.CANCELLED

    assert made.job.tally.cancelled == 6
    assert made.now_ms < begun_at_ms + GRACE_MS


@pytest.mark.parametrize("wanted", [Wanted.RUN, Wanted.CANCEL])
def test_an_answer_to_what_the_runner_before_sent_again_is_waited_for(wanted: Wanted) -> None:
    made = world(Trouble(frozenset({14})))
    made.answer = lambda _request: None
    with pytest.raises(KilledError):
        made.run()
    assert len(made.sent) == 6
    # Each was refused at first, and sent again by a runner that was killed then.
    made.replies = [refused(request) for request in made.sent]
    made.unanswered, made.answer = list(made.sent), ok
    if wanted is Wanted.RUN:
        made.job = replace(made.job, deadline_at_ms=made.now_ms - 1)
    member = made.take()
    member.wanted = wanted

    ended = member.runner(grace_ms=GRACE_MS).run()

    assert ended is (Status.COMPLETED if wanted is Wanted.RUN else Status.CANCELLED)
    assert made.job.tally.ok == 6
