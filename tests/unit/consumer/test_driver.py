"""What the driver gives its engines, and what it makes of what they tell."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from fairlane import names
from fairlane.outcomes import Code, Decision, Outcome
from fairlane.records import HistoryUse, InferenceReply, Message, Output, Passage, TokenUsage, WorkItem
from fairlane_server.kafka.settlement import Settlement
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.driver import EngineFailedError, TooManyDeadLettersError
from inference_consumers.engine_process.failures import is_end_of_engine, is_out_of_memory, problem_of
from inference_consumers.engine_process.states import EngineState
from inference_consumers.engines.protocol import (
    CancelledItem,
    EngineGoneError,
    Failure,
    ItemOutcome,
    LoadFailed,
    Problem,
    Success,
)
from inference_consumers.results.chunk_writer import StreamedText, chunk_of
from inference_consumers.results.dead_letter_share import DeadLetterShare
from inference_consumers.results.retries import MAX_ENDS
from tests.kit.driver_bench import KILLED, OK, DriverBench, FakeHost, named, streaming
from tests.kit.waiting import eventually

BROKEN = Problem("RuntimeError")
NO_MEMORY = Problem("MemoryError", out_of_memory=True)
TOO_LARGE = Failure(Code.OVERLOADED, "no memory")
TOO_LONG = Failure(Code.CONTEXT_TOO_LONG, "long")


def outcomes(bench: DriverBench) -> dict[str, tuple[str, str | None]]:
    """What each request was answered; each once."""
    answered = Counter(reply.request_id for reply in bench.replies)
    assert set(answered.values()) <= {1}
    return {reply.request_id: (reply.outcome, reply.code) for reply in bench.replies}


def test_an_item_is_answered_as_soon_as_its_outcome_is_known() -> None:
    bench = DriverBench()
    bench.add(named("a"), named("b"))
    assert set(bench.start()) == {"a", "b"}
    assert bench.start() == [], "one batch at a time"
    first = bench.host.given[0][1][0].item_id
    bench.tell({0: OK})
    (reply,) = bench.replies
    assert (reply.request_id, reply.outcome, reply.batch_size, reply.attempts) == (first, Outcome.OK, 2, 1)
    bench.tell({1: OK})
    bench.end()
    assert set(outcomes(bench)) == {"a", "b"}
    assert bench.driver.is_at_rest


def test_the_next_batch_is_sent_when_all_outcomes_are_known_and_before_the_end_is_reported() -> None:
    bench = DriverBench(max_items=1)
    bench.add(named("a"), named("b"), named("c"))
    (first,) = bench.start()
    assert bench.start() == [], "it is not known yet what became of it"
    bench.tell({0: OK})
    (second,) = bench.start()
    assert bench.start() == [], "one at a time"
    assert {first, second} < {"a", "b", "c"}
    run_ids = [run_id for run_id, _ in bench.host.given]
    assert len(set(run_ids)) == 2


def test_an_engine_that_dies_between_two_batches_takes_only_the_second_along() -> None:
    bench = DriverBench(max_items=1)
    bench.add(named("a"), named("b"))
    (first,) = bench.start()
    bench.tell({0: OK})
    (second,) = bench.start()
    bench.die()
    bench.load()
    assert bench.start() == [second]
    assert outcomes(bench) == {first: (Outcome.OK, None)}


def test_a_second_outcome_of_an_item_and_what_an_ended_run_tells_are_ignored() -> None:
    bench = DriverBench()
    bench.add(named("a"))
    bench.start()
    bench.tell({0: OK})
    bench.tell({0: TOO_LONG})
    bench.end()
    bench.tell({0: TOO_LONG})
    bench.end()
    assert outcomes(bench) == {"a": (Outcome.OK, None)}


def test_text_goes_out_numbered_and_the_last_says_so() -> None:
    bench = DriverBench()
    bench.add(streaming(named("a")), named("b"))
    bench.start()
    index = [item.item_id for item in bench.host.given[0][1]].index("a")
    bench.tell({}, [(index, "Hel")])
    bench.tell({index: OK}, [(index, "lo")])
    told = [(one.work.request_id, one.number, one.text, one.last) for one in bench.chunks.written]
    assert told == [("a", 0, "Hel", False), ("a", 1, "lo", False), ("a", 2, "", True)]
    assert {(one.work.generation, one.work.runs) for one in bench.chunks.written} == {(5, 1)}


def test_text_of_another_attempt_is_numbered_from_the_start() -> None:
    bench = DriverBench()
    bench.add(streaming(named("a")))
    bench.start()
    bench.tell({}, [(0, "Hel")])
    bench.die()
    bench.load()
    assert bench.start() == ["a"]
    bench.tell({0: OK}, [(0, "Hello")])
    told = [(one.work.runs, one.number, one.text) for one in bench.chunks.written]
    assert told == [(1, 0, "Hel"), (2, 0, "Hello"), (2, 1, "")]
    assert bench.replies[0].attempts == 2


def test_a_failing_batch_is_narrowed_down_to_the_item_at_fault() -> None:
    bench = DriverBench()
    bench.add(*(named(name) for name in "abcd"))
    while ids := bench.start():
        if "c" in ids:
            bench.end(BROKEN)
        else:
            bench.tell(dict.fromkeys(range(len(ids)), OK))
            bench.end()
    assert outcomes(bench) == {
        "a": (Outcome.OK, None),
        "b": (Outcome.OK, None),
        "c": (Outcome.FAILED, Code.POISON),
        "d": (Outcome.OK, None),
    }
    assert len([1 for s in bench.transactions.settlements for o in s.outputs if o.topic == names.DEAD_LETTER_WORK]) == 1


def test_what_had_its_outcome_before_the_run_failed_keeps_it() -> None:
    bench = DriverBench()
    bench.add(named("a"), named("b"), named("c"))
    ids = bench.start()
    bench.tell({0: OK})
    bench.end(BROKEN)
    halves = []
    while again := bench.start():
        halves += again
        bench.tell(dict.fromkeys(range(len(again)), OK))
        bench.end()
    assert sorted(halves) == sorted(ids[1:])
    assert set(outcomes(bench)) == set(ids)


def test_an_engine_that_leaves_an_item_without_an_outcome_failed_on_it() -> None:
    bench = DriverBench()
    bench.add(named("a"))
    bench.start()
    bench.end()
    assert outcomes(bench) == {"a": (Outcome.FAILED, Code.POISON)}
    assert "MissingOutcome" in bench.replies[0].message


def test_the_safe_size_is_remembered_when_memory_runs_out() -> None:
    bench = DriverBench(max_items=4)
    bench.add(*(named(name) for name in "abcd"))
    assert len(bench.start()) == 4
    bench.end(NO_MEMORY)
    bench.run_all()
    bench.add(*(named(name) for name in "efgh"))
    sizes = []
    while ids := bench.start():
        sizes.append(len(ids))
        bench.tell(dict.fromkeys(range(len(ids)), OK))
        bench.end()
    assert max(sizes) == 2
    assert set(outcomes(bench)) == set("abcdefgh")


def test_the_way_to_the_engine_and_back_counts_for_the_size_of_a_batch() -> None:
    bench = DriverBench(max_items=16)
    sizes = []
    for _ in range(300):
        bench.add(*(named("a") for _ in range(16 - len(bench.driver.waiting))))
        sizes.append(len(bench.start()))
        bench.now_ms += 10
        bench.tell(dict.fromkeys(range(sizes[-1]), OK))
        # By itself the engine is as fast with one item as with many.
        bench.end(seconds=0.0001 * sizes[-1])
    assert sizes[-100:].count(16) > 50


def test_a_pause_of_the_consumer_is_no_slow_engine() -> None:
    bench = DriverBench(max_items=4)
    bench.add(named("a"))
    bench.start()
    bench.now_ms += 60_000
    bench.tell({0: OK})
    bench.end(seconds=0.01)
    # By such a pause it could not end in time: whoever comes after it would go first.
    bench.add(
        named("b", deadline_at_ms=bench.now_ms + 30_000), *(named(name, at_ms=bench.now_ms + 1) for name in "cdef")
    )
    assert bench.start() == ["b", "c", "d", "e"]


def test_who_ends_engines_runs_alone_and_is_found() -> None:
    bench = DriverBench()
    bench.add(*(named(name) for name in "abc"))
    deaths = 0
    while ids := bench.start():
        if "b" in ids:
            deaths += 1
            bench.die()
            assert bench.start() == [], "nothing runs while no engine is there"
            bench.load()
        else:
            bench.tell(dict.fromkeys(range(len(ids)), OK))
            bench.end()
    assert deaths == 4
    assert outcomes(bench) == {
        "a": (Outcome.OK, None),
        "b": (Outcome.FAILED, Code.POISON),
        "c": (Outcome.OK, None),
    }


def test_an_item_whose_engine_is_killed_from_outside_is_tried_again_and_answered() -> None:
    bench = DriverBench()
    bench.add(named("a"))
    for _ in range(MAX_ENDS - 1):
        assert bench.start() == ["a"]
        bench.die(KILLED)
        bench.load()
    bench.run_all()
    assert outcomes(bench) == {"a": (Outcome.OK, None)}
    assert bench.replies[0].attempts == MAX_ENDS


def test_what_is_left_of_a_batch_did_not_run_alone() -> None:
    bench = DriverBench()
    bench.add(named("a"), named("b"))
    left = bench.start()[0]
    bench.tell({1: OK})
    bench.die()
    bench.load()
    assert bench.start() == [left]
    bench.die()
    bench.load()
    bench.run_all()
    assert set(outcomes(bench).values()) == {(Outcome.OK, None)}, "one end alone, and one beside another"


def test_what_is_too_large_is_handed_back_and_then_refused() -> None:
    bench = DriverBench()
    once = named("b")
    bench.add(named("a"), replace(once, item=replace(once.item, handed_back=1)))
    bench.run_all(TOO_LARGE)
    (returned,) = bench.written(names.returned_topic("gpu"))
    assert (returned.request.request_id, returned.handed_back) == ("a", 1)
    assert outcomes(bench) == {"b": (Outcome.REJECTED, Code.OVERLOADED)}


def test_a_context_that_is_too_long_runs_once_more_with_fewer_passages() -> None:
    bench = DriverBench()
    work = named("a")
    found = (Passage("best", "text", 0.9), Passage("next", "text", 0.8))
    bench.add(replace(work, item=replace(work.item, passages=found)))
    bench.start()
    bench.tell({0: TOO_LONG})
    bench.end()
    bench.start()
    assert [passage.passage_id for passage in bench.host.given[-1][1][0].passages] == ["best"]
    bench.tell({0: OK})
    bench.end()
    (reply,) = bench.replies
    assert ([passage.passage_id for passage in reply.passages], reply.degradations) == (["best"], ("fewer_passages",))
    assert reply.attempts == 2


def test_the_engine_gets_the_time_that_is_left_to_each_item() -> None:
    bench = DriverBench()
    bench.add(named("a", deadline_at_ms=3_500), named("b", deadline_at_ms=61_000))
    bench.start()
    assert {item.item_id: item.time_left_s for item in bench.host.given[-1][1]} == {"a": 2.5, "b": 60.0}


def test_what_was_said_before_reaches_the_engine_and_half_of_it_the_second_time() -> None:
    bench = DriverBench()
    work = named("a")
    history = tuple(Message(role, text) for text in ("old", "new") for role in ("user", "assistant"))
    bench.add(replace(work, item=replace(work.item, history=history, history_use=HistoryUse(4))))
    bench.start()
    assert bench.host.given[-1][1][0].history == history
    bench.tell({0: TOO_LONG})
    bench.end()
    bench.start()
    assert bench.host.given[-1][1][0].history == history[2:]
    bench.tell({0: OK})
    bench.end()
    (reply,) = bench.replies
    assert (reply.degradations, reply.history_use) == (("shorter_context",), HistoryUse(2, "shortened"))


def test_answers_are_told_as_they_are_committed_and_nothing_else_is() -> None:
    bench = DriverBench()
    told: list[tuple[WorkItem, InferenceReply]] = []
    bench.driver.settler.keep = lambda work, reply: told.append((work, reply))
    bench.add(named("a"), named("b"))
    bench.start()
    bench.tell({0: OK, 1: TOO_LARGE})
    bench.end()
    assert [(work.request.request_id, reply) for work, reply in told] == [("a", bench.replies[0])]


def test_what_may_pass_is_tried_again_after_a_pause() -> None:
    bench = DriverBench()
    bench.add(named("a"))
    bench.start()
    bench.end(Problem("TransientEngineError", transient=True))
    assert bench.start() == []
    bench.now_ms += 100
    assert bench.start() == ["a"]
    bench.tell({0: OK})
    assert outcomes(bench) == {"a": (Outcome.OK, None)}


def test_what_was_cancelled_while_it_ran_is_answered_so_and_its_cost_is_booked() -> None:
    bench = DriverBench()
    bench.add(named("a"))
    bench.start()
    bench.tell({0: CancelledItem(TokenUsage(prompt_tokens=9, completion_tokens=4))})
    bench.end()
    assert outcomes(bench) == {"a": (Outcome.CANCELLED, None)}
    (usage,) = bench.written(names.LEDGER_USAGE)
    assert (usage.outcome, usage.prompt_tokens, usage.completion_tokens) == (Outcome.CANCELLED, 9, 4)
    (audit,) = bench.written(names.LEDGER_AUDIT)
    assert (audit.decision, audit.code) == (Decision.CANCELLED, None)


@pytest.mark.parametrize(
    "fail",
    [
        lambda bench: bench.die(),
        lambda bench: bench.end(NO_MEMORY),
        lambda bench: bench.end(Problem("TransientEngineError", transient=True)),
    ],
)
def test_what_was_cancelled_while_it_ran_does_not_run_again(fail: Callable[[DriverBench], None]) -> None:
    bench = DriverBench()
    bench.add(named("a"), named("b"))
    bench.start()
    bench.driver.cancellations.add("acme", "a", bench.now_ms)
    fail(bench)
    assert outcomes(bench) == {"a": (Outcome.CANCELLED, None)}
    bench.load()
    bench.now_ms += 200
    assert bench.start() == ["b"]


def test_a_cancel_that_overtakes_its_run_is_told_after_it() -> None:
    bench = DriverBench()
    bench.add(named("a"), named("b"))
    # Known after the run was picked and before the engine has it.
    bench.host.before_run = lambda: bench.driver.cancellations.add("acme", "b", bench.now_ms)
    ids = bench.start()
    assert bench.host.cancelled == [(bench.run_id, (ids.index("b"),))]


def test_text_of_work_that_was_handed_back_is_newer_than_any_before() -> None:
    chunks = [
        chunk_of(StreamedText(replace(one, generation=generation, item=replace(one.item, handed_back=times)), 0, "x"))
        for one, generation, times in ((named("a"), 90, 0), (named("a"), 3, 1))
    ]
    assert chunks[0].generation < chunks[1].generation


def test_a_continuous_engine_takes_what_comes_while_it_runs_up_to_its_room() -> None:
    bench = DriverBench(max_items=3, continuous=True)
    bench.add(named("a"), named("b"))
    assert set(bench.start()) == {"a", "b"}
    first = bench.run_id
    bench.add(named("c"), named("d"))
    assert len(bench.start()) == 1
    assert bench.start() == []
    bench.tell({0: OK}, run_id=first)
    assert len(bench.start()) == 1
    assert len(bench.driver.engines.runs) == 3


def test_nothing_is_due_while_a_continuous_engine_has_no_room_for_the_next_item() -> None:
    bench = DriverBench(max_items=3, max_tokens=100, continuous=True)
    bench.add(named("a", tokens=60), named("b", tokens=60))
    assert len(bench.start()) == 1
    assert bench.start() == []
    assert bench.driver.waiting.due_at_ms(bench.driver.engines, idle=True) is None
    bench.tell({0: OK})
    assert len(bench.start()) == 1


def test_a_suspect_has_a_continuous_engine_to_itself() -> None:
    bench = DriverBench(max_items=4, continuous=True)
    bench.add(named("a"), named("b"))
    bench.start()
    bench.die()
    bench.load()
    assert set(bench.start()) == {"a", "b"}
    bench.die()
    bench.load()
    bench.add(named("c"))
    (alone,) = bench.start()
    assert bench.start() == [], "neither the other suspect nor what came since"
    bench.die()
    bench.load()
    assert bench.start() == ["b" if alone == "a" else "a"]
    bench.tell({0: OK})
    bench.end()
    assert bench.start() == [alone], "once alone is not proof enough"
    bench.die()
    bench.load()
    assert outcomes(bench)[alone] == (Outcome.FAILED, Code.POISON)
    assert bench.start() == ["c"]


def test_what_a_continuous_engine_fails_on_beside_others_is_no_proof() -> None:
    bench = DriverBench(max_items=4, continuous=True)
    bench.add(named("neighbour"))
    assert bench.start() == ["neighbour"]
    neighbours = bench.run_id
    bench.add(named("innocent"))
    assert bench.start() == ["innocent"]
    bench.end(BROKEN)
    assert outcomes(bench) == {}
    assert bench.start() == [], "it is tried again when the engine runs nothing else"
    bench.tell({0: OK}, run_id=neighbours)
    bench.end(run_id=neighbours)
    bench.run_all()
    assert set(outcomes(bench).values()) == {(Outcome.OK, None)}


def test_what_a_continuous_engine_fails_on_alone_is_poison() -> None:
    bench = DriverBench(max_items=4, continuous=True)
    bench.add(named("bad"))
    assert bench.start() == ["bad"]
    bench.end(BROKEN)
    assert outcomes(bench) == {}, "others may have joined it"
    assert bench.start() == ["bad"]
    bench.add(named("later"))
    assert bench.start() == []
    bench.end(BROKEN)
    assert outcomes(bench) == {"bad": (Outcome.FAILED, Code.POISON)}


def test_a_continuous_engine_is_measured_by_its_busy_time() -> None:
    bench = DriverBench(continuous=True)
    bench.add(named("a"), named("b"))
    bench.start()
    bench.now_ms += 400
    bench.tell({0: OK})
    bench.now_ms += 100
    bench.tell({1: OK})
    bench.end()
    bench.now_ms += 60_000
    assert bench.driver.meter.rates.completion_tokens_per_s == pytest.approx(2 * 3 / 0.5)


def test_one_that_has_served_and_cannot_be_loaded_again_ends_the_consumer() -> None:
    bench = DriverBench()
    bench.add(named("served"))
    bench.start()
    bench.die()
    bench.driver.engine_failed(bench.host, LoadFailed("m: no such file"))
    (error,) = bench.fatal
    assert isinstance(error, EngineFailedError)
    assert "no such file" in str(error)


def test_a_version_that_cannot_be_loaded_is_noted_and_served_by_nobody() -> None:
    bench = DriverBench()
    host, (name, version) = FakeHost(), bench.host.key
    host.key = name, f"{version}-next"
    states = bench.driver.engines
    states.by_key[host.key] = EngineState(host, 1, 1)
    assert not states.serves(host.key), "it is being loaded"
    failure = LoadFailed("m: no such file")
    bench.driver.engine_failed(host, failure)
    assert not bench.fatal
    assert states.by_key[host.key].failure == failure
    assert (states.serves(bench.host.key), states.serves(host.key)) == (True, False)
    assert bench.driver.served[0] == (bench.host.key,)


def test_one_that_has_served_nothing_or_is_on_its_way_out_ends_nothing() -> None:
    for is_hidden in (False, True):
        bench = DriverBench()
        if is_hidden:
            bench.add(named("served"))
            bench.start()
            bench.driver.engines.by_key[bench.host.key].is_hidden = True
        bench.die()
        bench.driver.engine_failed(bench.host, LoadFailed("m: too little memory", no_room=True))
        assert not bench.fatal
        assert not bench.driver.engines.serves(bench.host.key)
        assert not bench.driver.lost_engines


def test_a_version_on_its_way_out_finishes_its_run_and_gives_back_the_rest() -> None:
    bench = DriverBench(max_items=1)
    bench.add(named("runs"), named("waits"))
    assert bench.start() == ["runs"]
    state = bench.driver.engines.by_key[bench.host.key]

    state.is_hidden = True
    assert bench.driver.served[0] == ()
    assert bench.driver.engines.serves(bench.host.key)
    assert bench.driver.take_unserved() == []

    state.is_leaving = True
    assert [work.request_id for work in bench.driver.take_unserved()] == ["waits"]
    bench.tell({0: OK})
    bench.end()
    assert [reply.outcome for reply in bench.replies] == ["ok"]
    assert not bench.start()


def test_what_is_to_run_again_is_given_back_when_its_version_leaves() -> None:
    bench = DriverBench()
    bench.add(named("first"), named("second"))
    bench.start()
    bench.driver.engines.by_key[bench.host.key].is_leaving = True
    bench.die()
    assert sorted(work.request_id for work in bench.driver.take_unserved()) == ["first", "second"]


def test_a_consumer_that_would_bury_its_topic_ends_and_does_not() -> None:
    bench = DriverBench(max_items=1)
    bench.driver.dead_letters = DeadLetterShare(0.5)
    bench.add(*(of_tenant(f"id-{number}", f"tenant-{number % 3}") for number in range(30)))
    while not bench.fatal and bench.start():
        bench.end(BROKEN)
    (error,) = bench.fatal
    assert isinstance(error, TooManyDeadLettersError)
    assert str(error).startswith("10 of the latest 10 items of all tenants but the worst")
    assert len(bench.written(names.LEDGER_USAGE)) == 14, "the one that was too many is not settled"


def of_tenant(name: str, tenant: str) -> ReceivedWork:
    one = named(name)
    return replace(one, item=replace(one.item, tenant=tenant))


def test_one_tenant_ends_no_consumer_whatever_it_sends() -> None:
    bench = DriverBench(max_items=1)
    bench.driver.dead_letters = DeadLetterShare(0.5)
    bench.add(*(named(f"id-{number}") for number in range(300)))
    while bench.start():
        bench.end(BROKEN)
    assert not bench.fatal
    assert len(bench.replies) == 300


def test_what_moved_on_while_it_ran_does_not_run_again() -> None:
    bench = DriverBench()
    bench.add(named("a", partition=1), named("b", partition=2))
    bench.start()
    bench.driver.is_current = lambda claim: claim.partition.partition == 2
    bench.die()
    bench.load()
    assert bench.start() == ["b"]
    assert not bench.replies


def test_texts_and_outcomes_of_items_that_are_not_there_are_ignored() -> None:
    bench = DriverBench()
    bench.add(streaming(named("a")))
    bench.start()
    bench.tell({0: OK, 7: OK, -1: OK}, [(0, "x"), (9, "y"), (-1, "z")])
    bench.end()
    assert outcomes(bench) == {"a": (Outcome.OK, None)}
    assert [one.text for one in bench.chunks.written] == ["x", ""]


def test_a_run_is_not_over_before_its_answers_are_handed_on() -> None:
    bench = DriverBench()
    at_rest: list[bool] = []
    submit = bench.transactions.submit_many

    def looked_at(settlements: Sequence[Settlement]) -> None:
        at_rest.append(bench.driver.is_at_rest)
        submit(settlements)

    bench.transactions.submit_many = looked_at  # type: ignore[method-assign] # to look in between
    bench.add(named("a"))
    bench.start()
    bench.end(BROKEN)
    assert at_rest == [False]
    assert bench.driver.is_at_rest


@pytest.mark.parametrize(
    ("told", "problem", "failed"),
    [
        ([OK, TOO_LARGE], None, False),
        ([TOO_LARGE, TOO_LARGE], None, True),
        ([TOO_LONG, Failure(Code.ENGINE_ERROR, "nan")], None, True),
        ([TOO_LONG, Failure(Code.INVALID, "empty")], None, None),
        ([TOO_LONG], BROKEN, True),
    ],
)
def test_the_senders_mistakes_are_no_failure_of_the_engine(
    told: list[ItemOutcome], problem: Problem | None, failed: bool | None
) -> None:
    bench = DriverBench()
    bench.add(named("a"), named("b"))
    bench.start()
    bench.tell(dict(enumerate(told)))
    run = bench.driver.engines.runs.get(bench.run_id)
    assert run is not None
    assert run.all_failed(problem is not None) is failed


def test_only_what_succeeded_counts_as_served_by_the_tokens_that_were_counted() -> None:
    """Not by the estimates: those of a cold start may be wrong by any factor."""
    bench = DriverBench(max_tokens=100_000)
    bench.add(*(named(f"id-{tokens}", tokens=tokens) for tokens in (1_000, 2_000, 4_000)))
    ids = bench.start()
    uncounted = Success(Output(text="cat"), TokenUsage())
    by_id: dict[str, ItemOutcome] = {"id-1000": OK, "id-2000": TOO_LONG, "id-4000": uncounted}
    bench.tell({index: by_id[item_id] for index, item_id in enumerate(ids)})
    run = bench.driver.engines.runs.get(bench.run_id)
    assert run is not None
    measured = run.measured(0.5)
    assert (measured.items, measured.prompt_tokens, measured.completion_tokens) == (3, 7, 3)
    assert measured.cost_tokens == 7 + 2 * 3 + 4_000


def test_the_feeding_thread_starts_what_comes_and_ends_when_told() -> None:
    bench = DriverBench()
    thread = threading.Thread(target=bench.driver.feed, daemon=True)
    thread.start()
    with bench.driver.changed:
        bench.add(named("a"))
        bench.driver.changed.notify_all()
    eventually(lambda: len(bench.host.given) == 1)
    bench.driver.stop()
    thread.join(10)
    assert not thread.is_alive()


class OutOfMemoryError(RuntimeError):
    """By the name of torch's own, which this test does without."""


class AcceleratorError(RuntimeError):
    """As above."""


@pytest.mark.parametrize(
    ("error", "out_of_memory", "end"),
    [
        (MemoryError(), True, False),
        (OutOfMemoryError("CUDA out of memory"), True, False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True, False),
        (RuntimeError("shape mismatch"), False, False),
        (RuntimeError("CUDA error: device-side assert triggered"), False, True),
        (AcceleratorError("CUDA error: an illegal memory access"), False, True),
        (EngineGoneError("gone"), False, True),
    ],
)
def test_errors_of_engines_are_told_apart(error: Exception, out_of_memory: bool, end: bool) -> None:
    assert (is_out_of_memory(error), is_end_of_engine(error)) == (out_of_memory, end)
    assert problem_of(error).error == type(error).__name__
