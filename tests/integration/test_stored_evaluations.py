"""Evaluation sets, runs, schedules and judges in a real Postgres, as the roles that use them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from fairlane.clock import now_ms
from fairlane_server.administration.evaluations import TenantEvaluations
from fairlane_server.administration.events import AdminAudit, EventFilter
from fairlane_server.administration.labels import TenantLabels
from fairlane_server.cli import main
from fairlane_server.erasure.erasures import ErasureKind, Erasures
from fairlane_server.evaluation import set_store
from fairlane_server.evaluation.calibration import RatedGrade, agreement_of
from fairlane_server.evaluation.calibration_store import JudgeCalibrations
from fairlane_server.evaluation.evaluation_set import EvaluationSet, line_of, read_evaluation_set
from fairlane_server.evaluation.grading import ExampleScore
from fairlane_server.evaluation.judge import Rubric
from fairlane_server.evaluation.measuring import JudgeWish, judge_use_of
from fairlane_server.evaluation.run_store import LEASE_MS, EvaluationRuns, RunTakenError
from fairlane_server.evaluation.schedule_store import EvaluationSchedules
from fairlane_server.evaluation.schedules import EvaluationSchedule
from fairlane_server.evaluation.set_store import EvaluationSets, EvaluationStoreError, UnknownEvaluationError
from fairlane_server.evaluation.stored_runs import JudgeUse, RunHead, RunResult, request_id_of
from fairlane_server.labelling.queue import LabelError, UnknownLabelItemError
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from stream_processors.recorder.evaluation_watch import EvaluationWatch
from tests.kit.label_kit import LabelBench, request_id
from tests.kit.stack import PostgresServer

pytestmark = [pytest.mark.full, pytest.mark.broker]

DAY_MS = 86_400_000
RUBRIC = Rubric("It is right.")
EXAMPLES = "SELECT name, version, place, request_id FROM evaluation_examples ORDER BY 1, 2, 3"
RATED = agreement_of([RatedGrade(float(number % 2), 1 + 4 * (number % 2)) for number in range(60)])


def lines(*names: str, **fields: Any) -> EvaluationSet:
    rows = ({"id": name, "input": {"prompt": f"about {name}"}, "expected": "x", **fields} for name in names)
    return read_evaluation_set(json.dumps(row).encode() for row in rows)


def made_of(*numbers: int, tenant: str = "acme") -> EvaluationSet:
    """As an export of labels has it."""
    rows = (
        {
            "id": request_id(number),
            "input": {"prompt": "p"},
            "output": {"text": "an answer"},
            "label": "bad",
            "expected": None,
            "provenance": {"request_id": request_id(number), "tenant": tenant, "reviewers": ["a"]},
        }
        for number in numbers
    )
    return read_evaluation_set(json.dumps(row).encode() for row in rows)


def head(**fields: Any) -> RunHead:
    made = RunHead("holdout", 1, "d" * 64, 2, "digits/2", "digits", "accuracy", {"priority": "low"})
    return replace(made, **fields)


@pytest.fixture
def sets(migrated: PostgresServer) -> Iterator[EvaluationSets]:
    with EvaluationSets(migrated.operator_dsn, "acme") as made:
        yield made


@pytest.fixture
def runs(migrated: PostgresServer) -> Iterator[EvaluationRuns]:
    with EvaluationRuns(migrated.operator_dsn, "acme") as made:
        yield made


@pytest.fixture
def schedules(migrated: PostgresServer) -> Iterator[EvaluationSchedules]:
    with EvaluationSchedules(migrated.operator_dsn, "acme") as made:
        yield made


@pytest.fixture
def rig(migrated: PostgresServer) -> Iterator[LabelBench]:
    made = LabelBench(migrated)
    yield made
    made.close()


def test_a_set_has_versions_by_its_content(sets: EvaluationSets) -> None:
    first, is_new = sets.add("holdout", lines("a", "b"), "me")
    assert is_new
    assert (first.name, first.version, first.examples, first.present, first.labelled) == ("holdout", 1, 2, 2, 0)
    assert sets.add("holdout", lines("a", "b"), "you") == (first, False)
    second, _ = sets.add("holdout", lines("b", "a"), "me")
    assert second.version == 2
    other, _ = sets.add("other", lines("a"), "me")
    assert [(one.name, one.version) for one in sets.list()] == [("holdout", 1), ("holdout", 2), ("other", 1)]
    assert sets.list(after=("holdout", 1), most=1) == [second]
    assert sets.list("other") == [other]
    assert sets.find("holdout") == second
    found = sets.examples("holdout", 1)
    assert [one.example_id for one in found.values()] == ["a", "b"]
    again = read_evaluation_set(line_of(one).encode() for one in found.values())
    assert again.digest == first.digest, "what is read is what was stored"


def test_a_removed_version_is_gone_and_its_number_is_not_used_again(sets: EvaluationSets) -> None:
    sets.add("holdout", lines("a"), "me")
    sets.remove("holdout", 1)
    with pytest.raises(UnknownEvaluationError, match="no evaluation set holdout:1"):
        sets.find("holdout", 1)
    assert sets.list() == []
    assert sets.add("holdout", lines("a"), "me")[0].version == 2


def test_texts_of_any_kind_come_back_as_they_were(sets: EvaluationSets) -> None:
    hostile = lines("a", input={"prompt": "\x00 \ud800 \u2028 \\u0000", "n": 1e300, "m": 1.0})
    stored, _ = sets.add("holdout", hostile, "me")
    assert sets.examples("holdout", stored.version)[0] == hostile.examples[0]


def test_sets_are_bounded(sets: EvaluationSets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_store, "MOST_SET_BYTES", 100)
    with pytest.raises(EvaluationStoreError, match="at most 100 are stored"):
        sets.add("holdout", lines("a", "b", "c"), "me")
    monkeypatch.undo()
    monkeypatch.setattr(set_store, "MOST_TENANT_BYTES", 100)
    sets.add("holdout", lines("a"), "me")
    with pytest.raises(EvaluationStoreError, match="would have more than 100 bytes"):
        sets.add("holdout", lines("b"), "me")
    monkeypatch.setattr(set_store, "MOST_VERSIONS", 1)
    with pytest.raises(EvaluationStoreError, match="which is the most"):
        sets.add("holdout", lines("c"), "me")
    with pytest.raises(EvaluationStoreError, match="name: "):
        sets.add("../etc", lines("a"), "me")


def test_another_tenant_sees_nothing(sets: EvaluationSets, runs: EvaluationRuns, migrated: PostgresServer) -> None:
    sets.add("holdout", lines("a"), "me")
    run_id = runs.begin(head(), "me", "r")
    with EvaluationSets(migrated.operator_dsn, "globex") as others:
        assert others.list() == []
        with pytest.raises(UnknownEvaluationError):
            others.find("holdout")
        assert others.add("holdout", lines("a"), "they")[0].version == 1
    with EvaluationRuns(migrated.operator_dsn, "globex") as theirs:
        assert theirs.list() == []
        with pytest.raises(UnknownEvaluationError):
            theirs.claim(run_id, "r")
    # With neither a tenant nor a role that acts for all there is no row at all.
    with connect(migrated.admin_dsn, "tests") as connection:
        act_for(connection, ALL_TENANTS)
        assert connection.execute("SELECT * FROM evaluation_examples").fetchall() == []


def test_a_set_of_labels_needs_consent_and_is_of_its_own_tenant(sets: EvaluationSets, rig: LabelBench) -> None:
    with pytest.raises(EvaluationStoreError, match="does not allow evaluation"):
        sets.add("rated", made_of(1), "me")
    rig.allow("acme", evaluation="denied")
    with pytest.raises(EvaluationStoreError, match="does not allow evaluation"):
        sets.add("rated", made_of(1), "me")
    rig.allow("acme")
    with pytest.raises(EvaluationStoreError, match="of another tenant"):
        sets.add("rated", made_of(1, tenant="globex"), "me")
    stored, _ = sets.add("rated", made_of(1, 2), "me")
    assert stored.labelled == 2
    example = sets.examples("rated", 1)[0]
    assert (example.output, example.rating) == ("an answer", 0.0)
    assert "reviewers" not in json.dumps(sets.lines("rated", 1)), "who judged is not part of it"


def test_without_consent_examples_of_requests_go(sets: EvaluationSets, rig: LabelBench) -> None:
    rig.allow("acme")
    sets.add("rated", made_of(1), "me")
    sets.add("written", lines("a"), "me")
    rig.allow("acme", evaluation="denied")
    rig.collector.look()
    assert [row[0] for row in rig.tables.rows(EXAMPLES)] == ["written"]
    assert sets.find("rated").present == 0


def test_an_erasure_reaches_examples_and_what_runs_answered_to_them(
    sets: EvaluationSets, runs: EvaluationRuns, rig: LabelBench, migrated: PostgresServer
) -> None:
    rig.allow("acme")
    rig.answered(1, 2)
    stored, _ = sets.add("rated", made_of(1, 2), "me")
    run_id = runs.begin(head(set_name="rated", set_digest=stored.digest), "me", "r")
    runs.add(run_id, "r", {0: ExampleScore(1.0), 1: ExampleScore(0.0)})
    asked = request_id_of(run_id, 0, "answer")
    with psycopg.connect(migrated.owner_dsn) as owner:
        owner.execute("SELECT set_config('fairlane.tenant', '*', true)")
        owner.execute("UPDATE results SET request_id = %s WHERE request_id = %s", (asked, request_id(2)))
    with Erasures(migrated.gateway_dsn, "acme", kept_ms=DAY_MS) as erasures:
        erasure_id = erasures.request(ErasureKind.REQUESTS, [request_id(1)], "key:1")
        while erasures.step(erasure_id):
            pass
    assert rig.tables.rows(EXAMPLES) == [("rated", 1, 1, request_id(2))]
    assert rig.tables.rows("SELECT request_id FROM results") == [], "of the request, and of the run that repeated it"
    found = sets.find("rated")
    assert (found.examples, found.present) == (2, 1)
    ended = runs.finish(run_id, "r")
    assert ended.result is not None
    assert ended.result.scored == 2, "a score has no text"
    with pytest.raises(EvaluationStoreError, match="the request was erased; export the set again"):
        sets.add("rated", made_of(1, 2, 3), "me")


def test_a_run_belongs_to_one_runner_and_ends_once(runs: EvaluationRuns, migrated: PostgresServer) -> None:
    run_id = runs.begin(head(), "me", "first")
    with pytest.raises(RunTakenError, match="another process asks"):
        runs.claim(run_id, "second")
    runs.add(run_id, "first", {0: ExampleScore(1.0, model_version="2", prompt_tokens=3)})
    runs.add(run_id, "first", {0: ExampleScore(0.0)})
    later = EvaluationRuns(migrated.operator_dsn, "acme", lambda: now_ms() + LEASE_MS + 1_000)
    with later:
        assert later.claim(run_id, "second").stored == 1
        with pytest.raises(RunTakenError):
            runs.add(run_id, "first", {1: ExampleScore(0.0)})
        with pytest.raises(RunTakenError):
            runs.finish(run_id, "first")
        assert later.places(run_id) == {0}
        later.add(run_id, "second", {1: ExampleScore(None, "no verdict")})
        ended = later.finish(run_id, "second")
        with pytest.raises(RunTakenError):
            later.finish(run_id, "second")
    assert ended.state == "finished"
    assert ended.result == RunResult(1.0, *_wilson(), 1, 1, {}, {"2": 1}, 3, 0)
    assert runs.find(run_id) == ended
    with pytest.raises(RunTakenError, match="it is finished"):
        runs.cancel(run_id)


def _wilson() -> tuple[float, float]:
    from fairlane_server.evaluation.comparison import wilson_interval

    return wilson_interval(1, 1)


def test_a_left_run_may_be_taken_over_at_once_and_a_cancelled_one_not(runs: EvaluationRuns) -> None:
    run_id = runs.begin(head(), "me", "first")
    runs.release(run_id, "first")
    runs.claim(run_id, "second")
    runs.cancel(run_id)
    with pytest.raises(RunTakenError, match="it is cancelled"):
        runs.claim(run_id, "second")


def test_old_runs_go_and_the_baseline_stays(
    runs: EvaluationRuns, schedules: EvaluationSchedules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlane_server.evaluation.run_store.MOST_RUNS", 2)
    schedules.set(EvaluationSchedule("digits", "holdout", "accuracy", {}, None, 24.0))
    ended = [finished(runs, 1.0, may_be_baseline=True) for _ in range(5)]
    assert schedules.list()[0].baseline_run == ended[0]
    assert {one.run_id for one in runs.list()} == {ended[0], ended[3], ended[4]}
    with pytest.raises(UnknownEvaluationError):
        runs.scores(ended[1])


def finished(runs: EvaluationRuns, *scores: float, may_be_baseline: bool = False, **fields: Any) -> str:
    run_id = runs.begin(head(is_scheduled=True, **fields), "me", "r")
    runs.add(run_id, "r", {place: ExampleScore(score) for place, score in enumerate(scores)})
    runs.finish(run_id, "r", 100, may_be_baseline=may_be_baseline)
    return run_id


def test_one_scheduled_run_of_a_model_at_a_time(runs: EvaluationRuns) -> None:
    run_id = runs.begin(head(is_scheduled=True), "me", "r")
    with pytest.raises(RunTakenError, match="a scheduled run of digits is under way"):
        runs.begin(head(is_scheduled=True, reference="digits/3"), "you", "s")
    runs.begin(head(), "me", "r")
    runs.begin(head(is_scheduled=True, model="words", reference="words/1"), "me", "r")
    runs.cancel(run_id)
    runs.begin(head(is_scheduled=True), "me", "r")


def route_recorded(server: PostgresServer, offset: int, **rollout: Any) -> None:
    """A change of the route of digits, as the recorder keeps it."""
    state = {"rollout": "3-1", "status": "running", "decided": "started", "step": 0, "steps": [1.0, 100.0]}
    state |= {"findings": [], "candidate": "3", "champion": "2", **rollout}
    row = (offset, now_ms() - 4 * DAY_MS + offset, json.dumps({"champion": "2"}), offset, json.dumps(state))
    with psycopg.connect(server.owner_dsn) as owner:
        owner.execute(
            "INSERT INTO model_routes (model, revision, aliases, previous, rules, stopped, changed_at_ms, changed_by, "
            "reason, managed_by, log_topic, log_partition, log_offset, rollout) "
            "SELECT 'digits', revision, aliases::jsonb, '{}', '[]', '[]', at_ms, 'me', '', 'api', 'l', 0, log_offset, "
            "rollout::jsonb FROM (VALUES (%s, %s, %s, %s, %s)) AS made (revision, at_ms, aliases, log_offset, rollout)",
            row,
        )


def test_a_fall_below_the_baseline_is_shown_logged_and_explained(
    runs: EvaluationRuns,
    schedules: EvaluationSchedules,
    migrated: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    schedules.set(
        EvaluationSchedule("digits", "holdout", "accuracy", {}, None, 24.0, created_at_ms=now_ms() - 3 * DAY_MS)
    )
    baseline = finished(runs, *[1.0] * 40, may_be_baseline=True)
    fallen = finished(runs, *[1.0] * 20, *[0.0] * 20, reference="digits/3", baseline_run=baseline)
    unreliable = JudgeUse("judge", "r", "d", refusal="it was never calibrated with this rubric")
    doubtful = finished(runs, *[0.0] * 40, reference="digits/4", baseline_run=baseline, judge=unreliable)
    fall = runs.find(fallen).fall
    assert fall is not None
    assert (fall["is_fall"], fall["worse"], fall["better"]) == (True, 20, 0)
    of_doubtful = runs.find(doubtful).fall
    assert of_doubtful is not None
    assert not of_doubtful["is_fall"], "a judge that cannot be relied on raises no alarm"
    route_recorded(migrated, 1)
    assert schedules.state("digits").versions == ("2", "3"), "the champion, and the candidate of the rollout"
    failures: list[BaseException] = []
    watch = EvaluationWatch(migrated.recorder_dsn, failures.append)
    with capture_logs() as logged:
        watch.look()
        watch.look()
    assert [(one["event"], one["model"], one["run"]) for one in logged] == [("evaluation_fell", "digits/3", fallen)]

    def shown(name: str, version: str) -> float | None:
        labels = {"tenant": "acme", "model": "digits", "version": version}
        return REGISTRY.get_sample_value(f"fairlane_evaluation_{name}", labels)

    assert [shown("fell", one) for one in "234"] == [0.0, 1.0, None]
    assert shown("score_ratio", "3") == 0.5
    of_model = {"tenant": "acme", "model": "digits"}
    assert REGISTRY.get_sample_value("fairlane_evaluation_overdue", of_model) == 0.0
    with psycopg.connect(migrated.owner_dsn) as owner:
        owner.execute("SELECT set_config('fairlane.tenant', '*', true)")
        owner.execute("UPDATE evaluation_runs SET finished_at_ms = finished_at_ms - %s", (3 * DAY_MS,))
    watch.look()
    assert REGISTRY.get_sample_value("fairlane_evaluation_overdue", of_model) == 1.0
    # The rollout shows it.
    monkeypatch.setenv("POSTGRES_DSN", migrated.operator_dsn)
    with pytest.raises(SystemExit) as ended:
        main(("rollout", "explain", "digits"))
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert "evaluation of digits/3 on holdout:1 of acme: accuracy 0.5000" in out
    assert f"worse than the baseline {baseline}" in out
    # What was taken back is no alarm any more.
    route_recorded(migrated, 2, status="rolled_back", decided="rolled_back")
    watch.look()
    watch.close()
    assert (shown("fell", "2"), shown("fell", "3"), failures) == (0.0, None, [])


def test_a_schedule_is_replaced_and_its_baseline_stays(runs: EvaluationRuns, schedules: EvaluationSchedules) -> None:
    daily = EvaluationSchedule("digits", "holdout", "accuracy", {"top": 3}, {"reference": "j", "rubric": "r"}, 24.0)
    schedules.set(daily)
    baseline = finished(runs, 1.0, may_be_baseline=True)
    schedules.set(replace(daily, every_hours=None, every_requests=500))
    (found,) = schedules.list()
    assert found == replace(daily, every_hours=None, every_requests=500, baseline_run=baseline)
    assert schedules.last_runs(found, "d" * 64)["2"].requests == 100
    assert schedules.last_runs(found, "e" * 64) == {}
    schedules.set_baseline("digits", None)
    assert schedules.list()[0].baseline_run is None
    with pytest.raises(UnknownEvaluationError):
        schedules.set_baseline("words", None)
    with pytest.raises(UnknownEvaluationError):
        schedules.remove("words")
    for wrong, field in (
        (replace(daily, model="no/model"), "model"),
        (replace(daily, every_hours=None), "every_hours"),
    ):
        with pytest.raises(EvaluationStoreError) as refused:
            schedules.set(wrong)
        assert refused.value.field == field
    schedules.remove("digits")
    assert schedules.list() == []


def test_the_latest_calibration_of_a_judge_and_rubric_counts(sets: EvaluationSets, migrated: PostgresServer) -> None:
    stored, _ = sets.add("rated", lines("a"), "me")
    with JudgeCalibrations(migrated.operator_dsn, "acme") as calibrations:
        poor = replace(RATED, refusal="kappa may be as low as 0.10; 0.4 is needed")
        calibrations.add("words", "1", RUBRIC, stored, poor, "me")
        good = calibrations.add("words", "2", RUBRIC, stored, RATED, "me")
        assert calibrations.latest("words", RUBRIC) == good
        assert calibrations.latest("words", Rubric("another")) is None
        assert calibrations.latest("other", RUBRIC) is None
        assert calibrations.find(good.calibration_id) == good
        with pytest.raises(UnknownEvaluationError):
            calibrations.find("none")
        assert len(calibrations.list()) == 2
    with JudgeCalibrations(migrated.operator_dsn, "globex") as theirs:
        assert theirs.list() == []
    use = judge_use_of(JudgeWish("words", RUBRIC), good)
    assert (use.refusal, use.version, use.scores) == (None, "2", RATED.scores)
    assert judge_use_of(JudgeWish("other", RUBRIC), good).refusal is not None
    assert judge_use_of(JudgeWish("words", RUBRIC), None).refusal == "it was never calibrated with this rubric"


def test_the_admin_api_adds_reads_and_compares_as_its_role(migrated: PostgresServer, runs: EvaluationRuns) -> None:
    first, second = (finished(runs, *scores) for scores in ((1.0, 1.0), (0.0, 1.0)))
    other = finished(runs, 1.0, set_digest="e" * 64)
    with AdminAudit(migrated.admin_dsn) as audit:
        office = TenantEvaluations(migrated.admin_dsn, audit)
        stored, is_new = office.add_set("acme", "holdout", lines("a", "b"), "key:1")
        assert (is_new, office.add_set("acme", "holdout", lines("a", "b"), "key:1")[1]) == (True, False)
        assert office.sets("acme", None, ("", 0), 10) == [stored]
        assert office.find_set("acme", "holdout", 1) == stored
        assert [line["id"] for _, line in office.examples("acme", "holdout", 1, -1, 1, "key:1")] == ["a"]
        assert [line["id"] for _, line in office.examples("acme", "holdout", 1, 0, 9, "key:1")] == ["b"]
        assert {one.run_id for one in office.runs("acme", "digits", None, None, 9)} == {first, second, other}
        newest = office.runs("acme", None, None, None, 1)[0]
        behind = office.runs("acme", None, None, (newest.started_at_ms, newest.run_id), 9)
        assert newest.run_id not in {one.run_id for one in behind}
        compared = office.comparison("acme", first, second)
        assert compared is not None
        assert (compared.pairs, compared.worse) == (2, 1)
        with pytest.raises(EvaluationStoreError, match="they differ"):
            office.comparison("acme", first, other)
        assert office.scores("acme", first)[0].value == 1.0
        schedule = EvaluationSchedule("digits", "holdout", "accuracy", {}, None, 24.0)
        office.set_schedule("acme", schedule, "key:1")
        with pytest.raises(UnknownEvaluationError):
            office.set_schedule("acme", replace(schedule, set_name="none"), "key:1")
        assert office.schedules("acme") == [schedule]
        office.remove_schedule("acme", "digits", "key:1")
        office.remove_set("acme", "holdout", 1, "key:1")
        assert office.calibrations("acme", 9) == []
        events = [one.event for one in reversed(audit.list(EventFilter("acme"), None, 50))]
    assert events == [
        *("evaluation_set_added", "evaluation_set_read", "evaluation_set_read"),
        *("evaluation_schedule_set", "evaluation_schedule_removed", "evaluation_set_removed"),
    ]


def test_labels_are_judged_and_exported_over_the_admin_api(migrated: PostgresServer, rig: LabelBench) -> None:
    with AdminAudit(migrated.admin_dsn) as audit:
        office = TenantLabels(migrated.admin_dsn, audit)
        with pytest.raises(LabelError, match="does not allow evaluation"):
            office.lease("acme", "user:anna", "user:anna")
        rig.allow("acme")
        rig.answered(1, 2, 3)
        rig.rated(1, 2, 3)
        rig.collector.look()
        for reviewer in ("user:anna", "user:ben"):
            for _ in range(2):
                task = office.lease("acme", reviewer, reviewer)
                assert task is not None
                assert task.output["text"] == f"answer {int(task.request_id[-12:])}"
                office.submit("acme", reviewer, task.request_id, "bad", "Canberra")
        last = office.lease("acme", "user:cleo", "user:cleo")
        assert last is not None
        office.skip("acme", "user:cleo", last.request_id)
        office.set_gold("acme", last.request_id, "bad", "user:cleo")
        with pytest.raises(UnknownLabelItemError):
            office.set_gold("acme", request_id(9), "bad", "user:cleo")
        counts, reviewers = office.statistics("acme")
        assert counts == {"agreed": 2, "gold": 1}
        assert [(one.reviewer, one.agreed) for one in reviewers] == [
            ("user:anna", 2),
            ("user:ben", 2),
            ("user:cleo", 0),
        ]
        page = office.export("acme", None, (0, ""), 1, "user:anna", is_chat=False)
        assert (len(page.lines), page.left_out) == (1, 0)
        assert page.following is not None
        rest = office.export("acme", None, page.following, 9, "user:anna", is_chat=True)
        assert rest.following is None
        assert rest.lines[0]["example"]["messages"][-1] == {"role": "assistant", "content": "Canberra"}
        exported = {page.lines[0]["id"], rest.lines[0]["provenance"]["request_id"]}
        assert len(exported) == 2
        events = {one.event for one in audit.list(EventFilter("acme"), None, 50)}
    assert events == {"label_item_read", "label_item_gold_set", "labels_exported"}


def test_the_commands_of_sets_and_schedules(
    migrated: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POSTGRES_DSN", migrated.operator_dsn)
    file, out = tmp_path / "set.jsonl", tmp_path / "copy.jsonl"
    file.write_text('{"id": "a", "input": {"prompt": "p"}, "expected": "x"}\n')

    def run(*arguments: str, code: int = 0) -> Any:
        with pytest.raises(SystemExit) as ended:
            main(("evaluation", *arguments, "--tenant", "acme", "--json"))
        shown = capsys.readouterr()
        assert ended.value.code == code, shown.err
        return json.loads(shown.out) if shown.out else shown.err

    assert run("set", "add", "holdout", str(file))["new"]
    assert not run("set", "add", "holdout", str(file))["new"]
    assert run("set", "list")["sets"][0]["present"] == 1
    assert run("set", "show", "holdout:1", "--out", str(out))["set"]["version"] == 1
    assert (json.loads(out.read_text())["id"], out.stat().st_mode & 0o077) == ("a", 0)
    assert "no evaluation set other" in run("set", "show", "other", code=1)
    assert "is no name of a set" in run("set", "show", "holdout:0", code=1)
    scheduled = run("schedule", "set", "digits", "--set", "holdout", "--scorer", "accuracy", "--every-hours", "24")
    assert scheduled["schedule"]["parameters"] == {"priority": "low"}
    assert "every_hours: give it, or every_requests" in run("schedule", "set", "digits", "--set", "holdout", code=1)
    assert len(run("schedule", "list")["schedules"]) == 1
    assert run("schedule", "baseline", "digits")["baseline_run"] is None
    assert run("schedule", "remove", "digits") == {"removed": "digits"}
    assert run("judge", "list") == {"calibrations": []}
    assert run("list") == {"runs": []}
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("It is right.")
    wish = ("run", "holdout", "--model", "words", "--scorer", "judge", "--judge", "words", "--rubric", str(rubric))
    assert "it was never calibrated with this rubric" in run(*wish, code=1)
    assert "--judge: goes with --scorer judge" in run("run", "holdout", "--model", "m", "--scorer", "judge", code=1)
    assert "--priority: 'none' is none of" in run("run", "holdout", "--model", "m", "--priority", "none", code=1)
    assert run("set", "remove", "holdout", "1", "--yes")["removed"] == {"name": "holdout", "version": 1}
