"""How much of a tenant's backlog goes before a request with a given deadline. Pure."""

from dataclasses import dataclass

from stream_processors.dispatcher.scheduling.backlog_statistics import Schedulable

_BUCKET_MS = 1_000


@dataclass(slots=True)
class _Bucket:
    requests: int = 0
    tokens: int = 0


class DeadlineBacklogs:
    """The queued online tokens of each tenant and class in one pool, by second of their deadline. A look-up costs as
    much as the tenant has different seconds queued: no more than its requests. For one thread."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], dict[int, _Bucket]] = {}

    def add(self, item: Schedulable) -> None:
        """Count a request that is queued now; backfill goes last and is left out."""
        if not item.is_backfill:
            buckets = self._buckets.setdefault((item.tenant, item.priority_class), {})
            bucket = buckets.setdefault(item.deadline_at_ms // _BUCKET_MS, _Bucket())
            bucket.requests += 1
            bucket.tokens += item.cost_tokens

    def remove(self, item: Schedulable) -> None:
        """Undo ``add``."""
        if item.is_backfill:
            return
        key, second = (item.tenant, item.priority_class), item.deadline_at_ms // _BUCKET_MS
        bucket = self._buckets[key][second]
        bucket.requests -= 1
        bucket.tokens -= item.cost_tokens
        if not bucket.requests:
            del self._buckets[key][second]
            if not self._buckets[key]:
                del self._buckets[key]

    def tokens_until(self, tenant: str, priority_class: str, deadline_at_ms: int) -> int:
        """Of the requests with a deadline in this second or an earlier one."""
        last = deadline_at_ms // _BUCKET_MS
        buckets = self._buckets.get((tenant, priority_class), {})
        return sum(bucket.tokens for second, bucket in buckets.items() if second <= last)
