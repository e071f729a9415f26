"""The loop of one job: plan a chunk, publish it, collect the replies, write them, and at the end join the parts.

Each step is durable in Postgres, in Kafka or in files before the next one begins. The runner that continues a job after
a kill finds a chunk in one of these states:

- planned, not published: it is published now. The topic itself says whether it is (see ``KafkaPublisher``).
- published, or answered, not written: the replies are read from the chunk's first possible offset.
- written, not finished: it is written again under another name; only the part that is recorded as finished counts.
- all chunks finished: the parts are joined again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from traceback import extract_tb

from confluent_kafka import KafkaException

from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from fairlane.names import JOBS_REPLIES
from fairlane.outcomes import Outcome
from fairlane.records import InferenceRequest
from producers.backfill.answers import tally_of
from producers.backfill.chunk_ledger import ChunkLedger
from producers.backfill.errors import JobFailedError, LeaseLostError, UnavailableError
from producers.backfill.inputs import RowSource
from producers.backfill.job import (
    MAX_COST_REACHED,
    BadRow,
    ChunkPlan,
    InputPosition,
    Job,
    ParsedRow,
    RowContent,
    RowIds,
    RowTally,
    Status,
    Wanted,
    affordable_rows,
)
from producers.backfill.job_store import PostgresJobLog
from producers.backfill.kafka import KafkaPublisher, KafkaReplies
from producers.backfill.lease import JobRetries, LeaseKeeper, LeftError
from producers.backfill.outputs import FileParts
from producers.backfill.rows import parse_row

log = get_logger(__name__)

_FRAMES = 4


def guarded(job: Job, job_log: PostgresJobLog, work: Callable[[], Status]) -> Status:
    """The result of ``work`` on a job; FAILED, with the reason in its log, if the job cannot continue.

    Raises UnavailableError and LeaseLostError, and KafkaException for settings that no job could be run with.
    """
    try:
        return work()
    except (UnavailableError, LeaseLostError, KafkaException):
        raise
    except JobFailedError as error:
        reason = str(error)
        log.error("job_failed", job_id=job.job_id, tenant=job.tenant, reason=reason)
    except Exception as error:  # noqa: BLE001 - an unforeseen error fails this job alone
        # Not its text, which may quote a row.
        reason = f"the runner met what it cannot handle: {type(error).__name__}"
        frames = [f"{frame.filename}:{frame.lineno}" for frame in extract_tb(error.__traceback__)[-_FRAMES:]]
        log.error("job_broke", job_id=job.job_id, tenant=job.tenant, error=type(error).__name__, frames=frames)
    job_log.move(Status.FAILED, reason)
    return Status.FAILED


MOST_HELD_BYTES = 64 * 1024 * 1024
"""Size of unwritten results from which on no further chunk is opened."""

MOST_RECORD_BYTES = 4_000_000
"""A little less than the limit of a backfill topic (topics.yaml)."""

GRACE_MS = 30_000
"""How long a reply is awaited after the deadline, or after the cancellation."""

_READ_S = 0.2


@dataclass(slots=True)
class Runner:
    """Runs one job until it ends or is left. For one thread.

    Attributes:
        job: with all that is planned and done so far.
        encode: encodes a request; raises ValueError for one that cannot be a record.
        row_cost: estimated cost of a row, in cost tokens.
        max_timeout_ms: longest timeout of a request.
        grace_ms: see ``GRACE_MS``.
        on_progress: called with the totals after every chunk.
    """

    job: Job
    job_log: PostgresJobLog
    source: RowSource
    publisher: KafkaPublisher
    replies: KafkaReplies
    parts: FileParts
    control: LeaseKeeper
    clock: ClockMs
    encode: Callable[[InferenceRequest], bytes]
    _: KW_ONLY
    row_cost: float
    max_timeout_ms: int
    grace_ms: int = GRACE_MS
    on_progress: Callable[[RowTally], None] = lambda _done: None
    _retry: JobRetries = field(init=False)
    _ledger: ChunkLedger = field(init=False)
    _begun_at_ms: int = field(init=False)
    _cancelled_at_ms: int | None = field(default=None, init=False)
    _replies_end: int | None = field(default=None, init=False)
    _losses: int = field(default=0, init=False)
    _chunks_with_losses: tuple[int, ...] = field(default=(), init=False)
    _losses_end: int = field(default=0, init=False)
    _has_progressed: bool = field(default=False, init=False)
    _backlog_end: int = field(default=0, init=False)
    """End of the replies that the previous runner may have read."""

    def __post_init__(self) -> None:
        job = self.job
        self._retry = JobRetries(job.job_id, self.job_log, self.control)
        self._ledger = ChunkLedger(job.tenant, RowIds(job.job_id, job.partitions))
        self._begun_at_ms = self.clock()

    def run(self) -> Status:
        """The job's status afterwards; PAUSED also if another runner is to continue it. Raises LeaseLostError."""
        try:
            try:
                return self._run()
            except JobFailedError as error:
                reason = str(error)
                log.error("job_failed", job_id=self.job.job_id, tenant=self.job.tenant, reason=reason)
                self._retry.is_ending = True
                self._retry(lambda: self.job_log.move(Status.FAILED, reason))
                return Status.FAILED
        except LeftError:
            return Status.PAUSED

    def _run(self) -> Status:
        try:
            self._begin()
            while (ended := self._step()) is None:
                if self.control.gives_way and self._has_progressed:
                    raise LeftError
        except JobFailedError as error:
            if self.control.wanted is not Wanted.CANCEL or self._retry.is_ending:
                raise
            # A cancelled job must end although its input is gone: with the results that there are.
            return self._end_cancelled(str(error))
        return ended

    def _begin(self) -> None:
        """Continue the job where it was left."""
        first_unpublished = self._retry(self.publisher.start)
        plans = self._retry(self.job_log.open_chunks)
        begin = min((plan.reply_offset for plan in plans), default=None)
        self._retry(lambda: self.replies.start(begin))
        self._backlog_end = self._retry(self.replies.end)
        for plan in plans:
            rows = self._rows_of(plan)
            is_new = plan.number >= first_unpublished
            self._ledger.open(plan, rows, is_new=is_new)
            if is_new:
                self._send(plan, rows)
        log.info("job_begun", job_id=self.job.job_id, tenant=self.job.tenant, open_chunks=len(plans))

    def _step(self) -> Status | None:
        """One iteration. Returns the status once the job has ended, else None."""
        self._retry.check_commands()
        if self.control.wanted is Wanted.CANCEL and self._cancelled_at_ms is None:
            self._cancel()
        if rows := self._rows_to_open():
            self._open_next(rows)
        wait_s = 0.0 if self._rows_to_open() else _READ_S
        now_ms = self.clock()
        was_spent = self._ledger.spent_until_ms > now_ms
        for reply in self._retry(lambda: self.replies.read(wait_s)):
            self._ledger.take(reply, now_ms)
        if self._ledger.spent_until_ms > now_ms and not was_spent:
            log.info("job_waits_for_budget", job_id=self.job.job_id, tenant=self.job.tenant)
        self.control.answered_rows = self.job.tally.rows + self._ledger.answered_rows
        self._has_progressed |= self.replies.position >= self._backlog_end
        self._resend_lost(now_ms)
        if self._may_send:
            self._send_again()
        else:
            self._ledger.give_up_refused(self._unfinished_outcome)
        self._give_up_if_late()
        for plan in self._ledger.complete():
            self._finish(plan)
        if self._ledger.chunks:
            return None
        if self._cancelled_at_ms is not None or self.job.planned >= self.job.total_rows:
            return self._finalize()
        if self._affordable_rows == 0 and not self._is_late:
            self._retry(lambda: self.job_log.move(Status.PAUSED, MAX_COST_REACHED))
            return Status.PAUSED
        return None

    @property
    def _is_late(self) -> bool:
        """Whether the completion window has ended."""
        deadline_at_ms = self.job.deadline_at_ms
        return deadline_at_ms is not None and self.clock() >= deadline_at_ms

    @property
    def _may_send(self) -> bool:
        return self.control.wanted is not Wanted.CANCEL and not self._is_late

    @property
    def _unfinished_outcome(self) -> Outcome:
        """Outcome of rows without a reply. In a job that is late and cancelled they are cancelled."""
        return Outcome.CANCELLED if self.control.wanted is Wanted.CANCEL else Outcome.EXPIRED

    def _rows_to_open(self) -> int:
        """Number of rows for the next chunk; 0: none may be opened now. Rows that are not sent any more are still read
        and get a result."""
        spec = self.job.spec
        if (
            self._cancelled_at_ms is not None
            or self.control.wanted is not Wanted.RUN
            or self._ledger.chunks >= spec.max_open_chunks
            or self._ledger.spent_until_ms > self.clock()
            or self._ledger.held_bytes >= MOST_HELD_BYTES
        ):
            return 0
        rows = min(spec.chunk_rows, self.job.total_rows - self.job.planned)
        affordable = None if self._is_late else self._affordable_rows
        if affordable is None or affordable >= rows:
            return rows
        # Rows in flight may turn out cheaper: only the last rows of a budget are sent as a smaller chunk.
        return 0 if self._ledger.chunks else affordable

    @property
    def _affordable_rows(self) -> int | None:
        done = self.job.tally
        # The average of the finished rows; before there are any, the estimate.
        row_cost = done.cost_tokens / done.rows if done.rows else self.row_cost
        return affordable_rows(self.control.max_cost_tokens, done.cost_tokens, row_cost, self._ledger.open_rows)

    def _open_next(self, most_rows: int) -> None:
        job = self.job
        try:
            contents, end = self._read(job.next_position, most_rows, job.spec.chunk_bytes)
        except _CancelledWhileReadingError:
            return
        if not contents:
            raise JobFailedError(f"the input ends after {job.planned} rows; {job.total_rows} were counted")
        rows = self._parsed(contents)
        plan = ChunkPlan(job.next_chunk, job.planned, len(rows), job.next_position, end, self.replies.position)
        self._retry(lambda: self.job_log.plan(plan))
        self.job = replace(job, planned=job.planned + plan.rows, next_chunk=job.next_chunk + 1, next_position=plan.end)
        self._ledger.open(plan, rows)
        self._send(plan, rows)

    def _rows_of(self, plan: ChunkPlan) -> list[ParsedRow]:
        # No limit of bytes: it was applied when the chunk was planned.
        contents, end = self._read(plan.begin, plan.rows, _ANY_BYTES)
        if len(contents) != plan.rows or end != plan.end:
            raise JobFailedError(f"the input has changed: rows {plan.first_row} and on are not where they were")
        return self._parsed(contents)

    def _read(self, begin: InputPosition, most_rows: int, most_bytes: int) -> tuple[list[RowContent], InputPosition]:
        """Read rows; an unavailable input is retried until the job is cancelled or late. Raises JobFailedError."""

        def read() -> tuple[list[RowContent], InputPosition]:
            try:
                return self.source.read(begin, most_rows, most_bytes)
            except UnavailableError as error:
                reason = f"the input could not be read in time: {error}"
                if self.control.wanted is Wanted.CANCEL:
                    raise _CancelledWhileReadingError(reason) from None
                if self._is_late:
                    raise JobFailedError(reason) from None
                raise

        return self._retry(read)

    def _parsed(self, contents: Sequence[RowContent]) -> list[ParsedRow]:
        spec, tenant = self.job.spec, self.job.tenant
        return [parse_row(content, tenant, spec.defaults, spec.openai_url) for content in contents]

    def _send(self, plan: ChunkPlan, rows: Sequence[ParsedRow]) -> None:
        """Publish the rows of an open chunk; give them up if they may not be sent any more by the time it succeeds."""

        def publish() -> None:
            if self._may_send:
                if records := self._records(plan, rows):
                    self.publisher.publish(plan.number, records)
            # A failed attempt may be in the topic all the same; then its replies are awaited.
            elif plan.number >= self.publisher.start():
                self._ledger.give_up(self._unfinished_outcome, plan.number)

        self._retry(publish)

    def _records(
        self, plan: ChunkPlan, rows: Sequence[ParsedRow], only: frozenset[int] | None = None
    ) -> list[tuple[str, bytes]]:
        """Request ids and encoded requests of a chunk's rows, or of some of them, whose timeout is the time that is
        left. A row that cannot be a record gets its result."""
        deadline_at_ms = self.job.deadline_at_ms
        left_ms = self.max_timeout_ms if deadline_at_ms is None else deadline_at_ms - self.clock()
        timeout_ms = max(1, min(left_ms, self.max_timeout_ms))
        records: list[tuple[str, bytes]] = []
        for number, row in enumerate(rows, plan.first_row):
            if isinstance(row, BadRow) or (only is not None and number not in only):
                continue
            request_id = self._ledger.ids.id_of(number)
            request = replace(
                row.request,
                request_id=request_id,
                timeout_ms=timeout_ms,
                reply_to=JOBS_REPLIES,
                requested_by=self.job.spec.requested_by,
            )
            try:
                records.append((request_id, self._encoded(request)))
            except ValueError as error:
                self._ledger.refuse(plan.number, number, BadRow(row.row_id, "row", str(error), row.url))
        return records

    def _encoded(self, request: InferenceRequest) -> bytes:
        record = self.encode(request)
        if len(record) > MOST_RECORD_BYTES:
            raise ValueError(f"{len(record)} bytes are more than {MOST_RECORD_BYTES}")
        return record

    def _send_again(self) -> None:
        for plan, numbers in self._ledger.due(self.clock()).items():
            # Rows are not kept in memory: few are rejected for now, and these are read again.
            with suppress(_CancelledWhileReadingError):
                self._retry(partial(self._publish_again, plan, self._rows_of(plan), numbers))

    def _publish_again(self, plan: ChunkPlan, rows: Sequence[ParsedRow], numbers: frozenset[int]) -> None:
        # Otherwise a failed attempt may be in the topic: a reply is awaited, as for other rows.
        if self._may_send:
            self.publisher.send_again(self._records(plan, rows, numbers))

    def _resend_lost(self, now_ms: int) -> None:
        """After a loss of replies, read to the present end; then send the rows without a reply again under their ids.
        The dispatcher answers a known id with its recorded reply."""
        if self.replies.losses != self._losses:
            self._losses_end = self._retry(self.replies.end)
            self._losses, self._chunks_with_losses = self.replies.losses, self._ledger.numbers
        if self._chunks_with_losses and self.replies.position >= self._losses_end:
            self._ledger.ask_again(self._chunks_with_losses, now_ms)
            self._chunks_with_losses = ()

    def _cancel(self) -> None:
        self._retry(lambda: self.job_log.move(Status.CANCELLING))
        awaited = self._ledger.awaited()
        if awaited:
            self._retry(lambda: self.publisher.cancel(awaited))
        self._cancelled_at_ms = self.clock()

    def _end_cancelled(self, reason: str) -> Status:
        if self._cancelled_at_ms is None:
            with suppress(JobFailedError):
                self._cancel()
        self._cancelled_at_ms = self._cancelled_at_ms or self.clock()
        self._ledger.give_up(Outcome.CANCELLED)
        for plan in self._ledger.complete():
            self._finish(plan)
        return self._finalize(reason)

    def _give_up_if_late(self) -> None:
        late_from_ms = self.job.deadline_at_ms if self._cancelled_at_ms is None else self._cancelled_at_ms
        if late_from_ms is None or self.clock() < max(late_from_ms, self._begun_at_ms) + self.grace_ms:
            return
        if not self._ledger.chunks:
            return
        # A runner that starts late, or reads slowly, first takes all replies that exist by now.
        if self._replies_end is None:
            self._replies_end = self._retry(self.replies.end)
        if self.replies.position >= self._replies_end:
            self._ledger.give_up(self._unfinished_outcome)

    def _finish(self, plan: ChunkPlan) -> None:
        answers = self._ledger.answers_of(plan.number, ordered=self.job.spec.ordered)
        tally = tally_of(answers)
        part = self._retry(lambda: self.parts.write(plan.number, answers))
        self._retry(lambda: self.job_log.finish(plan, part, tally))
        self._ledger.close(plan.number)
        self._has_progressed = True
        self.job = replace(self.job, tally=self.job.tally + tally)
        self.on_progress(self.job.tally)

    def _finalize(self, reason: str | None = None) -> Status:
        # From durable state only: the same however long joining takes, and whichever runner does it.
        status = Status.EXPIRED if self.job.tally.expired else Status.COMPLETED
        if self.control.wanted is Wanted.CANCEL:
            status = Status.CANCELLED
        self._retry.is_ending = True
        self._retry(lambda: self.job_log.move(Status.FINALIZING))
        self._retry(lambda: self.parts.join(self._finished_parts))
        self._retry(lambda: self.job_log.move(status, reason))
        try:
            self._retry(self.parts.clean_up)
        except Exception as error:  # noqa: BLE001 - the job has ended, whether or not its parts can be removed
            log.warning("parts_left_behind", job_id=self.job.job_id, reason=type(error).__name__)
        return status

    def _finished_parts(self) -> Iterator[str]:
        """Raises LeftError when the process is to end: joining gigabytes takes minutes."""
        for part in self.job_log.parts(ordered=self.job.spec.ordered):
            if self.control.stopping:
                raise LeftError
            yield part


_ANY_BYTES = 2**62


class _CancelledWhileReadingError(JobFailedError):
    """The input is unavailable, and the job is cancelled, which does not need it."""
