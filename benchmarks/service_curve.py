"""Figures of service over time. Pure: completions in, figures out.

Service is counted in cost tokens (prompt plus twice the output) when a request completes, normalised by the tenant's
weight. With D(t) the normalised service of one tenant less that of another up to t, the difference over the interval
from a to b is D(b) - D(a); the largest over all intervals is the largest D less the smallest.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

Interval = tuple[int, int]
"""From (included) and to (excluded), milliseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that was served."""

    at_ms: int
    tenant: str
    cost_tokens: float


def within(completions: Sequence[ServedRequest], interval: Interval) -> list[ServedRequest]:
    """What completed in the interval, in order of time."""
    start, end = interval
    return sorted((one for one in completions if start <= one.at_ms < end), key=lambda one: one.at_ms)


def served_tokens(completions: Sequence[ServedRequest], tenants: Sequence[str]) -> dict[str, float]:
    """Cost tokens by tenant, of all these tenants."""
    totals = dict.fromkeys(tenants, 0.0)
    for one in completions:
        if one.tenant in totals:
            totals[one.tenant] += one.cost_tokens
    return totals


def largest_gap(completions: Sequence[ServedRequest], weights: Mapping[str, float]) -> float:
    """The largest difference of normalised service between any two tenants over any part of the time covered.

    Args:
        completions: of an interval in which all these tenants stay backlogged, in order of time.
        weights: by tenant; who is not in it is left out.
    """
    by_tenant: dict[str, list[ServedRequest]] = {tenant: [] for tenant in weights}
    for one in completions:
        if one.tenant in by_tenant:
            by_tenant[one.tenant].append(one)
    largest = 0.0
    for first, second in combinations(weights, 2):
        both = sorted((*by_tenant[first], *by_tenant[second]), key=lambda one: one.at_ms)
        difference = lowest = highest = 0.0
        # What completes in the same millisecond, as the items of a batch do, has no order.
        for _, together in groupby(both, key=lambda one: one.at_ms):
            for one in together:
                difference += one.cost_tokens / weights[one.tenant] * (1 if one.tenant == first else -1)
            lowest, highest = min(lowest, difference), max(highest, difference)
        largest = max(largest, highest - lowest)
    return largest


def largest_share_error(served: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """How far the tenant that is furthest from its entitled part of the whole is off, relative to that part."""
    total, weight = sum(served[tenant] for tenant in weights), sum(weights.values())
    if not total:
        return math.inf
    return max(abs(served[tenant] / total / (weights[tenant] / weight) - 1) for tenant in weights)


def longest_common_wait(waits: Mapping[str, Sequence[Interval]], interval: Interval) -> Interval:
    """The longest part of the interval in which every tenant has something waiting all the time; empty if none.

    Args:
        waits: by tenant, when each of its requests waited, in any order; they overlap.
        interval: where to look.
    """
    start, end = interval
    breaks: list[Interval] = []
    for intervals in waits.values():
        covered = start
        for begin, stop in sorted(intervals):
            if begin > covered:
                breaks.append((covered, min(begin, end)))
            covered = max(covered, stop)
            if covered >= end:
                break
        if covered < end:
            breaks.append((covered, end))

    def length(one: Interval) -> int:
        return one[1] - one[0]

    longest, free_from = (start, start), start
    for begin, stop in sorted((begin, stop) for begin, stop in breaks if begin < end):
        longest = max(longest, (free_from, begin), key=length)
        free_from = max(free_from, stop)
    return max(longest, (free_from, end), key=length)


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least ``part`` (0 to 1) of the values do not exceed; NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def least_within(times_ms: Sequence[int], interval: Interval, window_ms: int) -> int:
    """How many of these moments the window of this length holds that holds fewest, wherever it lies in the interval.

    Raises ValueError when it does not fit into the interval.
    """
    start, end = interval
    if end - start < window_ms:
        raise ValueError(f"a window of {window_ms} ms does not fit into {end - start} ms")
    times = sorted(times_ms)
    # A window holds least where it begins just after a moment, or with the interval.
    begins = [start, *(at + 1 for at in times if start <= at < end - window_ms)]
    return min(bisect_left(times, begin + window_ms) - bisect_left(times, begin) for begin in begins)


def jain_index(values: Sequence[float]) -> float:
    """1 when all are equal, 1/n when one has everything (Jain, Chiu and Hawe, 1984)."""
    squares = sum(value * value for value in values)
    return math.nan if not squares else sum(values) ** 2 / (len(values) * squares)
