"""Routes: whole checks, conditions, and arms that stay with what they were given."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import InferenceRequest, ModelRoute, RequestInput, RouteArm, RouteRule
from fairlane_server.models.route_checks import check_route
from fairlane_server.models.routes import arm_for, model_of, rule_for

NEW, OLD = RouteArm("candidate", "@candidate", 5.0), RouteArm("champion", "1", 95.0)
RULE = RouteRule("canary", (NEW, OLD))
ROUTE = ModelRoute("words", 1, {"champion": "1", "candidate": "2"}, {}, rules=(RULE,))
VERSIONS = ("1", "2", "3")
REQUESTS = 2_000


def request(number: int = 0, **changes: Any) -> InferenceRequest:
    return replace(InferenceRequest(f"id-{number}", "words", "generate", RequestInput(prompt="p")), **changes)


def with_rule(**changes: Any) -> ModelRoute:
    return replace(ROUTE, rules=(replace(RULE, **changes),))


def test_a_good_route_passes() -> None:
    check_route("words", ROUTE, VERSIONS)
    check_route("words", ROUTE)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (replace(ROUTE, model="other"), "model: 'other' under the key 'words'"),
        (replace(ROUTE, revision=0), "revision: 0 is less than 1"),
        (replace(ROUTE, aliases={"candidate": "2"}), "aliases: champion is missing"),
        (
            replace(ROUTE, aliases={"champion": "9", "candidate": "2"}),
            "aliases.champion: unknown version '9'",
        ),
        (replace(ROUTE, aliases={**ROUTE.aliases, "Bad one": "2"}), "aliases: 'Bad one' is no name"),
        (replace(ROUTE, aliases={**ROUTE.aliases, "version": "2"}), "aliases: 'version' is no name"),
        (replace(ROUTE, stopped=("1",)), "stopped: '1' is the champion"),
        (replace(ROUTE, stopped=("9",)), "stopped: unknown version '9'"),
        (replace(ROUTE, rules=(RULE, RULE)), "rules: two have the same name"),
        (replace(ROUTE, rules=tuple(replace(RULE, rule=f"r{n}") for n in range(65))), "rules: 65 are more than 64"),
        (with_rule(rule="no name"), "rules.no name: 'no name' is no name"),
        (with_rule(arms=()), "rules.canary: arms: 0 instead of 1 to 16"),
        (with_rule(arms=(NEW, replace(OLD, percent=90))), "arms: the percentages add up to 95, not to 100"),
        (with_rule(arms=(NEW, replace(OLD, percent=float("nan")))), "arms.champion: percent: nan is not from 0 to 100"),
        (with_rule(arms=(replace(NEW, percent=-5), replace(OLD, percent=105))), "percent: -5 is not from 0 to 100"),
        (with_rule(arms=(NEW, replace(OLD, arm="candidate"))), "arms: two have the same name"),
        (with_rule(arms=(NEW, replace(OLD, target="9"))), "arms.champion: target: unknown version '9'"),
        (
            with_rule(arms=(NEW, replace(OLD, target="@old"))),
            "unknown alias '@old'; known: candidate, champion",
        ),
        (with_rule(sticky_by="moon"), "sticky_by: 'moon' is none of conversation, caller, request"),
        (with_rule(tasks=("sing",)), "tasks: 'sing' is none of"),
        (with_rule(from_ms=5, until_ms=5), "until_ms: not after from_ms"),
        (with_rule(tenants=tuple(map(str, range(1_001)))), "tenants: 1001 are more than 1000"),
    ],
)
def test_a_wrong_route_is_refused_with_the_field_and_the_reason(bad: ModelRoute, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        check_route("words", bad, VERSIONS)


@pytest.mark.parametrize(
    ("conditions", "met"),
    [
        ({}, True),
        ({"tenants": ("acme", "globex")}, True),
        ({"tenants": ("globex",)}, False),
        ({"callers": ("key:1",)}, True),
        ({"callers": ("key:2",)}, False),
        ({"tasks": ("generate",)}, True),
        ({"tasks": ("embed",)}, False),
        ({"tenants": ("acme",), "tasks": ("embed",)}, False),
        ({"from_ms": 100}, True),
        ({"from_ms": 101}, False),
        ({"until_ms": 101}, True),
        ({"until_ms": 100}, False),
    ],
)
def test_a_rule_holds_for_requests_that_meet_all_conditions(conditions: dict[str, Any], met: bool) -> None:
    asked, other = request(requested_by="key:1"), replace(RULE, rule="rest")
    found = rule_for((replace(RULE, **conditions), other), asked, "acme", now_ms=100)
    assert found is not None
    assert (found.rule == "canary") is met


def test_of_no_rule_that_is_met_there_is_none() -> None:
    assert rule_for((replace(RULE, tenants=("globex",)),), request(), "acme", 0) is None


def test_arms_get_their_part_of_the_requests() -> None:
    counts = Counter(arm_for(RULE, request(number), "acme").arm for number in range(REQUESTS))
    # Five standard deviations of a binomial distribution.
    assert abs(counts["candidate"] - 0.05 * REQUESTS) < 5 * (REQUESTS * 0.05 * 0.95) ** 0.5


@given(before=st.integers(0, 100), more=st.integers(0, 100), number=st.integers(0, 10**9))
def test_with_a_larger_part_an_arm_keeps_what_it_had(before: int, more: int, number: int) -> None:
    def arms(percent: int) -> RouteRule:
        return replace(RULE, arms=(replace(NEW, percent=percent), replace(OLD, percent=100 - percent)))

    after = min(100, before + more)
    if arm_for(arms(before), request(number), "acme").arm == "candidate":
        assert arm_for(arms(after), request(number), "acme").arm == "candidate"


def test_an_arm_of_no_percent_gets_nothing() -> None:
    rule = replace(RULE, arms=(replace(NEW, percent=0), replace(OLD, percent=100)))
    assert {arm_for(rule, request(number), "acme").arm for number in range(100)} == {"champion"}


@pytest.mark.parametrize(
    ("sticky_by", "same", "stays"),
    [
        ("conversation", {"conversation_id": "c", "requested_by": None}, True),
        ("conversation", {"conversation_id": None, "requested_by": "key:1"}, False),
        ("caller", {"conversation_id": "c", "requested_by": "key:1"}, True),
        ("caller", {"conversation_id": "c", "requested_by": None}, False),
        ("request", {"conversation_id": "c", "requested_by": "key:1"}, False),
    ],
)
def test_what_is_sticky_stays_on_its_arm(sticky_by: str, same: dict[str, Any], stays: bool) -> None:
    half = (replace(NEW, percent=50), replace(OLD, percent=50))
    rule = replace(RULE, arms=half, sticky_by=sticky_by)
    seen = {arm_for(rule, request(number, **same), "acme").arm for number in range(100)}
    assert (len(seen) == 1) is stays


def test_tenants_and_rules_are_drawn_independently() -> None:
    half = replace(RULE, arms=(replace(NEW, percent=50), replace(OLD, percent=50)))
    drawn = [
        [arm_for(rule, request(number), tenant).arm for number in range(200)]
        for rule, tenant in ((half, "acme"), (half, "globex"), (replace(half, rule="other"), "acme"))
    ]
    for one, other in ((0, 1), (0, 2)):
        alike = sum(a == b for a, b in zip(drawn[one], drawn[other], strict=True))
        assert 60 < alike < 140


@pytest.mark.parametrize(
    ("reference", "model"), [("words", "words"), ("words/2", "words"), ("words@candidate", "words"), ("", "")]
)
def test_the_model_of_a_reference(reference: str, model: str) -> None:
    assert model_of(reference) == model
