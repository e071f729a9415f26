"""What is left of the reports that were there before the start: how a pool stood when it was last heard of."""

from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import CapacityReport
from fairlane_server.admission_rule import CAPACITY_TTL_MS, CapacityState, PoolCapacity
from stream_processors.dispatcher.feedback.work_records import CapacityHistory
from stream_processors.dispatcher.scheduling.capacity import CapacityBoard

NOW_MS = 1_700_000_000_000


def report(instance_id: str, rate: float = 1_000.0, *, draining: bool = False, pool: str = "llm") -> CapacityReport:
    # Their own clock says 1: nobody looks at it.
    return CapacityReport(
        *(instance_id, pool, ("m",), "healthy", draining, rate, rate, 32, 16_384, 0.5, 0, 0), 1, cost_tokens_per_s=rate
    )


def board_of(history: CapacityHistory, now_ms: int = NOW_MS) -> CapacityBoard:
    board = CapacityBoard()
    for heard in history.take(now_ms):
        board.report(heard.report, now_ms - heard.age_ms)
    return board


def test_a_pool_whose_consumers_fell_silent_is_lost_with_what_they_could_do() -> None:
    history = CapacityHistory()
    for step in range(100):
        for number in range(4):
            history.add(report(f"gpu-{number}"), NOW_MS - 300_000 + 250 * step + number)
    lost = board_of(history).pool("llm", NOW_MS)
    assert lost.state is CapacityState.LOST
    assert lost.lost_for_ms == 300_000 - 250 * 99 - 3
    assert lost.last_cost_tokens_per_s == 4_000.0


def test_a_pool_that_drained_is_lost() -> None:
    history = CapacityHistory()
    history.add(report("gpu"), NOW_MS - 60_250)
    history.add(report("gpu", draining=True), NOW_MS - 60_000)
    lost = board_of(history).pool("llm", NOW_MS)
    assert (lost.state, lost.lost_for_ms, lost.last_cost_tokens_per_s) == (CapacityState.LOST, 60_000, 1_000.0)


def test_a_pool_that_came_back_lives() -> None:
    history = CapacityHistory()
    history.add(report("gpu"), NOW_MS - 60_250)
    history.add(report("gpu", draining=True), NOW_MS - 60_000)
    history.add(report("gpu", rate=0.0), NOW_MS - 100)
    live = board_of(history).pool("llm", NOW_MS)
    assert (live.state, live.consumers) == (CapacityState.LIVE, 1)
    assert live.cost_tokens_per_s == 1_000.0, "what it measured before"


def test_our_clock_being_behind_makes_nobody_younger() -> None:
    history = CapacityHistory()
    history.add(report("lost", pool="a"), NOW_MS)
    history.add(report("lives", pool="b"), NOW_MS + 60_000)
    board = board_of(history)
    assert board.pool("a", NOW_MS).lost_for_ms == 60_000
    assert board.pool("b", NOW_MS).state is CapacityState.LIVE


def test_nothing_was_ever_reported() -> None:
    assert CapacityHistory().take(NOW_MS) == []
    assert board_of(CapacityHistory()).pool("llm", NOW_MS) == PoolCapacity()


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from((0.0, 10.0, 30.0)), st.booleans(), st.integers(0, 2_000)),
        max_size=60,
    ),
    st.integers(0, 2 * CAPACITY_TTL_MS),
)
def test_it_tells_the_same_as_the_whole_log(log: list[tuple[str, float, bool, int]], later_ms: int) -> None:
    """Who lives, who is gone, since when; of the rates, those of the living that have measured one."""
    history, whole = CapacityHistory(), CapacityBoard()
    at_ms = NOW_MS
    for name, rate, draining, after_ms in log:
        at_ms += after_ms
        history.add(report(name, rate, draining=draining), at_ms)
        whole.report(report(name, rate, draining=draining), at_ms)
    now_ms = at_ms + later_ms
    assert len(deepcopy(history).take(now_ms)) <= 4 * 3
    told, known = board_of(history, now_ms).pool("llm", now_ms), whole.pool("llm", now_ms)
    assert (told.state, told.consumers, told.lost_for_ms, told.batches) == (
        *(known.state, known.consumers, known.lost_for_ms, known.batches),
    )
