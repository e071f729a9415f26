"""Parsed rows, and request ids derived from job and row. Pure.

An id has 64 bits of the job, 48 of the row, and 16 chosen so that the reply comes to the job's partition of the reply
topic. Every runner of a job derives the same ids, so none has to be stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlane.records import InferenceRequest
from fairlane_server.kafka.reply_partition import partition_of


@dataclass(frozen=True, slots=True)
class BadRow:
    """An invalid row. ``row_id``: its own id, if readable; ``field``: the invalid field, or ``row``; ``url``: of an
    OpenAI batch line."""

    row_id: str | None
    field: str
    reason: str
    url: str | None = None


@dataclass(frozen=True, slots=True)
class GoodRow:
    """A valid row and its request, which still lacks its id, timeout and reply topic."""

    row_id: str | None
    request: InferenceRequest
    url: str | None = None


ParsedRow = GoodRow | BadRow
RowContent = bytes | Mapping[str, Any] | BadRow
"""A line of JSON, or the columns of a row, or the reason why it cannot be read."""


MOST_ROWS = 2**48
_SALTS = 2**16
_PREFIX_CHARS = 19


@dataclass(frozen=True, slots=True)
class RowIds:
    """Request ids of one job. ``job_id``: 16 hexadecimal digits; ``partitions``: of the reply topic."""

    job_id: str
    partitions: int

    @property
    def partition(self) -> int:
        """Partition of the replies to all its rows."""
        return int(self.job_id, 16) % self.partitions

    @property
    def prefix(self) -> str:
        """Common prefix of its ids."""
        return f"{self.job_id[:8]}-{self.job_id[8:12]}-{self.job_id[12:]}-"

    def id_of(self, row: int) -> str:
        """The request id of a row, counted from 0; always the same. Raises ValueError for a row that no id can name."""
        if not 0 <= row < MOST_ROWS:
            raise ValueError(f"row {row} is not between 0 and {MOST_ROWS - 1}")
        digits = f"{row:012x}"
        stem = f"{self.prefix}{digits[:4]}-{digits[4:]}"
        wanted, partitions = self.partition, self.partitions
        # One in ``partitions`` fits.
        for salt in range(_SALTS):
            request_id = f"{stem}{salt:04x}"
            if partition_of(request_id, partitions) == wanted:
                return request_id
        raise ValueError(f"no id of row {row} comes to partition {wanted} of {partitions}")

    def row_of(self, request_id: str) -> int | None:
        """The row of this id, None for an id of another job."""
        if len(request_id) != 36 or not request_id.startswith(self.prefix):
            return None
        try:
            row = int(request_id[_PREFIX_CHARS:23] + request_id[24:32], 16)
        except ValueError:
            return None
        return row if self.id_of(row) == request_id else None
