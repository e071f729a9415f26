"""How much may be in flight: the formula, and that the window is kept."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.admission_rule import BatchCapacity, CapacityState, PoolCapacity
from stream_processors.dispatcher.scheduling.in_flight import Held
from stream_processors.dispatcher.scheduling.window import STARTING_LIMITS, Amount, room_tokens, window

TARGET_QUEUE_MS = 100


def live(*batches: BatchCapacity, rate: float = 0.0) -> PoolCapacity:
    return PoolCapacity(
        CapacityState.LIVE,
        consumers=len(batches),
        cost_tokens_per_s=rate,
        consumer_cost_tokens_per_s=rate / len(batches),
        last_cost_tokens_per_s=rate,
        batches=batches,
    )


def test_two_batches_for_each_consumer() -> None:
    capacity = live(BatchCapacity(8, 10_000), BatchCapacity(32, 500), rate=10)
    assert window(capacity, 100, TARGET_QUEUE_MS) == Amount(2 * 10_500, 2 * 40)


def test_fast_consumers_get_the_target_queue_time() -> None:
    capacity = live(BatchCapacity(8, 1_000), rate=100_000)
    assert window(capacity, 100, TARGET_QUEUE_MS) == Amount(10_000, 100)
    assert window(capacity, 0, TARGET_QUEUE_MS) == Amount(10_000, 10_000)


def test_small_requests_before_it_do_not_shrink_the_window_of_a_large_one() -> None:
    capacity = live(BatchCapacity(8, 10_000), rate=10)
    assert window(capacity, 1, TARGET_QUEUE_MS) == window(capacity, 5_000, TARGET_QUEUE_MS)


def test_a_pool_that_never_reported_gets_the_window_of_one_consumer() -> None:
    never = PoolCapacity()
    assert window(never, 100, TARGET_QUEUE_MS) == Amount(2 * STARTING_LIMITS.tokens, 2 * STARTING_LIMITS.items)


def test_a_lost_pool_gets_none() -> None:
    lost = PoolCapacity(CapacityState.LOST, last_cost_tokens_per_s=1_000, lost_for_ms=4_000)
    assert window(lost, 100, TARGET_QUEUE_MS) == Amount(0, 0)


LIMITS = st.builds(BatchCapacity, st.integers(1, 256), st.integers(1, 100_000))
AMOUNTS = st.floats(0, 1e6)


@given(st.lists(LIMITS, min_size=1, max_size=5), LIMITS, AMOUNTS, AMOUNTS, st.floats(0, 1_000))
def test_the_window_never_shrinks_by_one_more_consumer(
    batches: list[BatchCapacity], one_more: BatchCapacity, rate: float, mean: float, target_ms: float
) -> None:
    before = window(live(*batches, rate=rate), mean, target_ms)
    assert before.tokens > 0
    assert before.items > 0
    for after in (
        window(live(*batches, one_more, rate=rate), mean, target_ms),
        window(live(*batches, rate=2 * rate), mean, target_ms),
    ):
        assert after.tokens >= before.tokens
        assert after.items >= before.items


def held(tokens: int, items: int, own_tokens: int, own_items: int) -> Held:
    made = Held()
    made.add(tokens - own_tokens, items - own_items, is_own=False)
    made.add(own_tokens, own_items, is_own=True)
    return made


def room(whole: float, share: float, in_flight: int, own: int) -> float:
    """With room for any number of requests."""
    return room_tokens(Amount(whole, inf), share, held(in_flight, int(in_flight > 0), own, int(own > 0)))


def test_room_is_the_own_part_or_what_the_pool_has_left() -> None:
    assert room(1_000, 0.5, 300, 200) == 300
    assert room(1_000, 0.5, 900, 200) == 100
    assert room(1_000, 0.5, 1_200, 200) == 0
    assert room(1_000, 0.5, 700, 600) == 0


def test_one_that_costs_more_than_the_whole_part_goes_when_the_part_is_free() -> None:
    assert room(1_000, 0.5, 500, 0) == inf
    assert room(1_000, 0.5, 501, 0) == 499
    assert room(1_000, 0.5, 1, 1) == 499


def test_no_more_requests_than_two_batches_hold() -> None:
    whole = Amount(1_000, 8)
    assert room_tokens(whole, 0.5, held(30, 7, 20, 3)) == 480
    assert room_tokens(whole, 0.5, held(30, 7, 20, 4)) == 0
    assert room_tokens(whole, 0.5, held(30, 8, 20, 3)) == 0
    assert room_tokens(whole, 0.05, held(30, 7, 0, 0)) == inf, "a part of less than one request is one"
    assert room_tokens(whole, 0.05, held(30, 8, 0, 0)) == 0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_nothing_goes_to_a_lost_pool(share: float) -> None:
    assert room_tokens(Amount(0, 0), share, held(0, 0, 0, 0)) == 0


@given(
    st.floats(100, 10_000),
    st.integers(1, 20),
    st.lists(st.floats(0.01, 1), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20_000), st.booleans()), max_size=60),
)
def test_the_window_is_never_exceeded_by_what_fits(
    tokens: float, items: int, weights: list[float], steps: list[tuple[int, int, bool]]
) -> None:
    """Several dispatchers that know of one another's dispatches; one that costs more than its dispatcher's part goes
    alone in it."""
    whole = Amount(tokens, items)
    shares = [weight / sum(weights) for weight in weights]
    in_flight: list[list[int]] = [[] for _ in shares]
    for index, cost, settles in steps:
        who = index % len(shares)
        if settles:
            if in_flight[who]:
                in_flight[who].pop(0)
            continue
        everything = sum(map(sum, in_flight))
        own = in_flight[who]
        if cost <= room_tokens(whole, shares[who], held(everything, sum(map(len, in_flight)), sum(own), len(own))):
            in_flight[who].append(cost)
            part = tokens * shares[who]
            assert sum(in_flight[who]) <= part * (1 + 1e-9) or len(in_flight[who]) == 1
            assert everything + cost <= tokens * (1 + 1e-9) or cost > part
            assert len(in_flight[who]) <= items * shares[who] or len(in_flight[who]) == 1
            assert sum(map(len, in_flight)) - 1 < items + len(shares)
