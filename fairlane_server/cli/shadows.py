"""``fairlane shadow``: a candidate runs copies of a sample of a model's requests, and is compared with its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane.clock import now_ms
from fairlane.evaluation_records import Shadow
from fairlane.records import ModelRoute
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
from fairlane_server.dead_letters.selection import parse_time
from fairlane_server.evaluation.shadows import ShadowPlan, is_running, with_shadow, without_shadow
from fairlane_server.models.changes import route_of

if TYPE_CHECKING:
    from fairlane_server.evaluation.comparison import MeanScore, RatioOfMeans
    from fairlane_server.evaluation.pairs import PairReport

shadows = typer.Typer(
    help="Shadows: a candidate runs copies of a sample of a model's requests, and answers nobody.",
    no_args_is_help=True,
)

_PLAN = ShadowPlan("")


def _time(option: str, text: str) -> int:
    try:
        return parse_time(text, now_ms())
    except ValueError as error:
        fail(f"{option} {text}: {error}")


From = Annotated[
    int | None,
    typer.Option("--from", metavar="TIME", parser=partial(_time, "--from"), help="Not before: ISO 8601 (UTC)."),
]
Until = Annotated[
    int | None, typer.Option("--until", metavar="TIME", parser=partial(_time, "--until"), help="Only before then.")
]


@shadows.command("start")
def start_shadow(
    model: ModelName,
    version: VersionName,
    percent: Annotated[
        float, typer.Option(metavar="P", min=0, max=100, help="Of the requests, that are sampled.")
    ] = _PLAN.percent,
    max_concurrent: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most copies under way.")
    ] = _PLAN.max_concurrent,
    max_share: Annotated[
        float, typer.Option(metavar="F", min=0, max=1, help="Most of the pool's rate for copies, from 0 to 1.")
    ] = _PLAN.max_share,
    max_tokens_per_s: Annotated[
        float | None, typer.Option(metavar="N", min=0, help="Most cost tokens of copies a second.")
    ] = None,
    max_age_s: Annotated[
        float, typer.Option(metavar="S", min=1, help="A copy that waits longer is dropped.")
    ] = _PLAN.max_age_ms / 1_000,
    arm: Annotated[str | None, typer.Option(metavar="ARM", help="Sample the requests of this arm alone.")] = None,
    sticky_by: Annotated[
        str, typer.Option(metavar="KEY", help="conversation, caller or request: what is sampled together.")
    ] = _PLAN.sticky_by,
    from_ms: From = None,
    until_ms: Until = None,
    reason: Reason = "",
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Start to copy requests of a model to a version that is not the champion.

    Only requests of tenants with `evaluation: allowed` are copied. A copy runs when no request waits for its pool, and
    nobody gets its answer.
    """
    plan = ShadowPlan(
        *(version, percent, max_concurrent, max_share, round(1_000 * max_age_s), sticky_by, arm, max_tokens_per_s),
        from_ms=from_ms,
        until_ms=until_ms,
    )
    settings, author = settings_with(kafka_bootstrap_servers=bootstrap_servers), author_of(reason)
    try:
        route = change_route(
            settings, codec_for(settings), model, lambda published: with_shadow(published, model, plan, author)
        )
    except ValueError as error:
        fail(f"{model}: {error}")
    _show_change(route, "started", as_json=as_json)


@shadows.command("stop")
def stop_shadow(
    model: ModelName, reason: Reason = "", bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False
) -> None:
    """Make no more copies. Those that wait still run."""
    settings, author = settings_with(kafka_bootstrap_servers=bootstrap_servers), author_of(reason)
    try:
        route = change_route(
            settings, codec_for(settings), model, lambda published: without_shadow(published, model, author)
        )
    except ValueError as error:
        fail(f"{model}: {error}")
    _show_change(route, "stopped", as_json=as_json)


@shadows.command("status")
def show_shadows(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Of this model alone.")] = None,
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show the latest shadow of each model: what it sampled, and how its copies ended.

    Counts are from the tables that the recorder fills (POSTGRES_DSN).
    """
    from fairlane_server.evaluation.shadow_report import read_shadow_counts

    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    published = model_topic(settings, codec_for(settings)).read()
    found = {
        route.model: route.shadow
        for route in published.values()
        if isinstance(route, ModelRoute) and route.shadow is not None and model in (None, route.model)
    }
    counts = {name: read_shadow_counts(settings, shadow.run) for name, shadow in found.items()}
    if as_json:
        show_json({name: {"shadow": asdict(one), **asdict(counts[name])} for name, one in found.items()})
    elif not found:
        say("there is no shadow" if model is None else f"{model} has had no shadow")
    else:
        columns = ("model", "candidate", "of the requests", "state", "since (UTC)", "sampled", "copies ended")
        rows = [
            (
                *(name, one.candidate, f"{one.percent:g} %", _state(one), utc(one.started_at_ms)),
                *(_listed(counts[name].sampled), _listed(counts[name].ended)),
            )
            for name, one in sorted(found.items())
        ]
        show_table(columns, rows)


@shadows.command("report")
def report_shadow(
    model: ModelName,
    run: Annotated[str | None, typer.Option(metavar="ID", help="This shadow, not the latest.")] = None,
    most: Annotated[
        int, typer.Option("--pairs", metavar="N", min=1, max=100_000, help="Compare at most so many.")
    ] = 10_000,
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Compare copies with their originals: how alike the answers are, failures, time of the engine, and tokens.

    From the tables that the recorder fills (POSTGRES_DSN); of tenants that allow evaluation now.
    """
    # Other commands run without what it needs.
    from fairlane_server.evaluation.shadow_report import read_shadow_report

    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    if run is None:
        route = route_of(model_topic(settings, codec_for(settings)).read(), model)
        if route is None or route.shadow is None:
            fail(f"{model}: it has had no shadow")
        run = route.shadow.run
    report = read_shadow_report(settings, run, most)
    if as_json:
        show_json(asdict(report))
        return
    say(f"{run}: sampled {_listed(report.counts.sampled)}; copies ended {_listed(report.counts.ended)}")
    if report.tasks:
        columns = ("task", "pairs", "same answer", "similarity", "answered", "engine time", "answer tokens", "failures")
        show_table(columns, [_row(one) for one in report.tasks])


def _row(report: "PairReport") -> Sequence[str]:
    answered = report.answered
    return (
        report.task,
        str(report.pairs),
        _mean(report.equal),
        _mean(report.similarity),
        "-" if answered is None else f"{answered.difference:+.4f} ({answered.low:+.4f} to {answered.high:+.4f})",
        _ratio(report.engine_ms),
        _ratio(report.completion_tokens),
        _listed(report.failed_codes),
    )


def _mean(score: "MeanScore") -> str:
    return "-" if score.mean is None else f"{score.mean:.4f} ({score.low:.4f} to {score.high:.4f})"


def _ratio(ratio: "RatioOfMeans | None") -> str:
    return "-" if ratio is None else f"x {ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "0"


def _state(shadow: Shadow) -> str:
    if shadow.stopped_at_ms is not None:
        return "stopped"
    return "running" if is_running(shadow, now_ms()) else "not now"


def _show_change(route: ModelRoute, done: str, *, as_json: bool) -> None:
    shadow = route.shadow
    assert shadow is not None  # noqa: S101 - every change here has made or changed one
    text = f"{route.model}: {done} {shadow.run}; version {shadow.candidate} gets copies of {shadow.percent:g} %"
    show(asdict(shadow), text, as_json=as_json)
