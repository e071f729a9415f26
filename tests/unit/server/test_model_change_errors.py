"""Problems of routes as the admin API names them: the field, and the reason whole."""

from dataclasses import replace

import pytest

from fairlane.records import ModelRoute, ModelVersion, RouteArm, RouteRule
from fairlane_server.administration.model_routes import invalid_change
from fairlane_server.models.catalog import ModelRecord
from fairlane_server.models.changes import Author
from fairlane_server.models.route_checks import check_route
from fairlane_server.rollouts.changes import RolloutPlan, with_rollout

ONE = ModelVersion("words", "1", "gpu", "torch", ("generate",), "words", 4_096, 512)
ROUTE = ModelRoute("words", 1, {"champion": "1"}, {})
RULE = RouteRule("canary", (RouteArm("new", "9", 50.0),))
PUBLISHED: dict[str, ModelRecord | None] = {
    "words/1": ONE,
    "words/2": replace(ONE, version="2", tasks=("rank",)),
    "words/3": replace(ONE, version="3", max_output_tokens=8),
    "words": ROUTE,
}


@pytest.mark.parametrize(
    ("route", "field", "reason"),
    [
        (replace(ROUTE, aliases={"champion": "9"}), "aliases.champion", "unknown version '9'; known: 1, 2"),
        (replace(ROUTE, stopped=("1",)), "stopped", "'1' is the champion"),
        (replace(ROUTE, rules=(RULE,)), "rules.canary.arms.new.target", "unknown version '9'; known: 1, 2"),
        (replace(ROUTE, rules=(replace(RULE, arms=()),)), "rules.canary.arms", "0 instead of 1 to 16"),
    ],
)
def test_the_field_and_the_reason_of_a_route_are_told_apart(route: ModelRoute, field: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        check_route("words", route, ("1", "2"))
    refused = invalid_change(raised.value)
    assert (refused.field, str(refused)) == (field, reason)


@pytest.mark.parametrize(
    ("plan", "field", "reason"),
    [
        (RolloutPlan("9"), "candidate", "unknown version '9'; known: 1, 2, 3"),
        (RolloutPlan("1"), "candidate", "'1' is the champion"),
        (RolloutPlan("2"), "candidate", "it does not do generate, which the champion does"),
        (RolloutPlan("3"), "candidate", "its max_output_tokens is 8, and the champion's 512"),
        (RolloutPlan("1", steps=(100.0,)), "steps", "1 instead of 2 to 16"),
    ],
)
def test_the_field_of_a_rollout_is_that_of_its_plan(plan: RolloutPlan, field: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        with_rollout(PUBLISHED, "words", plan, Author("ops@desk", 1))
    refused = invalid_change(raised.value)
    assert (refused.field, str(refused)) == (field, reason)
