"""How much may be in flight: the formula, and that the window is kept."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.admission_rule import BatchCapacity, CapacityState, PoolCapacity
from stream_processors.dispatcher.scheduling.in_flight import ConsumerLoad, Held
from stream_processors.dispatcher.scheduling.window import (
    STARTING_LIMITS,
    Amount,
    ConsumerChoice,
    remaining_ms,
    room_tokens,
    window,
)

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


def loaded(tokens: int, items: int, since_ms: int = 0) -> ConsumerLoad:
    return ConsumerLoad(tokens, items, since_ms, 0)


def choice(
    capacity: PoolCapacity, *loads: ConsumerLoad, now_ms: int = 0, mean: float = 100, target_ms: float = TARGET_QUEUE_MS
) -> ConsumerChoice:
    return ConsumerChoice(capacity, loads, mean, target_ms, now_ms)


def test_the_second_batch_comes_when_the_first_is_nearly_done() -> None:
    """8 items of 100 tokens at 1,000 a second: 800 ms."""
    capacity = live(BatchCapacity(8, 10_000), rate=1_000)

    def items(now_ms: int, load: ConsumerLoad) -> float:
        return choice(capacity, load, now_ms=now_ms).window.items

    assert items(0, loaded(800, 8)) == 8 + 1, "and what is served within the target queue time"
    assert items(699, loaded(800, 8)) == 8 + 1
    assert items(700, loaded(800, 8)) == 16
    assert items(5_000, loaded(800, 8)) == 16, "it takes longer than was estimated"
    assert items(700, loaded(800, 8, since_ms=600)) == 8 + 1
    assert items(0, loaded(0, 0)) == 16, "it has nothing to do"


def test_each_consumer_has_its_part() -> None:
    capacity = live(BatchCapacity(1, 1_000), BatchCapacity(1, 1_000), rate=2_000)
    one_of_two = choice(capacity, loaded(500, 1), loaded(50, 1), mean=500)
    assert one_of_two.window == Amount(500 + 2_000, 1 + 2), "the first is full"
    assert one_of_two.next_consumer == 1


def test_without_a_rate_two_batches_are_in_flight() -> None:
    capacity = live(BatchCapacity(8, 1_000))
    assert choice(capacity, loaded(800, 8)).window == window(capacity, 100, TARGET_QUEUE_MS)


def test_the_next_request_goes_to_the_one_that_is_done_first() -> None:
    capacity = live(*[BatchCapacity(2, 10_000)] * 3, rate=3_000)
    among = choice(capacity, loaded(1_000, 1), loaded(600, 1), loaded(0, 0))
    chosen = []
    for _ in range(4):
        chosen.append((among.next_consumer, among.is_idle))
        among.add(300)
    assert chosen == [(2, True), (2, False), (1, False), (2, False)]


@given(
    tokens=st.lists(st.integers(0, 5_000), min_size=1, max_size=6),
    asked=st.lists(st.tuples(st.sets(st.integers(0, 7)), st.integers(1, 3_000)), max_size=12),
)
def test_a_request_goes_to_the_best_of_the_consumers_that_it_can_go_to(
    tokens: list[int], asked: list[tuple[set[int], int]]
) -> None:
    """As if there were only those, if one of them has room; and what others get and the window are as ever."""
    capacity = live(*[BatchCapacity(4, 4_000)] * len(tokens), rate=1_000 * len(tokens))
    loads = [loaded(one, min(one, 1)) for one in tokens]
    among = choice(capacity, *loads)
    for able, cost in asked:
        fresh = choice(capacity, *loads)
        assert (among.window.items, among.window.tokens) == pytest.approx((fresh.window.items, fresh.window.tokens))
        assert among.next_consumer == fresh.next_consumer
        is_placed = among.prefer(able)
        chosen = among.next_consumer
        here = [number for number in sorted(able) if number < len(tokens)]
        fewer = live(*[BatchCapacity(4, 4_000)] * max(1, len(here)), rate=1_000 * max(1, len(here)))
        alone = choice(fewer, *(loads[number] for number in here)) if here else None
        has_room = alone is not None and alone.window.items > sum(loads[number].items for number in here)
        # With room nowhere, the next consumer is as good as any.
        assert is_placed == (has_room or fresh.next_consumer in here)
        if not is_placed:
            assert chosen == fresh.next_consumer
            continue
        assert chosen in here
        assert alone is not None
        assert loads[chosen].tokens == loads[here[alone.next_consumer]].tokens
        among.add(cost)
        loads[chosen] = loaded(loads[chosen].tokens + cost, loads[chosen].items + 1)


def test_room_in_tokens_without_room_in_items_is_nobodys() -> None:
    """One is full of small requests, the other of large ones: together they would have room for many."""
    capacity = live(BatchCapacity(32, 16_384), BatchCapacity(32, 16_384), rate=2_000)
    full = choice(capacity, loaded(33 * 50, 35), loaded(17_000, 2))
    assert full.window == Amount(33 * 50 + 17_000, 37)
    assert room_tokens(full.window, 1.0, held(33 * 50 + 17_000, 37, 33 * 50 + 17_000, 37)) == 0


LOADS = st.builds(loaded, st.integers(0, 20_000), st.integers(0, 64), st.integers(0, 5_000))


@given(
    st.lists(
        st.tuples(st.builds(BatchCapacity, st.integers(1, 64), st.integers(1, 20_000)), LOADS), min_size=1, max_size=6
    ),
    st.floats(0, 1e5),
    st.lists(st.integers(1, 5_000), max_size=40),
)
def test_a_round_never_gives_a_full_consumer_more(
    consumers: list[tuple[BatchCapacity, ConsumerLoad]], rate: float, costs: list[int]
) -> None:
    capacity = live(*(limits for limits, _ in consumers), rate=rate)
    among = choice(capacity, *(load for _, load in consumers), now_ms=5_000)
    tokens, items = sum(load.tokens for _, load in consumers), sum(load.items for _, load in consumers)
    for cost in costs:
        room = room_tokens(among.window, 1.0, held(tokens, items, tokens, items))
        if items and cost > room:
            break
        most = max(2 * limits.items for limits, _ in consumers)
        among.add(cost)
        tokens, items = tokens + cost, items + 1
        assert among.window.items >= items
        assert most > 0
    assert items <= sum(max(load.items, 2 * limits.items, rate) for limits, load in consumers) + 1


@given(st.integers(0, 10_000), st.integers(1, 100), st.floats(1, 1e5), st.integers(0, 100_000), st.integers(0, 5_000))
def test_what_is_left_of_a_run_falls_with_time(
    tokens: int, items: int, rate: float, since_ms: int, later_ms: int
) -> None:
    load = loaded(tokens, items, since_ms)
    first = remaining_ms(load, rate, since_ms)
    assert first == pytest.approx(1_000 * tokens / rate)
    assert 0 <= remaining_ms(load, rate, since_ms + later_ms) == pytest.approx(max(0.0, first - later_ms))


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
        # Less the rounding of a sum.
        assert after.tokens >= before.tokens * (1 - 1e-9)
        assert after.items >= before.items * (1 - 1e-9)


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
