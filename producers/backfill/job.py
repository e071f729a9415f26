"""Values of a job: its definition, progress, budget and states. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

MEBIBYTE = 1024 * 1024
DEFAULT_WINDOW_MS = 86_400_000


class Format(StrEnum):
    """Format of rows in a file."""

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
"""Why a job is paused that its budget stopped."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in the input: a byte in a file of lines, or a row in a row group of Parquet."""

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
        input: a path, or ``s3://bucket/key``.
        output: likewise.
        input_format: of the input.
        output_format: of the output.
        errors: where rows go that failed; None: into the output, with the others.
        columns: request field by column of CSV or Parquet; empty: columns are named like fields.
        defaults: fields of every row that does not set them itself.
        ordered: the output has the rows in the order of the input.
        chunk_rows: most rows of a chunk.
        chunk_bytes: most bytes of a chunk's rows, or one row that is larger.
        max_row_bytes: a larger row is not run.
        max_open_chunks: that are read and not yet written: the most that waits in Kafka and in memory.
        max_cost_tokens: nothing more is sent once so much was spent.
        window_ms: how long after it was submitted rows may still be run.
        endpoint: of S3-compatible storage.
        openai_url: every row must be an OpenAI batch line for this one.
    """

    input: str
    output: str
    input_format: Format = Format.JSONL
    output_format: Format = Format.JSONL
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

    def as_json(self) -> dict[str, Any]:
        """JSON form, read by ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Read the form of ``as_json``; fields of later versions are ignored."""
        known = {entry.name for entry in fields(cls)}
        given = {name: value for name, value in found.items() if name in known}
        for name in ("input_format", "output_format"):
            if name in given:
                given[name] = Format(given[name])
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Tally:
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

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Tally)))


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Some rows of the input that are sent, answered and written together.

    Attributes:
        number: from 0, in the order of the input.
        first_row: the number of its first row.
        rows: how many.
        begin: where they begin in the input.
        end: where the next chunk begins.
        reply_offset: no reply to any of them stands before it.
    """

    number: int
    first_row: int
    rows: int
    begin: Position
    end: Position
    reply_offset: int


@dataclass(frozen=True, slots=True)
class Job:
    """A registered job.

    Attributes:
        job_id: 16 hexadecimal digits.
        tenant: whose it is.
        spec: what was asked for.
        fingerprint: of the input when it was submitted.
        total_rows: of the input; 0 until they are counted.
        partitions: of the topic of the replies, when it was submitted.
        status: where it stands.
        wanted: what its owner wants.
        reason: why it is where it stands, if that needs one.
        tally: of the chunks that are done.
        planned: rows that were read and sent, or refused, so far.
        next_chunk: number of the chunk that is planned next.
        next_position: where it begins.
        created_at_ms: when it was submitted.
        started_at_ms: when it was first run, its rows being counted.
        deadline_at_ms: when its completion window ends, also of a job that nobody has run yet.
        ended_at_ms: when it got to a final status, or failed.
        runner: who runs it, or ran it last.
        token: how often it was taken by a runner: what a runner with an older one writes is refused.
        counted: whether its rows are counted.
        cancelling_at_ms: when its owner cancelled it.
        finalizing_at_ms: when its runner began to join its parts.
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
    tally: Tally = field(default_factory=Tally)
    planned: int = 0
    next_chunk: int = 0
    next_position: Position = field(default_factory=Position)
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
"""What a row costs that costs anything worth counting."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that a job may cost, in cost tokens; None has no end.

    What a row will cost is taken from the rows that are done, and before the first of them from the estimate.
    """

    max_cost_tokens: int | None
    estimated_row_cost: float = 0.0

    def row_cost(self, done: Tally) -> float:
        """Expected cost of the next row."""
        return done.cost_tokens / done.rows if done.rows else self.estimated_row_cost

    def affordable_rows(self, done: Tally, open_rows: int) -> int | None:
        """Number of rows that may still be sent with so many in flight; None: any number."""
        if self.max_cost_tokens is None:
            return None
        left = self.max_cost_tokens - done.cost_tokens
        if left <= 0:
            return 0
        row_cost = self.row_cost(done)
        return max(0, int(left / row_cost) - open_rows) if row_cost > _LEAST_COST else None
