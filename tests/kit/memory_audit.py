"""The audit of administration in memory."""

from collections.abc import Iterable, Sequence

from fairlane_server.administration.events import AdminAudit, AdminEvent, AuditError


class MemoryAudit(AdminAudit):
    """Records in memory, numbered from 1; may be away."""

    def __init__(self) -> None:
        self.events: list[AdminEvent] = []
        self.is_away = False

    def note_all(self, events: Iterable[AdminEvent]) -> Sequence[int]:
        if self.is_away:
            raise AuditError("away")
        first = len(self.events) + 1
        self.events += events
        return range(first, len(self.events) + 1)
