"""``fairlane costs``: what requests used and cost, by tenant, model, caller, day and more."""

import csv
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from functools import partial
from typing import Annotated, NoReturn

import typer

from fairlane.outcomes import Priority
from fairlane_server.cli.output import (
    AsJson,
    OneTenant,
    console,
    fail,
    printable,
    say,
    settings_with,
    show_json,
    table,
)
from fairlane_server.costs.daily_sums import Group, SumQuery, UsageSum, totals
from fairlane_server.postgres.usage_sums import read_sums

_DEFAULT = f"{Group.TENANT},{Group.MODEL}"
_UNKNOWN = "-"
_TOTAL = "total"
_COLUMNS = {
    "requests": "requests",
    "cached_answers": "cached answers",
    "prompt_tokens": "prompt tokens",
    "cached_tokens": "cached tokens",
    "completion_tokens": "completion tokens",
    "images": "images",
}


def _groups(text: str) -> tuple[Group, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in tuple(Group):
            _wrong("--by", name, f"is none of {', '.join(Group)}")
    if len(set(names)) < len(names):
        _wrong("--by", text, "names one twice")
    return tuple(map(Group, names))


def _day(option: str, text: str) -> date:
    try:
        return date.fromisoformat(f"{text}-01" if len(text) == len("2026-01") else text)
    except ValueError:
        _wrong(option, text, "is neither a day (2026-01-31) nor a month (2026-01)")


def _wrong(option: str, text: str, why: str) -> NoReturn:
    fail(f"{option} {text}: {why}")


By = Annotated[
    str,
    typer.Option(metavar="GROUPS", help=f"What to sum by, comma-separated: {', '.join(Group)}."),
]
Since = Annotated[
    date | None,
    typer.Option(metavar="DAY", parser=partial(_day, "--since"), help="From this day or month on (UTC)."),
]
Until = Annotated[
    date | None,
    typer.Option(metavar="DAY", parser=partial(_day, "--until"), help="Before this day or month (UTC)."),
]
Model = Annotated[str | None, typer.Option(metavar="MODEL", help="Only of this model.")]
Version = Annotated[str | None, typer.Option(metavar="VERSION", help="Only of this model version.")]
Pool = Annotated[str | None, typer.Option(metavar="POOL", help="Only of this pool.")]
Class = Annotated[Priority | None, typer.Option("--class", help="Only of this class.")]
Caller = Annotated[
    str | None, typer.Option(metavar="CALLER", help="Only of this caller of the gateway: key:ID or user:SUBJECT.")
]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print comma-separated values instead of a table.")]


def costs_command(
    by: By = _DEFAULT,
    since: Since = None,
    until: Until = None,
    tenant: OneTenant = None,
    model: Model = None,
    version: Version = None,
    pool: Pool = None,
    priority_class: Class = None,
    caller: Caller = None,
    *,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Sum up what requests used and cost, by whole days in UTC.

    From the tables that the recorder fills (POSTGRES_DSN). Requests without a known price have the currency "-": see
    `fairlane prices`.
    """
    if as_json and as_csv:
        fail("--json and --csv: choose one")
    only = {
        Group.TENANT: tenant,
        Group.MODEL: model,
        Group.VERSION: version,
        Group.POOL: pool,
        Group.CLASS: None if priority_class is None else priority_class.value,
        Group.CALLER: caller,
    }
    groups = _groups(by)
    try:
        query = SumQuery(groups, since, until, {group: value for group, value in only.items() if value is not None})
    except ValueError as error:
        fail(str(error))
    sums = read_sums(settings_with(), query, tenant)
    if as_json:
        show_json(
            {
                "since": None if since is None else since.isoformat(),
                "until": None if until is None else until.isoformat(),
                "costs": [_as_json(groups, one) for one in sums],
                "totals": [_as_json((), one) for one in totals(sums)],
            }
        )
    elif as_csv:
        _write_csv(groups, sums)
    elif not sums:
        say("nothing is recorded")
    else:
        _show(groups, sums)


def _as_json(groups: Sequence[Group], one: UsageSum) -> dict[str, object]:
    keys = {group.value: _name(group, key) or None for group, key in zip(groups, one.keys, strict=True)}
    return {
        **keys,
        "currency": one.currency,
        "cost": one.amount,
        "cost_nanos": one.cost_nanos,
        **{name: getattr(one, name) for name in _COLUMNS},
        "engine_ms": one.engine_ms,
    }


def _name(group: Group, key: str | date) -> str:
    return str(key)[: len("2026-01")] if group is Group.MONTH else str(key)


def _write_csv(groups: Sequence[Group], sums: Iterable[UsageSum]) -> None:
    """Without totals, which a program would add up with the rest."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow((*groups, "currency", "cost", *_COLUMNS, "engine_ms"))
    for one in sums:
        keys = [_name(group, key) for group, key in zip(groups, one.keys, strict=True)]
        counts = [getattr(one, name) for name in _COLUMNS]
        writer.writerow((*map(_as_text, keys), one.currency or "", one.amount or "", *counts, one.engine_ms))


def _as_text(name: str) -> str:
    """A name that a spreadsheet does not take for a formula: callers and models are what others wrote."""
    return f"'{printable(name)}" if name[:1] in ("=", "+", "-", "@") else printable(name)


def _show(groups: Sequence[Group], sums: Sequence[UsageSum]) -> None:
    columns = (*groups, *_COLUMNS.values(), "engine s", "cost", "currency")
    rows = [
        _row([_name(group, key) or _UNKNOWN for group, key in zip(groups, one.keys, strict=True)], one) for one in sums
    ]
    rows += [_row([_TOTAL, *[""] * (len(groups) - 1)], one) for one in totals(sums)]
    console().print(table(columns, rows, range(len(groups), len(columns) - 1)))


def _row(keys: Sequence[str], one: UsageSum) -> tuple[str, ...]:
    counts = (f"{getattr(one, name):,}" for name in _COLUMNS)
    return (*keys, *counts, f"{one.engine_ms / 1_000:,.1f}", one.amount or _UNKNOWN, one.currency or _UNKNOWN)
