"""Hours in which a tenant spends far more than it used to. Pure.

An hour is compared with the same hour of the day, the one before and the one after, in the two weeks before: median and
median absolute deviation, which a few earlier outliers do not move (Iglewicz and Hoaglin 1993, "How to Detect and
Handle Outliers"; their factor 1.4826 makes the deviation comparable to a standard deviation)::

    limit = max(least, median + FACTOR x max(1.4826 x MAD, LEAST_SPREAD x median))

It is an anomaly to spend more than that. Hours without spending count as 0, and a tenant without three days of history
has no limit yet: everything would be new.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

HOURS_PER_DAY = 24
HISTORY_DAYS = 14
LEAST_HISTORY_DAYS = 3
NEIGHBOURS = (-1, 0, 1)
FACTOR = 6.0
LEAST_SPREAD = 0.25
_COMPARABLE = 1.4826


@dataclass(frozen=True, slots=True)
class HourlyCost:
    """What a tenant spent in an hour since the epoch, in one currency."""

    tenant: str
    currency: str
    hour: int
    nanos: int


@dataclass(frozen=True, slots=True)
class HourlySpending:
    """One hour of a tenant against its own history. ``limit_nanos`` None: there is too little of it."""

    tenant: str
    currency: str
    hour: int
    nanos: int
    median_nanos: int
    limit_nanos: int | None

    @property
    def ratio(self) -> float:
        """Above 1 it is an anomaly; 0 without a limit."""
        return 0.0 if self.limit_nanos is None else self.nanos / max(1, self.limit_nanos)

    @property
    def is_anomaly(self) -> bool:
        return self.limit_nanos is not None and self.nanos > self.limit_nanos


def compared_hours(hour: int) -> list[int]:
    """The hours that an hour is compared with."""
    return [hour - HOURS_PER_DAY * day + shift for day in range(1, HISTORY_DAYS + 1) for shift in NEIGHBOURS]


def judge(
    costs: Iterable[HourlyCost], first_hours: Mapping[str, int], hour: int, least_nanos: int
) -> list[HourlySpending]:
    """The spending of the present hour, so far, and of the hour before, of every tenant that spent anything in them;
    the largest ratios first.

    Args:
        costs: of these hours, and of those that they are compared with.
        first_hours: the first hour in which each tenant spent anything.
        hour: the present one.
        least_nanos: what a tenant may spend in an hour in any case.
    """
    spent: dict[tuple[str, str], dict[int, int]] = {}
    for cost in costs:
        spent.setdefault((cost.tenant, cost.currency), {})[cost.hour] = cost.nanos
    found = [
        _judged(tenant, currency, by_hour, first_hours.get(tenant, at), at, least_nanos)
        for (tenant, currency), by_hour in spent.items()
        for at in (hour, hour - 1)
        if by_hour.get(at)
    ]
    return sorted(found, key=lambda one: (-one.ratio, one.tenant, one.currency, -one.hour))


def _judged(
    tenant: str, currency: str, by_hour: Mapping[int, int], first_hour: int, hour: int, least_nanos: int
) -> HourlySpending:
    history = [by_hour.get(at, 0) for at in compared_hours(hour) if at >= first_hour]
    if hour - first_hour < LEAST_HISTORY_DAYS * HOURS_PER_DAY:
        return HourlySpending(tenant, currency, hour, by_hour[hour], _median(history), None)
    middle = _median(history)
    spread = max(_COMPARABLE * _median([abs(nanos - middle) for nanos in history]), LEAST_SPREAD * middle)
    limit = max(least_nanos, middle + round(FACTOR * spread))
    return HourlySpending(tenant, currency, hour, by_hour[hour], middle, limit)


def _median(values: Sequence[int]) -> int:
    return round(median(values)) if values else 0
