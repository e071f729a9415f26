"""Queued requests and bytes of each tenant over all pools, and the tenants whose backfill must pause. Pure.

Online requests and backfill are counted apart: backfill fetched before its pause never causes the rejection of an
online request, and a backlog of online requests never stops the reading of backfill.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fairlane.records import TenantSpec
from stream_processors.dispatcher.admission.rules import AdmissionPolicy, Bounds, backfill_paused
from stream_processors.dispatcher.scheduling.backlog_statistics import Schedulable

ItemT = TypeVar("ItemT", bound=Schedulable)


@dataclass(slots=True)
class RequestIndex(Generic[ItemT]):
    """Requests by tenant and id; an id may be sent any number of times. All methods are O(1) plus their result."""

    _by_id: dict[tuple[str, str], dict[Hashable, ItemT]] = field(default_factory=dict)

    def add(self, item: ItemT) -> None:
        self._by_id.setdefault((item.tenant, item.request_id), {})[item.claim] = item

    def remove(self, item: ItemT) -> None:
        """Raises KeyError when it is missing."""
        key = item.tenant, item.request_id
        same_id = self._by_id[key]
        del same_id[item.claim]
        if not same_id:
            del self._by_id[key]

    def find(self, tenant: str, request_id: str) -> tuple[ItemT, ...]:
        return tuple(self._by_id.get((tenant, request_id), {}).values())


@dataclass(slots=True)
class _Held:
    requests: int = 0
    size_bytes: int = 0
    tokens: int = 0
    is_paused: bool = False

    def add(self, item: Schedulable, sign: int) -> None:
        self.requests += sign
        self.size_bytes += sign * item.size_bytes
        self.tokens += sign * item.cost_tokens


@dataclass(slots=True)
class _Account:
    by_tenant: dict[str, _Held] = field(default_factory=dict)
    """Tenants with queued requests only."""
    all: _Held = field(default_factory=_Held)


@dataclass(slots=True)
class TenantOccupancy:
    """Running sums; every method but ``paused_backfill`` is O(1)."""

    _online: _Account = field(default_factory=_Account)
    _backfill: _Account = field(default_factory=_Account)

    def add(self, item: Schedulable) -> None:
        account = self._of(item.is_backfill)
        account.all.add(item, 1)
        account.by_tenant.setdefault(item.tenant, _Held()).add(item, 1)

    def remove(self, item: Schedulable) -> None:
        """Raises KeyError when nothing of its tenant and kind is queued."""
        account = self._of(item.is_backfill)
        held = account.by_tenant[item.tenant]
        held.add(item, -1)
        account.all.add(item, -1)
        if not held.requests:
            del account.by_tenant[item.tenant]

    def bounds(self, spec: TenantSpec, weight: float, all_weights: float, *, backfill: bool) -> Bounds:
        """The tenant's and the total occupancy and limits, of online requests or of backfill."""
        account = self._of(backfill)
        held = account.by_tenant.get(spec.tenant) or _Held()
        return Bounds(
            tenant_waiting_requests=held.requests,
            tenant_waiting_bytes=held.size_bytes,
            tenant_waiting_tokens=held.tokens,
            tenant_max_requests=spec.max_queue_requests,
            tenant_max_bytes=spec.max_queue_bytes,
            tenant_weight=weight,
            all_weights=all_weights,
            total_waiting_requests=account.all.requests,
            total_waiting_bytes=account.all.size_bytes,
            total_waiting_tokens=self._online.all.tokens + self._backfill.all.tokens,
        )

    def paused_backfill(self, policy: AdmissionPolicy, bounds_of: Callable[[str], Bounds]) -> set[str]:
        """Tenants with enough backfill queued; reading resumes when half of it is left."""
        paused = set()
        for tenant, held in self._backfill.by_tenant.items():
            held.is_paused = backfill_paused(policy, held.is_paused, bounds_of(tenant))
            if held.is_paused:
                paused.add(tenant)
        return paused

    def is_full_of_backfill(self, policy: AdmissionPolicy) -> bool:
        """Whether so much backfill is queued that no tenant's is read. Records fetched before a pause still come in, so
        the pauses of single tenants would not bound the sum."""
        held = self._backfill.all
        return held.requests >= policy.max_waiting_requests or held.size_bytes >= policy.max_waiting_bytes

    @property
    def size_bytes(self) -> int:
        return self._online.all.size_bytes + self._backfill.all.size_bytes

    def _of(self, is_backfill: bool) -> _Account:
        return self._backfill if is_backfill else self._online
