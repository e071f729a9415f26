"""An engine that does not come back: what is said of it, what becomes of what waits behind it, and how it ends."""

from dataclasses import replace

import pytest

from fairlane import names
from fairlane.outcomes import Code, Decision, Health, Outcome
from inference_consumers.capacity.measurement import CapacityMeter, MeasuredRun
from inference_consumers.engine_process.failures import EndKind, EngineEnd
from inference_consumers.engine_process.stall_detection import MOST_TIMES_LONGER, REPORTED_AFTER_MS, RunWatch
from inference_consumers.results.retries import LONE_ENDS_OF_POISON, MAX_ENDS
from tests.kit.driver_bench import OK, PATIENCE, named
from tests.kit.stuck_engine import STEP_MS, Stuck


@pytest.fixture
def made() -> Stuck:
    return Stuck()


def test_one_whose_engine_does_not_come_back_says_that_it_fails(made: Stuck) -> None:
    made.poll_for(PATIENCE.overdue_ms)
    assert made.consumer.reading().health == Health.HEALTHY
    made.poll_for(STEP_MS)
    assert made.consumer.reading().health == Health.FAILING


def test_one_that_makes_progress_is_not_stuck_however_long_it_takes(made: Stuck) -> None:
    for _ in range(10):
        made.poll_for(PATIENCE.overdue_ms)
        made.bench.tell({})
    assert made.consumer.reading().health == Health.HEALTHY
    assert not made.bench.host.killed


def test_what_a_run_is_predicted_to_take_says_nothing_of_its_steps() -> None:
    watch = RunWatch(PATIENCE, 0, predicted_s=1_000.0)
    for now_ms in range(0, PATIENCE.hung_ms + 2_000, 1_000):
        watch.look(now_ms)
    assert not watch.is_hung, "it may be an engine that tells of no steps"
    watch.progressed(PATIENCE.hung_ms + 2_000)
    for now_ms in range(PATIENCE.hung_ms + 2_000, 2 * PATIENCE.hung_ms + 5_000, 1_000):
        watch.look(now_ms)
    assert watch.is_hung


def test_it_is_healthy_again_when_the_engine_comes_back_after_all(made: Stuck) -> None:
    made.poll_for(PATIENCE.overdue_ms + STEP_MS)
    made.bench.tell({0: OK})
    made.bench.end()
    assert made.consumer.reading().health == Health.HEALTHY


def test_what_expires_behind_a_running_batch_is_answered_meanwhile(made: Stuck) -> None:
    made.add(named("late", deadline_at_ms=5_000), named("early", deadline_at_ms=500_000))
    made.poll_for(6_000)
    (reply,) = made.bench.replies
    assert (reply.request_id, reply.outcome) == ("late", Outcome.EXPIRED)
    assert made.consumer.reading().held_items == 2


def test_the_queue_of_a_stuck_engine_is_handed_back_when_the_dispatchers_know_that_it_is_stuck(made: Stuck) -> None:
    returned = named("returned")
    returned = replace(returned, item=replace(returned.item, handed_back=1))
    made.add(named("waiting"), returned)
    made.poll_for(PATIENCE.overdue_ms + REPORTED_AFTER_MS)
    assert not made.bench.transactions.settlements
    made.poll_for(STEP_MS)
    (item,) = made.bench.written(names.returned_topic("gpu"))
    assert item.handed_back == 1
    (usage,) = made.bench.written(names.LEDGER_USAGE)
    assert (usage.outcome, usage.code, usage.engine_ms) == (Outcome.REJECTED, Code.OVERLOADED, 0)
    (audit,) = made.bench.written(names.LEDGER_AUDIT)
    assert (audit.decision, audit.message) == (
        Decision.HANDED_BACK,
        "the engine has been busy with one batch for 62 s",
    )
    assert made.consumer.reading().held_items == 2, "the one that runs, and the one that came back once already"
    # Whoever sends work here now has no better place for it.
    made.add(named("later"))
    made.poll_for(10 * STEP_MS)
    assert len(made.bench.transactions.settlements) == 1


def test_a_hung_engine_is_ended(made: Stuck, capsys: pytest.CaptureFixture[str]) -> None:
    made.poll_for(PATIENCE.hung_ms)
    assert not made.bench.host.killed
    made.poll_for(STEP_MS)
    assert made.bench.host.killed == [EngineEnd(EndKind.HUNG, "it made no progress for 120 s")]
    assert "engine_hung" in "".join(capsys.readouterr())


def test_an_engine_that_somebody_stopped_is_ended_but_did_not_hang(made: Stuck) -> None:
    made.poll_for(PATIENCE.hung_ms // 2)
    made.bench.host.is_stopped = True
    made.poll_for(PATIENCE.hung_ms // 2 + STEP_MS)
    (end,) = made.bench.host.killed
    assert (end.kind, end.is_own) == (EndKind.STOPPED, False)


@pytest.mark.parametrize(("computes", "kind"), [(0.0, EndKind.STOPPED), (0.4, EndKind.STOPPED), (0.6, EndKind.HUNG)])
def test_an_engine_that_waited_or_was_starved_did_not_hang_by_what_it_ran(
    made: Stuck, computes: float, kind: EndKind
) -> None:
    made.computes = computes
    made.poll_for(PATIENCE.hung_ms + STEP_MS)
    (end,) = made.bench.host.killed
    assert (end.kind, end.is_own) == (kind, kind == EndKind.HUNG)
    if kind == EndKind.STOPPED:
        assert "used a processor for" in end.reason


@pytest.mark.parametrize("computes", [0.0, 1.0])
def test_what_hangs_alone_is_poison_by_proof_alone_and_ends_in_any_case(made: Stuck, computes: float) -> None:
    made.computes = computes
    hangs = 0
    while not made.bench.replies:
        made.poll_for(PATIENCE.hung_ms + STEP_MS)
        hangs += 1
        assert len(made.bench.host.killed) == hangs
        made.bench.die(made.bench.host.killed[-1])
        made.bench.load()
        made.bench.start()
    expected = (LONE_ENDS_OF_POISON, Code.POISON) if computes else (MAX_ENDS, Code.RETRIES_EXHAUSTED)
    assert (hangs, made.bench.replies[0].code) == expected


def test_many_threads_for_a_short_time_and_unknown_times_are_no_proof() -> None:
    burst, unknown, ending = (RunWatch(PATIENCE, 0, None) for _ in range(3))
    for second in range(PATIENCE.hung_ms // 1_000 + 2):
        now_ms = 1_000 * second
        burst.look(now_ms, cpu_ms=16 * min(now_ms, 30_000))
        unknown.look(now_ms, cpu_ms=None)
        # A process below the engine's ends in the middle, and takes its time along.
        ending.look(now_ms, cpu_ms=now_ms + (500_000 if now_ms < PATIENCE.hung_ms // 2 else 0))
    assert [watch.end.is_own for watch in (burst, unknown, ending)] == [False, False, True]


def test_what_was_computed_before_the_last_step_says_nothing_of_the_silence() -> None:
    watch = RunWatch(PATIENCE, 0, None)
    for second in range(60):
        watch.look(1_000 * second, cpu_ms=1_000 * second)
    watch.progressed(60_000)
    for second in range(61, 182):
        watch.look(1_000 * second, cpu_ms=200_000)
    assert watch.is_hung
    assert not watch.end.is_own


def test_a_hang_that_was_not_watched_all_the_time_is_no_proof() -> None:
    watch = RunWatch(PATIENCE, 0, None)
    late_ms = 60_000
    for now_ms in (*range(0, 60_001, 1_000), *range(60_000 + late_ms, 300_000, 1_000)):
        watch.look(now_ms, cpu_ms=now_ms)
        if watch.is_hung:
            break
    assert watch.is_hung
    assert not watch.end.is_own
    watch.look(now_ms + 1_000, cpu_ms=now_ms + 1_000)
    assert watch.end.is_own, "for as long without the gap"


def test_what_was_cancelled_is_answered_wherever_it_is(made: Stuck) -> None:
    made.add(named("waiting"))
    made.cancel("somebody-else", "waiting")
    made.cancel("somebody-else", "running")
    assert not made.bench.replies
    assert not made.bench.host.cancelled
    made.cancel("acme", "waiting")
    made.cancel("acme", "running")
    made.cancel("acme", "unknown")
    (reply,) = made.bench.replies
    assert (reply.request_id, reply.outcome, reply.attempts) == ("waiting", Outcome.CANCELLED, 0)
    assert made.bench.host.cancelled == [(made.bench.run_id, (0,))]
    assert made.consumer.reading().held_items == 1


def test_one_whose_engine_died_says_that_it_fails_until_it_is_back(made: Stuck) -> None:
    made.bench.die()
    assert made.consumer.reading().health == Health.FAILING
    made.bench.load()
    assert made.consumer.reading().health == Health.HEALTHY


def test_a_batch_that_was_predicted_to_take_long_may() -> None:
    watch = RunWatch(PATIENCE, 0, predicted_s=20.0)
    for now_ms in range(0, 200_001, 1_000):
        watch.look(now_ms)
    assert not watch.is_overdue(200_000)
    assert watch.is_overdue(200_001)
    assert not watch.is_hung
    for now_ms in range(201_000, 400_001, 1_000):
        watch.look(now_ms)
    assert watch.is_reported
    assert not watch.is_hung
    watch.look(401_000)
    assert watch.is_hung


def test_no_prediction_makes_a_silent_engine_one_that_is_waited_for_without_end() -> None:
    watch = RunWatch(PATIENCE, 0, predicted_s=10_000.0)
    last_ms = MOST_TIMES_LONGER * PATIENCE.hung_ms
    for now_ms in range(0, last_ms + 1, 1_000):
        watch.look(now_ms)
    assert not watch.is_hung
    assert not watch.is_overdue(MOST_TIMES_LONGER * PATIENCE.overdue_ms)
    assert watch.is_overdue(MOST_TIMES_LONGER * PATIENCE.overdue_ms + 1)
    watch.look(last_ms + 1_000)
    assert watch.is_hung


@pytest.mark.parametrize("jump_ms", [10**9, -(10**9)])
def test_a_paused_process_or_a_clock_that_is_set_makes_no_hung_engine(jump_ms: int) -> None:
    watch = RunWatch(PATIENCE, 0, None)
    watch.look(jump_ms)
    assert not watch.is_hung
    assert not watch.is_reported
    for step in range(1, 121):
        watch.look(jump_ms + 1_000 * step)
    assert watch.is_hung == (jump_ms > 0)


def run(items: int, cost: int, seconds: float) -> MeasuredRun:
    return MeasuredRun(items, cost, 0, cost, seconds)


def test_a_batch_is_predicted_from_its_own_size_or_from_the_nearest_bound() -> None:
    meter = CapacityMeter()
    assert meter.predicted_s(1, 100) is None
    meter.ran(run(32, 32_000, 4.0))
    assert meter.predicted_s(32, 16_000) == pytest.approx(2.0)
    # A lone one takes no longer than 32 of its like.
    assert meter.predicted_s(1, 1_000) == pytest.approx(4.0)
    meter.ran(run(1, 1_000, 1.0))
    assert meter.predicted_s(1, 1_000) == pytest.approx(1.0)
    # 64 are at most twice 32.
    assert meter.predicted_s(64, 64_000) == pytest.approx(8.0)
