"""How commands speak: tables or JSON on stdout, one line on stderr when something is wrong."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table

_WIDTH_OF_A_PIPE = 160
FAILURE = 1


def show_json(value: object) -> None:
    """One JSON object on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout; nothing in a cell is taken for markup."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console().print(table, markup=False)


def say(text: str) -> None:
    """A line on stdout."""
    typer.echo(text)


def warn(text: str) -> None:
    """A line on stderr for what a person should know."""
    typer.echo(f"warning: {text}", err=True)


def fail(text: str) -> NoReturn:
    """One line on stderr, exit status 1."""
    typer.echo(f"error: {' '.join(text.split())}", err=True)
    sys.exit(FAILURE)


def _console() -> Console:
    # A pipe has no width, and 80 columns would break topic names.
    return Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE, highlight=False)
