"""What consumers reported while nobody listened: before this process came, or since it listened last. Pure."""

from dataclasses import dataclass, field

from fairlane.records import CapacityReport
from stream_processors.dispatcher.work_events import CapacityHeard

_Kind = tuple[str, str, bool, bool]


@dataclass(slots=True)
class CapacityHistory:
    """Reports go in as they stand in the log; at most four of a consumer come out, whatever their number.

    Those are enough to know who lived when a pool was last heard of, and what it could do: the newest report of each
    consumer, the newest in which it had measured a rate, and its farewell.
    """

    _newest: dict[_Kind, tuple[CapacityReport, int]] = field(default_factory=dict)
    _newest_at_ms: int = 0

    def add(self, report: CapacityReport, at_ms: int) -> None:
        """A report was read; ``at_ms`` is the time of its record, the broker's."""
        kind = (report.pool, report.instance_id, report.draining, report.cost_tokens_per_s > 0)
        # Taken out first: what is put back stands at the end.
        self._newest.pop(kind, None)
        self._newest[kind] = (report, at_ms)
        self._newest_at_ms = max(self._newest_at_ms, at_ms)

    def take(self, now_ms: int) -> list[CapacityHeard]:
        """Take them out, in the order of the log. Their ages are those at ``now_ms``, or at the time of the newest
        record that ever came if that is later."""
        taken, self._newest = self._newest, {}
        latest_ms = max(now_ms, self._newest_at_ms)
        return [CapacityHeard(report, latest_ms - at_ms) for report, at_ms in taken.values()]
