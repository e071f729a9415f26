"""Sums of usage and costs by day: what they can be grouped by, and the queries for it. Pure.

The tables are filled by triggers of ``usage`` (revision 0016), in the transaction of its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from enum import StrEnum
from typing import Any

from fairlane.money import nanos_text

KEYS: Mapping[str, tuple[str, ...]] = {
    "usage_daily": ("tenant", "day", "model", "model_version", "pool", "priority_class", "currency"),
    "usage_daily_callers": ("tenant", "day", "requested_by", "currency"),
}
"""Tables, and their keys."""

SUMS = (
    *("requests", "cached_answers", "prompt_tokens", "completion_tokens", "cached_tokens", "images", "engine_ms"),
    "cost_nanos",
)

_BY_MODEL, _BY_CALLER = KEYS


class Group(StrEnum):
    """What sums can be grouped by. Days and months are in UTC; a month is named by its first day."""

    TENANT = "tenant"
    MODEL = "model"
    VERSION = "version"
    POOL = "pool"
    CLASS = "class"
    CALLER = "caller"
    DAY = "day"
    MONTH = "month"


_EXPRESSIONS: Mapping[Group, str] = {
    Group.TENANT: "tenant",
    Group.MODEL: "model",
    Group.VERSION: "model_version",
    Group.POOL: "pool",
    Group.CLASS: "priority_class",
    Group.CALLER: "requested_by",
    Group.DAY: "day",
    Group.MONTH: "date_trunc('month', day::timestamp)::date",
}
_NOT_BY_CALLER = frozenset({Group.MODEL, Group.VERSION, Group.POOL, Group.CLASS})


@dataclass(frozen=True, slots=True)
class SumQuery:
    """Which sums: grouped ``by`` these, of the days from ``since`` on and before ``until``, where the groups in
    ``only`` have these values.

    Raises ValueError: sums by caller know nothing of models, pools and classes.
    """

    by: tuple[Group, ...] = ()
    since: date | None = None
    until: date | None = None
    only: Mapping[Group, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = {*self.by, *self.only}
        if Group.CALLER in named and (others := sorted(named & _NOT_BY_CALLER)):
            raise ValueError(f"caller: the sums of callers are not divided by {', '.join(others)}")

    @property
    def table(self) -> str:
        return _BY_CALLER if Group.CALLER in {*self.by, *self.only} else _BY_MODEL


@dataclass(frozen=True, slots=True)
class UsageSum:
    """The sums of one group, in one currency. ``keys`` are the values of the groups, in the order of the query; an
    empty caller is none that is known. ``currency`` None: of requests whose cost is not known."""

    keys: tuple[str | date, ...]
    currency: str | None
    requests: int
    cached_answers: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    images: int
    engine_ms: int
    cost_nanos: int | None

    @property
    def amount(self) -> str | None:
        """The cost in units of the currency, exactly."""
        return None if self.cost_nanos is None else nanos_text(self.cost_nanos)

    @property
    def place(self) -> tuple[str, ...]:
        """Its place in the order of the groups."""
        return (*map(str, self.keys), self.currency or "")


def sum_question(
    query: SumQuery, behind: Sequence[str] | None = None, most: int | None = None
) -> tuple[bytes, tuple[Any, ...]]:
    """The SQL statement and its parameters: at most ``most`` groups in their order, those behind a ``place``."""
    groups = [_EXPRESSIONS[group] for group in query.by]
    ordered = ", ".join((*groups, "currency"))
    conditions: list[str] = []
    parameters: list[Any] = []
    for condition, value in (
        ("day >= %s", query.since),
        ("day < %s", query.until),
        *((f"{_EXPRESSIONS[group]} = %s", value) for group, value in query.only.items()),
    ):
        if value is not None:
            conditions.append(condition)
            parameters.append(value)
    if behind is not None:
        conditions.append(f"({ordered}) > ({', '.join(_marks(query.by))})")
        parameters += behind
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    sums = ", ".join(f"sum({name})" for name in SUMS)
    limit = "" if most is None else "LIMIT %s"
    statement = (
        f"SELECT {ordered}, {sums} FROM {query.table} {where} "  # noqa: S608 - our own names
        f"GROUP BY {ordered} ORDER BY {ordered} {limit}"
    )
    return statement.encode(), (*parameters, *(() if most is None else (most,)))


def _marks(groups: Sequence[Group]) -> list[str]:
    return [*("%s::date" if group in (Group.DAY, Group.MONTH) else "%s" for group in groups), "%s"]


def sum_of(row: Sequence[Any], groups: int) -> UsageSum:
    """The sums in a row of the answer, for a query with so many groups."""
    currency = row[groups] or None
    numbers = {name: int(number) for name, number in zip(SUMS, row[groups + 1 :], strict=True)}
    return _usage_sum(tuple(row[:groups]), currency, numbers)


def totals(sums: Sequence[UsageSum]) -> list[UsageSum]:
    """The sums of all groups, by currency."""
    by_currency: dict[str | None, list[UsageSum]] = {}
    for one in sums:
        by_currency.setdefault(one.currency, []).append(one)
    return [
        _usage_sum((), currency, {name: sum(getattr(one, name) or 0 for one in found) for name in SUMS})
        for currency, found in sorted(by_currency.items(), key=lambda item: item[0] or "")
    ]


def _usage_sum(keys: tuple[str | date, ...], currency: str | None, numbers: Mapping[str, int]) -> UsageSum:
    others: dict[str, Any] = {**numbers}
    cost_nanos = others.pop("cost_nanos")
    return UsageSum(keys, currency, cost_nanos=None if currency is None else cost_nanos, **others)
