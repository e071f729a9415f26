"""Micro-batches: when they close, what is in them, who leads them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.batching.batch_size import FULL_RUNS_BEFORE_MORE, BatchLimits
from inference_consumers.batching.micro_batch import MicroBatcher
from tests.kit.micro_batch_kit import MODEL, PRIORITIES, SMALL_MODEL, batcher, longest_wait, sized, taken, work


def test_a_batch_waits_for_more_until_its_time_bound() -> None:
    made = batcher(work(at_ms=100), work(at_ms=115))
    assert made.due_at_ms(idle=False) == 120
    assert made.next_batch(119, idle=False) is None
    assert len(taken(made.next_batch(120, idle=False))) == 2
    assert made.due_at_ms(idle=False) is None
    assert made.next_batch(10**6, idle=True) is None


def test_a_batch_waits_no_longer_than_its_run_takes() -> None:
    made = batcher(work(at_ms=100, tokens=10), work(at_ms=101, tokens=10))
    for _ in range(30):
        made.ran(MODEL, 2, 20, 0.003)
    assert made.due_at_ms(idle=False) == 103
    for _ in range(30):
        made.ran(MODEL, 2, 20, 0.5)
    assert made.due_at_ms(idle=False) == 120, "a long run does not lengthen the wait"


def test_an_idle_engine_takes_what_is_there_at_once() -> None:
    made = batcher(work(at_ms=100))
    assert made.due_at_ms(idle=True) == 100
    assert len(taken(made.next_batch(100, idle=True))) == 1


def test_the_item_bound_closes_a_batch() -> None:
    made = batcher(*(work() for _ in range(6)))
    assert len(taken(made.next_batch(0, idle=False))) == 4
    assert made.next_batch(0, idle=False) is None
    assert len(taken(made.next_batch(20, idle=False))) == 2


def test_the_token_bound_closes_a_batch() -> None:
    made = batcher(work(tokens=60), work(tokens=39), work(tokens=2))
    assert [one.item.cost_tokens for one in taken(made.next_batch(0, idle=False))] == [60, 39]


def test_an_item_over_the_token_bound_runs_alone() -> None:
    made = batcher(work(tokens=1_000), work(tokens=1))
    assert [one.item.cost_tokens for one in taken(made.next_batch(0, idle=False))] == [1_000]
    assert len(made) == 1


def test_each_model_has_its_own_limits_and_batches() -> None:
    made = batcher(work(at_ms=0), *(work(model=SMALL_MODEL, at_ms=1) for _ in range(3)))
    batch = made.next_batch(1, idle=False)
    assert batch is not None
    assert batch.model_key == SMALL_MODEL, "it is full, and does not wait for an older one that is not"
    assert len(batch.work) == 2
    assert made.due_at_ms(idle=False) == 6


def test_batches_keep_the_order_of_arrival_within_a_priority() -> None:
    items = [work(tokens=30) for _ in range(5)]
    made = batcher(*items)
    assert [*taken(made.next_batch(50, idle=False)), *taken(made.next_batch(50, idle=False))] == items


def test_room_left_is_filled_from_other_priorities() -> None:
    low, normal, high = work("low"), work("normal"), work("high")
    made = batcher(low, normal, high)
    assert taken(made.next_batch(0, idle=True)) == (high, normal, low)


@given(
    depths=st.dictionaries(st.sampled_from(PRIORITIES), st.just(400), min_size=1),
    rounds=st.integers(12, 60),
)
def test_priorities_share_batches_by_weight(depths: dict[str, int], rounds: int) -> None:
    """While all have work, each leads its weighted share of the batches, to one batch; nobody waits longer."""
    weights = {"high": 8, "normal": 3, "low": 1}
    made = batcher(*(work(priority) for priority, depth in depths.items() for _ in range(depth)))
    led = [taken(made.next_batch(10**6, idle=False))[0].item.priority_class for _ in range(rounds)]
    total = sum(weights[priority] for priority in depths)
    for priority in depths:
        assert abs(led.count(priority) - rounds * weights[priority] / total) <= 1
    assert led[0] == next(priority for priority in PRIORITIES if priority in depths)


def test_low_is_never_starved_by_a_flood_of_high() -> None:
    made = batcher(work("low", at_ms=0))
    for now_ms in range(1, 100):
        for _ in range(8):
            made.add(work("high", at_ms=now_ms))
        if any(one.item.priority_class == "low" for one in taken(made.next_batch(now_ms, idle=False))):
            assert now_ms <= 9
            return
    pytest.fail("low was starved")


def test_a_priority_that_was_away_saved_nothing_up() -> None:
    made = batcher(*(work("normal") for _ in range(200)))
    for _ in range(30):
        made.next_batch(10**6, idle=False)
    for _ in range(40):
        made.add(work("low"))
        made.add(work("normal"))
    led = [taken(made.next_batch(10**6, idle=False))[0].item.priority_class for _ in range(8)]
    assert led.count("low") == 2, "its quarter beside normal, and no burst"


def test_expired_work_is_removed_before_it_runs() -> None:
    late, on_time = work(deadline_at_ms=99), work(deadline_at_ms=100)
    made = batcher(late, on_time)
    assert made.take_expired(100) == [late]
    assert made.take_expired(100) == []
    assert taken(made.next_batch(100, idle=True)) == (on_time,)


def test_an_answer_that_changes_while_it_is_asked_loses_nothing() -> None:
    """Another thread may revoke a partition between two questions."""
    made = batcher(work(), work(), work())
    answers = iter([True, True, False])
    assert len(made.take(lambda _work: not next(answers, False))) == 1
    assert len(made) == 2
    assert len(taken(made.next_batch(0, idle=True))) == 2


@given(
    rounds=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(50, 60)), min_size=60, max_size=60),
)
def test_low_waits_for_no_more_batches_than_is_promised(rounds: list[tuple[int, int, int]]) -> None:
    """Whatever comes of the others, in whatever lengths: they never have more batches in a row. None of them is full,
    so that nobody of low joins theirs."""
    made = batcher(limits=BatchLimits(max_items=1, max_tokens=100, timeout_ms=20))
    waited = 0
    for now_ms, (high, normal, tokens) in enumerate(rounds):
        arriving = [("high", high), ("normal", normal), ("low", 1)]
        for priority, count in arriving:
            for _ in range(count):
                made.add(work(priority, at_ms=now_ms, tokens=tokens, prompt_tokens=tokens // 2))
        [led] = taken(made.next_batch(now_ms, idle=True))
        waited = 0 if led.item.priority_class == "low" else waited + 1
        assert waited <= longest_wait("low", others_jump=False)


def test_a_lonely_length_waits_no_longer_than_its_age_says() -> None:
    """Others of one length keep coming; it leads as soon as it is the oldest, and nobody joins it."""
    made = batcher(limits=BatchLimits(max_items=4, max_tokens=10_000, timeout_ms=20))
    for at_ms in range(3):
        made.add(sized(100, at_ms=at_ms))
    lonely = sized(2_000, at_ms=3)
    made.add(lonely)
    for at_ms in range(4, 12):
        made.add(sized(100, at_ms=at_ms))
    assert lonely not in taken(made.next_batch(12, idle=False))
    assert taken(made.next_batch(23, idle=False)) == (lonely,)


def test_only_models_that_can_run_are_picked() -> None:
    made = batcher(work("high"), work("low", model=SMALL_MODEL, at_ms=5))
    assert made.next_batch(100, idle=True, runnable=set()) is None
    assert made.due_at_ms(idle=False, runnable=set()) is None
    assert made.due_at_ms(idle=False, runnable={SMALL_MODEL}) == 10
    batch = made.next_batch(100, idle=True, runnable={SMALL_MODEL, ("other", "1")})
    assert batch is not None
    assert batch.model_key == SMALL_MODEL


def test_of_models_the_one_with_the_oldest_item_is_next() -> None:
    made = batcher(work(at_ms=3), work(model=SMALL_MODEL, at_ms=2))
    assert taken(made.next_batch(10, idle=True))[0].model_key == SMALL_MODEL
    made = batcher(work(at_ms=2), work(model=SMALL_MODEL, at_ms=3))
    assert taken(made.next_batch(10, idle=True))[0].model_key == MODEL


def test_a_model_that_is_not_due_waits_on_while_another_runs() -> None:
    made = batcher(work("high", at_ms=9), work("low", model=SMALL_MODEL, at_ms=5))
    batch = made.next_batch(10, idle=False)
    assert batch is not None
    assert batch.model_key == SMALL_MODEL
    assert made.next_batch(10, idle=False) is None


def test_nobody_waits_for_company_that_does_not_come_in_time() -> None:
    """Items come every 50 ms, and the time bound is 20."""
    made = batcher()
    for at_ms in range(0, 1_000, 50):
        made.add(work(at_ms=at_ms))
        made.next_batch(at_ms + 20, idle=False)
    made.add(work(at_ms=1_000))
    assert len(taken(made.next_batch(1_000, idle=False))) == 1
    for at_ms in range(1_001, 1_040, 2):
        made.add(work(at_ms=at_ms))
        made.next_batch(at_ms, idle=True)
    made.add(work(at_ms=1_041))
    assert made.next_batch(1_041, idle=False) is None, "now they come fast, and are waited for"
    assert made.due_at_ms(idle=False) == 1_061


def test_a_batch_is_no_larger_than_is_worth_it_and_does_not_wait_for_more() -> None:
    """An engine for which the second item costs as much as the first."""
    made = batcher()
    for _ in range(60):
        for _ in range(4):
            made.add(work())
        items = len(taken(made.next_batch(10**6, idle=False)))
        made.ran(MODEL, items, 10 * items, 0.1 * items)
        made.take(lambda _work: True)
    made.add(work(at_ms=10**6))
    assert len(taken(made.next_batch(10**6, idle=False))) == 1, "full with one"


def test_a_size_is_found_for_each_kind_of_items() -> None:
    """Long ones fill the engine alone, short ones do not."""
    made = MicroBatcher(BatchLimits(max_items=16, max_tokens=10**6, timeout_ms=20))

    def batch_of(tokens: int) -> int:
        for _ in range(16):
            made.add(work(tokens=tokens))
        items = len(taken(made.next_batch(10**6, idle=False)))
        made.ran(MODEL, items, tokens * items, max(1.0, 0.001 * tokens * items))
        made.take(lambda _work: True)
        return items

    sizes = [(batch_of(50), batch_of(2_000)) for _ in range(100)]
    short, long = (sorted(column)[25] for column in zip(*sizes[50:], strict=True))
    assert (short, long) == (16, 1)


def test_what_ran_out_of_memory_is_not_made_again_until_more_proves_safe() -> None:
    made = batcher()
    made.out_of_memory(MODEL, 4, 100)
    assert (made.limits_of(MODEL).max_items, made.limits_of(MODEL).max_tokens) == (2, 50)
    assert made.limits_of(SMALL_MODEL) == made.limits_by_model[SMALL_MODEL]
    for _ in range(8):
        made.add(work())
    assert len(taken(made.next_batch(0, idle=True))) == 2
    for _ in range(FULL_RUNS_BEFORE_MORE):
        made.ran(MODEL, 2, 20, 1.0)
    assert made.limits_of(MODEL).max_items == 3


def test_a_continuous_engine_takes_what_there_is_at_once() -> None:
    """Without waiting, without regard to length, in turn by weight."""
    items = [
        sized(length, priority=priority, at_ms=100) for priority in ("low", "normal", "high") for length in (10, 2_000)
    ]
    made = batcher(*items, limits=BatchLimits(max_items=8, max_tokens=10_000, timeout_ms=20))
    joined = made.take_for(MODEL, 100, 8, 10_000)
    assert sorted(one.claim.offset for one in joined) == sorted(one.claim.offset for one in items)
    assert [one.item.priority_class for one in joined[:3]] == ["high", "normal", "low"]
    assert len(made) == 0
    assert made.take_for(("other", "1"), 100, 8, 10_000) == []


def test_a_continuous_engine_is_given_no_more_than_it_has_room_for() -> None:
    made = batcher(*(work(tokens=30) for _ in range(5)))
    assert len(made.take_for(MODEL, 0, 2, 100)) == 2
    assert len(made.take_for(MODEL, 0, 8, 59)) == 1
    assert made.take_for(MODEL, 0, 8, 29) == []
    assert made.take_for(MODEL, 0, 0, 100) == []


def test_a_small_item_is_not_let_past_a_large_one_for_ever() -> None:
    large, small = work(tokens=90), work(tokens=10)
    made = batcher(large, small)
    assert made.take_for(MODEL, 0, 8, 80) == []
    assert made.take_for(MODEL, 0, 8, 100) == [large, small]


def test_an_item_above_the_bound_joins_an_engine_with_all_its_room() -> None:
    made = batcher(work(tokens=500))
    assert made.take_for(MODEL, 0, 8, 99) == []
    assert len(made.take_for(MODEL, 0, 8, 100)) == 1


def test_what_expired_joins_no_engine() -> None:
    late = work(deadline_at_ms=9)
    made = batcher(late)
    assert made.take_for(MODEL, 10, 8, 100) == []
    assert made.next_batch(10, idle=True) is None
    assert made.due_at_ms(idle=True) is None
    assert len(made) == 1
    assert made.take_expired(10) == [late]


def test_what_expired_can_still_be_taken() -> None:
    """Its partition may move on before it is answered."""
    late = work(deadline_at_ms=9)
    made = batcher(late)
    assert made.next_batch(10, idle=True) is None
    assert made.take(lambda _work: True) == [late]
    assert made.take_expired(10) == []
    assert (len(made), made.size_bytes("normal"), made.cost_tokens, made.count("normal")) == (0, 0, 0, 0)


def test_an_unknown_priority_is_refused_and_leaves_no_trace() -> None:
    made = batcher()
    with pytest.raises(KeyError):
        made.add(work("urgent"))
    assert (len(made), made.size_bytes("normal"), made.cost_tokens) == (0, 0, 0)
