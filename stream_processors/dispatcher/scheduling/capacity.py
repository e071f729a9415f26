"""Capacity of each pool, from the reports of its inference consumers. Pure: every method takes ``now_ms``.

A consumer counts until its newest report is older than ``CAPACITY_TTL_MS``, by the time of *receipt*: consumers' clocks
are not trusted. A report with ``draining`` removes it at once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fairlane.outcomes import Health, VersionState
from fairlane.records import CapacityReport
from fairlane_server.admission_rule import CAPACITY_TTL_MS, BatchCapacity, CapacityState, PoolCapacity

_COMING = frozenset({VersionState.LOADING, VersionState.CHANGING})


@dataclass(slots=True)
class _Consumer:
    report: CapacityReport
    received_at_ms: int


@dataclass(slots=True)
class _Pool:
    consumers: dict[str, _Consumer] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    """Versions that a consumer unloaded, and that no report names since then."""
    heard_at_ms: int = 0
    consumer_rate: float = 0.0
    rate: float = 0.0
    # Recomputed only when a report arrives or a consumer becomes stale; nothing else changes a live pool.
    live: PoolCapacity | None = None
    live_until_ms: int = 0
    is_stale: bool = False


class CapacityBoard:
    """The newest report of each consumer, by pool. For one thread.

    Consumers that are gone are forgotten; a pool is not: its last rate is what is expected back.
    """

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._now_ms = 0

    def report(self, report: CapacityReport, now_ms: int) -> None:
        """Add a report received at ``now_ms``."""
        if now_ms < self._now_ms:
            self._set_back(now_ms)
        self._now_ms = now_ms
        pool = self._pools.setdefault(report.pool, _Pool())
        if report.draining or now_ms > pool.heard_at_ms:
            _catch_up(pool)
        pool.heard_at_ms = max(pool.heard_at_ms, now_ms)
        if report.draining:
            pool.consumers.pop(report.instance_id, None)
            _assess(pool, now_ms)
        else:
            before = pool.consumers.get(report.instance_id)
            if before is not None and report.follows_models:
                pool.given_up |= set(before.report.versions)
            pool.given_up -= set(report.versions)
            pool.consumers[report.instance_id] = _Consumer(report, now_ms)
            # Computed once for all reports that came together.
            pool.is_stale = True

    def pool(self, pool: str, now_ms: int) -> PoolCapacity:
        """The pool's capacity at ``now_ms``; O(1) between changes."""
        known = self._pools.get(pool)
        if known is None:
            return PoolCapacity()
        _catch_up(known)
        if known.live is not None and now_ms > known.live_until_ms:
            _assess(known, now_ms)
        if known.live is not None:
            return known.live
        return PoolCapacity(
            CapacityState.LOST,
            consumer_cost_tokens_per_s=known.consumer_rate,
            last_cost_tokens_per_s=known.rate,
            lost_for_ms=max(0, now_ms - known.heard_at_ms),
        )

    def _set_back(self, now_ms: int) -> None:
        """The clock was set back: what was received in what is now the future counts as received now."""
        for pool in self._pools.values():
            pool.heard_at_ms = min(pool.heard_at_ms, now_ms)
            for consumer in pool.consumers.values():
                consumer.received_at_ms = min(consumer.received_at_ms, now_ms)
            pool.is_stale = True

    def pools(self) -> Iterable[str]:
        return tuple(self._pools)

    def loaded(self, now_ms: int) -> dict[str, Mapping[str, float | None] | None]:
        """By pool with live consumers, the versions that they have loaded, as in ``PoolCapacity``."""
        capacities = {name: self.pool(name, now_ms) for name in self._pools}
        return {name: capacity.loaded for name, capacity in capacities.items() if capacity.state is CapacityState.LIVE}


def _catch_up(pool: _Pool) -> None:
    """Compute the capacity from the reports since the last time."""
    if not pool.is_stale:
        return
    _assess(pool, pool.heard_at_ms)
    if pool.live is not None:
        # Consumers that end together, by a crash or a deployment, become stale one after another. The rate expected
        # back is that of all consumers alive at the last report, not that of the last of them.
        pool.rate = pool.live.cost_tokens_per_s


def _assess(pool: _Pool, now_ms: int) -> None:
    """Drop stale consumers and compute the capacity of the others.

    A consumer without a measured rate counts with the mean of those that have one, or with the pool's last known mean
    if none has. A failing one adds no capacity beside healthy ones; if all fail they count, because only work that
    reaches them shows that they have recovered. A failing consumer still owns its partitions and works off their items.
    """
    pool.is_stale = False
    stale_before_ms = now_ms - CAPACITY_TTL_MS
    for instance_id in [i for i, consumer in pool.consumers.items() if consumer.received_at_ms < stale_before_ms]:
        del pool.consumers[instance_id]
    if not pool.consumers:
        pool.live = None
        return
    pool.live_until_ms = min(consumer.received_at_ms for consumer in pool.consumers.values()) + CAPACITY_TTL_MS
    reports = [consumer.report for consumer in pool.consumers.values()]
    counted = [report for report in reports if report.health != Health.FAILING] or reports
    measured = [report.cost_tokens_per_s for report in counted if report.cost_tokens_per_s > 0]
    if measured:
        pool.consumer_rate = sum(measured) / len(measured)
    rate = pool.consumer_rate * len(counted)
    pool.live = PoolCapacity(
        CapacityState.LIVE,
        consumers=len(counted),
        cost_tokens_per_s=rate,
        consumer_cost_tokens_per_s=pool.consumer_rate,
        last_cost_tokens_per_s=rate,
        batches=tuple(BatchCapacity(report.max_batch_size, report.max_batch_tokens) for report in counted),
        owned_partitions=frozenset().union(*owned) if (owned := _partitions(reports, among=reports)) else None,
        work_partitions=_partitions(counted, among=reports),
        versions=_versions(counted, among=reports),
        loaded=_loaded(reports, pool.given_up),
    )


def _partitions(consumers: list[CapacityReport], *, among: list[CapacityReport]) -> tuple[frozenset[int], ...] | None:
    """The partitions of each of these; None if any live consumer does not report its own."""
    if not all(report.partitions for report in among):
        return None
    return tuple(frozenset(report.partitions) for report in consumers)


def _versions(consumers: list[CapacityReport], *, among: list[CapacityReport]) -> tuple[frozenset[str], ...] | None:
    """The versions that each of these has loaded; None if any live consumer does not report its own."""
    if not all(report.versions or report.follows_models for report in among):
        return None
    return tuple(frozenset(report.versions) for report in consumers)


def _loaded(reports: list[CapacityReport], given_up: set[str]) -> Mapping[str, float | None] | None:
    """The part of the consumers that has loaded each version, None for one that is only being loaded, 0 for one that
    was unloaded; None if one of them does not report its own."""
    loaded = _versions(reports, among=reports)
    if loaded is None:
        return None
    counts = Counter(version for of_consumer in loaded for version in of_consumer)
    coming = {change.version for report in reports for change in report.changes if change.state in _COMING}
    parts: dict[str, float | None] = dict.fromkeys(given_up, 0.0)
    return parts | dict.fromkeys(coming) | {version: count / len(reports) for version, count in counts.items()}
