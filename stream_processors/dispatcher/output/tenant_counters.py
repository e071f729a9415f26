"""Per-tenant counters, flushed once per batch: updating a labelled metric for every record is too expensive."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from fairlane import metrics
from fairlane.names import EVALUATION_TENANT
from fairlane.outcomes import Decision
from fairlane.records import Cost
from stream_processors.dispatcher.output.heartbeat_report import TenantStats

LATENCY_TARGET = "latency_target"
"""Reason in heartbeats of a refusal as ``overloaded`` although there is room."""

UNREGISTERED = ""
"""Common label of all unregistered tenants, whose number is unbounded. No tenant has this name."""


@dataclass(slots=True)
class TenantCounters:
    """Records read and decided since the last ``flush``; ``recent`` counts for the heartbeat."""

    recent: TenantStats = field(default_factory=TenantStats, compare=False)
    _read: Counter[str] = field(default_factory=Counter)
    _decided: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _cancels_passed_on: Counter[str] = field(default_factory=Counter)
    _degraded: Counter[tuple[str, str]] = field(default_factory=Counter)
    _waits_ms: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    _registered: frozenset[str] | None = None
    """None before ``set_tenants``: then every tenant counts as registered."""

    def set_tenants(self, tenants: Collection[str]) -> None:
        """Set the registered tenants; remove the metrics of those withdrawn."""
        known, self._registered = self._registered, frozenset(tenants)
        if known is not None:
            metrics.forget_tenants(known - self._registered)

    def label(self, tenant: str) -> str:
        is_known = self._registered is None or tenant in self._registered or tenant == EVALUATION_TENANT
        return tenant if is_known else UNREGISTERED

    def read(self, tenant: str) -> None:
        self._read[tenant] += 1

    def decided(self, tenant: str, decision: Decision, code: str = "") -> None:
        self._decided[tenant, decision, code] += 1

    def shed(self, tenant: str, pool: str, code: str, now_ms: int, *, is_for_target: bool = False) -> None:
        """Count the rejection of a valid request. In heartbeats those for the latency target are told from those of a
        full queue, which have the same code."""
        self._decided[tenant, Decision.REFUSED, code] += 1
        self.recent.shed(tenant, pool, LATENCY_TARGET if is_for_target else code, now_ms)

    def cost(self, tenant: str, model: str, cost: Cost | None) -> None:
        """Count the cost of a cached answer; at once, since these are few."""
        metrics.count_cost(self.label(tenant), model, cost)

    def cancel_passed_on(self, tenant: str) -> None:
        self._cancels_passed_on[tenant] += 1

    def degraded(self, tenant: str, steps: Iterable[str]) -> None:
        self._degraded.update((tenant, step) for step in steps)

    def dispatched(self, tenant: str, pool: str, priority_class: str, waited_ms: int, now_ms: int) -> None:
        self._decided[tenant, Decision.DISPATCHED, ""] += 1
        self._waits_ms.setdefault((pool, priority_class), []).append(waited_ms)
        self.recent.dispatched(tenant, pool, waited_ms, now_ms)

    def flush(self) -> None:
        """Add the counts to the metrics and reset them. Call once per batch."""
        for tenant, count in self._read.items():
            metrics.REQUESTS_READ.labels(tenant=self.label(tenant)).inc(count)
        for (tenant, decision, code), count in self._decided.items():
            metrics.DECISIONS.labels(tenant=self.label(tenant), decision=decision, code=code).inc(count)
        for tenant, count in self._cancels_passed_on.items():
            metrics.CANCELS_PASSED_ON.labels(tenant=self.label(tenant)).inc(count)
        for (tenant, step), count in self._degraded.items():
            metrics.DEGRADATIONS.labels(tenant=self.label(tenant), step=step).inc(count)
        for (pool, priority_class), waits_ms in self._waits_ms.items():
            histogram = metrics.WAIT_SECONDS.labels(pool=pool, priority_class=priority_class)
            for waited_ms in waits_ms:
                histogram.observe(waited_ms / 1000)
        for counts in (self._read, self._decided, self._cancels_passed_on, self._degraded, self._waits_ms):
            counts.clear()
