"""Lengths that run together: classes, padding, and how much of the prefill is wasted on real lengths."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.trace import RequestSize, TraceSampler, load_trace
from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.batching.length_buckets import MAX_PADDING, Cell, PaddingRecord, Shape, cell_of, output_tokens
from inference_consumers.batching.micro_batch import MicroBatcher
from tests.kit.micro_batch_kit import MODEL, shape_of, sized, taken, work

LIMITS = BatchLimits(max_items=32, max_tokens=8_192, timeout_ms=20)
SCALE = 0.27
"""The 99th percentile of the trace's lengths becomes about 2,048."""


@given(prompt=st.integers(0, 10**6), more=st.integers(0, 10**6))
def test_classes_follow_lengths(prompt: int, more: int) -> None:
    shorter, longer = cell_of(sized(prompt)), cell_of(sized(prompt + more))
    assert shorter.prompt_class <= longer.prompt_class
    assert shorter.longest_prompt_tokens > prompt
    if shorter.prompt_class == longer.prompt_class and prompt >= 16:
        assert prompt + more <= 1.25 * prompt


def test_answers_are_told_apart_too_but_prompts_first() -> None:
    here = cell_of(sized(100, 10))
    assert cell_of(sized(100, 300)) != here
    assert here.distance(cell_of(sized(100, 300))) < here.distance(cell_of(sized(200, 10)))


def test_no_length_is_too_long_for_a_class() -> None:
    assert cell_of(sized(10**12)).longest_prompt_tokens > 0
    assert Cell(0, 0).longest_prompt_tokens == 16


def test_the_answer_is_what_the_cost_says() -> None:
    assert output_tokens(sized(100, 7)) == 7
    assert output_tokens(work(tokens=5, prompt_tokens=9)) == 0, "an estimate that cannot be"


def test_padding_is_what_the_longest_prompt_makes_of_the_others() -> None:
    shape = shape_of([sized(100, 10), sized(60), sized(80)])
    assert (shape.padding_tokens, shape.padded_tokens) == (60, 320)
    assert shape.padding_share() == pytest.approx(0.2)
    assert Shape().padding_share() == 0
    assert shape_of([sized(100, 10)]).merged(shape_of([sized(60), sized(80)])) == shape


def test_like_lengths_run_together_whatever_their_order() -> None:
    long, short = [sized(1_000) for _ in range(4)], [sized(100) for _ in range(4)]
    made = MicroBatcher(LIMITS)
    for pair in zip(long, short, strict=True):
        for one in pair:
            made.add(one)
    assert list(taken(made.next_batch(0, idle=True))) == long
    assert list(taken(made.next_batch(0, idle=True))) == short


def test_the_nearest_lengths_join_while_padding_stays_small() -> None:
    made = MicroBatcher(LIMITS)
    for length in (1_000, 300, 940, 1_100, 700):
        made.add(sized(length))
    assert {one.item.prompt_tokens for one in taken(made.next_batch(0, idle=True))} == {1_000, 940, 1_100}


def test_the_nearest_length_joins_first() -> None:
    made = MicroBatcher(replace(LIMITS, max_items=2))
    made.add(sized(850, priority="low"))
    for length in (1_000, 850, 1_010):
        made.add(sized(length, priority="high"))
    assert [one.item.prompt_tokens for one in taken(made.next_batch(0, idle=True))] == [1_000, 1_010]


def test_the_own_priority_joins_before_nearer_lengths_of_others() -> None:
    made = MicroBatcher(replace(LIMITS, max_items=2))
    for one in (sized(1_000, priority="high"), sized(1_000, priority="low"), sized(1_090, priority="high")):
        made.add(one)
    assert [one.item.priority_class for one in taken(made.next_batch(0, idle=True))] == ["high", "high"]


def test_padding_counts_against_the_token_bound() -> None:
    """It takes the same memory."""
    made = MicroBatcher(replace(LIMITS, max_tokens=2_050))
    for length in (1_030, 1_000):
        made.add(sized(length))
    assert len(taken(made.next_batch(0, idle=True))) == 1


def with_base_of_1000_tokens(*lengths: int, unpadded: int = 8, max_items: int = 32) -> MicroBatcher:
    """A batcher whose engine takes 1 s for a run and 1 ms for a token, after so many batches without padding."""
    made = MicroBatcher(replace(LIMITS, max_items=max_items))
    for tokens in (200, 4_000):
        made.ran(MODEL, 4, tokens, 1.0 + 0.001 * tokens)
    for _ in range(unpadded):
        made.add(sized(1_000))
        made.next_batch(0, idle=True)
    for length in lengths:
        made.add(sized(length))
    return made


def test_a_run_of_its_own_that_costs_more_than_padding_is_saved() -> None:
    made = with_base_of_1000_tokens(1_000, 500, 100)
    assert [one.item.prompt_tokens for one in taken(made.next_batch(0, idle=True))] == [1_000, 500], (
        "500 tokens of padding are cheaper than a run, 1,400 are not"
    )


def test_who_adds_no_padding_joins_a_batch_that_has_much() -> None:
    made = with_base_of_1000_tokens()
    made.add(sized(1_000, priority="low"))
    made.next_batch(0, idle=True)
    for one in (sized(1_000), sized(500), sized(1_000, priority="low")):
        made.add(one)
    assert [one.item.prompt_tokens for one in taken(made.next_batch(0, idle=True))] == [1_000, 500, 1_000]


def test_a_group_that_would_need_a_run_all_the_same_is_not_padded() -> None:
    lengths = 1_000, 800, 800
    assert len(taken(with_base_of_1000_tokens(*lengths, max_items=3).next_batch(0, idle=True))) == 3
    assert len(taken(with_base_of_1000_tokens(*lengths, 800, max_items=3).next_batch(0, idle=True))) == 2


def test_only_what_others_left_over_is_spent_on_that() -> None:
    assert len(taken(with_base_of_1000_tokens(1_000, 500, unpadded=0).next_batch(0, idle=True))) == 1


@pytest.mark.parametrize("waiting", [4, 16, 64])
def test_padding_stays_small_over_time_even_where_it_costs_nothing(waiting: int) -> None:
    """On an engine for which a token more is no more time."""
    made, arriving = MicroBatcher(LIMITS), sizes(1_000)
    area = padding = 0
    for tokens in (10, 4_000) * 10:
        made.ran(MODEL, 1, tokens, 1.0)
    while arriving or len(made):
        while arriving and len(made) < waiting:
            size = arriving.pop()
            made.add(sized(size.prompt_tokens, size.output_tokens))
        batch = taken(made.next_batch(0, idle=True))
        shape = shape_of(batch)
        made.ran(MODEL, shape.items, shape.cost_tokens, 1.0)
        area += shape.items * shape.longest_prompt
        padding += shape.padding_tokens
    assert 0.1 < padding / area < 0.15


def sizes(count: int) -> list[RequestSize]:
    sampler = TraceSampler(load_trace(), 1, scale=SCALE)
    return [sampler.size() for _ in range(count)]


@pytest.mark.parametrize("waiting", [4, 32, 256])
def test_little_of_real_lengths_is_padding(waiting: int) -> None:
    """However many wait. By arrival more than two thirds of the prefill would be padding."""
    made, arriving = MicroBatcher(LIMITS), sizes(2_000)
    area = padding = batches = 0
    while arriving or len(made):
        while arriving and len(made) < waiting:
            size = arriving.pop()
            made.add(sized(size.prompt_tokens, size.output_tokens))
        shape = shape_of(taken(made.next_batch(10**6, idle=False)))
        area += shape.items * shape.longest_prompt
        padding += shape.padding_tokens
        batches += 1
        assert shape.padding_share() <= MAX_PADDING
    assert padding / area < 0.1
    assert 2_000 / batches > {4: 1.1, 32: 3.0, 256: 6.0}[waiting], "it is not done by batches of one"


def test_by_arrival_most_would_be_padding() -> None:
    drawn = [sized(size.prompt_tokens, size.output_tokens) for size in sizes(2_000)]
    shapes = [shape_of(drawn[first : first + 14]) for first in range(0, len(drawn), 14)]
    area = sum(shape.items * shape.longest_prompt for shape in shapes)
    assert sum(shape.padding_tokens for shape in shapes) / area > 0.6


def test_classes_are_fine_enough_to_find_the_nearest() -> None:
    """Where classes meet, a batch goes on as if they did not."""
    boundaries = sorted({cell_of(sized(length)).longest_prompt_tokens for length in range(16, 2_048)})
    assert all(1.1 < longer / shorter < 1.3 for shorter, longer in pairwise(boundaries))
    made = MicroBatcher(LIMITS)
    for length in (boundaries[8] - 1, boundaries[8]):
        made.add(sized(length))
    assert len(taken(made.next_batch(0, idle=True))) == 2


def items_per_batch(computed: float) -> float:
    """On real lengths, with an engine that computes this part of a rectangle's padding."""
    made, arriving = MicroBatcher(LIMITS), sizes(1_000)
    batches: list[Shape] = []
    while arriving or len(made):
        while arriving and len(made) < 32:
            size = arriving.pop()
            made.add(sized(size.prompt_tokens, size.output_tokens))
        shape = shape_of(taken(made.next_batch(0, idle=True)))
        padding_tokens = round(computed * shape.padding_tokens)
        seconds = 0.2 + 0.001 * (shape.cost_tokens + padding_tokens)
        made.ran(MODEL, shape.items, shape.cost_tokens, seconds, padding_tokens=padding_tokens)
        batches.append(shape)
    later = batches[30:]
    padding = computed * sum(shape.padding_tokens for shape in later)
    assert padding / (padding + sum(shape.prompt_tokens for shape in later)) < 0.15
    return sum(shape.items for shape in later) / len(later)


def test_padding_that_the_engine_does_not_compute_keeps_nobody_apart() -> None:
    """One that prefills without a rectangle is given larger batches, of more different lengths."""
    none, half, all_of_it = items_per_batch(0.0), items_per_batch(0.5), items_per_batch(1.0)
    assert none > 1.2 * max(half, all_of_it)


def test_an_engine_that_says_nothing_is_taken_to_pad() -> None:
    record = PaddingRecord()
    record.made(Shape(2, 100, 150, 150))
    assert record.weight == 1
    record.ran(3, 0)
    assert record.weight == 1, "of another batch"
    for _ in range(30):
        record.made(Shape(2, 100, 150, 150))
        record.ran(2, 10)
    assert record.weight == pytest.approx(0.2, abs=0.05)
    record.ran(2, 1_000_000)
    assert record.weight == 1
