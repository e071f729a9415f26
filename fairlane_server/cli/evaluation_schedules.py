"""``fairlane evaluation schedule`` and ``judge``: continuous runs, and calibrations of judges."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane.clock import now_ms
from fairlane_server.cli.evaluation import (
    Judge,
    MaxTokens,
    Priority,
    RubricFile,
    ScorerName,
    SetArgument,
    Top,
    Uncalibrated,
    check_measure,
    judge_wish,
    opened,
)
from fairlane_server.cli.output import AsJson, BootstrapServers, Tenant, fail, say, show, show_list, utc
from fairlane_server.command_author import command_author

if TYPE_CHECKING:
    from fairlane_server.evaluation.calibration_store import JudgeCalibration
    from fairlane_server.evaluation.schedules import EvaluationSchedule

schedules = typer.Typer(help="Continuous runs: the champion and the candidate of a model.", no_args_is_help=True)
judges = typer.Typer(help="Judges: how they agree with people.", no_args_is_help=True)

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="The name of the model.", show_default=False)]


@schedules.command("set")
def set_schedule(
    model: ModelName,
    tenant: Tenant,
    name: Annotated[str, typer.Option("--set", metavar="NAME", help="The set; its latest version is used.")],
    every_hours: Annotated[
        float | None, typer.Option("--every-hours", metavar="N", help="Measure again after so many hours.")
    ] = None,
    every_requests: Annotated[
        int | None,
        typer.Option("--every-requests", metavar="M", help="Measure again after so many requests to the model."),
    ] = None,
    scorer: ScorerName = "exact",
    top: Top = None,
    max_tokens: MaxTokens = None,
    priority: Priority = "low",
    judge: Judge = None,
    rubric: RubricFile = None,
    *,
    uncalibrated: Uncalibrated = False,
    as_json: AsJson = False,
) -> None:
    """Have the champion of a model, and its candidate, measured again and again by `fairlane evaluation due`.

    The first run of the champion becomes the baseline that later ones are compared with.
    """
    from fairlane_server.evaluation.measuring import MeasureWish
    from fairlane_server.evaluation.schedules import EvaluationSchedule

    check_measure(scorer, priority, judge)
    wish = judge_wish(judge, rubric, against=None, calibration=None, uncalibrated=uncalibrated)
    made = EvaluationSchedule(
        model=model,
        set_name=name,
        scorer=scorer,
        parameters=MeasureWish(model, scorer, top, max_tokens, priority).parameters,
        judge=None if wish is None else {"reference": wish.reference, "rubric": wish.rubric.text},
        every_hours=every_hours,
        every_requests=every_requests,
        created_at_ms=now_ms(),
        created_by=command_author(),
    )
    with opened(tenant) as measuring:
        measuring.sets.find(name)
        if wish is not None:
            measuring.judge_use(wish)
        measuring.schedules.set(made)
    show({"schedule": asdict(made)}, f"{model} is measured on {name} {_when(made)}", as_json=as_json)


@schedules.command("list")
def list_schedules(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """List the schedules of a tenant."""
    with opened(tenant) as measuring:
        found = measuring.schedules.list()
    show_list(
        *("schedules", found, ("model", "set", "scorer", "when", "baseline", "since (UTC)", "by"), _schedule_row),
        to_json=asdict,
        empty="nothing is measured by itself",
        as_json=as_json,
    )


@schedules.command("baseline")
def set_baseline(
    model: ModelName,
    tenant: Tenant,
    run_id: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="This run; by default the next one of the champion.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Choose the run that later ones are compared with, as after a fall that was accepted."""
    with opened(tenant) as measuring:
        if run_id is not None and measuring.runs.find(run_id).state != "finished":
            fail(f"--run: {run_id} has no result")
        measuring.schedules.set_baseline(model, run_id)
    text = f"{model} is compared with {run_id or 'its next run'}"
    show({"model": model, "baseline_run": run_id}, text, as_json=as_json)


@schedules.command("remove")
def remove_schedule(model: ModelName, tenant: Tenant, *, as_json: AsJson = False) -> None:
    """Measure a model no longer. Its runs stay."""
    with opened(tenant) as measuring:
        measuring.schedules.remove(model)
    show({"removed": model}, f"{model} is not measured by itself any more", as_json=as_json)


@judges.command("calibrate")
def calibrate_judge(
    evaluation_set: SetArgument,
    tenant: Tenant,
    judge: Annotated[str, typer.Option("--judge", metavar="MODEL", help="The model that judges.")],
    rubric: Annotated[Path, typer.Option("--rubric", metavar="FILE", help="What makes an answer good, in words.")],
    priority: Priority = "low",
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Have a judge grade answers that people have rated, and store how well it agrees with them.

    From examples with an `output` and a `rating`, or a `label` good or bad, such as `fairlane labels export` writes.
    """
    from fairlane_server.evaluation.set_store import set_reference

    wish = judge_wish(judge, rubric, against=None, calibration=None, uncalibrated=True)
    assert wish is not None  # noqa: S101 - a judge is given
    check_measure("judge", priority, judge)
    with opened(tenant, bootstrap_servers) as measuring:
        made = measuring.calibrate(*set_reference(evaluation_set), wish, priority)
    show({"calibration": asdict(made)}, _told(made), as_json=as_json)


@judges.command("list")
def list_calibrations(
    tenant: Tenant,
    judge: Annotated[str | None, typer.Option("--judge", metavar="MODEL", help="Only of this judge.")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List the calibrations, the newest first."""
    with opened(tenant) as measuring:
        found = measuring.calibrations.list(judge)
    if found or as_json:
        columns = ("calibration", "judge", "version", "rubric", "set", "graded", "kappa", "95 %", "may be relied on")
        show_list(
            *("calibrations", found, columns, _calibration_row), to_json=asdict, empty="no judge", as_json=as_json
        )
    else:
        say("no judge is calibrated")


def _when(schedule: "EvaluationSchedule") -> str:
    parts = [
        *([] if schedule.every_hours is None else [f"every {schedule.every_hours:g} hours"]),
        *([] if schedule.every_requests is None else [f"every {schedule.every_requests:,} requests"]),
    ]
    return " or ".join(parts)


def _schedule_row(schedule: "EvaluationSchedule") -> tuple[str, ...]:
    return (
        *(schedule.model, schedule.set_name, schedule.scorer, _when(schedule), schedule.baseline_run or "-"),
        *(utc(schedule.created_at_ms), schedule.created_by),
    )


def _calibration_row(one: "JudgeCalibration") -> tuple[str, ...]:
    agreement = one.agreement
    kappa, interval = "-", "-"
    if agreement.kappa is not None:
        kappa, interval = f"{agreement.kappa:.2f}", f"{agreement.kappa_low:.2f} to {agreement.kappa_high:.2f}"
    return (
        *(
            one.calibration_id,
            one.judge,
            one.judge_version,
            one.rubric_digest[:16],
            f"{one.set_name}:{one.set_version}",
        ),
        *(f"{agreement.graded} of {agreement.examples}", kappa, interval, agreement.refusal or "yes"),
    )


def _told(made: "JudgeCalibration") -> str:
    agreement = made.agreement
    kappa = (
        "no kappa"
        if agreement.kappa is None
        else f"kappa {agreement.kappa:.2f} ({agreement.kappa_low:.2f} to {agreement.kappa_high:.2f})"
    )
    verdict = "it may be relied on" if agreement.refusal is None else f"it cannot be relied on: {agreement.refusal}"
    return f"{made.calibration_id}: {agreement.graded} of {agreement.examples} graded, {kappa}; {verdict}"
