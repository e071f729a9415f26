"""``python -m benchmarks NAME [--json] [--check] [--trace FILE] [--shape SHAPE]``.

``all`` runs every one and writes docs/benchmarks.md.

``python -m benchmarks report FILE...`` writes there what ``--json`` printed, and leaves the other benchmarks alone.
"""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.peers import PeersMissingError
from benchmarks.result import ReportError, Result, read_results, write
from benchmarks.traffic import SHAPES
from benchmarks.vllm_direct import VllmMissingError
from deploy.local.nginx import NginxMissingError
from producers.replay.trace import TraceError

# In the order of the document. Each is a module of this name, with "_" for "-".
_NAMES = (
    *(
        "cost",
        "stack-rate",
        "recorder-rate",
        "peers",
        "hop-latency",
        "secured",
        "dispatch-rate",
        "exactly-once-cost",
        "exactly-once",
        "recovery",
        "rolling-restart",
        "update",
        "queue-cost",
    ),
    *("fairness", "isolation", "hostile", "overload", "tenants", "simulate", "batching", "pipeline-efficiency"),
    *("streaming", "retrieval", "cache", "grounded", "guardrails", "rollout", "drift", "gateway", "edge", "sync-call"),
    "backfill",
)
_MODULES = tuple(import_module(f"benchmarks.{name.replace('-', '_')}") for name in _NAMES)
BENCHMARKS: dict[str, Callable[..., Result]] = {module.NAME: module.run for module in _MODULES}
HOW: dict[str, str] = {module.NAME: module.HOW for module in _MODULES}
DOCUMENT = Path("docs/benchmarks.md")


def _of_traffic(option: str) -> str:
    return ", ".join(name for name, run in BENCHMARKS.items() if option in signature(run).parameters)


def main(
    name: Annotated[str, typer.Argument(help=f"report, all, or one of: {', '.join(BENCHMARKS)}")],
    files: Annotated[list[Path] | None, typer.Argument(help="For report: what --json printed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per benchmark.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when an aim is missed.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help=f"A trace in the columns of the Azure LLM traces. For {_of_traffic('trace')}.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help=f"One of: {', '.join(SHAPES)}. For {_of_traffic('shape')}.")] = None,
) -> None:
    """Measure what the project claims, every ratio in one run; or write results to docs/benchmarks.md."""
    if name not in ("report", "all", *BENCHMARKS):
        _refuse(f"no benchmark is called {name!r}; there are: all, {', '.join(BENCHMARKS)}")
    if (name == "report") != bool(files):
        _refuse("report takes one or more FILE, and nothing else does")
    options = {option: value for option, value in (("trace", trace), ("shape", shape)) if value is not None}
    for option in options:
        if name not in BENCHMARKS or option not in signature(BENCHMARKS[name]).parameters:
            _refuse(f"{name} takes no --{option}; it is for {_of_traffic(option)}")
    if shape is not None and shape not in SHAPES:
        _refuse(f"no shape is called {shape!r}; there are: {', '.join(SHAPES)}")
    console = Console(stderr=as_json)
    if name == "report":
        try:
            results = [result for file in files or () for result in read_results(file)]
            write(DOCUMENT, results, HOW)
        except ReportError as error:
            _refuse(str(error))
    else:
        results = []
        for chosen in BENCHMARKS if name == "all" else (name,):
            results.append(_run(chosen, options, console, as_json=as_json))
            if name == "all":
                # At once: what fails later does not take it along.
                write(DOCUMENT, results[-1:], HOW)
    if name in ("report", "all"):
        console.print(f"written to {DOCUMENT}")
    sys.exit(1 if check and not all(result.met for result in results) else 0)


def _run(name: str, options: Mapping[str, Any], console: Console, *, as_json: bool) -> Result:
    console.print(f"[bold]{name}[/bold] …")
    # What runs in this process logs to the standard output, which is for the result.
    with redirect_stdout(sys.stderr):
        try:
            result = BENCHMARKS[name](**options)
        except (VllmMissingError, NginxMissingError, PeersMissingError, TraceError, FileNotFoundError) as error:
            _refuse(str(error))
    if as_json:
        print(json.dumps(result.as_json()), flush=True)
    else:
        _show(console, result)
    return result


def _refuse(why: str) -> NoReturn:
    typer.echo(f"benchmarks: {why}", err=True)
    sys.exit(2)


def _show(console: Console, result: Result) -> None:
    table = Table("figure", "value", "unit", "aim", "met")
    for figure in result.figures:
        met = {None: "", True: "[green]yes[/green]", False: "[red]no[/red]"}[figure.met]
        table.add_row(figure.name, f"{figure.value:.3g}", figure.unit, figure.aim_text, met)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
