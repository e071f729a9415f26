"""Records a change outside of Postgres in the audit: before it begins, and how it ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from fairlane_server.administration.events import AdminAudit, AdminEvent, AdminEventOutcome
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.store_error import ReportableError


@contextmanager
def recorded_change(audit: AdminAudit, change: AdminEvent) -> Iterator[dict[str, object]]:
    """Record that the block starts, and its end with what the block adds to the yielded details, or with the reason
    why it failed. Raises AuditError."""
    started = replace(change, outcome=AdminEventOutcome.STARTED)
    number = audit.note(started)
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
        audit.note(replace(started, details=ended, outcome=outcome, of_event=number))
