"""The loop of a job: whatever kills it wherever, every row of the input is in the output once."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest
from confluent_kafka import KafkaException
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from fairlane.names import JOBS_REPLIES
from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply, InferenceRequest
from producers.backfill.errors import (
    InputChangedError,
    JobFailedError,
    LeaseLostError,
    NoSuchInputError,
    UnavailableError,
)
from producers.backfill.job import MAX_COST_REACHED, RowContent, Status, Wanted
from producers.backfill.runner import MOST_RECORD_BYTES, guarded
from tests.kit.backfill_kit import (
    GOOD_ROW,
    TENANT,
    JobLogInMemory,
    KilledError,
    PartsInMemory,
    RepliesInMemory,
    SourceInMemory,
    Trouble,
    World,
    good_rows,
    ok,
    world_of,
)

MIXED: list[RowContent] = [
    GOOD_ROW % 0,
    b"no json",
    GOOD_ROW % 2,
    GOOD_ROW % 3,
    b'{"model": "words", "prompt": 5}',
    GOOD_ROW % 5,
    b"[]",
]


def assert_complete(world: World, *, ordered: bool = True) -> None:
    """Every row is in the output once, and was sent once if it could be sent at all."""
    assert world.output is not None
    rows = [answer.row for answer in world.output]
    assert (rows if ordered else sorted(rows)) == list(range(len(world.rows)))
    assert max(Counter(request.request_id for request in world.sent).values(), default=0) <= 1
    assert world.job.tally.rows == len(world.rows)


def assert_complete_but_for_repeats(world: World) -> None:
    """Likewise, though some were sent again."""
    assert world.output is not None
    assert [answer.row for answer in world.output] == list(range(len(world.rows)))
    assert {answer.outcome for answer in world.output} == {Outcome.OK}


def test_the_rows_of_a_job_are_those_of_its_caller() -> None:
    for caller in ("key:0123456789abcdef", None):
        world = world_of(good_rows(2), requested_by=caller)
        assert world.run() is Status.COMPLETED
        assert [request.requested_by for request in world.sent] == [caller] * 2


def test_a_job_without_trouble() -> None:
    world = world_of(MIXED, chunk_rows=3, max_open_chunks=2)

    assert world.run() is Status.COMPLETED

    assert_complete(world)
    assert world.parts == {}
    assert world.output is not None
    assert [answer.outcome for answer in world.output] == [
        *(Outcome.OK, Outcome.REJECTED, Outcome.OK, Outcome.OK, Outcome.REJECTED, Outcome.OK, Outcome.REJECTED)
    ]
    assert world.output[4].field == "prompt"
    assert all(request.reply_to == JOBS_REPLIES for request in world.sent)
    assert world.job.tally.cost_tokens == 4 * (3 + 2 * 2)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_kill_at_every_single_step_changes_nothing(ordered: bool) -> None:
    whole = world_of(MIXED, chunk_rows=2, max_open_chunks=2, ordered=ordered)
    whole.run()
    steps = whole.trouble.step
    assert steps > 20

    for step in range(1, steps + 1):
        world = world_of(MIXED, trouble=Trouble(frozenset({step})), chunk_rows=2, max_open_chunks=2, ordered=ordered)
        assert world.run_until_done() is Status.COMPLETED
        assert world.job.token == (2 if step <= steps - 3 else 1), f"step {step} killed nobody"
        assert_complete(world, ordered=ordered)


@given(
    rows=st.lists(st.booleans(), max_size=40),
    chunk_rows=st.integers(1, 7),
    max_open_chunks=st.integers(1, 4),
    kills=st.frozensets(st.integers(1, 200), max_size=25),
    away=st.frozensets(st.integers(1, 200), max_size=25),
    ordered=st.booleans(),
    seed=st.integers(0, 1_000),
)
def test_any_number_of_kills_and_outages_at_any_steps(
    rows: list[bool],
    chunk_rows: int,
    max_open_chunks: int,
    kills: frozenset[int],
    away: frozenset[int],
    ordered: bool,
    seed: int,
) -> None:
    contents = [GOOD_ROW % number if good else b"bad" for number, good in enumerate(rows)]
    world = world_of(
        contents,
        trouble=Trouble(kills, away),
        seed=seed,
        chunk_rows=chunk_rows,
        max_open_chunks=max_open_chunks,
        ordered=ordered,
    )

    assert world.run_until_done() is Status.COMPLETED

    assert_complete(world, ordered=ordered)
    assert world.most_open <= max_open_chunks


def test_a_stale_runner_writes_nothing_more() -> None:
    world = world_of(good_rows(20), chunk_rows=5)
    first = world.take().runner()
    world.trouble.kills = frozenset({12})
    with pytest.raises(KilledError):
        first.run()
    stale = world.take().runner()
    assert world.run() is Status.COMPLETED
    output = world.output

    with pytest.raises(LeaseLostError):
        stale.run()

    assert world.output is output
    assert_complete(world)


def test_a_row_counts_as_answered_before_its_chunk_is_finished() -> None:
    counted: set[int] = set()
    world = world_of([*good_rows(19), b"no json"], chunk_rows=20)
    member = world.take()

    def answer(request: InferenceRequest) -> InferenceReply:
        counted.add(member.answered_rows)
        assert world.job.tally.rows == 0
        return ok(request)

    world.answer = answer
    assert member.runner().run() is Status.COMPLETED
    assert len(counted) > 2
    assert max(counted) < member.answered_rows == 20


def test_a_row_refused_for_now_is_sent_again_under_its_id() -> None:
    refused: Counter[str] = Counter()

    def answer(request: InferenceRequest) -> InferenceReply:
        refused[request.request_id] += 1
        if refused[request.request_id] <= 2:
            return InferenceReply(request.request_id, TENANT, Outcome.REJECTED, Code.OVERLOADED, retry_after_ms=500)
        return ok(request)

    world = world_of(good_rows(4), answer=answer, chunk_rows=2)

    assert world.run() is Status.COMPLETED

    assert world.job.tally.ok == 4
    assert set(Counter(request.request_id for request in world.sent).values()) == {3}


def test_a_row_that_is_refused_for_ever_is_an_error() -> None:
    def answer(request: InferenceRequest) -> InferenceReply:
        return InferenceReply(request.request_id, TENANT, Outcome.REJECTED, Code.OVERLOADED, retry_after_ms=500)

    world = world_of(good_rows(1), answer=answer)

    assert world.run() is Status.COMPLETED

    assert world.output is not None
    assert world.output[0].code == Code.OVERLOADED
    assert len(world.sent) == 5


def test_a_job_waits_for_its_budget_and_sends_nothing_new_meanwhile() -> None:
    paid, tries = 3, 0

    def answer(request: InferenceRequest) -> InferenceReply:
        nonlocal paid, tries
        tries += 1
        if tries > 12:
            paid = 99
        if paid <= 0:
            code = Code.INSUFFICIENT_QUOTA
            return InferenceReply(request.request_id, TENANT, Outcome.REJECTED, code, retry_after_ms=80_000_000)
        paid -= 1
        return ok(request)

    world = world_of(good_rows(20), answer=answer, chunk_rows=2, max_open_chunks=2)
    assert world.run() is Status.COMPLETED
    assert world.job.tally.ok == 20, "no row fails, however often it is refused"
    before = [request.request_id for request in world.sent[:12]]
    assert len(set(before)) <= 3 + 2 * 2, "of the rows that do not fit, those of the open chunks are tried"


def test_a_job_whose_budget_does_not_renew_in_its_window_ends_with_what_it_has() -> None:
    paid = 3

    def answer(request: InferenceRequest) -> InferenceReply:
        nonlocal paid
        paid -= 1
        if paid < 0:
            code = Code.INSUFFICIENT_QUOTA
            return InferenceReply(request.request_id, TENANT, Outcome.REJECTED, code, retry_after_ms=10**9)
        return ok(request)

    world = world_of(good_rows(20), answer=answer, chunk_rows=2, max_open_chunks=2, deadline_at_ms=1_600_000)
    assert world.run() is Status.EXPIRED
    assert (world.job.tally.ok, world.job.tally.expired, world.job.tally.failed) == (3, 17, 0)
    assert world.output is not None
    assert len(world.output) == 20


def test_the_reply_to_another_tenant_is_not_taken() -> None:
    def answer(request: InferenceRequest) -> InferenceReply:
        world.replies.append(replace(ok(request), tenant="globex"))
        return ok(request)

    world = world_of(good_rows(3), answer=answer)

    world.run()

    assert world.job.tally.cost_tokens == 3 * 7


def test_what_is_not_done_in_the_completion_window_is_expired() -> None:
    world = world_of(good_rows(30), answer=lambda _request: None, chunk_rows=5, max_open_chunks=2)
    world.job = replace(world.job, deadline_at_ms=world.now_ms + 10_000)

    assert world.run() is Status.EXPIRED

    assert_complete(world)
    assert world.job.tally.expired == 30
    assert len(world.sent) == 10
    assert all(0 < (request.timeout_ms or 0) <= 10_000 for request in world.sent)


def test_a_runner_that_comes_late_takes_every_answer_that_came_in_time() -> None:
    world = world_of(good_rows(60), trouble=Trouble(frozenset({14})), chunk_rows=30, max_open_chunks=2)
    world.answer = lambda _request: None
    with pytest.raises(KilledError):
        world.run()
    assert len(world.sent) == 60
    world.replies = [ok(request) for request in world.sent]
    world.job = replace(world.job, deadline_at_ms=world.now_ms - 1)

    # It reads a few at a time, and each time takes longer than the grace.
    assert world.take().runner(grace_ms=1).run() is Status.COMPLETED

    assert_complete(world)
    assert world.job.tally.ok == 60


def test_a_cancelled_job_takes_every_answer_that_is_there() -> None:
    world = world_of(good_rows(60), trouble=Trouble(frozenset({14})), chunk_rows=30, max_open_chunks=2)
    world.answer = lambda _request: None
    with pytest.raises(KilledError):
        world.run()
    world.replies = [ok(request) for request in world.sent]
    member = world.take()
    member.wanted = Wanted.CANCEL

    assert member.runner(grace_ms=1).run() is Status.CANCELLED

    assert world.job.tally.ok == 60


@pytest.mark.parametrize("error", [JobFailedError("no right to delete"), LeaseLostError(), OSError("secret")])
def test_a_job_that_is_done_stays_done_when_its_parts_cannot_be_removed(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clean_up(_parts: PartsInMemory) -> None:
        raise error

    monkeypatch.setattr(PartsInMemory, "clean_up", clean_up)
    world = world_of(good_rows(3))

    assert world.run() is Status.COMPLETED

    assert (world.job.status, world.job.reason) == (Status.COMPLETED, None)
    assert_complete(world)


def test_a_job_that_is_done_is_done_though_the_process_ends_while_it_tidies_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(good_rows(3))
    member = world.take()

    def clean_up(_parts: PartsInMemory) -> None:
        member.stopping = True
        raise UnavailableError("nothing answers")

    monkeypatch.setattr(PartsInMemory, "clean_up", clean_up)

    assert member.runner().run() is Status.COMPLETED


@pytest.mark.parametrize("mistake", [RecursionError("secret"), UnicodeDecodeError("utf-8", b"secret", 0, 1, "secret")])
def test_what_nobody_foresaw_fails_one_job_and_is_said_without_its_text(
    mistake: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_place: object) -> None:
        raise mistake

    monkeypatch.setattr(SourceInMemory, "read", read)
    world = world_of(good_rows(3))
    member = world.take()

    with capture_logs() as entries:
        assert guarded(world.job, JobLogInMemory(member), member.runner().run) is Status.FAILED  # type: ignore[arg-type]  # a double

    assert world.job.status is Status.FAILED
    assert type(mistake).__name__ in (world.job.reason or "")
    assert "secret" not in (world.job.reason or "")
    (said,) = [entry for entry in entries if entry["event"] == "job_broke"]
    assert said["error"] == type(mistake).__name__
    assert "secret" not in repr(said)


def test_a_job_that_cannot_begin_fails_with_its_reason() -> None:
    world = world_of(good_rows(3))

    def work() -> Status:
        raise JobFailedError("OUTPUT is the same file as INPUT")

    assert guarded(world.job, JobLogInMemory(world.take()), work) is Status.FAILED  # type: ignore[arg-type]  # a double
    assert world.job.reason == "OUTPUT is the same file as INPUT"


@pytest.mark.parametrize(
    "error", [UnavailableError("nothing answers"), LeaseLostError(), KafkaException("no such setting")]
)
def test_what_is_not_the_jobs_fault_leaves_it_as_it_is(error: Exception) -> None:
    world = world_of(good_rows(3))
    member = world.take()

    def work() -> Status:
        raise error

    with pytest.raises(type(error)):
        guarded(world.job, JobLogInMemory(member), work)  # type: ignore[arg-type]  # a double
    assert world.job.status is Status.RUNNING


def test_nothing_more_is_sent_once_the_budget_is_spent() -> None:
    world = world_of(good_rows(100), chunk_rows=10, max_open_chunks=3, max_cost_tokens=7 * 25)

    assert world.take().runner(row_cost=7.0).run() is Status.PAUSED

    assert world.job.status is Status.PAUSED
    assert world.job.reason == MAX_COST_REACHED
    assert len(world.sent) == 25
    assert world.job.tally.cost_tokens == 7 * 25

    world.job = replace(world.job, spec=replace(world.job.spec, max_cost_tokens=7 * 100))
    assert world.run() is Status.COMPLETED
    assert_complete(world)


def test_a_paused_job_is_left_and_gone_on_with() -> None:
    world = world_of(good_rows(20), chunk_rows=3, max_open_chunks=2)
    member = world.take()

    def answer(request: InferenceRequest) -> InferenceReply:
        if len(world.replies) == 7:
            member.wanted = Wanted.PAUSE
        return ok(request)

    world.answer = answer

    assert member.runner().run() is Status.PAUSED
    assert world.job.status is Status.PAUSED
    assert len(world.sent) < 20
    assert world.run() is Status.COMPLETED
    assert_complete(world)


def test_a_process_that_is_to_end_leaves_the_job_running() -> None:
    world = world_of(good_rows(20), chunk_rows=3)
    member = world.take()
    member.stopping = True

    assert member.runner().run() is Status.PAUSED
    assert world.job.status is Status.RUNNING
    assert world.run() is Status.COMPLETED
    assert_complete(world)


def test_a_cancelled_job_cancels_what_is_under_way_and_writes_what_is_done() -> None:
    world = world_of(good_rows(20), chunk_rows=3, max_open_chunks=2)
    member = world.take()

    def answer(request: InferenceRequest) -> InferenceReply | None:
        if len(world.replies) == 4:
            member.wanted = Wanted.CANCEL
            return None
        return ok(request)

    world.answer = answer

    assert member.runner().run() is Status.CANCELLED

    assert world.output is not None
    rows = [answer.row for answer in world.output]
    assert rows == list(range(len(rows)))
    assert world.job.tally.ok >= 4
    assert world.job.tally.cancelled == len(rows) - world.job.tally.ok > 0
    cancelled = {answer.request_id for answer in world.output if answer.outcome == Outcome.CANCELLED}
    assert cancelled <= set(world.cancelled)


def test_a_job_that_is_cancelled_while_nobody_runs_it() -> None:
    world = world_of(good_rows(6), trouble=Trouble(frozenset({9})), answer=lambda _request: None, chunk_rows=2)
    with pytest.raises(KilledError):
        world.run()
    sent = len(world.sent)
    member = world.take()
    member.wanted = Wanted.CANCEL

    assert member.runner().run() is Status.CANCELLED

    assert len(world.sent) == sent
    assert world.output is not None
    assert {answer.outcome for answer in world.output} <= {Outcome.CANCELLED}


def test_an_input_that_changed_fails_the_job_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(good_rows(9), trouble=Trouble(frozenset({10})), chunk_rows=2)
    with pytest.raises(KilledError):
        world.run()
    world.rows = world.rows[:1]

    assert world.run() is Status.FAILED

    assert "the input has changed" in (world.job.reason or "")


def test_an_input_that_is_another_one_by_now_fails_the_job_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_place: object) -> None:
        raise InputChangedError("in.jsonl has changed since the job was submitted")

    monkeypatch.setattr(SourceInMemory, "read", read)
    world = world_of(good_rows(3))

    assert world.run() is Status.FAILED

    assert world.job.reason == "in.jsonl has changed since the job was submitted"


def test_a_job_whose_input_is_gone_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(good_rows(12), trouble=Trouble(frozenset({40})), chunk_rows=2, max_open_chunks=2)
    with pytest.raises(KilledError):
        world.run()
    done = world.job.tally.rows
    assert 0 < done < 12

    def read(*_place: object) -> None:
        raise NoSuchInputError("in.jsonl: there is no such file")

    monkeypatch.setattr(SourceInMemory, "read", read)
    member = world.take()
    member.wanted = Wanted.CANCEL

    assert member.runner().run() is Status.CANCELLED

    assert world.job.reason == "in.jsonl: there is no such file"
    assert world.output is not None
    assert [answer.row for answer in world.output] == list(range(done))


def test_an_input_that_does_not_answer_is_waited_for_until_the_window_has_ended() -> None:
    world = world_of(good_rows(3))
    world.job = replace(world.job, deadline_at_ms=world.now_ms + 60_000)
    world.is_input_away = True

    assert world.run() is Status.FAILED

    assert world.now_ms >= (world.job.deadline_at_ms or 0)
    assert "the storage does not answer" in (world.job.reason or "")


def test_an_input_that_answers_again_is_gone_on_with() -> None:
    world = world_of(good_rows(3))
    world.is_input_away = True
    member = world.take()

    def back() -> None:
        world.is_input_away = False

    member.on_wait = back

    assert member.runner().run() is Status.COMPLETED
    assert_complete(world)


@pytest.mark.parametrize("begun", [True, False])
def test_who_waits_for_an_input_hears_a_cancel(begun: bool) -> None:
    world = world_of(good_rows(12), trouble=Trouble(frozenset({40} if begun else ())), chunk_rows=2, max_open_chunks=2)
    if begun:
        with pytest.raises(KilledError):
            world.run()
    world.is_input_away = True
    member = world.take()

    def cancel() -> None:
        member.wanted = Wanted.CANCEL

    member.on_wait = cancel

    assert member.runner().run() is Status.CANCELLED
    assert world.output is not None


def test_who_waits_for_an_input_hears_a_pause() -> None:
    world = world_of(good_rows(3))
    world.is_input_away = True
    member = world.take()

    def pause() -> None:
        member.wanted = Wanted.PAUSE

    member.on_wait = pause

    assert member.runner().run() is Status.PAUSED
    assert world.job.status is Status.PAUSED


@pytest.mark.parametrize("what", ["stopping", "gives_way"])
def test_who_waits_for_an_input_leaves_its_place(what: str) -> None:
    world = world_of(good_rows(3))
    world.is_input_away = True
    member = world.take()
    member.on_wait = lambda: setattr(member, what, True)

    assert member.runner().run() is Status.PAUSED
    assert world.job.status is Status.RUNNING


def test_a_pause_that_comes_while_a_job_ends_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(good_rows(3))
    member = world.take()
    join = PartsInMemory.join

    def away_once(parts: PartsInMemory, done: Callable[[], Iterator[str]]) -> None:
        if member.wanted is Wanted.RUN:
            member.wanted = Wanted.PAUSE
            raise UnavailableError("nothing answers")
        join(parts, done)

    monkeypatch.setattr(PartsInMemory, "join", away_once)

    assert member.runner().run() is Status.COMPLETED
    assert_complete(world)


@pytest.mark.parametrize("is_away", [True, False])
def test_a_runner_that_lost_its_lease_does_nothing_more(is_away: bool) -> None:
    world = world_of(good_rows(6), chunk_rows=2)
    member = world.take()

    def answer(request: InferenceRequest) -> InferenceReply:
        member.lost = True
        world.is_input_away = is_away
        return ok(request)

    world.answer = answer

    with pytest.raises(LeaseLostError):
        member.runner().run()
    assert world.output is None


def test_a_job_that_gives_way_comes_on_with_every_turn() -> None:
    world = world_of(good_rows(20), chunk_rows=3, max_open_chunks=2)
    turns = 0
    while not world.job.status.is_final:
        member = world.take()
        member.gives_way = True
        member.runner().run()
        turns += 1

    assert turns > 1
    assert_complete(world)


def test_a_job_that_gives_way_first_takes_the_answers_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may find none of them: the first one of a consumer, and one that only finds the replies of other jobs."""
    world = world_of(good_rows(20), trouble=Trouble(frozenset({14})), chunk_rows=10, max_open_chunks=2)
    world.answer = lambda _request: None
    with pytest.raises(KilledError):
        world.run()
    world.unanswered.clear()
    world.replies = [ok(request) for request in world.sent]
    read, reads = RepliesInMemory.read, count()

    def read_every_other_time(replies: RepliesInMemory, timeout_s: float) -> list[InferenceReply]:
        return read(replies, timeout_s) if next(reads) % 2 else []

    monkeypatch.setattr(RepliesInMemory, "read", read_every_other_time)
    member = world.take()
    member.gives_way = True
    member.runner().run()

    assert world.done


@pytest.mark.parametrize("removed", [3, 20])
def test_rows_whose_replies_were_removed_are_asked_for_again(removed: int) -> None:
    world = world_of(good_rows(20), trouble=Trouble(frozenset({14})), chunk_rows=10, max_open_chunks=2)
    world.answer = lambda _request: None
    with pytest.raises(KilledError):
        world.run()
    assert len(world.sent) == 20
    world.unanswered.clear()
    world.job = replace(world.job, deadline_at_ms=world.now_ms + 600_000)
    world.replies, world.removed = [ok(request) for request in world.sent], removed
    world.answer = ok

    assert world.run() is Status.COMPLETED

    assert world.job.tally.ok == 20
    again = Counter(request.request_id for request in world.sent)
    assert {name for name, times in again.items() if times > 1} == {
        reply.request_id for reply in world.replies[:removed]
    }
    assert max(again.values()) == 2


def test_replies_that_are_removed_while_a_job_runs_are_asked_for_again() -> None:
    world = world_of(good_rows(20), chunk_rows=10, max_open_chunks=2)

    def answer(request: InferenceRequest) -> InferenceReply:
        if len(world.replies) == 11:
            world.removed = 11
        return ok(request)

    world.answer = answer
    world.job = replace(world.job, deadline_at_ms=world.now_ms + 600_000)

    assert world.run() is Status.COMPLETED

    assert_complete_but_for_repeats(world)


def test_nobody_waits_for_gigabytes_to_be_joined_before_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(good_rows(20), chunk_rows=2)
    member = world.take()
    parts = JobLogInMemory.parts

    def stopping(log: JobLogInMemory, *, ordered: bool) -> Iterator[str]:
        for part in parts(log, ordered=ordered):
            log.member.stopping = log.member is member
            yield part

    monkeypatch.setattr(JobLogInMemory, "parts", stopping)

    assert member.runner().run() is Status.PAUSED
    assert world.output is None
    assert world.run() is Status.COMPLETED
    assert_complete(world)


def test_a_row_that_is_too_large_for_the_topic_is_a_row_with_an_error() -> None:
    large = b'{"model": "words", "prompt": "%s"}' % (b"a" * (MOST_RECORD_BYTES + 1))
    world = world_of([GOOD_ROW % 0, large])

    assert world.run() is Status.COMPLETED

    assert world.output is not None
    assert [answer.outcome for answer in world.output] == [Outcome.OK, Outcome.REJECTED]
    assert world.output[1].field == "row"
    assert str(MOST_RECORD_BYTES) in (world.output[1].message or "")


def test_an_empty_input_makes_an_empty_output() -> None:
    world = world_of([])

    assert world.run() is Status.COMPLETED
    assert world.output == []
    assert math.isclose(world.job.tally.cost_tokens, 0)
