"""Output of commands: tables or JSON on stdout, one line on stderr for an error."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn, TextIO

import typer
from rich.console import Console
from rich.table import Table

_WIDTH_OF_A_PIPE = 160
FAILURE = 1


def show_json(value: object) -> None:
    """One JSON object on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout; nothing in a cell is taken for markup, or for a command to the terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    console().print(table, markup=False)


def printable(text: str) -> str:
    """The text with every character that does not print replaced, so that a record cannot steer a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def say(text: str) -> None:
    """A line on stdout."""
    _write(sys.stdout, text)


def warn(text: str) -> None:
    """A line on stderr for what a person should know."""
    _write(sys.stderr, f"warning: {text}")


def _write(stream: TextIO, text: str) -> None:
    # typer.echo finds the real stream behind the one that a progress bar puts there to keep lines above itself.
    stream.write(f"{text}\n")
    stream.flush()


def fail(text: str) -> NoReturn:
    """One line on stderr, exit status 1."""
    typer.echo(f"error: {' '.join(text.split())}", err=True)
    sys.exit(FAILURE)


def console() -> Console:
    """Stdout, for what is more than a line of text."""
    # A pipe has no width, and 80 columns would break topic names.
    return Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE, highlight=False)
