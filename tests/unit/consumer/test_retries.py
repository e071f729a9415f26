"""What becomes of work whose run failed: the item at fault is found, and no other pays for it."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import Code
from fairlane.records import HistoryUse, Message, Passage
from fairlane_server.conversations.turns import newest_half
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.engine_process.failures import EndKind, EngineEnd
from inference_consumers.engines.protocol import Failure, Problem
from inference_consumers.results.retries import (
    LONE_ENDS_OF_POISON,
    MAX_ENDS,
    MAX_TRIES,
    Again,
    PendingRetries,
    Verdict,
    after_death,
    after_failure,
    after_problem,
)
from tests.kit.driver_bench import CRASHED, KILLED, named

BROKEN = Problem("RuntimeError")
NO_MEMORY = Problem("MemoryError", out_of_memory=True)
PASSING = Problem("TransientEngineError", transient=True)
TOO_LONG = Failure(Code.CONTEXT_TOO_LONG, "3000 tokens; the context holds 2048", "input")


def items(count: int, **fields: int) -> list[ReceivedWork]:
    return [named(f"id-{number}", **fields) for number in range(count)]


def ids(works: tuple[ReceivedWork, ...]) -> set[str]:
    return {work.request_id for work in works}


def settle_all(works: list[ReceivedWork], bad: set[str], *, kills: bool) -> tuple[dict[str, Failure], set[str], int]:
    """Run until everything has an answer, on an engine that the bad ones break or kill. Returns what failed, what
    succeeded, and how many runs it took."""
    failed: dict[str, Failure] = {}
    served: set[str] = set()
    waiting = [Again(tuple(works))]
    runs = 0
    while waiting:
        again = waiting.pop(0)
        runs += 1
        assert runs < 1_000
        if not ids(again.work) & bad:
            assert not served & ids(again.work)
            served |= ids(again.work)
            continue
        alone = len(again.work) == 1
        if kills:
            verdict = after_death(again.work, CRASHED, alone=alone)
        else:
            verdict = after_problem(again.work, BROKEN, 0, 0.0, alone=alone)
        for work, failure in verdict.failed:
            assert work.request_id not in failed
            failed[work.request_id] = failure
        waiting += verdict.again
    return failed, served, runs


@given(st.integers(1, 32), st.sets(st.integers(0, 31), max_size=5), st.booleans())
def test_exactly_the_items_at_fault_fail(count: int, bad_numbers: set[int], kills: bool) -> None:
    works = items(count)
    bad = {f"id-{number}" for number in bad_numbers if number < count}
    failed, served, _ = settle_all(works, bad, kills=kills)
    assert set(failed) == bad
    assert served == {work.request_id for work in works} - bad
    assert {failure.code for failure in failed.values()} <= {Code.POISON}


@given(st.integers(2, 32), st.integers(0, 31))
def test_one_that_kills_engines_kills_four(count: int, number: int) -> None:
    """The batch, the batch again, and then it alone, twice; its neighbours run apart from it."""
    _, _, runs = settle_all(items(count), {f"id-{number % count}"}, kills=True)
    assert runs == 3 + count


def test_one_that_breaks_a_run_costs_as_many_runs_as_there_are_halves() -> None:
    _, _, runs = settle_all(items(32), {"id-7"}, kills=False)
    assert runs == 1 + 2 * 5


def test_a_lone_one_in_a_dying_process_is_tried_once_more_too() -> None:
    verdict = after_death(items(1), CRASHED, alone=True)
    assert [again.alone for again in verdict.again] == [False]
    assert after_death(verdict.again[0].work, CRASHED, alone=True).failed[0][1] == Failure(
        Code.POISON, "the engine's process ends on this item alone: killed by SIGSEGV"
    )


@pytest.mark.parametrize("kind", [EndKind.KILLED, EndKind.STOPPED, EndKind.LOST])
def test_what_others_did_to_the_engine_is_not_the_items_doing(kind: EndKind) -> None:
    work = tuple(items(1))
    for _ in range(MAX_ENDS - 1):
        verdict = after_death(work, EngineEnd(kind, "gone"), alone=True)
        assert not verdict.failed
        (again,) = verdict.again
        work = again.work
    ((_, failure),) = after_death(work, EngineEnd(kind, "gone"), alone=True).failed
    assert (failure.code, failure.message) == (
        Code.RETRIES_EXHAUSTED,
        "the engine's process ended 5 times while it ran, at last: gone",
    )


def test_what_an_item_went_through_beside_others_is_no_proof() -> None:
    (suspect,) = items(1)
    suspect = replace(suspect, ends=1)
    for _ in range(MAX_ENDS - 2):
        (again,) = after_death([suspect], CRASHED, alone=False).again
        assert again.alone
        (suspect,) = again.work
    assert suspect.lone_ends == 0
    (again,) = after_problem([suspect], BROKEN, 0, 0.0, alone=False).again
    assert (again.work, again.alone) == ((suspect,), True)


@dataclass(frozen=True)
class Ended:
    """What happened to a run: the kind of its end, and how many neighbours there were."""

    kind: EndKind
    neighbours: int


@given(st.lists(st.builds(Ended, st.sampled_from(EndKind), st.integers(0, 3)), min_size=12, max_size=12))
def test_only_what_ended_an_engine_alone_is_poison_and_everything_ends(history: list[Ended]) -> None:
    """Whatever happens to an item: its verdict comes within a bounded number of runs, and needs its own proof."""
    work, proofs, told = named("innocent"), 0, ""
    for number, ended in enumerate(history, 1):
        others = [named(f"other-{place}") for place in range(ended.neighbours)]
        alone = not others
        verdict = after_death([work, *others], EngineEnd(ended.kind, "gone"), alone=alone)
        proofs += alone and EngineEnd(ended.kind, "gone").is_own
        told = next((failure.code for one, failure in verdict.failed if one.request_id == "innocent"), "")
        again = [one for entry in verdict.again for one in entry.work if one.request_id == "innocent"]
        assert len(again) + bool(told) == 1, "an item is either answered or run again"
        if told:
            assert number <= MAX_ENDS
            break
        (work,) = again
    assert told
    assert (told == Code.POISON) == (proofs >= LONE_ENDS_OF_POISON)


@given(st.lists(st.sampled_from([kind for kind in EndKind if not EngineEnd(kind, "").is_own]), max_size=2))
def test_an_innocent_item_outlives_two_ends_from_outside_after_two_bad_neighbours(outside: list[EndKind]) -> None:
    (first,) = after_death([named("a"), named("b")], CRASHED, alone=False).again
    second = after_death(first.work, CRASHED, alone=False).again
    work = next(again.work for again in second if again.work[0].request_id == "a")
    for kind in outside:
        verdict = after_death(work, EngineEnd(kind, "gone"), alone=True)
        assert not verdict.failed
        ((work),) = (again.work for again in verdict.again)


def test_who_was_in_two_crashes_runs_alone_and_the_others_together() -> None:
    known, new = items(2), [named("new-1"), named("new-2")]
    twice = [replace(work, ends=1) for work in known]
    verdict = after_death([*twice, *new], KILLED, alone=False)
    together, *alone = verdict.again
    assert (ids(together.work), together.alone) == ({"new-1", "new-2"}, False)
    assert [(ids(again.work), again.alone) for again in alone] == [({"id-0"}, True), ({"id-1"}, True)]


def test_what_is_too_large_alone_is_overloaded() -> None:
    halves = after_problem(items(4), NO_MEMORY, 0, 0.0, alone=False)
    assert [len(again.work) for again in halves.again] == [2, 2]
    ((_, failure),) = after_problem(items(1), NO_MEMORY, 0, 0.0, alone=True).failed
    assert (failure.code, "MemoryError" in failure.message) == (Code.OVERLOADED, True)


def test_what_may_pass_is_tried_three_times_with_growing_pauses() -> None:
    works, now_ms, pauses = tuple(items(3)), 1_000, []
    for _ in range(MAX_TRIES - 1):
        verdict = after_problem(works, PASSING, now_ms, 0.0, alone=False)
        assert not verdict.failed
        (at_ms,) = {again.not_before_ms for again in verdict.again}
        pauses.append((at_ms - now_ms, len(verdict.again)))
        works, now_ms = tuple(work for again in verdict.again for work in again.work), at_ms
    assert pauses == [(100, 1), (200, 3)], "the last try is each one's own"
    verdict = after_problem(works, PASSING, now_ms, 0.0, alone=False)
    assert not verdict.again
    assert {failure.code for _, failure in verdict.failed} == {Code.RETRIES_EXHAUSTED}
    assert {failure.message for _, failure in verdict.failed} == {
        "the engine failed: TransientEngineError; it was tried 3 times"
    }


def test_no_try_is_made_past_the_deadline() -> None:
    late, early = named("late", deadline_at_ms=1_100), named("early", deadline_at_ms=9_000)
    verdict = after_problem([late, early], PASSING, 1_000, 0.0, alone=False)
    assert [ids(again.work) for again in verdict.again] == [{"early"}]
    ((work, failure),) = verdict.failed
    assert (work.request_id, failure.code) == ("late", Code.RETRIES_EXHAUSTED)
    assert "deadline" in failure.message


@pytest.mark.parametrize(("passages", "left", "step"), [(4, 2, "fewer_passages"), (1, 0, "no_retrieval")])
def test_a_context_that_is_too_long_is_tried_once_with_fewer_passages(passages: int, left: int, step: str) -> None:
    work = named("a")
    found = tuple(Passage(f"p{number}", "text", 1.0 - number / 10) for number in range(passages))
    work = replace(work, item=replace(work.item, passages=found))
    (again,) = after_failure(work, TOO_LONG, 0, 0.0).again
    (shorter,) = again.work
    assert shorter.item.passages == found[:left]
    assert shorter.item.degradations == (step,)
    assert after_failure(shorter, TOO_LONG, 0, 0.0) == Verdict(failed=((shorter, TOO_LONG),))


def turns(*sizes: int) -> tuple[Message, ...]:
    """So many turns, each a question and as many answers to it as it says."""
    return tuple(
        Message("user" if place == 0 else "assistant", f"{number}.{place}")
        for number, answers in enumerate(sizes)
        for place in range(1 + answers)
    )


def test_the_newest_half_is_whole_turns() -> None:
    history = turns(1, 2, 0, 1, 1)
    assert newest_half(history) == history[6:]
    assert [message.content for message in newest_half(history)] == ["3.0", "3.1", "4.0", "4.1"]
    assert newest_half(turns(1)) == newest_half(()) == ()
    headless = (Message("assistant", "what was asked is gone"), *turns(1))
    assert newest_half(headless) == turns(1)


@given(st.lists(st.sampled_from(["user", "assistant"]), max_size=40))
def test_the_newest_half_ends_as_the_whole_and_begins_with_the_user(roles: list[str]) -> None:
    history = tuple(Message(role, str(number)) for number, role in enumerate(roles))
    half = newest_half(history)
    assert half == history[len(history) - len(half) :]
    assert not history or len(half) < len(history)
    assert not half or half[0].role == "user"
    asked = roles.count("user")
    assert sum(message.role == "user" for message in half) in {asked // 2, (asked + 1) // 2}


@pytest.mark.parametrize(
    ("passages", "sizes", "left", "steps", "use"),
    [
        (4, (1, 1, 1, 1), (2, 4), ("fewer_passages", "shorter_context"), HistoryUse(4, "shortened", 7)),
        (0, (1, 2), (0, 3), ("shorter_context",), HistoryUse(3, "shortened", 7)),
        (1, (1,), (0, 0), ("no_retrieval", "no_history"), HistoryUse(0, "no_room", 7)),
        (0, (0,), (0, 0), ("no_history",), HistoryUse(0, "no_room", 7)),
        (2, (), (1, 0), ("fewer_passages",), HistoryUse(0, None, 7)),
    ],
)
def test_a_context_that_is_too_long_is_tried_once_with_less_of_what_was_said(
    passages: int, sizes: tuple[int, ...], left: tuple[int, int], steps: tuple[str, ...], use: HistoryUse
) -> None:
    work, history = named("a"), turns(*sizes)
    found = tuple(Passage(f"p{number}", "text", 0.5) for number in range(passages))
    item = replace(work.item, passages=found, history=history, history_use=HistoryUse(len(history), None, 7))
    (again,) = after_failure(replace(work, item=item), TOO_LONG, 0, 0.0).again
    (shorter,) = again.work
    assert (len(shorter.item.passages), len(shorter.item.history)) == left
    assert (shorter.item.degradations, shorter.item.history_use) == (steps, use)
    if left != (0, 0):
        # More than half too long: at last with nothing but what it brought itself.
        (at_last,) = after_failure(shorter, TOO_LONG, 0, 0.0).again
        (shorter,) = at_last.work
        assert (shorter.item.passages, shorter.item.history) == ((), ())
        gone = {"no_retrieval"} if left[0] else set()
        gone |= {"no_history"} if left[1] else set()
        assert set(shorter.item.degradations) == {*steps, *gone}
    assert after_failure(shorter, TOO_LONG, 0, 0.0) == Verdict(failed=((shorter, TOO_LONG),))


def test_a_template_that_refuses_what_was_said_is_given_the_request_alone() -> None:
    refused = Failure(Code.INVALID, "roles must alternate", "conversation_id")
    work, found = named("a"), (Passage("p", "text", 0.5),)
    item = replace(work.item, passages=found, history=turns(1), history_use=HistoryUse(2, None, 7))
    (again,) = after_failure(replace(work, item=item), refused, 0, 0.0).again
    (alone,) = again.work
    assert (alone.item.passages, alone.item.history) == (found, ())
    assert alone.item.degradations == ("no_history",)
    assert after_failure(alone, refused, 0, 0.0) == Verdict(failed=((alone, refused),))


def test_why_a_history_had_gaps_already_is_not_forgotten() -> None:
    work, history = named("a"), turns(1, 1)
    item = replace(work.item, history=history, history_use=HistoryUse(4, "behind", 7))
    (again,) = after_failure(replace(work, item=item), TOO_LONG, 0, 0.0).again
    assert again.work[0].item.history_use == HistoryUse(2, "behind", 7)


def test_a_context_that_is_too_long_without_passages_is_answered() -> None:
    work = named("a")
    assert after_failure(work, TOO_LONG, 0, 0.0) == Verdict(failed=((work, TOO_LONG),))


def test_an_item_whose_own_failure_may_pass_is_tried_again() -> None:
    (again,) = after_failure(named("a"), Failure(Code.ENGINE_ERROR, "busy", transient=True), 500, 0.0).again
    assert again.not_before_ms == 600
    assert again.work[0].transient_failures == 1


AWAY = Failure(Code.ENGINE_ERROR, "no endpoint is healthy", transient=True, untried=True)


def test_what_was_not_tried_comes_again_until_its_deadline_and_uses_up_no_try() -> None:
    work, now_ms, pauses = named("a", deadline_at_ms=60_000), 1_000, []
    while not (verdict := after_failure(work, AWAY, now_ms, 0.0)).failed:
        (again,) = verdict.again
        pauses.append(again.not_before_ms - now_ms)
        (work,), now_ms = again.work, again.not_before_ms
    assert set(pauses) == {2_000}
    assert len(pauses) == 29
    ((failed, failure),) = verdict.failed
    assert (failed.transient_failures, failure.code) == (0, Code.RETRIES_EXHAUSTED)
    assert failure.message == "no endpoint is healthy; its deadline leaves no time for another try"


def test_those_that_were_not_tried_do_not_all_come_again_at_once() -> None:
    pauses = {after_failure(named("a"), AWAY, 0, chance).again[0].not_before_ms for chance in (0.0, 0.5, 0.99)}
    assert len(pauses) == 3
    assert min(pauses) >= 1_000


MODEL = named("any").model_key


def test_the_queue_gives_what_is_due_oldest_first_and_what_is_alone_to_an_idle_engine() -> None:
    queue = PendingRetries()
    first, second, alone = (Again((named(name),)) for name in ("first", "second", "alone"))
    queue.add([replace(first, not_before_ms=200), second, replace(alone, alone=True)])
    assert len(queue) == 3
    assert queue.next(100, {MODEL}, set()) == second
    assert queue.next(100, {MODEL}, set()) is None
    assert queue.waits_alone(100) == {MODEL}
    assert queue.due_at_ms({MODEL}, set()) == 200
    assert queue.due_at_ms(set(), set()) is None
    assert queue.next(100, {MODEL}, {MODEL}) == replace(alone, alone=True)
    assert queue.next(200, {MODEL}, set()) == replace(first, not_before_ms=200)
    assert len(queue) == 0


def test_what_is_taken_from_the_queue_does_not_run() -> None:
    queue = PendingRetries()
    queue.add([Again(tuple(items(3, tokens=10)))])
    assert queue.cost_tokens == 30
    assert [work.request_id for work in queue.take(lambda work: work.request_id == "id-1")] == ["id-1"]
    again = queue.next(0, {MODEL}, set())
    assert again is not None
    assert ids(again.work) == {"id-0", "id-2"}
