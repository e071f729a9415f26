"""Values of a job: its definition, progress, budget and states; its rows and their request ids. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from fairlane.records import InferenceRequest
from fairlane_server.kafka.reply_partition import partition_of

MEBIBYTE = 1024 * 1024
DEFAULT_WINDOW_MS = 86_400_000


class FileFormat(StrEnum):
    """FileFormat of rows in a file."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


class Status(StrEnum):
    """Status of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether it never changes again. A job that failed can be resumed."""
        return self in (Status.COMPLETED, Status.EXPIRED, Status.CANCELLED)


class Wanted(StrEnum):
    """Command of the job's owner; its runner polls it every second."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


MAX_COST_REACHED = "max-cost reached"
"""Reason of a job that was paused by its budget."""


@dataclass(frozen=True, slots=True, order=True)
class InputPosition:
    """InputPosition in the input: a byte of a file of lines (``group`` 0), or a row of a row group of Parquet."""

    group: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of a file's content: its size, and its modification time or etag."""

    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Definition of a job.

    Attributes:
        input: a path, or ``s3://bucket/key``, as are ``output`` and ``errors``.
        errors: output of failed rows; None: the same as ``output``.
        columns: request field by column of CSV or Parquet; empty: columns are named like fields.
        defaults: fields of every row that does not set them itself.
        ordered: the output has the rows in the order of the input.
        chunk_bytes: most bytes of a chunk's rows; a larger row is a chunk by itself.
        max_row_bytes: a larger row is not run.
        max_open_chunks: most chunks that are planned and not yet written.
        max_cost_tokens: nothing more is sent once this much was spent.
        window_ms: completion window, from the submission on.
        endpoint: of S3-compatible storage.
        openai_url: URL that every row must name, as a line of an OpenAI batch file.
        requested_by: caller of the gateway that submitted it, for the usage of its rows.
    """

    input: str
    output: str
    input_format: FileFormat = FileFormat.JSONL
    output_format: FileFormat = FileFormat.JSONL
    errors: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ordered: bool = True
    chunk_rows: int = 1_000
    chunk_bytes: int = 8 * MEBIBYTE
    max_row_bytes: int = 4 * MEBIBYTE
    max_open_chunks: int = 8
    max_cost_tokens: int | None = None
    window_ms: int = DEFAULT_WINDOW_MS
    endpoint: str | None = None
    openai_url: str | None = None
    requested_by: str | None = None

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Read the stored form (``asdict``); fields of later versions are ignored."""
        known = {entry.name for entry in fields(cls)}
        given = {name: value for name, value in found.items() if name in known}
        for name in ("input_format", "output_format"):
            if name in given:
                given[name] = FileFormat(given[name])
        return cls(**given)


@dataclass(frozen=True, slots=True)
class RowTally:
    """Rows by result, and their cost."""

    ok: int = 0
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_tokens: int = 0

    @property
    def rows(self) -> int:
        return self.ok + self.failed + self.expired + self.cancelled

    def __add__(self, other: "RowTally") -> "RowTally":
        return RowTally(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(RowTally)))


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Rows of the input that are sent, answered and written together. ``number`` counts from 0, in the order of the
    input; ``end`` is the position of the next chunk; no reply to these rows has an offset below ``reply_offset``."""

    number: int
    first_row: int
    rows: int
    begin: InputPosition
    end: InputPosition
    reply_offset: int


@dataclass(frozen=True, slots=True)
class Job:
    """A registered job.

    Attributes:
        job_id: 16 hexadecimal digits.
        fingerprint: of the input when the job was submitted, like ``partitions`` of the reply topic.
        total_rows: rows of the input; 0 until they are ``counted``.
        reason: of its status.
        tally: of the finished chunks.
        answered: rows with a result, in unfinished chunks too, when the last runner renewed its lease.
        reserved_nanos: what it has reserved of its tenant's budgets as a whole; None: nothing yet, or not since it was
            paused.
        planned: number of rows in planned chunks.
        next_chunk: number of the next chunk to plan, which begins at ``next_position``.
        started_at_ms: when it was first run with its rows counted.
        deadline_at_ms: end of the completion window.
        ended_at_ms: when it reached a final status, or failed.
        token: fencing token, raised whenever a runner takes the job; writes with an older one are refused.
    """

    job_id: str
    tenant: str
    spec: JobSpec
    fingerprint: Fingerprint
    total_rows: int
    partitions: int
    status: Status = Status.QUEUED
    wanted: Wanted = Wanted.RUN
    reason: str | None = None
    tally: RowTally = field(default_factory=RowTally)
    answered: int = 0
    reserved_nanos: int | None = None
    planned: int = 0
    next_chunk: int = 0
    next_position: InputPosition = field(default_factory=InputPosition)
    created_at_ms: int = 0
    started_at_ms: int | None = None
    deadline_at_ms: int | None = None
    ended_at_ms: int | None = None
    runner: str | None = None
    token: int = 0
    counted: bool = True
    cancelling_at_ms: int | None = None
    finalizing_at_ms: int | None = None


_LEAST_COST = 1e-6
"""Cost tokens; a row with less counts as free."""


def affordable_rows(max_cost_tokens: int | None, spent_tokens: int, row_cost: float, open_rows: int) -> int | None:
    """Number of rows that may still be sent within a cost limit, with so many in flight; None: any number."""
    if max_cost_tokens is None:
        return None
    left = max_cost_tokens - spent_tokens
    if left <= 0:
        return 0
    return max(0, int(left / row_cost) - open_rows) if row_cost > _LEAST_COST else None


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
    """Request ids of one job's rows. ``job_id``: 16 hexadecimal digits; ``partitions``: of the reply topic.

    An id has 64 bits of the job, 48 of the row, and 16 chosen so that the reply comes to the job's partition of the
    reply topic. Every runner of a job derives the same ids, so none has to be stored.
    """

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
