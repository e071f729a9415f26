"""Shared options of commands, and their output: tables or JSON on stdout, errors on stderr."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO, TypeVar

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fairlane.names import is_name
from fairlane.settings import Settings

ItemT = TypeVar("ItemT")


def checked_tenant(tenant: str | None) -> str | None:
    """Callback of ``--tenant``: end the command for a name that no tenant can have."""
    if tenant is not None and not is_name(tenant):
        fail(f"--tenant {tenant}: no tenant can have this name")
    return tenant


BootstrapServers = Annotated[
    str | None,
    typer.Option(
        metavar="HOSTS", help="Brokers to start from, host:port, comma-separated. [env: KAFKA_BOOTSTRAP_SERVERS]"
    ),
]
TenantsFile = Annotated[Path | None, typer.Option(metavar="FILE", help="The tenants. [env: TENANTS_FILE]")]
ModelsFile = Annotated[Path | None, typer.Option(metavar="FILE", help="The models and their pools. [env: MODELS_FILE]")]
TopicsFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The topic families; by default those that are installed.")
]
ReplicationFactor = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Copies of each new topic; by default 3, or 1 on fewer than 3 brokers."),
]
OneTenant = Annotated[
    str | None, typer.Option("--tenant", metavar="TENANT", help="Only of this tenant.", callback=checked_tenant)
]
Tenant = Annotated[
    str, typer.Option("--tenant", metavar="TENANT", help="The tenant to act for.", callback=checked_tenant)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Force = Annotated[bool, typer.Option("--force", help="Apply although the plan holds an error.")]


def settings_with(**overrides: Any) -> Settings:
    """The settings from the environment, with the options that were given. Ends the command when one is wrong."""
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        # The values stay out of the message: one of them may be a secret.
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        fail("; ".join(_sentence(problem["loc"], problem["msg"]) for problem in problems))


def _sentence(location: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, location)).upper()}: {message}" if location else message


_WIDTH_OF_A_PIPE = 160
FAILURE = 1
CHANGES_PENDING = 2


def show_json(value: object) -> None:
    """One JSON object on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def show(value: object, text: str, *, as_json: bool) -> None:
    """A result as JSON or as a line."""
    if as_json:
        show_json(value)
    else:
        say(text)


def show_list(
    name: str,
    items: Sequence[ItemT],
    columns: Sequence[str],
    to_row: Callable[[ItemT], Sequence[str]],
    *,
    to_json: Callable[[ItemT], object],
    empty: str,
    as_json: bool,
) -> None:
    """Items as JSON under ``name`` or as a table; the line ``empty`` for no items."""
    if as_json:
        show_json({name: [*map(to_json, items)]})
    elif not items:
        say(empty)
    else:
        show_table(columns, map(to_row, items))


def confirm(question: str, *, yes: bool) -> None:
    """Ask on stderr unless ``yes``; end the command if the answer is no."""
    if not yes:
        typer.confirm(question, abort=True, err=True)


def utc(at_ms: int | None) -> str:
    """A time to the second; a dash for None."""
    return "-" if at_ms is None else f"{datetime.fromtimestamp(at_ms / 1_000, UTC):%Y-%m-%d %H:%M:%S}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: range = range(0)) -> Table:
    """A table whose columns at the indexes ``numbers`` are aligned to the right; nothing in a cell is taken for markup,
    or for a command to the terminal."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout."""
    console().print(table(columns, rows))


def printable(text: str) -> str:
    """The text with every character that does not print replaced, so that a record cannot steer a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def say(text: str) -> None:
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
    typer.echo(f"error: {printable(' '.join(text.split()))}", err=True)
    sys.exit(FAILURE)


def console() -> Console:
    """Stdout, for what is more than a line of text."""
    # A pipe has no width, and 80 columns would break topic names.
    return Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE, highlight=False)
