"""Ports of the job loop: Kafka, Postgres and files. Tests use in-memory versions."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from fairlane.records import InferenceReply
from producers.backfill.answers import RowAnswer
from producers.backfill.job import ChunkPlan, Position, Status, Tally, Wanted
from producers.backfill.row import RowContent


class AwayError(Exception):
    """Something outside does not answer now; the same call may be made again. The message is one line."""


class LeaseLostError(Exception):
    """Another runner has this job: nothing more may be done to it."""


class JobFailedError(Exception):
    """The job cannot continue. The message is one line for its owner and quotes no row."""


class NoSuchInputError(JobFailedError):
    """The input, or a column of it, is not there or cannot be read as what it is said to be."""


class InputChangedError(JobFailedError):
    """The input is not what it was when the job was submitted."""


class JobLog(Protocol):
    """Durable state of one job. Every write is refused unless the runner still holds the lease.

    All raise AwayError (whether it was written is then unknown, and the same call may be made again) and
    LeaseLostError.
    """

    def open_chunks(self) -> list[ChunkPlan]:
        """Those that are planned and not done, in order."""
        ...

    def plan(self, chunk: ChunkPlan) -> None:
        """The next chunk is this one."""
        ...

    def finish(self, chunk: ChunkPlan, part: str, tally: Tally) -> None:
        """Record that the chunk's results are in this part. A finished chunk stays unchanged."""
        ...

    def parts(self, *, ordered: bool) -> Iterator[str]:
        """The parts of the chunks that are done, in the order of the input or of their end."""
        ...

    def move(self, status: Status, reason: str | None = None) -> None:
        """Record the job's new status."""
        ...


class Source(Protocol):
    """The rows of the input."""

    def read(self, begin: Position, most_rows: int, most_bytes: int) -> tuple[list[RowContent], Position]:
        """At most so many rows from a place on, at least one if there is any, and where the next ones begin.

        Reading the same again gives the same. Raises AwayError, InputChangedError and NoSuchInputError.
        """
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class Publisher(Protocol):
    """The way into the tenant's backfill topic. All raise AwayError and JobFailedError.

    A record is a request id and the encoded request.
    """

    def start(self) -> int:
        """Fence earlier publishers of this job. Returns the number of the first chunk that is not in the log."""
        ...

    def publish(self, chunk: int, records: Sequence[tuple[str, bytes]]) -> None:
        """Publish all rows of a chunk atomically and once: a chunk already in the log is skipped."""
        ...

    def send_again(self, records: Sequence[tuple[str, bytes]]) -> None:
        """Requests that were refused for now, under the ids that they had."""
        ...

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Cancel these requests."""
        ...


class Replies(Protocol):
    """The job's partition of the reply topic, in order. All raise AwayError."""

    @property
    def position(self) -> int:
        """The offset that is read next."""
        ...

    @property
    def losses(self) -> int:
        """Number of times that replies were removed from the topic before they were read."""
        ...

    def start(self, offset: int | None) -> None:
        """Read from here on; None: from what is appended next."""
        ...

    def read(self, timeout_s: float) -> list[InferenceReply]:
        """Replies that may be this job's, at once if there are any."""
        ...

    def end(self) -> int:
        """End offset: ``position`` is at least this once all current replies were read."""
        ...


class Parts(Protocol):
    """Where answers are kept until the output is whole. All raise AwayError and JobFailedError."""

    def write(self, chunk: int, answers: Sequence[RowAnswer]) -> str:
        """Keep the answers of a chunk, all or none; durable when this returns. Returns the name of the part."""
        ...

    def join(self, parts: Callable[[], Iterator[str]]) -> None:
        """Make the output of these, all or none; they may be asked for more than once."""
        ...

    def clean_up(self) -> None:
        """Remove every part: the output is whole."""
        ...


class Control(Protocol):
    """Commands to the runner. Never raises, never waits."""

    @property
    def wanted(self) -> Wanted: ...

    @property
    def lost(self) -> bool:
        """Whether another runner has the job."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether this process is to end."""
        ...

    @property
    def gives_way(self) -> bool:
        """Whether another job is to have this one's place in the process. Unlike ``stopping`` it can wait."""
        ...

    @property
    def max_cost_tokens(self) -> int | None:
        """The most that the job may cost: its owner may raise it."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Let time pass; less of it when the process is to end."""
        ...
