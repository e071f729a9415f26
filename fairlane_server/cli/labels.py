"""``fairlane labels``: judge outputs of a tenant, and export what was agreed on."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairlane_server.cli.output import (
    AsJson,
    Tenant,
    printable,
    say,
    settings_with,
    show,
    show_json,
    show_list,
    show_table,
    utc,
)
from fairlane_server.cli.progress import interruptible

if TYPE_CHECKING:
    from fairlane_server.labelling.decisions import ItemOutcome, ReviewerStatistics
    from fairlane_server.labelling.exports import AgreedItem
    from fairlane_server.labelling.queue import LabelQueue, LabelTask

_COLUMNS = ("reviewer", "labelled", "skipped", "gold right", "agreed")


class ExportFormat(StrEnum):
    """What the exported lines are for."""

    EVALUATION = "evaluation"
    CHAT = "chat"


Reviewer = Annotated[
    str, typer.Option("--reviewer", metavar="NAME", help="Who judges: an opaque name, one for each person.")
]
RequestArgument = Annotated[str, typer.Argument(metavar="REQUEST", help="The id of the item.", show_default=False)]
LabelArgument = Annotated[
    str, typer.Argument(metavar="LABEL", help="Of a text: good or bad; else the class.", show_default=False)
]
Correction = Annotated[
    str | None, typer.Option("--correction", metavar="TEXT", help="What the output should have been.")
]
Format = Annotated[
    ExportFormat,
    typer.Option("--format", help="evaluation: an evaluation set; chat: fine-tuning in OpenAI's chat format."),
]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write; it must not exist.")]
Model = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Only of this model.")]

app = typer.Typer(help="Judge outputs of tenants that allow evaluation.", no_args_is_help=True)


@app.command("next")
def next_command(tenant: Tenant, reviewer: Reviewer, *, as_json: AsJson = False) -> None:
    """Lease the next item, for 15 minutes, and show it."""
    with _opened(tenant) as queue:
        task = queue.lease(reviewer)
    if as_json:
        show_json({"item": None if task is None else asdict(task)})
    elif task is None:
        say("nothing is to be judged now")
    else:
        _say_task(task)


@app.command("submit")
def submit_command(
    request_id: RequestArgument,
    label: LabelArgument,
    tenant: Tenant,
    reviewer: Reviewer,
    correction: Correction = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Judge the leased item. The same label again changes nothing."""
    with _opened(tenant) as queue:
        outcome = queue.submit(reviewer, request_id, label, correction)
    _show_outcome(request_id, outcome, as_json=as_json)


@app.command("skip")
def skip_command(request_id: RequestArgument, tenant: Tenant, reviewer: Reviewer, *, as_json: AsJson = False) -> None:
    """Leave the leased item to other reviewers."""
    with _opened(tenant) as queue:
        outcome = queue.skip(reviewer, request_id)
    _show_outcome(request_id, outcome, as_json=as_json)


@app.command("gold")
def gold_command(request_id: RequestArgument, label: LabelArgument, tenant: Tenant, *, as_json: AsJson = False) -> None:
    """Make the answer of an item known: reviewers get it now and then, and are measured by it."""
    with _opened(tenant) as queue:
        queue.set_gold(request_id, label)
    show({"gold": {"request_id": request_id, "label": label}}, f"{printable(request_id)} is gold", as_json=as_json)


@app.command("stats")
def stats_command(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """Show the items by state, and how reviewers agree with gold items and with each other."""
    with _opened(tenant) as queue:
        counts, reviewers = queue.counts(), queue.reviewers()
    if as_json:
        show_json({"items": counts, "reviewers": [asdict(one) for one in reviewers]})
        return
    say(", ".join(f"{count:,} {state}" for state, count in counts.items()) or "no items")
    if reviewers:
        show_table(_COLUMNS, map(_row, reviewers))


@app.command("list")
def list_command(tenant: Tenant, model: Model = None, *, as_json: AsJson = False) -> None:
    """List the items on whose label two reviewers agreed, without their texts."""
    with _opened(tenant) as queue:
        # Texts may be large, and none is shown.
        found = [_without_text(item) for item in queue.agreed(model)]
    show_list(
        "items",
        found,
        ("request", "model", "version", "label", "agreed (UTC)"),
        lambda one: (
            *(str(one[name]) for name in ("request_id", "model", "model_version", "label")),
            utc(one["closed_at_ms"]),
        ),
        to_json=dict,
        empty="nothing is agreed",
        as_json=as_json,
    )


@app.command("export")
def export_command(
    tenant: Tenant,
    out: Out,
    export_format: Format = ExportFormat.EVALUATION,
    model: Model = None,
    *,
    with_context: Annotated[
        bool, typer.Option("--with-context", help="In an evaluation set also examples that cannot be asked again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write what was agreed as JSON Lines, with the provenance of each line: in it, or for chat in FILE.provenance.

    A file holds examples of one tenant. It is readable by its owner alone, and complete or not there. Items that are no
    examples are counted, and left out: of an evaluation set those with passages or earlier turns.
    """
    from fairlane_server.labelling.exports import evaluation_line, fine_tuning_lines, json_line
    from fairlane_server.private_files import new_files

    written = passed_over = 0
    beside = (out.with_name(f"{out.name}.provenance"),) if export_format is ExportFormat.CHAT else ()
    with _opened(tenant) as queue, interruptible() as is_stopped, new_files(out, *beside) as files:
        for item in queue.agreed(model):
            if is_stopped():
                raise typer.Abort
            lines: Sequence[Mapping[str, Any]] = ()
            if not beside:
                line = evaluation_line(item, tenant, keep_context=with_context)
                lines = () if line is None else (line,)
            elif (made := fine_tuning_lines(item, tenant)) is not None:
                lines = made.example, made.provenance
            for file, one in zip(files, lines, strict=False):
                file.write(json_line(one))
            written, passed_over = written + bool(lines), passed_over + (not lines)
    done = {"file": str(out), "format": export_format.value, "lines": written, "left_out": passed_over}
    text = f"{written:,} lines in {out}" + (f"; {passed_over:,} items are no examples" if passed_over else "")
    show({"exported": done}, text, as_json=as_json)


@contextmanager
def _opened(tenant: str) -> "Iterator[LabelQueue]":
    from fairlane_server.labelling.queue import LabelQueue

    with LabelQueue(settings_with().postgres_dsn.get_secret_value(), tenant) as queue:
        yield queue


def _say_task(task: "LabelTask") -> None:
    about = (task.model, task.model_version, *(() if task.arm is None else (task.arm,)))
    say(f"request {printable(task.request_id)}: {task.task} by {printable(' '.join(about))}")
    say(f"until {utc(task.lease_until_ms)} UTC")
    for name, content in (("input", task.input), ("output", task.output)):
        for line in json.dumps(content, indent=2, ensure_ascii=False).split("\n"):
            say(f"{name} {printable(line)}")
    if task.correction is not None:
        say(f"corrected by its user: {printable(task.correction)}")


def _show_outcome(request_id: str, outcome: "ItemOutcome", *, as_json: bool) -> None:
    label = "" if outcome.label is None else f": {printable(outcome.label)}"
    text = f"{printable(request_id)} is {outcome.state}{label}"
    show({"item": {"request_id": request_id, **asdict(outcome)}}, text, as_json=as_json)


def _row(one: "ReviewerStatistics") -> tuple[str, ...]:
    counts = (f"{one.labelled:,}", f"{one.skipped:,}")
    return (one.reviewer, *counts, f"{one.gold_right:,} of {one.gold:,}", f"{one.agreed:,} of {one.settled:,}")


def _without_text(one: "AgreedItem") -> dict[str, Any]:
    names = ("request_id", "origin", "model", "model_version", "arm", "task", "label", "answered_at_ms", "closed_at_ms")
    return {name: getattr(one, name) for name in names}
