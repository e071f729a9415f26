"""The other consumers of a pool, by their heartbeats, and whose turn it is to give up a version. Pure.

The heartbeats are in one partition, so that all consumers see them in one order: the first whose heartbeat says that it
waits for its turn has it, until a later one says otherwise or it falls silent. Silence is measured by the broker's
clock, the same for all.
"""

from dataclasses import dataclass, field

from fairlane.outcomes import VersionState
from fairlane.records import CapacityReport
from fairlane_server.admission_rule import CAPACITY_TTL_MS

_QUEUED = frozenset({VersionState.WAITING, VersionState.CHANGING})


@dataclass(slots=True)
class PoolMembers:
    """Newest heartbeats of a pool's consumers, given in the order of the log. One thread at a time."""

    pool: str
    _log_ms: int = 0
    """Time of the newest heartbeat of any pool."""
    _reports: dict[str, tuple[CapacityReport, int]] = field(default_factory=dict)
    _queue: dict[str, None] = field(default_factory=dict)
    """Those that wait for their turn, and the one that has it, the first to wait first."""

    def report(self, report: CapacityReport, appended_at_ms: int) -> None:
        self._log_ms = max(self._log_ms, appended_at_ms)
        for instance in [one for one, (_, at_ms) in self._reports.items() if at_ms < self._log_ms - CAPACITY_TTL_MS]:
            self._leave(instance)
        if report.pool != self.pool:
            return
        if report.draining:
            self._leave(report.instance_id)
            return
        self._reports[report.instance_id] = report, appended_at_ms
        if any(change.state in _QUEUED for change in report.changes):
            self._queue.setdefault(report.instance_id)
        else:
            self._queue.pop(report.instance_id, None)

    def _leave(self, instance: str) -> None:
        self._reports.pop(instance, None)
        self._queue.pop(instance, None)

    def has_turn(self, instance: str) -> bool:
        return next(iter(self._queue), None) == instance

    def all_have(self, version: str, *, but: str) -> bool:
        """Whether every consumer but this one has loaded a version."""
        return all(version in report.versions for name, (report, _) in self._reports.items() if name != but)

    def failed(self, *, but: str) -> set[str]:
        """Versions that a consumer other than this one could not load."""
        return {
            change.version
            for name, (report, _) in self._reports.items()
            for change in report.changes
            if name != but and change.state == VersionState.FAILED
        }
