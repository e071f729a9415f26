"""Rows as records of the tenant's backfill topic. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fairlane.names import JOBS_REPLIES
from fairlane.records import InferenceRequest
from producers.backfill.job import ChunkPlan
from producers.backfill.row import BadRow, ParsedRow
from producers.backfill.row_ids import RowIds

MOST_RECORD_BYTES = 4_000_000
"""A little less than a record of a backfill topic may have (topics.yaml)."""


@dataclass(frozen=True, slots=True)
class RequestRecords:
    """Of one job.

    Attributes:
        ids: of its rows.
        encode: raises ValueError for what cannot be a record.
        max_timeout_ms: the longest a request may have.
        deadline_at_ms: when the completion window ends, if it does.
    """

    ids: RowIds
    encode: Callable[[InferenceRequest], bytes]
    max_timeout_ms: int
    deadline_at_ms: int | None

    def of(
        self, plan: ChunkPlan, rows: Sequence[ParsedRow], now_ms: int, only: frozenset[int] | None = None
    ) -> tuple[list[tuple[str, bytes]], dict[int, BadRow]]:
        """Request ids and encoded requests of a chunk's rows, or of some of them, which have the time that is left; and
        the rows that turn out to be none that can be sent."""
        left_ms = self.max_timeout_ms if self.deadline_at_ms is None else self.deadline_at_ms - now_ms
        timeout_ms = max(1, min(left_ms, self.max_timeout_ms))
        records: list[tuple[str, bytes]] = []
        refused: dict[int, BadRow] = {}
        for number, row in enumerate(rows, plan.first_row):
            if isinstance(row, BadRow) or (only is not None and number not in only):
                continue
            request_id = self.ids.id_of(number)
            encoded = self._encoded(
                replace(row.request, request_id=request_id, timeout_ms=timeout_ms, reply_to=JOBS_REPLIES)
            )
            if isinstance(encoded, str):
                refused[number] = BadRow(row.row_id, "row", encoded, row.url)
            else:
                records.append((request_id, encoded))
        return records, refused

    def _encoded(self, request: InferenceRequest) -> bytes | str:
        """The record, or why there is none."""
        try:
            record = self.encode(request)
        except ValueError as error:
            return str(error)
        if len(record) > MOST_RECORD_BYTES:
            return f"{len(record)} bytes are more than {MOST_RECORD_BYTES}"
        return record
