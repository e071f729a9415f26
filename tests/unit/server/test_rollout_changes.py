"""Changes of a rollout: each is one record, from which the dispatchers know all that it means."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fairlane.records import InferenceRequest, ModelRoute, ModelVersion, RequestInput, RouteArm, RouteRule
from fairlane.rollout_records import Rollout, RolloutGuards
from fairlane.schema_files import default_codec
from fairlane_server.control.published_models import key_of
from fairlane_server.models.catalog import Choice, ModelCatalog, ModelRecord, route_of_one
from fairlane_server.models.changes import Author, with_alias, with_rules, with_stopped
from fairlane_server.models.rollout_arms import CANDIDATE_ARM, CONTROL_ARM, RolloutStatus
from fairlane_server.models.route_checks import check_route
from fairlane_server.models.routes import CHAMPION
from fairlane_server.rollouts.changes import (
    NoRolloutError,
    RolloutPlan,
    aborted,
    active_rollout,
    advanced,
    approved,
    paused,
    resumed,
    rolled_back,
    with_rollout,
)
from fairlane_server.rollouts.evidence import ArmEvidence, latency_bucket
from fairlane_server.rollouts.steps import StepApproval
from fairlane_server.rollouts.verdict import judge_step

ONE = ModelVersion("words", "1", "gpu", "torch", ("generate",), "words", 4_096, 512)
TWO = replace(ONE, version="2", path="words-2")
AUTHOR, LATER = Author("ops@desk", 1_000, "new weights"), Author("rollout controller", 90_000, "passed")
PLAN = RolloutPlan("2", steps=(5.0, 50.0, 100.0))
REQUESTS = 4_000


def published(*records: ModelRecord) -> dict[str, ModelRecord | None]:
    return {key_of(record): record for record in records}


BEFORE = published(ONE, TWO, route_of_one(ONE))


def started(plan: RolloutPlan = PLAN) -> ModelRoute:
    return with_rollout(BEFORE, "words", plan, AUTHOR)


def evidence(failed: int) -> ArmEvidence:
    return ArmEvidence(requests=500, failed=failed, latencies={latency_bucket(80): 500 - failed})


VERDICT = judge_step(evidence(60), evidence(0), RolloutGuards(), 2)


def shares(route: ModelRoute, **changes: Any) -> dict[str, float]:
    """The part of the requests that each arm gets, with its version."""
    catalog = ModelCatalog((ONE, TWO), (route,))
    found: Counter[str] = Counter()
    for number in range(REQUESTS):
        request = InferenceRequest(f"id-{number}", "words", "generate", RequestInput(prompt="p"))
        choice = catalog.choose(replace(request, **changes), "acme", 0, lambda _model, _tenant: 1.0)
        assert isinstance(choice, Choice)
        found[f"{choice.arm} {choice.model.version}"] += 1
    return {name: count / REQUESTS for name, count in found.items()}


def test_a_rollout_begins_with_equal_slices_of_candidate_and_champion() -> None:
    route = started()
    rollout = active_rollout(route)
    assert (rollout.candidate, rollout.champion, rollout.step, rollout.decided) == ("2", "1", 0, "started")
    assert (route.aliases, route.revision, route.reason) == ({CHAMPION: "1"}, 2, "new weights")
    assert shares(route) == pytest.approx(
        {f"{CANDIDATE_ARM} 2": 0.05, f"{CONTROL_ARM} 1": 0.05, f"{CHAMPION} 1": 0.9}, abs=0.015
    )


def test_a_larger_step_takes_the_candidate_from_nobody() -> None:
    first = ModelCatalog((ONE, TWO), (started(),))
    second = ModelCatalog((ONE, TWO), (advanced(started(), VERDICT, LATER),))
    for number in range(REQUESTS):
        request = InferenceRequest(
            f"id-{number}", "words", "generate", RequestInput(prompt="p"), conversation_id=f"talk-{number}"
        )
        before, after = (one.choose(request, "acme", 0) for one in (first, second))
        assert isinstance(before, Choice)
        assert isinstance(after, Choice)
        assert before.arm in (CHAMPION, after.arm)


def test_another_rollout_begins_with_others() -> None:
    def candidates(route: ModelRoute) -> set[int]:
        catalog = ModelCatalog((ONE, TWO), (route,))
        found = set()
        for number in range(REQUESTS):
            request = InferenceRequest(f"id-{number}", "words", "generate", RequestInput(prompt="p"))
            choice = catalog.choose(request, "acme", 0)
            assert isinstance(choice, Choice)
            if choice.arm == CANDIDATE_ARM:
                found.add(number)
        return found

    first = candidates(started())
    second = candidates(with_rollout(BEFORE, "words", PLAN, replace(AUTHOR, at_ms=2_000)))
    assert len(first & second) < len(first) / 2


def test_a_rule_goes_before_the_rollout() -> None:
    rule = RouteRule("fixed", (RouteArm("old", "1", 100.0),), tenants=("acme",))
    route = with_rules(published(ONE, TWO, started()), "words", (rule,), LATER)
    assert shares(route) == {"old 1": 1.0}


def test_the_last_step_makes_the_candidate_the_champion() -> None:
    second = advanced(started(), VERDICT, LATER)
    assert active_rollout(second).step == 1
    assert active_rollout(second).step_started_at_ms == LATER.at_ms
    last = advanced(second, VERDICT, LATER)
    assert last.rollout is not None
    assert (last.rollout.status, last.rollout.decided) == (RolloutStatus.PROMOTED, "promoted")
    assert (last.aliases, last.previous) == ({CHAMPION: "2"}, {CHAMPION: "1"})
    assert last.rollout.findings == VERDICT.findings
    assert (last.rollout.candidate_requests, last.rollout.control_requests) == (500, 500)
    assert shares(last) == {f"{CHAMPION} 2": 1.0}


def test_a_rollback_is_one_record_that_also_moves_what_waits() -> None:
    back = rolled_back(started(), VERDICT, LATER)
    assert back.stopped == ("2",)
    assert back.rollout is not None
    assert (back.rollout.status, back.rollout.decided) == (RolloutStatus.ROLLED_BACK, "rolled_back")
    assert shares(back) == {f"{CHAMPION} 1": 1.0}
    catalog = ModelCatalog((ONE, TWO), (back,))
    waiting = InferenceRequest("id", "words", "generate", RequestInput(prompt="p"))
    assert catalog.again("2", CANDIDATE_ARM, waiting, "acme", 0) == Choice(ONE, CHAMPION)


def test_an_abort_leaves_the_candidate_to_what_waits_for_it() -> None:
    ended = aborted(started(), LATER)
    assert ended.stopped == ()
    assert shares(ended) == {f"{CHAMPION} 1": 1.0}
    catalog = ModelCatalog((ONE, TWO), (ended,))
    waiting = InferenceRequest("id", "words", "generate", RequestInput(prompt="p"))
    assert catalog.again("2", CANDIDATE_ARM, waiting, "acme", 0) == Choice(TWO, CANDIDATE_ARM)


def test_what_a_version_is_asked_for_by_name_is_no_part_of_a_rollout() -> None:
    assert shares(started(), model="words/2") == {"version 2": 1.0}
    aliased = with_alias(published(ONE, TWO, started()), "words", "candidate", "2", LATER)
    assert shares(aliased, model="words@candidate") == {"candidate 2": 1.0}


def test_a_stopped_candidate_ends_its_rollout() -> None:
    stopped = with_stopped(published(ONE, TWO, started()), "words", "2", LATER, stopped=True)
    assert stopped.rollout is not None
    assert stopped.rollout.status == RolloutStatus.ROLLED_BACK
    assert shares(stopped) == {f"{CHAMPION} 1": 1.0}


def test_a_paused_rollout_keeps_its_arms_and_can_be_resumed() -> None:
    still = paused(started(), LATER)
    assert active_rollout(still).status == RolloutStatus.PAUSED
    assert shares(still) == shares(started())
    assert active_rollout(resumed(still, LATER)).status == RolloutStatus.RUNNING


def test_an_approval_is_of_one_step() -> None:
    route = approved(started(replace(PLAN, needs_approval=True)), StepApproval.WHEN_PASSED, LATER)
    assert active_rollout(route).approval == StepApproval.WHEN_PASSED
    assert active_rollout(advanced(route, VERDICT, LATER)).approval is None


def test_a_route_is_the_same_after_kafka() -> None:
    codec = default_codec()
    back = rolled_back(started(), VERDICT, LATER)
    assert codec.decode(codec.encode(back)) == back


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda: with_rollout(published(ONE, TWO, started()), "words", PLAN, LATER), "version 2 is under way"),
        (lambda: resumed(started(), LATER), "the rollout is running, not paused"),
        (lambda: paused(paused(started(), LATER), LATER), "the rollout is paused, not running"),
        (lambda: approved(started(), StepApproval.WHEN_PASSED, LATER), "needs no approval"),
        (lambda: aborted(aborted(started(), LATER), LATER), "no rollout is under way"),
        (lambda: rolled_back(route_of_one(ONE), None, LATER), "no rollout is under way"),
    ],
)
def test_what_does_not_fit_the_state_is_refused(change: Any, problem: str) -> None:
    with pytest.raises(NoRolloutError, match=problem):
        change()


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (replace(PLAN, candidate="9"), "rollout: candidate: unknown version '9'; known: 1, 2"),
        (replace(PLAN, candidate="1"), "rollout: candidate: '1' is the champion"),
        (replace(PLAN, steps=(100.0,)), "rollout: steps: 1 instead of 2 to 16"),
        (replace(PLAN, steps=(5.0, 50.0)), "rollout: steps: the last one is not 100"),
        (replace(PLAN, steps=(5.0, 60.0, 100.0)), "rollout: steps: all but the last must be above 0 and at most 50"),
        (replace(PLAN, steps=(0.0, 100.0)), "rollout: steps: all but the last must be above 0"),
        (replace(PLAN, steps=(float("nan"), 100.0)), "rollout: steps: all but the last must be above 0"),
        (replace(PLAN, steps=(5.0, 5.0, 100.0)), "rollout: steps: they do not rise"),
        (replace(PLAN, sticky_by="moon"), "rollout: sticky_by: 'moon' is none of"),
        (replace(PLAN, least_step_ms=-1), "rollout: least_step_ms: -1 is less than 0"),
        (replace(PLAN, guards=RolloutGuards(false_pass_rate=1.0)), "false_pass_rate: 1.0 is not between 0 and 1"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_field_and_the_reason(plan: RolloutPlan, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        with_rollout(BEFORE, "words", plan, AUTHOR)


def test_a_stopped_version_is_no_candidate() -> None:
    route = replace(route_of_one(ONE), stopped=("2",))
    with pytest.raises(ValueError, match="candidate: '2' is stopped"):
        with_rollout(published(ONE, TWO, route), "words", PLAN, AUTHOR)


def test_the_champion_stays_while_a_rollout_compares_with_it() -> None:
    with pytest.raises(ValueError, match="rollout: champion: '1' is not the champion; abort the rollout first"):
        with_alias(published(ONE, TWO, started()), "words", CHAMPION, "2", LATER)


@pytest.mark.parametrize("name", [CANDIDATE_ARM, CONTROL_ARM])
def test_rules_and_aliases_cannot_have_the_arms_of_rollouts(name: str) -> None:
    rule = RouteRule("all", (RouteArm(name, "1", 100.0),))
    with pytest.raises(ValueError, match="is an arm of rollouts"):
        with_rules(BEFORE, "words", (rule,), AUTHOR)
    with pytest.raises(ValueError, match="is an arm of rollouts"):
        with_alias(BEFORE, "words", name, "2", AUTHOR)


def test_a_status_that_nobody_knows_is_refused() -> None:
    rollout: Rollout = replace(active_rollout(started()), status="dancing")
    with pytest.raises(ValueError, match="rollout: status: 'dancing' is none of running, paused"):
        check_route("words", replace(started(), rollout=rollout), ("1", "2"))
