"""``fairlane drift``: what changed in the requests and answers of tenants and models, and how far the watch is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane_server.cli.output import (
    AsJson,
    OneTenant,
    fail,
    printable,
    say,
    settings_with,
    show_json,
    show_list,
    show_table,
    utc,
)

if TYPE_CHECKING:
    from fairlane_server.postgres.drift_findings import DriftFindings, FoundDrift, StatisticState

_COLUMNS = ("finding", "tenant", "model", "version", "statistic", "effect", "changed (UTC)", "found (UTC)")
_STATES = ("tenant", "model", "version", "task", "statistic", "phase", "blocks", "evidence")

Model = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Only of this model.")]
Most = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=10_000, help="At most so many.")]
FindingArgument = Annotated[str, typer.Argument(metavar="FINDING", help="The id of a finding.", show_default=False)]

app = typer.Typer(help="What changed in requests and answers.", no_args_is_help=True)


@app.command("list")
def list_command(tenant: OneTenant = None, model: Model = None, limit: Most = 50, *, as_json: AsJson = False) -> None:
    """Show findings, the latest first."""
    found = _findings().page(tenant, model, most=limit)
    show_list("findings", found, _COLUMNS, _row, to_json=asdict, empty="nothing was found", as_json=as_json)


@app.command("show")
def show_command(finding_id: FindingArgument, *, as_json: AsJson = False) -> None:
    """Show one finding: what the figures were like, what they are now, and requests that show it."""
    found = _findings().get(finding_id)
    if found is None:
        fail(f"{finding_id}: there is no finding with this id")
    finding, samples = found
    if as_json:
        show_json({"finding": asdict(finding), "samples": [asdict(one) for one in samples]})
        return
    version = f", answers of version {finding.version}" if finding.version else ""
    say(printable(f"{finding.statistic} of {finding.tenant}, {finding.model} ({finding.task}{version})"))
    say(f"changed about {utc(finding.since_ms)} UTC; {finding.blocks:,} blocks until {utc(finding.until_ms)}")
    evidence, needed = map(_number, (finding.log_evidence, finding.log_needed))
    say(f"effect {finding.effect:.3f}, evidence {evidence}, of which {needed} was needed")
    for name, figures in (("before", finding.before), ("now", finding.now)):
        if figures:
            say(f"{name} {printable(_figures(figures))}")
    if samples:
        show_table(
            ("request", "answered (UTC)", "strangeness"),
            ((one.request_id, utc(one.answered_at_ms), f"{one.strangeness:.3g}") for one in samples),
        )


@app.command("status")
def status_command(
    tenant: OneTenant = None, model: Model = None, limit: Most = 1_000, *, as_json: AsJson = False
) -> None:
    """Show every statistic that is watched, or still needs blocks to compare with."""
    found = _findings().statistics(tenant, model, limit)
    show_list("statistics", found, _STATES, _state, to_json=asdict, empty="nothing is watched", as_json=as_json)


def _findings() -> "DriftFindings":
    from fairlane_server.postgres.drift_findings import DriftFindings

    return DriftFindings(settings_with())


def _row(one: "FoundDrift") -> Sequence[str]:
    about = (one.finding_id, one.tenant, one.model, one.version or "-", one.statistic)
    return *about, f"{one.effect:.3f}", utc(one.since_ms), utc(one.found_at_ms)


def _state(one: "StatisticState") -> Sequence[str]:
    evidence = "-" if one.log_evidence is None else _number(one.log_evidence)
    return one.tenant, one.model, one.version or "-", one.task, one.statistic, one.phase, f"{one.blocks:,}", evidence


def _number(log: float) -> str:
    """A number whose natural logarithm this is."""
    return f"{math.exp(min(log, 300.0)):,.3g}"


def _figures(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name or 'others'}: {value:,.3g}" for name, value in figures.items())
