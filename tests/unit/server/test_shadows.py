"""Shadows in the route of a model: how they start and stop, and which requests are in the sample."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.evaluation_records import Shadow
from fairlane.records import InferenceRequest, ModelVersion, RequestInput
from fairlane_server.control.published_models import key_of
from fairlane_server.evaluation.shadow_plan import shadow_plan_of_json
from fairlane_server.evaluation.shadows import (
    NoShadowError,
    ShadowPlan,
    is_sampled,
    with_shadow,
    without_shadow,
)
from fairlane_server.models.catalog import ModelRecord, route_of_one
from fairlane_server.models.changes import Author, with_alias, with_stopped
from fairlane_server.models.route_checks import check_route
from fairlane_server.yaml_config import ConfigError

ONE = ModelVersion("words", "1", "gpu", "torch", ("generate",), "words", 4_096, 512)
TWO = replace(ONE, version="2", path="words-2")
AUTHOR, LATER = Author("ops@desk", 1_000, "new weights"), Author("user:u-17", 90_000, "enough")
SHADOW = Shadow("words-2-1", "2", 20.0, 16, 0.1, 600_000, 1_000, sticky_by="request")


def published(*records: ModelRecord) -> dict[str, ModelRecord | None]:
    return {key_of(record): record for record in records}


BEFORE = published(ONE, TWO, route_of_one(ONE))


def request(number: int, **fields: Any) -> InferenceRequest:
    return InferenceRequest(f"r-{number}", "words", "generate", RequestInput(prompt="hello"), **fields)


def test_a_shadow_starts_and_stops_with_one_record_each_and_leaves_the_rest_of_the_route() -> None:
    route = with_shadow(BEFORE, "words", ShadowPlan("2", percent=5.0), AUTHOR)
    assert route.shadow is not None
    assert (route.shadow.candidate, route.shadow.percent, route.shadow.started_at_ms) == ("2", 5.0, 1_000)
    assert (route.revision, route.changed_by, route.reason) == (2, "ops@desk", "new weights")
    assert route.aliases == {"champion": "1"}
    now = published(ONE, TWO, route)
    with pytest.raises(NoShadowError, match="the shadow of version 2 is under way"):
        with_shadow(now, "words", ShadowPlan("2"), LATER)
    stopped = without_shadow(now, "words", LATER)
    assert stopped.shadow == replace(route.shadow, stopped_at_ms=90_000)
    with pytest.raises(NoShadowError, match="no shadow is under way"):
        without_shadow(published(ONE, TWO, stopped), "words", LATER)
    again = with_shadow(published(ONE, TWO, stopped), "words", ShadowPlan("2"), LATER)
    assert again.shadow is not None
    assert again.shadow.run != route.shadow.run


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (ShadowPlan("1"), "candidate: '1' is the champion"),
        (ShadowPlan("9"), "shadow: candidate: unknown version '9'"),
        (ShadowPlan("2", percent=0), "shadow: percent: 0 is not above 0"),
        (ShadowPlan("2", percent=101), "shadow: percent: 101"),
        (ShadowPlan("2", max_concurrent=0), "shadow: max_concurrent: 0"),
        (ShadowPlan("2", max_share=1.5), "shadow: max_share: 1.5"),
        (ShadowPlan("2", max_tokens_per_s=0), "shadow: max_tokens_per_s: 0"),
        (ShadowPlan("2", max_age_ms=86_400_000), "shadow: max_age_ms: 86400000"),
        (ShadowPlan("2", sticky_by="moon"), "shadow: sticky_by: 'moon' is none of"),
        (ShadowPlan("2", from_ms=9, until_ms=9), "shadow: until_ms: not after from_ms"),
    ],
)
def test_an_invalid_shadow_is_refused_with_its_field(plan: ShadowPlan, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        with_shadow(BEFORE, "words", plan, AUTHOR)


def test_a_stopped_version_is_no_candidate_and_a_model_without_champion_has_no_shadow() -> None:
    stopped = with_stopped(BEFORE, "words", "2", AUTHOR, stopped=True)
    with pytest.raises(ValueError, match="candidate: '2' is stopped"):
        with_shadow(published(ONE, TWO, stopped), "words", ShadowPlan("2"), LATER)
    with pytest.raises(ValueError, match="it has no champion"):
        with_shadow(published(ONE), "words", ShadowPlan("2"), AUTHOR)


def test_a_running_shadow_is_in_the_way_of_no_promotion_and_no_rollback() -> None:
    now = published(ONE, TWO, with_shadow(BEFORE, "words", ShadowPlan("2", percent=100), AUTHOR))
    promoted = with_alias(now, "words", "champion", "2", LATER)
    check_route("words", promoted)
    assert promoted.shadow is not None
    assert not is_sampled(promoted.shadow, request(1), "acme", "2", "champion", 2_000)
    rolled_back = with_stopped(now, "words", "2", LATER, stopped=True)
    check_route("words", rolled_back)


@given(st.floats(1, 100), st.integers(0, 1_000_000))
def test_the_sample_is_as_large_as_wanted_and_only_grows_with_its_percentage(percent: float, seed: int) -> None:
    smaller, larger = replace(SHADOW, percent=percent / 2), replace(SHADOW, percent=percent)
    requests = [request(seed + number) for number in range(400)]
    of_smaller, of_larger = (
        {one.request_id for one in requests if is_sampled(shadow, one, "acme", "1", "champion", 2_000)}
        for shadow in (smaller, larger)
    )
    assert of_smaller <= of_larger
    # Five standard deviations of a binomial distribution.
    assert abs(len(of_larger) - 4 * percent) <= 5 * (400 * percent / 100 * (1 - percent / 100)) ** 0.5 + 1


def test_a_sample_keeps_a_conversation_together_and_respects_arm_and_time() -> None:
    sticky = replace(SHADOW, percent=50.0, sticky_by="conversation")
    for talk in range(20):
        found = {
            is_sampled(sticky, request(number, conversation_id=f"talk-{talk}"), "acme", "1", "champion", 2_000)
            for number in range(20)
        }
        assert len(found) == 1
    everything = replace(SHADOW, percent=100.0)
    sampled = [
        is_sampled(shadow, request(1), "acme", "1", "canary", now_ms)
        for shadow, now_ms in (
            (everything, 2_000),
            (replace(everything, arm="canary"), 2_000),
            (replace(everything, arm="champion"), 2_000),
            (replace(everything, from_ms=2_001), 2_000),
            (replace(everything, until_ms=2_000), 2_000),
            (replace(everything, from_ms=2_000, until_ms=2_001), 2_000),
            (replace(everything, stopped_at_ms=1_500), 2_000),
        )
    ]
    assert sampled == [True, True, False, False, False, True, False]


def test_a_plan_of_a_call_names_its_candidate() -> None:
    plan = shadow_plan_of_json(b'{"candidate": "2", "percent": 5, "max_age_s": 30, "until": "2026-12-31"}')
    assert (plan.candidate, plan.percent, plan.max_age_ms, plan.until_ms) == ("2", 5, 30_000, 1_798_675_200_000)
    for body, problem in (
        (b'{"percent": 5}', "candidate"),
        (b'{"candidate": "2", "percent": 500}', "percent"),
        (b'{"candidate": "2", "colour": "red"}', "colour"),
    ):
        with pytest.raises(ConfigError, match=problem):
            shadow_plan_of_json(body)
