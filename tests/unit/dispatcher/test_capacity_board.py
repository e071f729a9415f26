"""What the dispatcher knows of its pools: who counts, for how long, and what is left when nobody does."""

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import Health
from fairlane.records import CapacityReport
from fairlane_server.admission_rule import CAPACITY_TTL_MS, BatchCapacity, CapacityState, PoolCapacity
from stream_processors.dispatcher.scheduling.capacity import CapacityBoard

T0 = 1_700_000_000_000


def report(
    instance_id: str = "gpu-1",
    rate: float = 1_000.0,
    *,
    pool: str = "llm",
    draining: bool = False,
    health: str = Health.HEALTHY,
    items: int = 32,
    tokens: int = 16_384,
    partitions: tuple[int, ...] = (),
) -> CapacityReport:
    return CapacityReport(
        instance_id=instance_id,
        pool=pool,
        models=("m",),
        health=health,
        draining=draining,
        prefill_tokens_per_s=rate,
        decode_tokens_per_s=rate,
        max_batch_size=items,
        max_batch_tokens=tokens,
        batch_fill=0.5,
        in_flight_items=0,
        in_flight_tokens=0,
        reported_at_ms=T0 - 12_345_678,  # some other clock
        cost_tokens_per_s=rate,
        partitions=partitions,
    )


def board_of(reports: Iterable[CapacityReport], now_ms: int = T0) -> CapacityBoard:
    board = CapacityBoard()
    for each in reports:
        board.report(each, now_ms)
    return board


def test_a_pool_that_never_reported_is_known_as_that() -> None:
    board = CapacityBoard()
    assert board.pool("llm", T0) == PoolCapacity(CapacityState.NEVER)
    assert tuple(board.pools()) == ()


def test_live_consumers_add_up() -> None:
    board = board_of([report("a", 1_000), report("b", 3_000, items=8, tokens=4_096), report("c", pool="other")])
    capacity = board.pool("llm", T0)
    assert (capacity.state, capacity.consumers) == (CapacityState.LIVE, 2)
    assert (capacity.cost_tokens_per_s, capacity.consumer_cost_tokens_per_s) == (4_000, 2_000)
    assert capacity.last_cost_tokens_per_s == 4_000
    assert capacity.batches == (BatchCapacity(32, 16_384), BatchCapacity(8, 4_096))
    assert (capacity.max_batch_items, capacity.max_batch_tokens) == (40, 20_480)
    assert set(board.pools()) == {"llm", "other"}


def test_a_newer_report_replaces_the_older_one() -> None:
    board = board_of([report(rate=1_000), report(rate=1_500)])
    assert board.pool("llm", T0).cost_tokens_per_s == 1_500


def test_a_report_counts_for_three_seconds_after_it_was_received() -> None:
    board = board_of([report()])
    board.report(report(pool="other"), T0 + CAPACITY_TTL_MS)
    assert board.pool("llm", T0 + CAPACITY_TTL_MS).state is CapacityState.LIVE
    gone = board.pool("llm", T0 + CAPACITY_TTL_MS + 1)
    assert (gone.state, gone.consumers, gone.cost_tokens_per_s) == (CapacityState.LOST, 0, 0)
    assert (gone.lost_for_ms, gone.last_cost_tokens_per_s) == (CAPACITY_TTL_MS + 1, 1_000)
    assert board.pool("llm", T0 + 60_000).lost_for_ms == 60_000


def test_one_that_falls_silent_leaves_the_others() -> None:
    board = board_of([report("a", 1_000), report("b", 3_000)])
    board.report(report("b", 3_000), T0 + CAPACITY_TTL_MS)
    assert board.pool("llm", T0 + CAPACITY_TTL_MS).consumers == 2
    capacity = board.pool("llm", T0 + CAPACITY_TTL_MS + 1)
    assert (capacity.consumers, capacity.cost_tokens_per_s) == (1, 3_000)


def test_a_draining_consumer_is_gone_at_once() -> None:
    board = board_of([report("a"), report("b")])
    board.report(report("a", draining=True), T0 + 10)
    assert board.pool("llm", T0 + 10).consumers == 1
    board.report(report("b", draining=True), T0 + 20)
    capacity = board.pool("llm", T0 + 20)
    assert (capacity.state, capacity.lost_for_ms) == (CapacityState.LOST, 0)
    assert capacity.last_cost_tokens_per_s == 2_000, "both are expected back"
    board.report(report("b"), T0 + 30)
    assert board.pool("llm", T0 + 30).state is CapacityState.LIVE


def test_a_consumer_that_drains_before_anybody_saw_it_leaves_a_lost_pool() -> None:
    capacity = board_of([report(draining=True)]).pool("llm", T0)
    assert (capacity.state, capacity.last_cost_tokens_per_s) == (CapacityState.LOST, 0)


def test_consumers_that_die_together_are_expected_back_together() -> None:
    """Their last reports are up to a quarter of a second apart, and so they go stale one by one."""
    board = CapacityBoard()
    for index in range(4):
        board.report(report(f"gpu-{index}"), T0 + 60 * index)
    for ms in range(0, 4_000, 50):
        capacity = board.pool("llm", T0 + ms)
    assert capacity.state is CapacityState.LOST
    assert (capacity.last_cost_tokens_per_s, capacity.consumer_cost_tokens_per_s) == (4_000, 1_000)


def test_one_that_has_measured_nothing_counts_as_the_mean_of_the_others() -> None:
    capacity = board_of([report("a", 1_000), report("b", 3_000), report("c", 0)]).pool("llm", T0)
    assert (capacity.consumers, capacity.cost_tokens_per_s) == (3, 6_000)


def test_nothing_measured_is_an_unknown_rate() -> None:
    assert board_of([report("a", 0), report("b", 0)]).pool("llm", T0).cost_tokens_per_s == 0


def test_after_a_restart_the_last_known_rate_stands_in() -> None:
    board = board_of([report("a", 1_200)])
    board.report(report("b", 0), T0 + 10_000)
    assert board.pool("llm", T0 + 10_000).cost_tokens_per_s == 1_200
    assert board.pool("llm", T0 + 20_000).last_cost_tokens_per_s == 1_200


def test_a_failing_consumer_is_no_capacity_beside_a_healthy_one() -> None:
    board = board_of([report("a", 1_000), report("b", 1_000, health=Health.FAILING)])
    assert board.pool("llm", T0).consumers == 1


def test_if_all_fail_they_count_because_only_work_shows_that_they_recovered() -> None:
    board = board_of([report("a", health=Health.FAILING), report("b", health=Health.FAILING)])
    assert (board.pool("llm", T0).state, board.pool("llm", T0).consumers) == (CapacityState.LIVE, 2)


def test_partitions_belong_to_those_that_live() -> None:
    board = board_of([report("a", partitions=(0, 2)), report("b", partitions=(1,))])
    assert board.pool("llm", T0).owned_partitions == frozenset({0, 1, 2})
    assert board.pool("llm", T0).work_partitions == (frozenset({0, 2}), frozenset({1}))
    board.report(report("b", partitions=(1,)), T0 + 10)
    assert board.pool("llm", T0 + CAPACITY_TTL_MS + 1).owned_partitions == frozenset({1})
    board.report(report("b", partitions=(0, 1, 2)), T0 + CAPACITY_TTL_MS + 2)
    assert board.pool("llm", T0 + CAPACITY_TTL_MS + 2).owned_partitions == frozenset({0, 1, 2})
    board.report(report("b", draining=True, partitions=(0, 1, 2)), T0 + CAPACITY_TTL_MS + 3)
    lost = board.pool("llm", T0 + CAPACITY_TTL_MS + 3)
    assert (lost.owned_partitions, lost.work_partitions) == (None, None)


def test_new_work_is_not_for_one_that_fails_beside_a_healthy_one() -> None:
    failing = report("b", health=Health.FAILING, partitions=(1,))
    capacity = board_of([report("a", partitions=(0,)), failing]).pool("llm", T0)
    assert (capacity.owned_partitions, capacity.work_partitions) == (frozenset({0, 1}), (frozenset({0}),))
    capacity = board_of([failing]).pool("llm", T0)
    assert (capacity.owned_partitions, capacity.work_partitions) == (frozenset({1}), (frozenset({1}),))


def test_nothing_is_known_of_partitions_while_one_that_lives_does_not_name_its_own() -> None:
    board = board_of([report("new", partitions=(0,)), report("old")])
    assert (board.pool("llm", T0).owned_partitions, board.pool("llm", T0).work_partitions) == (None, None)
    board.report(report("old", draining=True), T0)
    assert board.pool("llm", T0).owned_partitions == frozenset({0})


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.tuples(st.frozensets(st.integers(0, 7), min_size=1), st.sampled_from(Health)),
        min_size=1,
    )
)
def test_work_goes_to_healthy_owners_if_there_are_any(consumers: dict[str, tuple[frozenset[int], Health]]) -> None:
    reports = [report(name, health=health, partitions=tuple(owned)) for name, (owned, health) in consumers.items()]
    capacity = board_of(reports).pool("llm", T0)
    everybody = frozenset().union(*(owned for owned, _ in consumers.values()))
    healthy = [owned for owned, health in consumers.values() if health == Health.HEALTHY]
    assert capacity.owned_partitions == everybody
    assert capacity.work_partitions is not None
    assert Counter(capacity.work_partitions) == Counter(healthy or [owned for owned, _ in consumers.values()])


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2_000),  # time that passes
        st.sampled_from("abc"),
        st.sampled_from((0.0, 500.0, 1_000.0)),
        st.booleans(),
    ),
    max_size=30,
)


@given(STEPS, st.integers(0, 10_000))
def test_the_board_is_what_the_reports_say(steps: list[tuple[int, str, float, bool]], later_ms: int) -> None:
    """Against a plain model: asked at any time, as often as one likes, the board counts the fresh and undrained."""
    board, now_ms, newest = CapacityBoard(), T0, dict[str, tuple[int, float]]()
    for passed_ms, instance_id, rate, draining in steps:
        now_ms += passed_ms
        board.report(report(instance_id, rate, draining=draining), now_ms)
        newest.pop(instance_id, None)
        if not draining:
            newest[instance_id] = (now_ms, rate)
        fresh = [at_ms for at_ms, _ in newest.values() if now_ms - at_ms <= CAPACITY_TTL_MS]
        assert board.pool("llm", now_ms).consumers == len(fresh)
    now_ms += later_ms
    rates = [rate for at_ms, rate in newest.values() if now_ms - at_ms <= CAPACITY_TTL_MS]
    capacity = board.pool("llm", now_ms)
    assert capacity == board.pool("llm", now_ms)
    assert capacity.consumers == len(rates)
    assert (capacity.state is CapacityState.LIVE) == bool(rates)
    assert (capacity.state is CapacityState.NEVER) == (not steps)
    if measured := [rate for rate in rates if rate]:
        assert capacity.cost_tokens_per_s == pytest.approx(sum(measured) / len(measured) * len(rates))


@pytest.mark.parametrize("back_ms", [1_000, 10_000, 3_600_000])
def test_a_clock_that_is_set_back_loses_no_pool_and_keeps_no_dead_consumer(back_ms: int) -> None:
    board = board_of([report("gpu-1"), report("gpu-2"), report("other", pool="embed")])
    now_ms = T0 - back_ms
    board.report(report("gpu-1"), now_ms)
    assert (board.pool("llm", now_ms).consumers, board.pool("embed", now_ms).consumers) == (2, 1)
    now_ms += CAPACITY_TTL_MS
    board.report(report("gpu-1"), now_ms)
    board.report(report("gpu-1"), now_ms + 1)
    assert board.pool("llm", now_ms + 1).consumers == 1
    assert board.pool("embed", now_ms + 1).state is CapacityState.LOST
    assert board.pool("embed", now_ms + 1).lost_for_ms == CAPACITY_TTL_MS + 1
