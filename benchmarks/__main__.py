"""``python -m benchmarks NAME [--json] [--check]``; ``all`` runs every one and writes docs/benchmarks.md."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import dispatch_rate, exactly_once_cost, hop_latency, recovery
from benchmarks.report import write_markdown
from benchmarks.result import Result

BENCHMARKS = {module.NAME: module.run for module in (hop_latency, dispatch_rate, exactly_once_cost, recovery)}
DOCUMENT = Path("docs/benchmarks.md")


def main(
    name: Annotated[str, typer.Argument(help=f"all, or one of: {', '.join(BENCHMARKS)}")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per benchmark.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when an aim is missed.")] = False,
) -> None:
    """Measure what the project claims. Every ratio is taken in one run, three times; the median is reported."""
    if name != "all" and name not in BENCHMARKS:
        typer.echo(f"benchmarks: no benchmark is called {name!r}; there are: all, {', '.join(BENCHMARKS)}", err=True)
        sys.exit(2)
    console = Console(stderr=as_json)
    results = []
    for chosen in BENCHMARKS if name == "all" else (name,):
        console.print(f"[bold]{chosen}[/bold] …")
        result = BENCHMARKS[chosen]()
        results.append(result)
        if as_json:
            print(json.dumps(result.as_json()), flush=True)
        else:
            _show(console, result)
        if name == "all":
            write_markdown(DOCUMENT, results)
    if name == "all":
        console.print(f"written to {DOCUMENT}")
    sys.exit(1 if check and not all(result.met for result in results) else 0)


def _show(console: Console, result: Result) -> None:
    table = Table("figure", "value", "unit", "aim", "met")
    for figure in result.figures:
        row = figure.as_json()
        met = {None: "", True: "[green]yes[/green]", False: "[red]no[/red]"}[figure.met]
        table.add_row(figure.name, f"{figure.value:.3g}", figure.unit, row["aim"] or "", met)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
