"""Compaction of capacity reports read since the last ``take``, such as the log before this process started. Pure."""

from dataclasses import dataclass, field

from fairlane.records import CapacityReport
from stream_processors.dispatcher.feedback.work_events import AgedCapacityReport

_Kind = tuple[str, str, bool, bool]


@dataclass(slots=True)
class CapacityHistory:
    """Takes reports in log order and keeps at most four per pool and consumer.

    These suffice to know which consumers of a pool were alive at its last report, and its rates: the newest report, the
    newest with a measured rate, and the draining ones.
    """

    _newest: dict[_Kind, tuple[CapacityReport, int]] = field(default_factory=dict)
    _newest_at_ms: int = 0

    def add(self, report: CapacityReport, at_ms: int) -> None:
        """Add a report; ``at_ms`` is its time by the broker's clock, as far as that is known."""
        kind = (report.pool, report.instance_id, report.draining, report.cost_tokens_per_s > 0)
        # Removed first, so that it is inserted at the end.
        self._newest.pop(kind, None)
        self._newest[kind] = (report, at_ms)
        self._newest_at_ms = max(self._newest_at_ms, at_ms)

    def take(self, now_ms: int) -> list[AgedCapacityReport]:
        """Remove and return the reports in log order. Ages are relative to ``now_ms`` or to the newest record ever
        added, whichever is later."""
        taken, self._newest = self._newest, {}
        latest_ms = max(now_ms, self._newest_at_ms)
        return [AgedCapacityReport(report, latest_ms - at_ms) for report, at_ms in taken.values()]
