"""What becomes of rows when a job's time is up, or it is cancelled: of those that were refused for now nothing is under
way, and nothing is sent any more."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from fairlane.outcomes import Code, Outcome, Task
from fairlane.records import InferenceReply, InferenceRequest, RequestInput
from producers.backfill.chunk_ledger import ChunkLedger
from producers.backfill.errors import UnavailableError
from producers.backfill.job import ChunkPlan, GoodRow, InputPosition, RowIds, Status, Wanted
from tests.kit.backfill_kit import (
    PARTITIONS,
    TENANT,
    KilledError,
    PartsInMemory,
    PublisherInMemory,
    RepliesInMemory,
    Trouble,
    World,
    good_rows,
    ok,
    world_of,
)

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


def test_an_answer_is_waited_for_though_an_earlier_copy_was_refused_after_the_runner_took_over() -> None:
    made = world(Trouble(frozenset({14})))
    made.answer = lambda _request: None
    with pytest.raises(KilledError):
        made.run()
    # Each was refused at first, and sent again by a runner that was killed then.
    made.replies = [refused(request) for request in made.sent]
    made.unanswered = list(made.sent)
    deadline_at_ms = made.now_ms + 600_000
    made.job = replace(made.job, deadline_at_ms=deadline_at_ms)
    refused_again: set[str] = set()

    def answer(request: InferenceRequest) -> InferenceReply | None:
        if len(made.sent) >= 12 and request.request_id not in refused_again:
            refused_again.add(request.request_id)
            return replace(refused(request), retry_after_ms=GRACE_MS)
        if len(made.sent) >= 12 and made.now_ms > deadline_at_ms:
            return ok(request)
        made.unanswered.append(request)
        return None

    made.answer = answer

    assert made.take().runner(grace_ms=GRACE_MS).run() is Status.COMPLETED

    assert len(refused_again) == 6
    assert made.job.tally.ok == 6


def test_of_a_row_that_was_asked_for_again_a_copy_may_be_under_way_though_one_is_refused() -> None:
    ids = RowIds("00c0ffee00c0ffee", PARTITIONS)
    request = InferenceRequest(ids.id_of(0), "words", Task.GENERATE, RequestInput(prompt="a question"))
    ledger = ChunkLedger(TENANT, ids)
    ledger.open(ChunkPlan(0, 0, 1, InputPosition(), InputPosition(), 0), [GoodRow("0", request)])
    ledger.ask_again([0], 1)
    assert ledger.due(1)

    assert ledger.take(refused(request), 2)
    ledger.give_up_refused(Outcome.EXPIRED)

    assert ledger.awaited() == [request.request_id]


# ------------------------------------------------------------------ Kafka is away


def away(monkeypatch: pytest.MonkeyPatch, method: str, made: World, until_ms: int, *, is_kept: bool = False) -> None:
    """Kafka is away until then; what it was given first is in the log all the same if it ``is_kept``."""
    call: Callable[..., None] = getattr(PublisherInMemory, method)
    tries = 0

    def tried(publisher: PublisherInMemory, *arguments: object) -> None:
        nonlocal tries
        tries += 1
        is_away = made.now_ms < until_ms
        if not is_away or (is_kept and tries == 1):
            call(publisher, *arguments)
        if is_away:
            raise UnavailableError("nothing answers")

    monkeypatch.setattr(PublisherInMemory, method, tried)


def test_nothing_is_sent_after_the_window_to_a_kafka_that_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world_of(good_rows(6), chunk_rows=3, max_open_chunks=2)
    deadline_at_ms = made.now_ms + 60_000
    made.job = replace(made.job, deadline_at_ms=deadline_at_ms)
    away(monkeypatch, "publish", made, deadline_at_ms + 60_000)

    assert made.take().runner(grace_ms=GRACE_MS).run() is Status.EXPIRED

    assert made.sent == []
    assert made.job.tally.expired == 6
    assert made.now_ms < deadline_at_ms + GRACE_MS, "nobody waits for what was not sent"


def test_what_is_sent_to_a_kafka_that_was_away_has_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world_of(good_rows(3))
    back_at_ms = made.now_ms + 40_000
    made.job = replace(made.job, deadline_at_ms=back_at_ms + 20_000)
    away(monkeypatch, "publish", made, back_at_ms)

    assert made.run() is Status.COMPLETED

    assert len(made.sent) == 3
    assert all((request.timeout_ms or 0) <= 20_000 for request in made.sent)


def test_what_is_in_the_log_by_a_try_that_nobody_heard_of_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world_of(good_rows(3))
    deadline_at_ms = made.now_ms + 60_000
    made.job = replace(made.job, deadline_at_ms=deadline_at_ms)
    away(monkeypatch, "publish", made, deadline_at_ms + 60_000, is_kept=True)

    assert made.take().runner(grace_ms=GRACE_MS).run() is Status.COMPLETED

    assert made.job.tally.ok == 3
    assert len(made.sent) == 3


def test_a_job_that_is_cancelled_while_kafka_is_away_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world_of(good_rows(6), chunk_rows=3, max_open_chunks=2)
    away(monkeypatch, "publish", made, made.now_ms + 60_000)
    member = made.take()
    member.on_wait = lambda: setattr(member, "wanted", Wanted.CANCEL)

    assert member.runner(grace_ms=GRACE_MS).run() is Status.CANCELLED

    assert made.sent == []
    assert made.job.tally.cancelled == 3


@pytest.mark.parametrize("is_kept", [True, False])
def test_nor_is_anything_sent_again_after_the_window(monkeypatch: pytest.MonkeyPatch, is_kept: bool) -> None:
    made = world_of(good_rows(1))
    deadline_at_ms = made.now_ms + 200_000
    made.job = replace(made.job, deadline_at_ms=deadline_at_ms)
    made.answer = lambda request: refused(request) if len(made.replies) == 0 else ok(request)
    away(monkeypatch, "send_again", made, deadline_at_ms + 60_000, is_kept=is_kept)

    ended = made.take().runner(grace_ms=120_000).run()

    assert ended is (Status.COMPLETED if is_kept else Status.EXPIRED)

    assert len(made.sent) == (2 if is_kept else 1)


# ------------------------------------------------------------------ which end it is


@pytest.mark.parametrize("is_under_way", [True, False])
def test_what_is_cancelled_is_cancelled_though_its_time_is_up(
    monkeypatch: pytest.MonkeyPatch, is_under_way: bool
) -> None:
    made = world()
    deadline_at_ms = made.now_ms + 10_000
    made.job = replace(made.job, deadline_at_ms=deadline_at_ms)
    if is_under_way:
        made.answer = lambda request: refused(request) if len(made.replies) < 3 else None
    member = made.take()
    read: Callable[[RepliesInMemory, float], Sequence[InferenceReply]] = RepliesInMemory.read

    def cancelled_late(replies: RepliesInMemory, timeout_s: float) -> Sequence[InferenceReply]:
        found = read(replies, timeout_s)
        if made.now_ms >= deadline_at_ms:
            member.wanted = Wanted.CANCEL
        return found

    monkeypatch.setattr(RepliesInMemory, "read", cancelled_late)

    assert member.runner(grace_ms=1_000).run() is Status.CANCELLED

    assert (made.job.tally.cancelled, made.job.tally.expired) == (6, 0)


@pytest.mark.parametrize("joining", ["at once", "slowly", "by another runner"])
def test_how_a_job_ended_does_not_depend_on_how_long_its_parts_are_joined(
    monkeypatch: pytest.MonkeyPatch, joining: str
) -> None:
    made = world_of(good_rows(6), chunk_rows=3, max_open_chunks=2)
    made.job = replace(made.job, deadline_at_ms=made.now_ms + 60_000)
    made.answer = lambda request: (
        InferenceReply(request.request_id, TENANT, Outcome.EXPIRED) if len(made.replies) == 2 else ok(request)
    )
    join = PartsInMemory.join

    def joined(parts: PartsInMemory, done: Callable[[], Iterator[str]]) -> None:
        if joining != "at once":
            made.now_ms += 120_000
        if joining == "by another runner" and made.job.token == 1:
            raise KilledError
        join(parts, done)

    monkeypatch.setattr(PartsInMemory, "join", joined)

    assert made.run_until_done() is Status.EXPIRED

    assert (made.job.tally.ok, made.job.tally.expired) == (5, 1)
