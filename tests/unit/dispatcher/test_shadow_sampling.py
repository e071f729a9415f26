"""Bounds of a shadow: concurrency, rate and load hold whatever comes, and every sampled request has one result."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fairlane.evaluation_records import Shadow
from fairlane_server.evaluation.copies import copy_id
from stream_processors.dispatcher.evaluation.sampling import (
    COPIED,
    Pressure,
    Sampled,
    ShadowBounds,
    ShadowSampler,
    SkipReason,
)
from tests.kit.dispatcher_bench import Bench, request

SHADOW = Shadow("words-2-1", "2", 100.0, 4, 0.5, 10_000, 0, sticky_by="request")
CALM = Pressure(is_under_load=False, cost_tokens_per_s=1_000.0, dispatchers=1)


def sample(
    sampler: ShadowSampler,
    number: int,
    now_ms: int,
    shadow: Shadow = SHADOW,
    pressure: Pressure = CALM,
    *,
    is_allowed: bool = True,
    is_loaded: bool = True,
) -> Sampled | None:
    queued = Bench().queued(request(number))
    return sampler.sample(queued, shadow, now_ms, is_allowed=is_allowed, is_loaded=is_loaded, pressure=lambda: pressure)


def test_a_sampled_request_is_copied_or_says_why_not() -> None:
    sampler = ShadowSampler()
    results = [
        sample(sampler, 1, 0),
        sample(sampler, 2, 0, is_allowed=False),
        sample(sampler, 3, 0, is_loaded=False),
        sample(sampler, 4, 0, pressure=replace(CALM, is_under_load=True)),
        sample(sampler, 5, 0, pressure=replace(CALM, cost_tokens_per_s=0.0)),
    ]
    assert [one and one.result for one in results] == [COPIED, "not_allowed", "not_loaded", "load", "rate"]
    assert sample(sampler, 6, 0, replace(SHADOW, stopped_at_ms=0)) is None


def test_copies_under_way_are_bounded_and_end_with_their_usage_or_their_age() -> None:
    sampler, free = ShadowSampler(), replace(CALM, cost_tokens_per_s=1e9)
    results = [sample(sampler, number, 0, pressure=free) for number in range(6)]
    assert [one.result for one in results if one] == [COPIED] * 4 + ["concurrency"] * 2
    first = results[0]
    assert first is not None
    sampler.ended(copy_id(SHADOW.run, "candidate", "acme", first.mark.request_id))
    sampler.ended("a copy of somebody else")
    assert [sample(sampler, number, 1, pressure=free).result for number in (6, 7)] == [COPIED, "concurrency"]  # type: ignore[union-attr]
    # Whatever became of the others, they are over by then.
    assert sample(sampler, 8, 10_001, pressure=free).result == COPIED  # type: ignore[union-attr]


def test_another_run_begins_anew_and_dispatchers_share_the_bounds() -> None:
    sampler, free = ShadowSampler(), replace(CALM, cost_tokens_per_s=1e9, dispatchers=2)
    assert [sample(sampler, number, 0, pressure=free).result for number in range(3)] == [COPIED] * 2 + ["concurrency"]  # type: ignore[union-attr]
    other = replace(SHADOW, run="words-2-2")
    assert sample(sampler, 3, 0, other, pressure=free).result == COPIED  # type: ignore[union-attr]


STEPS = st.lists(
    st.tuples(
        st.integers(0, 3_000),  # milliseconds since the step before
        st.integers(1, 2_000),  # cost of the request
        st.booleans(),  # load
        st.booleans(),  # whether the oldest copy ends first
    ),
    max_size=60,
)


@given(STEPS, st.floats(0.01, 1.0), st.sampled_from([None, 50.0, 5_000.0]), st.integers(1, 8), st.integers(1, 3))
def test_no_bound_is_ever_exceeded(
    steps: list[tuple[int, int, bool, bool]],
    max_share: float,
    max_tokens_per_s: float | None,
    max_concurrent: int,
    dispatchers: int,
) -> None:
    shadow = replace(SHADOW, max_share=max_share, max_tokens_per_s=max_tokens_per_s, max_concurrent=max_concurrent)
    bounds, now_ms, spent, dearest = ShadowBounds(), 0, 0, 0
    under_way: list[tuple[str, int]] = []
    pressure = replace(CALM, dispatchers=dispatchers)
    rate = min(max_share * 1_000.0, max_tokens_per_s or float("inf")) / dispatchers / 1_000
    for number, (gap_ms, cost, is_loaded, ends) in enumerate(steps):
        now_ms += gap_ms
        if ends and under_way:
            bounds.ended(under_way.pop(0)[0])
        under_way = [(copy, ends_by) for copy, ends_by in under_way if ends_by > now_ms]
        skipped = bounds.judge(shadow, replace(pressure, is_under_load=is_loaded), now_ms)
        if is_loaded:
            assert skipped is SkipReason.LOAD
        if skipped is None:
            bounds.copied(f"copy-{number}", cost, now_ms + shadow.max_age_ms)
            under_way.append((f"copy-{number}", now_ms + shadow.max_age_ms))
            spent, dearest = spent + cost, max(dearest, cost)
        assert len(under_way) <= max(1, max_concurrent // dispatchers)
        # The bucket starts full, and one copy may overdraw it.
        assert spent <= rate * (now_ms + 2_000) + dearest + 1e-6


def test_a_clock_that_is_set_back_fills_no_bucket() -> None:
    bounds, shadow = ShadowBounds(), replace(SHADOW, max_concurrent=1_000)
    assert bounds.judge(shadow, CALM, 100_000) is None
    bounds.copied("copy", 100_000, 10**9)
    assert bounds.judge(shadow, CALM, 0) is SkipReason.RATE
    assert bounds.judge(shadow, CALM, 1_000) is SkipReason.RATE
