"""Records changes outside of Postgres in the audit: before they begin, and how they ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from fairlane_server.administration.events import AdminAudit, AdminEvent, AdminEventOutcome
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.store_error import ReportableError


@contextmanager
def recorded_change(audit: AdminAudit, *changes: AdminEvent) -> Iterator[dict[str, object]]:
    """Record that the block starts, and its end with what the block adds to the yielded details, or with the reason
    why it failed: for each of the changes that it makes together. Raises AuditError."""
    started = [replace(change, outcome=AdminEventOutcome.STARTED) for change in changes]
    numbers = audit.note_all(started)
    ended: dict[str, object] = {"reason": "the process failed"}
    outcome = AdminEventOutcome.FAILED
    try:
        yield ended
        del ended["reason"]
        outcome = AdminEventOutcome.DONE
    except (ClusterError, ReportableError) as error:
        ended["reason"] = str(error)
        raise
    finally:
        audit.note_all(
            replace(one, details=ended, outcome=outcome, of_event=number)
            for one, number in zip(started, numbers, strict=True)
        )
