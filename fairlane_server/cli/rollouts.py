"""``fairlane rollout``: a candidate gets a model's requests in steps, and is judged beside the champion."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fairlane.clock import now_ms
from fairlane.records import ModelRoute
from fairlane.rollout_records import Rollout
from fairlane.schema_registry import codec_for
from fairlane_server.cli.models import ModelName, Reason, VersionName, author_of
from fairlane_server.cli.output import (
    AsJson,
    BootstrapServers,
    fail,
    say,
    settings_with,
    show,
    show_json,
    show_table,
    utc,
)
from fairlane_server.control.published_models import model_topic
from fairlane_server.control.route_change import change_route
from fairlane_server.models.changes import Author, Published, route_of
from fairlane_server.models.rollout_arms import RolloutStatus
from fairlane_server.postgres.model_history import RouteChange, read_rollout_decisions
from fairlane_server.postgres.reading import reading
from fairlane_server.postgres.rollout_evidence import read_rollout_evidence
from fairlane_server.postgres.scheduled_runs import EndedRun, runs_of_model
from fairlane_server.rollouts.changes import (
    NoRolloutError,
    RolloutDecision,
    RolloutPlan,
    aborted,
    active_rollout,
    approved,
    paused,
    resumed,
    rolled_back,
    with_rollout,
)
from fairlane_server.rollouts.plan_file import load_plan
from fairlane_server.rollouts.steps import StepApproval
from fairlane_server.rollouts.verdict import judge_step

rollouts = typer.Typer(
    help="Rollouts: a new version gets requests in steps, and goes back by itself if it is worse.", no_args_is_help=True
)

_EVIDENCE_TIMEOUT_S = 60.0


@rollouts.command("start")
def start_rollout(
    model: ModelName,
    version: VersionName,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="Steps, tolerances, error rates: docs/rollouts.md.")
    ] = None,
    reason: Reason = "",
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Start to give requests to a version that is not the champion.

    Steps of 1, 5, 25, 50 and 100 percent, unless a plan has others. Requests that meet a rule of the model go on as the
    rule says. The process of the admin API judges the rollout.
    """
    plan = RolloutPlan(version) if plan_file is None else load_plan(plan_file, version)
    _change(
        *(model, bootstrap_servers, reason, as_json),
        lambda published, author: with_rollout(published, model, plan, author),
    )


@rollouts.command("status")
def show_status(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Of this model alone.")] = None,
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show the latest rollout of each model."""
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    published = model_topic(settings, codec_for(settings)).read()
    routes = [route for route in published.values() if isinstance(route, ModelRoute) and route.rollout is not None]
    found = {route.model: route.rollout for route in routes if route.rollout and model in (None, route.model)}
    if as_json:
        show_json({name: asdict(rollout) for name, rollout in found.items()})
    elif not found:
        say("there is no rollout" if model is None else f"{model} has had no rollout")
    else:
        columns = ("model", "candidate", "champion", "status", "step", "of the requests", "since (UTC)", "approval")
        show_table(columns, [_row(name, rollout) for name, rollout in sorted(found.items())])


@rollouts.command("approve")
def approve_step(
    model: ModelName,
    reason: Reason = "",
    bootstrap_servers: BootstrapServers = None,
    *,
    step: Annotated[int | None, typer.Option(metavar="N", min=1, help="The step that is meant, from 1.")] = None,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="Without waiting for evidence; not if the candidate is worse.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Approve the end of the present step: the next one begins when the guards pass."""
    approval = StepApproval.AT_ONCE if at_once else StepApproval.WHEN_PASSED
    _change_present(
        *(model, bootstrap_servers, reason, as_json),
        lambda route, author: approved(route, approval, author, None if step is None else step - 1),
    )


@rollouts.command("pause")
def pause_rollout(
    model: ModelName, reason: Reason = "", bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False
) -> None:
    """Keep a rollout at its step. A candidate that is worse is rolled back all the same."""
    _change_present(model, bootstrap_servers, reason, as_json, paused)


@rollouts.command("resume")
def resume_rollout(
    model: ModelName, reason: Reason = "", bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False
) -> None:
    """Let a paused rollout go on."""
    _change_present(model, bootstrap_servers, reason, as_json, resumed)


@rollouts.command("abort")
def abort_rollout(
    model: ModelName, reason: Reason = "", bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False
) -> None:
    """End a rollout: new requests go to the champion. What waits for the candidate is still answered by it."""
    _change_present(model, bootstrap_servers, reason, as_json, aborted)


@rollouts.command("rollback")
def roll_back(
    model: ModelName, reason: Reason = "", bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False
) -> None:
    """End a rollout and stop its candidate: what waits for it goes to the champion within a second."""
    _change_present(
        *(model, bootstrap_servers, reason, as_json), lambda route, author: rolled_back(route, None, author)
    )


@rollouts.command("verdict")
def show_verdict(model: ModelName, bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False) -> None:
    """Judge the present step now, and show what the verdict rests on. Decides nothing.

    From the tables that the recorder fills (POSTGRES_DSN).
    """
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    route = route_of(model_topic(settings, codec_for(settings)).read(), model)
    if route is None:
        fail(f"{model}: no model has this name")
    try:
        rollout = active_rollout(route)
    except NoRolloutError as error:
        fail(f"{model}: {error}")
    with reading(settings, "fairlane-rollouts", _EVIDENCE_TIMEOUT_S) as connection:
        candidate, control = read_rollout_evidence(connection, model, rollout, now_ms())
    verdict = judge_step(candidate, control, rollout.guards, len(rollout.steps) - 1)
    if as_json:
        show_json(asdict(verdict))
        return
    say(f"{verdict.verdict}: {verdict.reason}")
    _show_findings(asdict(verdict))


@rollouts.command("explain")
def explain_rollout(
    model: ModelName,
    rollout: Annotated[str | None, typer.Option(metavar="ID", help="This rollout, not the latest.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="At most so many decisions.")] = 200,
    *,
    as_json: AsJson = False,
) -> None:
    """Show every decision of a rollout with its evidence, and what evaluation runs measured meanwhile.

    From the table that the recorder fills (POSTGRES_DSN), so a decision of a moment ago may not be there yet.
    """
    settings = settings_with()
    found = read_rollout_decisions(settings, model, rollout, limit)
    runs = runs_of_model(settings, model, found[0].changed_at_ms, limit) if found else ()
    measured = [run for run in runs if run.finished_at_ms <= _end_of(found)]
    if as_json:
        show_json({"decisions": [asdict(one) for one in found], "evaluations": [asdict(run) for run in measured]})
    elif not found:
        say(f"nothing is recorded of {'a rollout' if rollout is None else rollout} of {model}")
    else:
        for decision in found:
            _show_decision(decision)
        for run in measured:
            _show_evaluation(run)


def _show_decision(change: RouteChange) -> None:
    rollout: Mapping[str, Any] = change.rollout or {}
    step, percents = rollout["step"], rollout["steps"]
    place = f"step {step + 1} of {percents[step]:g} %"
    if rollout["decided"] == RolloutDecision.ADVANCED:
        place += f", after {percents[step - 1]:g} %"
    say(
        f"{utc(change.changed_at_ms)}  {rollout['decided']}, {place}, by {change.changed_by}"
        + (f": {change.reason}" if change.reason else "")
    )
    if rollout["findings"]:
        _show_findings(rollout)


def _end_of(decisions: Sequence[RouteChange]) -> int:
    """When a rollout ended; now, if it is under way."""
    last = decisions[-1].rollout or {}
    return (
        now_ms() if last.get("status") in (RolloutStatus.RUNNING, RolloutStatus.PAUSED) else decisions[-1].changed_at_ms
    )


def _show_evaluation(run: EndedRun) -> None:
    mean = run.result["mean"]
    score = "no score" if mean is None else f"{mean:.4f} ({run.result['low']:.4f} to {run.result['high']:.4f})"
    fell = f", worse than the baseline {run.baseline_run}" if run.is_fall else ""
    about = f"{run.reference} on {run.set_name}:{run.set_version} of {run.tenant}"
    say(f"{utc(run.finished_at_ms)}  evaluation of {about}: {run.scorer} {score}{fell}")


def _show_findings(judged: Mapping[str, Any]) -> None:
    """Of a stored rollout, or of a verdict."""
    of_candidate, of_control = judged["candidate_requests"], judged["control_requests"]
    say(f"  {of_candidate} requests of the candidate, {of_control} of the control")
    columns = ("guard", "verdict", "candidate", "control", "harm", "at least", "at most", "tolerated")
    show_table(columns, [_finding(one) for one in judged["findings"]])


def _finding(finding: Mapping[str, Any]) -> Sequence[str]:
    names = ("candidate", "control", "harm", "lower", "upper", "tolerance")
    numbers = ["-" if finding[name] is None else f"{finding[name]:.4g}" for name in names]
    return (finding["guard"], finding["verdict"] or "no data", *numbers)


def _row(model: str, rollout: Rollout) -> Sequence[str]:
    at_end = rollout.status not in (RolloutStatus.RUNNING, RolloutStatus.PAUSED)
    return (
        model,
        rollout.candidate,
        rollout.champion,
        rollout.status,
        f"{rollout.step + 1} of {len(rollout.steps) - 1}",
        "-" if at_end else f"{rollout.steps[rollout.step]:g} %",
        utc(rollout.step_started_at_ms),
        (rollout.approval or "waits") if rollout.needs_approval and not at_end else "-",
    )


def _change_present(
    model: str,
    bootstrap_servers: str | None,
    reason: str,
    as_json: bool,
    decide: Callable[[ModelRoute, Author], ModelRoute],
) -> None:
    def decided(published: Published, author: Author) -> ModelRoute:
        route = route_of(published, model)
        if route is None:
            raise ValueError("no model has this name")
        return decide(route, author)

    _change(model, bootstrap_servers, reason, as_json, decided)


def _change(
    model: str,
    bootstrap_servers: str | None,
    reason: str,
    as_json: bool,
    decide: Callable[[Published, Author], ModelRoute],
) -> None:
    """Publish the changed route and show its rollout. Ends the command when it is not valid."""
    settings, author = settings_with(kafka_bootstrap_servers=bootstrap_servers), author_of(reason)
    try:
        route = change_route(settings, codec_for(settings), model, lambda published: decide(published, author))
    except ValueError as error:
        fail(f"{model}: {error}")
    rollout = route.rollout
    assert rollout is not None  # noqa: S101 - every change here has made or changed one
    text = f"{model}: {rollout.decided}; version {rollout.candidate} beside {rollout.champion}, {rollout.status}"
    show(asdict(rollout), text, as_json=as_json)
