"""Errors of a job, and the ports of its loop. Tests have in-memory versions of the ports."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from fairlane.records import InferenceReply
from producers.backfill.answers import RowAnswer
from producers.backfill.job import ChunkPlan, RowTally, Status


class UnavailableError(Exception):
    """A dependency does not answer now; the same call may be repeated. The message is one line."""


class LeaseLostError(Exception):
    """Another runner has this job: nothing more may be done to it."""


class JobFailedError(Exception):
    """The job cannot continue. The message is one line for its owner and quotes no row."""


class NoSuchInputError(JobFailedError):
    """The input, or a column of it, does not exist or cannot be read in its format."""


class InputChangedError(JobFailedError):
    """The input has changed since the job was submitted."""


class JobLog(Protocol):
    """Durable state of one job. Every write needs the lease.

    All raise UnavailableError (it is then unknown whether the write was done; it may be repeated) and LeaseLostError.
    """

    def open_chunks(self) -> list[ChunkPlan]:
        """Planned chunks that are not finished, in order."""
        ...

    def plan(self, chunk: ChunkPlan) -> None:
        """Record the next chunk."""
        ...

    def finish(self, chunk: ChunkPlan, part: str, tally: RowTally) -> None:
        """Record that the chunk's results are in this part. A finished chunk stays unchanged."""
        ...

    def parts(self, *, ordered: bool) -> Iterator[str]:
        """Parts of finished chunks, in the order of the input or in the order in which they were finished."""
        ...

    def move(self, status: Status, reason: str | None = None) -> None:
        """Record the job's new status."""
        ...


class RowPublisher(Protocol):
    """Publishes to the tenant's backfill topic; a record is a request id and the encoded request. All raise
    UnavailableError and JobFailedError."""

    def start(self) -> int:
        """Fence earlier publishers of this job. Returns the number of the first chunk that is not in the topic."""
        ...

    def publish(self, chunk: int, records: Sequence[tuple[str, bytes]]) -> None:
        """Publish all rows of a chunk in one transaction; a chunk that is already in the topic is skipped."""
        ...

    def send_again(self, records: Sequence[tuple[str, bytes]]) -> None:
        """Publish requests again that were rejected for now, under the same ids."""
        ...

    def cancel(self, request_ids: Sequence[str]) -> None: ...


class Replies(Protocol):
    """The job's partition of the reply topic, in order. All raise UnavailableError.

    Attributes:
        losses: number of times that replies were removed from the topic before they were read, or were unreadable.
    """

    losses: int

    @property
    def position(self) -> int:
        """Offset of the next record to read."""
        ...

    def start(self, offset: int | None) -> None:
        """Read from this offset on; None: from the end."""
        ...

    def read(self, timeout_s: float) -> list[InferenceReply]:
        """Replies that may be this job's, at once if there are any."""
        ...

    def end(self) -> int:
        """End offset: once ``position`` has reached it, all current replies were read."""
        ...


class Parts(Protocol):
    """Storage of results until the output is complete. All raise UnavailableError and JobFailedError."""

    def write(self, chunk: int, answers: Sequence[RowAnswer]) -> str:
        """Store the results of a chunk atomically; durable when this returns. Returns the name of the part."""
        ...

    def join(self, parts: Callable[[], Iterator[str]]) -> None:
        """Write the output from these parts, atomically; ``parts`` may be called more than once."""
        ...

    def clean_up(self) -> None:
        """Remove every part, once the output is complete."""
        ...
