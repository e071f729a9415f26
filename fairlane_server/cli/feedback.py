"""``fairlane feedback``: how satisfied users are with models, versions and arms."""

from collections.abc import Sequence
from typing import Annotated

import typer

from fairlane.clock import now_ms
from fairlane_server.cli.output import AsJson, OneTenant, settings_with, show_list
from fairlane_server.postgres.feedback_scores import ScoreSums, feedback_scores

_COLUMNS = ("model", "version", "arm", "rated", "satisfaction")
_HOUR_MS = 3_600_000
_MOST_HOURS = 24 * 366

Model = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Only of this model.")]
Hours = Annotated[float, typer.Option("--hours", metavar="N", min=0, max=_MOST_HOURS, help="Of the last N hours.")]

app = typer.Typer(help="What users say of outputs.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `summary` a command of its own: it stays the only one for now."""


@app.command("summary")
def summary_command(
    model: Model = None, hours: Hours = 24.0, tenant: OneTenant = None, *, as_json: AsJson = False
) -> None:
    """Show the mean rating of each model, version and arm: 1 is best, a thumb down is 0.

    From the tables that the recorder fills (POSTGRES_DSN).
    """
    since_ms = now_ms() - round(hours * _HOUR_MS)
    found = feedback_scores(settings_with(), since_ms, model, tenant=tenant)
    show_list("scores", found, _COLUMNS, _row, to_json=_plain, empty="nothing was rated", as_json=as_json)


def _row(one: ScoreSums) -> Sequence[str]:
    return one.model, one.model_version, one.arm or "-", f"{one.count:,}", f"{one.mean:.3f}"


def _plain(one: ScoreSums) -> dict[str, object]:
    return {
        "model": one.model,
        "version": one.model_version,
        "arm": one.arm or None,
        "rated": one.count,
        "satisfaction": one.mean,
        "variance": one.variance,
        "sum": one.total,
        "sum_of_squares": one.squares,
    }
