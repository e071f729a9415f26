"""The labelling queues of tenants for callers of the admin API, each of whom is a reviewer."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from fairlane_server.administration.events import AdminAudit, AdminEvent, AdminEventKind
from fairlane_server.labelling.decisions import ItemOutcome, ReviewerStatistics
from fairlane_server.labelling.exports import AgreedItem, evaluation_line, fine_tuning_lines
from fairlane_server.labelling.queue import LabelQueue, LabelTask

MOST_PAGE_CHARS = 4_194_304
"""Of the texts of a page of an export; it then ends early, behind one item at least."""
_AT_ONCE = 5


@dataclass(frozen=True, slots=True)
class ExportPage:
    """Lines of an export. ``following``: the place behind which the next page begins; None at the end. ``left_out``:
    items of this page that are no examples."""

    lines: Sequence[dict[str, Any]]
    left_out: int
    following: tuple[int, str] | None


class TenantLabels:
    """Of all tenants, one at a time. Each call connects anew; for one thread at a time. Every call raises LabelError,
    StoreError and, if it shows texts, AuditError."""

    def __init__(self, dsn: str, audit: AdminAudit) -> None:
        self._dsn = dsn
        self._audit = audit

    def lease(self, tenant: str, reviewer: str, author: str) -> LabelTask | None:
        """As ``LabelQueue.lease``. That the item is shown is recorded before it is."""
        with LabelQueue(self._dsn, tenant) as queue:
            task = queue.lease(reviewer)
        if task is not None:
            self._note(AdminEventKind.LABEL_ITEM_READ, tenant, author, {"request_id": task.request_id})
        return task

    def submit(self, tenant: str, reviewer: str, request_id: str, label: str, correction: str | None) -> ItemOutcome:
        """As ``LabelQueue.submit``."""
        with LabelQueue(self._dsn, tenant) as queue:
            return queue.submit(reviewer, request_id, label, correction)

    def skip(self, tenant: str, reviewer: str, request_id: str) -> ItemOutcome:
        """As ``LabelQueue.skip``."""
        with LabelQueue(self._dsn, tenant) as queue:
            return queue.skip(reviewer, request_id)

    def set_gold(self, tenant: str, request_id: str, label: str | None, author: str) -> None:
        """As ``LabelQueue.set_gold``."""
        with LabelQueue(self._dsn, tenant) as queue:
            queue.set_gold(request_id, label)
        details = {"request_id": request_id, "gold": label is not None}
        self._note(AdminEventKind.LABEL_ITEM_GOLD_SET, tenant, author, details)

    def statistics(self, tenant: str) -> tuple[dict[str, int], Sequence[ReviewerStatistics]]:
        """Items by state, and the reviewers."""
        with LabelQueue(self._dsn, tenant) as queue:
            return queue.counts(), queue.reviewers()

    def export(
        self, tenant: str, model: str | None, after: tuple[int, str], most: int, author: str, *, is_chat: bool
    ) -> ExportPage:
        """A page of what was agreed on, as ``fairlane labels export`` writes it; a line for fine-tuning has its
        provenance beside it. The export is recorded page by page."""
        self._note(AdminEventKind.LABELS_EXPORTED, tenant, author, {"model": model, "chat": is_chat, "after": after[0]})
        lines: list[dict[str, Any]] = []
        left_out, seen, chars = 0, 0, 0
        with LabelQueue(self._dsn, tenant) as queue, closing(queue.agreed(model, after, _AT_ONCE)) as items:
            for item in items:
                if seen and (seen == most or chars > MOST_PAGE_CHARS):
                    return ExportPage(lines, left_out, after)
                after, seen = (item.closed_at_ms, item.request_id), seen + 1
                line = _chat_line(item, tenant) if is_chat else evaluation_line(item, tenant)
                if line is None:
                    left_out += 1
                else:
                    lines.append(line)
                chars += len(str(item.input)) + len(str(item.output))
        return ExportPage(lines, left_out, None)

    def _note(self, kind: AdminEventKind, tenant: str, author: str, details: dict[str, Any]) -> None:
        self._audit.note(AdminEvent(kind, tenant, author, details=details))


def _chat_line(item: AgreedItem, tenant: str) -> dict[str, Any] | None:
    made = fine_tuning_lines(item, tenant)
    return None if made is None else {"example": dict(made.example), "provenance": dict(made.provenance)}
