"""The load of a deployment from its heartbeats: reports in, rows out. Pure: the caller says when each was seen.

A process that was not heard of for a while is gone: nothing of its last report counts any more, and it is shown as gone
until it is forgotten. One that said goodbye (``draining``) is not shown at all.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fairlane.outcomes import Health
from fairlane.records import BudgetLoad, CapacityReport, DispatchReport, PoolLoad, TenantLoad, TenantSpec
from fairlane_server.admission_rule import CAPACITY_TTL_MS

DISPATCH_TTL_MS = 2_000
"""How long a dispatcher's report counts. Longer than among dispatchers: a display must not flicker."""

LOADED = "loaded"
"""The state of a version that a consumer serves."""

RATE_WINDOW_MS = 10_000
"""What tokens per second and recent refusals are taken over, by the dispatcher's own clock."""

# Most reports of a dispatcher name no tenants; after this time without any, it has none.
_TENANTS_TTL_MS = 5_000
_FORGOTTEN_AFTER_MS = 60_000


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One pool: sums over the consumers that report (``consumers_gone`` went silent) and over all dispatchers that know
    the pool. ``batch_fill`` is the mean, 0 to 1, None without consumers; ``window_tokens`` is that of the dispatcher
    with the largest window; ``waiting_by_class`` is in requests; all tokens are cost tokens."""

    pool: str
    consumers: int
    consumers_failing: int
    consumers_gone: int
    capacity_tokens_per_s: float
    batch_fill: float | None
    window_tokens: int
    in_flight_tokens: int
    waiting_requests: int
    waiting_tokens: int
    waiting_by_class: Mapping[str, int]
    dispatchers: int


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One tenant in one pool; ``pool`` is None for a tenant without a report of a dispatcher.

    Attributes:
        weight: None for a tenant that is not (or no longer) configured.
        tokens_per_s: cost tokens settled per second over RATE_WINDOW_MS; None before there are two reports.
        served_share: of what the pool settled in that time, 0 to 1; None when it settled nothing, and while dispatchers
            that do not say what their pools settled are among those that know the tenant.
        entitled_share: of the pool, while all that wait go on waiting.
        wait_p99_ms: of its dispatches of the last minute, where it waits longest; None before the first report.
        shed: refused requests by code since the dispatchers started, or heard of the tenant again after it was idle;
            ``shed_recently`` over RATE_WINDOW_MS.
    """

    tenant: str
    pool: str | None
    weight: float | None
    waiting_requests: int = 0
    waiting_tokens: int = 0
    in_flight_tokens: int = 0
    tokens_per_s: float | None = None
    served_share: float | None = None
    entitled_share: float | None = None
    wait_p99_ms: float | None = None
    shed: Mapping[str, int] = field(default_factory=dict)
    shed_recently: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """Reservations of a tenant's budgets, or of one caller: of the queues of all dispatchers, and in flight, of which
    every dispatcher knows all."""

    tenant: str
    caller: str | None
    queued_nanos: int
    in_flight_nanos: int


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version, ``model/version``, at one consumer. ``state`` is loaded, or a ``VersionState`` with its ``reason``."""

    pool: str
    version: str
    consumer: str
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LoadView:
    """Everything at one moment. Tenants: those with most waiting first, then by what they get."""

    at_ms: int
    dispatchers: int
    dispatchers_gone: int
    pools: tuple[PoolRow, ...]
    tenants: tuple[TenantRow, ...]
    budgets: tuple[BudgetRow, ...] = ()
    versions: tuple[VersionRow, ...] = ()

    def reserved(self, tenant: str) -> Mapping[str | None, int] | None:
        """What is reserved of a tenant's budgets, by caller (None: of the tenant). None: no dispatcher reports it."""
        rows = [row for row in self.budgets if row.tenant == tenant]
        return {row.caller: row.queued_nanos + row.in_flight_nanos for row in rows} or None


@dataclass(frozen=True, slots=True)
class _Sample:
    """``shed`` is empty for a pool."""

    reported_at_ms: int
    served_tokens: int
    shed: Mapping[str, int] = field(default_factory=dict)


_Samples = deque[_Sample]
"""The oldest first."""


@dataclass(slots=True)
class _Consumer:
    seen_at_ms: int
    report: CapacityReport


@dataclass(slots=True)
class _Dispatcher:
    seen_at_ms: int
    report: DispatchReport
    tenants_at_ms: int = 0
    tenants: tuple[TenantLoad, ...] = ()
    budgets: tuple[BudgetLoad, ...] = ()
    samples: dict[tuple[str, str], _Samples] = field(default_factory=dict)
    pool_samples: dict[str, _Samples] = field(default_factory=dict)

    def sample(self, report: DispatchReport) -> None:
        """Remember what was served, as far back as rates are taken over. Of pools only in reports that name tenants: a
        part is measured over the same time as the whole."""
        at_ms = report.reported_at_ms
        for load in report.tenants:
            shed = {count.code: count.requests for count in load.shed}
            _remember(self.samples, (load.tenant, load.pool), _Sample(at_ms, load.served_tokens, shed))
        for pool in report.pools:
            _remember(self.pool_samples, pool.pool, _Sample(at_ms, pool.served_tokens))
        _drop_before(self.samples, at_ms - RATE_WINDOW_MS)
        _drop_before(self.pool_samples, at_ms - RATE_WINDOW_MS)

    def rate(self, tenant: str, pool: str) -> float | None:
        return _rate(self.samples.get((tenant, pool), ()))

    def pool_rate(self, tenant: str, pool: str) -> float:
        """Tokens per second served in the pool since the tenant's first sample, if there is one."""
        known = self.samples.get((tenant, pool))
        since_ms = known[0].reported_at_ms if known else 0
        samples = [sample for sample in self.pool_samples.get(pool, ()) if sample.reported_at_ms >= since_ms]
        return _rate(samples) or 0.0


class LoadBoard:
    """The newest reports of every process. ``seen_at_ms`` is the watcher's clock, as is ``now_ms``."""

    def __init__(self) -> None:
        self._specs: dict[str, TenantSpec] = {}
        self._consumers: dict[str, _Consumer] = {}
        self._dispatchers: dict[str, _Dispatcher] = {}

    def configure(self, tenant: str, spec: TenantSpec | None) -> None:
        """Set the latest registration of a tenant; None after its withdrawal."""
        if spec is None:
            self._specs.pop(tenant, None)
        else:
            self._specs[tenant] = spec

    @property
    def specs(self) -> tuple[TenantSpec, ...]:
        """The configured tenants, by name."""
        return tuple(self._specs[name] for name in sorted(self._specs))

    def capacity(self, report: CapacityReport, seen_at_ms: int) -> None:
        """A consumer reported. An older report than its last one changes nothing."""
        known = self._consumers.get(report.instance_id)
        if known is not None and report.reported_at_ms < known.report.reported_at_ms:
            return
        if report.draining:
            self._consumers.pop(report.instance_id, None)
        else:
            self._consumers[report.instance_id] = _Consumer(seen_at_ms, report)

    def dispatch(self, report: DispatchReport, seen_at_ms: int) -> None:
        """A dispatcher reported. An older report than its last one changes nothing."""
        known = self._dispatchers.get(report.instance_id)
        if known is not None and report.reported_at_ms < known.report.reported_at_ms:
            return
        if report.draining:
            self._dispatchers.pop(report.instance_id, None)
            return
        if known is None or known.report.started_at_ms != report.started_at_ms:
            known = self._dispatchers[report.instance_id] = _Dispatcher(seen_at_ms, report)
        known.seen_at_ms, known.report = seen_at_ms, report
        if report.tenants or report.budgets:
            known.budgets = report.budgets
        if report.tenants:
            known.tenants, known.tenants_at_ms = report.tenants, report.reported_at_ms
            known.sample(report)
        elif report.reported_at_ms - known.tenants_at_ms > _TENANTS_TTL_MS:
            known.tenants = ()
            known.samples.clear()
            known.pool_samples.clear()

    def view(self, now_ms: int) -> LoadView:
        oldest_ms = now_ms - _FORGOTTEN_AFTER_MS
        self._consumers = {name: one for name, one in self._consumers.items() if one.seen_at_ms >= oldest_ms}
        self._dispatchers = {name: one for name, one in self._dispatchers.items() if one.seen_at_ms >= oldest_ms}
        consumers = [one.report for one in self._consumers.values() if one.seen_at_ms >= now_ms - CAPACITY_TTL_MS]
        silent = [one.report for one in self._consumers.values() if one.seen_at_ms < now_ms - CAPACITY_TTL_MS]
        dispatchers = [one for one in self._dispatchers.values() if one.seen_at_ms >= now_ms - DISPATCH_TTL_MS]
        return LoadView(
            now_ms,
            len(dispatchers),
            len(self._dispatchers) - len(dispatchers),
            _pool_rows(self._specs.values(), consumers, silent, dispatchers),
            _tenant_rows(self._specs, dispatchers),
            _budget_rows(dispatchers),
            _version_rows(consumers),
        )


def _pool_rows(
    specs: Iterable[TenantSpec],
    consumers: list[CapacityReport],
    silent: list[CapacityReport],
    dispatchers: list[_Dispatcher],
) -> tuple[PoolRow, ...]:
    names = {report.pool for report in (*consumers, *silent)}
    names |= {load.pool for dispatcher in dispatchers for load in dispatcher.report.pools}
    names |= {spec.pool for spec in specs if spec.pool is not None}
    return tuple(
        _pool_row(
            name,
            [report for report in consumers if report.pool == name],
            sum(report.pool == name for report in silent),
            [load for dispatcher in dispatchers for load in dispatcher.report.pools if load.pool == name],
        )
        for name in sorted(names)
    )


def _pool_row(name: str, consumers: list[CapacityReport], gone: int, loads: list[PoolLoad]) -> PoolRow:
    by_class: Counter[str] = Counter()
    for load in loads:
        by_class.update({waiting.priority_class: waiting.waiting_requests for waiting in load.classes})
    return PoolRow(
        pool=name,
        consumers=len(consumers),
        consumers_failing=sum(report.health == Health.FAILING for report in consumers),
        consumers_gone=gone,
        capacity_tokens_per_s=sum(report.cost_tokens_per_s for report in consumers),
        batch_fill=sum(report.batch_fill for report in consumers) / len(consumers) if consumers else None,
        window_tokens=max((load.window_tokens for load in loads), default=0),
        in_flight_tokens=sum(load.in_flight_tokens for load in loads),
        waiting_requests=by_class.total(),
        waiting_tokens=sum(waiting.waiting_tokens for load in loads for waiting in load.classes),
        waiting_by_class={name: count for name, count in by_class.items() if count},
        dispatchers=len(loads),
    )


def _tenant_rows(specs: Mapping[str, TenantSpec], dispatchers: list[_Dispatcher]) -> tuple[TenantRow, ...]:
    loads: dict[tuple[str, str], list[tuple[TenantLoad, _Samples]]] = {}
    for dispatcher in dispatchers:
        for load in dispatcher.tenants:
            pair = (load.tenant, load.pool)
            loads.setdefault(pair, []).append((load, dispatcher.samples.get(pair, deque())))
    rows = [
        _tenant_row(tenant, pool, specs.get(tenant), reported, *_rates(tenant, pool, dispatchers))
        for (tenant, pool), reported in loads.items()
    ]
    spoken_of = {row.tenant for row in rows}
    rows += [TenantRow(name, None, spec.weight) for name, spec in specs.items() if name not in spoken_of]
    return tuple(
        sorted(rows, key=lambda row: (-row.waiting_tokens, -(row.tokens_per_s or 0.0), row.tenant, row.pool or ""))
    )


def _tenant_row(
    tenant: str,
    pool: str,
    spec: TenantSpec | None,
    reported: list[tuple[TenantLoad, _Samples]],
    rate: float | None,
    served_share: float | None,
) -> TenantRow:
    loads = [load for load, _ in reported]
    # One that waits nowhere has the same claim everywhere; one that waits at several dispatchers has a part at each.
    waiting = [load.entitled_share for load in loads if load.waiting_requests]
    shed: Counter[str] = Counter()
    recently: Counter[str] = Counter()
    for load, samples in reported:
        now = {count.code: count.requests for count in load.shed}
        shed.update(now)
        recently.update({code: count - samples[0].shed.get(code, 0) for code, count in now.items() if samples})
    return TenantRow(
        tenant=tenant,
        pool=pool,
        weight=None if spec is None else spec.weight,
        waiting_requests=sum(load.waiting_requests for load in loads),
        waiting_tokens=sum(load.waiting_tokens for load in loads),
        in_flight_tokens=sum(load.in_flight_tokens for load in loads),
        tokens_per_s=rate,
        served_share=served_share,
        entitled_share=sum(waiting) if waiting else max(load.entitled_share for load in loads),
        wait_p99_ms=max(load.wait_p99_ms for load in loads),
        shed=dict(sorted(shed.items())),
        shed_recently={code: count for code, count in sorted(recently.items()) if count > 0},
    )


def _budget_rows(dispatchers: list[_Dispatcher]) -> tuple[BudgetRow, ...]:
    rows: dict[tuple[str, str | None], BudgetRow] = {}
    for load in (load for dispatcher in dispatchers for load in dispatcher.budgets):
        place = load.tenant, load.caller
        known = rows.get(place, BudgetRow(*place, 0, 0))
        rows[place] = BudgetRow(
            *place, known.queued_nanos + load.queued_nanos, max(known.in_flight_nanos, load.in_flight_nanos)
        )
    return tuple(rows.values())


def _version_rows(consumers: list[CapacityReport]) -> tuple[VersionRow, ...]:
    """By pool and version, then by consumer."""
    rows = [VersionRow(one.pool, version, one.instance_id, LOADED) for one in consumers for version in one.versions]
    rows += [
        VersionRow(one.pool, change.version, one.instance_id, change.state, change.reason)
        for one in consumers
        for change in one.changes
    ]
    return tuple(sorted(rows, key=lambda row: (row.pool, row.version, row.consumer)))


def _rates(tenant: str, pool: str, dispatchers: list[_Dispatcher]) -> tuple[float | None, float | None]:
    """A tenant's tokens per second of all dispatchers together, and which part that is of what the pool settled: at any
    of them, for other tenants than it names and for other dispatchers than name it."""
    rates = [rate for one in dispatchers if (rate := one.rate(tenant, pool)) is not None]
    if not rates:
        return None, None
    rate, pool_rate = sum(rates), sum(one.pool_rate(tenant, pool) for one in dispatchers)
    # A part is never more than the whole, unless a dispatcher does not report the whole.
    return rate, rate / pool_rate if 0 < pool_rate >= rate else None


def _rate(samples: Iterable[_Sample]) -> float | None:
    known = list(samples)
    if len(known) < 2:
        return None
    first, last = known[0], known[-1]
    elapsed_ms = last.reported_at_ms - first.reported_at_ms
    return (last.served_tokens - first.served_tokens) * 1_000 / elapsed_ms if elapsed_ms > 0 else None


KeyT = TypeVar("KeyT")


def _remember(histories: dict[KeyT, _Samples], key: KeyT, sample: _Sample) -> None:
    history = histories.setdefault(key, deque())
    if history and history[-1].served_tokens > sample.served_tokens:
        history.clear()  # it counts anew
    history.append(sample)


def _drop_before(histories: dict[KeyT, _Samples], oldest_ms: int) -> None:
    for key, history in list(histories.items()):
        while history and history[0].reported_at_ms < oldest_ms:
            history.popleft()
        if not history:
            del histories[key]
