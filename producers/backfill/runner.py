"""The loop of one job: plan a chunk, publish it, collect the replies, write them, and at the end join what was written.

Whatever is durable is durable in Postgres, in Kafka or in files before the step after it begins, so that a runner that
is killed anywhere leaves a job that another one goes on with:

- planned, not published: it is published now. Whether it is, the log itself says (see ``Publisher``).
- published, not answered: the replies are read from where they can begin.
- answered, not written: the same.
- written, not done: it is written again, under another name; what counts is the part that is named with ``done``.
- all done: the parts are joined again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from traceback import extract_tb

from confluent_kafka import KafkaException

from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from fairlane.outcomes import Outcome
from fairlane.records import InferenceRequest
from producers.backfill.answers import tally_of
from producers.backfill.chunk_ledger import ChunkLedger
from producers.backfill.job import MAX_COST_REACHED, Budget, ChunkPlan, Job, Position, Status, Tally, Wanted
from producers.backfill.kafka import RequestRecords
from producers.backfill.lease import JobTimeouts, LeftError
from producers.backfill.ports import (
    AwayError,
    Control,
    JobFailedError,
    JobLog,
    LeaseLostError,
    Parts,
    Publisher,
    Replies,
    Source,
)
from producers.backfill.row import ParsedRow, RowContent, RowIds
from producers.backfill.rows import parse_row

log = get_logger(__name__)

_FRAMES = 4


def guarded(job: Job, job_log: JobLog, work: Callable[[], Status]) -> Status:
    """The result of ``work`` on a job; FAILED, with the reason in its log, if the job cannot continue.

    Raises AwayError and LeaseLostError, and KafkaException for settings that no job could be run with.
    """
    try:
        return work()
    except (AwayError, LeaseLostError, KafkaException):
        raise
    except JobFailedError as error:
        reason = str(error)
        log.error("job_failed", job_id=job.job_id, tenant=job.tenant, reason=reason)
    except Exception as error:  # noqa: BLE001 - a row that nobody foresaw fails its job alone
        # Not its text, which may quote a row.
        reason = f"the runner met what it cannot handle: {type(error).__name__}"
        frames = [f"{frame.filename}:{frame.lineno}" for frame in extract_tb(error.__traceback__)[-_FRAMES:]]
        log.error("job_broke", job_id=job.job_id, tenant=job.tenant, error=type(error).__name__, frames=frames)
    job_log.move(Status.FAILED, reason)
    return Status.FAILED


MOST_HELD_BYTES = 64 * 1024 * 1024
"""No further chunk is opened while so much waits to be written."""

GRACE_MS = 30_000
"""How long after its deadline, or after it was cancelled, a row is waited for: its reply may be on its way."""

_READ_S = 0.2


class Runner:
    """Runs one job until it ends or is stopped. For one thread.

    Args:
        job: as it was when the lease was taken.
        budget: of the job; the estimate of a row is all it needs, the limit comes from ``control``.
        max_timeout_ms: the longest a request may have.
        grace_ms: see ``GRACE_MS``.
        on_progress: told what is done, after every chunk.
    """

    def __init__(
        self,
        job: Job,
        log_: JobLog,
        source: Source,
        publisher: Publisher,
        replies: Replies,
        parts: Parts,
        control: Control,
        clock: ClockMs,
        encode: Callable[[InferenceRequest], bytes],
        *,
        budget: Budget,
        max_timeout_ms: int,
        grace_ms: int = GRACE_MS,
        on_progress: Callable[[Tally], None] = lambda _done: None,
    ) -> None:
        self._job = job
        self._log = log_
        self._source = source
        self._publisher = publisher
        self._replies = replies
        self._parts = parts
        self._control = control
        self._clock = clock
        self._budget = budget
        self._grace_ms = grace_ms
        self._on_progress = on_progress
        self._patiently = JobTimeouts(job.job_id, log_, control)
        ids = RowIds(job.job_id, job.partitions)
        self._requests = RequestRecords(ids, encode, max_timeout_ms, job.deadline_at_ms)
        self._ledger = ChunkLedger(job.tenant, ids)
        self._done = job.tally
        self._planned = job.planned
        self._next_chunk = job.next_chunk
        self._position = job.next_position
        self._cancelled_at_ms: int | None = None
        self._begun_at_ms = clock()
        self._replies_end: int | None = None
        self._losses = 0
        self._doubtful: tuple[int, ...] = ()  # chunks of which replies may be lost
        self._doubt_ends = 0
        self._came_on = False
        self._read_again_to = 0  # up to there stand replies that the runner before it may have read

    def run(self) -> Status:
        """The job's status afterwards; PAUSED also if another runner is to continue it.

        Raises LeaseLostError: another runner has it.
        """
        try:
            try:
                return self._run()
            except JobFailedError as error:
                reason = str(error)
                log.error("job_failed", job_id=self._job.job_id, tenant=self._job.tenant, reason=reason)
                self._patiently.is_ending = True
                self._patiently(lambda: self._log.move(Status.FAILED, reason))
                return Status.FAILED
        except LeftError:
            return Status.PAUSED

    def _run(self) -> Status:
        try:
            self._begin()
            while (ended := self._step()) is None:
                if self._control.gives_way and self._came_on:
                    raise LeftError
        except JobFailedError as error:
            if self._control.wanted is not Wanted.CANCEL or self._patiently.is_ending:
                raise
            # What its owner wants to end must come to an end though its input is gone: with what is known by now.
            return self._end_cancelled(str(error))
        return ended

    def _begin(self) -> None:
        """Take up the job where it was left."""
        first_unpublished = self._patiently(self._publisher.start)
        plans = self._patiently(self._log.open_chunks)
        begin = min((plan.reply_offset for plan in plans), default=None)
        self._patiently(lambda: self._replies.start(begin))
        self._read_again_to = self._patiently(self._replies.end)
        for plan in plans:
            rows = self._rows_of(plan)
            is_new = plan.number >= first_unpublished
            self._ledger.open(plan, rows, is_new=is_new)
            if is_new:
                self._send(plan, rows)
        log.info("job_begun", job_id=self._job.job_id, tenant=self._job.tenant, open_chunks=len(plans))

    def _step(self) -> Status | None:
        """One iteration. Returns the status once the job has ended, else None."""
        self._patiently.heed()
        if self._control.wanted is Wanted.CANCEL and self._cancelled_at_ms is None:
            self._cancel()
        if rows := self._rows_to_open():
            self._open_next(rows)
        wait_s = 0.0 if self._rows_to_open() else _READ_S
        now_ms = self._clock()
        for reply in self._patiently(lambda: self._replies.read(wait_s)):
            self._ledger.take(reply, now_ms)
        self._came_on |= self._replies.position >= self._read_again_to
        self._doubt_if_lost(now_ms)
        if self._may_send:
            self._send_again()
        else:
            self._ledger.give_up_refused(self._unsent)
        self._give_up_if_late()
        self._finish_complete()
        if self._ledger.chunks:
            return None
        if self._cancelled_at_ms is not None or self._all_planned:
            return self._finalize()
        if self._affordable_rows == 0 and not self._is_late:
            self._patiently(lambda: self._log.move(Status.PAUSED, MAX_COST_REACHED))
            return Status.PAUSED
        return None

    # What may be done

    @property
    def _all_planned(self) -> bool:
        return self._planned >= self._job.total_rows

    @property
    def _is_late(self) -> bool:
        """Whether the completion window has ended."""
        deadline_at_ms = self._job.deadline_at_ms
        return deadline_at_ms is not None and self._clock() >= deadline_at_ms

    @property
    def _may_send(self) -> bool:
        return self._control.wanted is not Wanted.CANCEL and not self._is_late

    @property
    def _unsent(self) -> Outcome:
        """Of what may not be sent, or is not waited for, any more. A late job that is cancelled has been cancelled."""
        return Outcome.CANCELLED if self._control.wanted is Wanted.CANCEL else Outcome.EXPIRED

    def _rows_to_open(self) -> int:
        """Number of rows for the next chunk; 0: none may be opened now. Rows that will not run are still read and get a
        result."""
        spec = self._job.spec
        if (
            self._cancelled_at_ms is not None
            or self._control.wanted is not Wanted.RUN
            or self._ledger.chunks >= spec.max_open_chunks
            or self._ledger.held_bytes >= MOST_HELD_BYTES
        ):
            return 0
        rows = min(spec.chunk_rows, self._job.total_rows - self._planned)
        affordable = None if self._is_late else self._affordable_rows
        if affordable is None or affordable >= rows:
            return rows
        # What is under way may turn out cheaper: only the last rows of a budget are sent as a smaller chunk.
        return 0 if self._ledger.chunks else affordable

    @property
    def _affordable_rows(self) -> int | None:
        budget = replace(self._budget, max_cost_tokens=self._control.max_cost_tokens)
        return budget.affordable_rows(self._done, self._ledger.open_rows)

    # Steps

    def _open_next(self, most_rows: int) -> None:
        with suppress(_CancelHeardError):
            self._plan_next(*self._read(self._position, most_rows, self._job.spec.chunk_bytes))

    def _plan_next(self, contents: Sequence[RowContent], end: Position) -> None:
        if not contents:
            raise JobFailedError(f"the input ends after {self._planned} rows; {self._job.total_rows} were counted")
        rows = self._parsed(contents)
        plan = ChunkPlan(
            self._next_chunk, self._planned, len(rows), self._position, end, reply_offset=self._replies.position
        )
        self._patiently(lambda: self._log.plan(plan))
        self._next_chunk += 1
        self._planned += plan.rows
        self._position = end
        self._ledger.open(plan, rows)
        self._send(plan, rows)

    def _rows_of(self, plan: ChunkPlan) -> list[ParsedRow]:
        # So many bytes as the chunk has: their number was bounded when it was planned.
        contents, end = self._read(plan.begin, plan.rows, _ANY_BYTES)
        if len(contents) != plan.rows or end != plan.end:
            raise JobFailedError(f"the input has changed: rows {plan.first_row} and on are not where they were")
        return self._parsed(contents)

    def _read(self, begin: Position, most_rows: int, most_bytes: int) -> tuple[list[RowContent], Position]:
        """An input that does not answer is waited for until the job is cancelled or its time is up.

        Raises JobFailedError.
        """

        def read() -> tuple[list[RowContent], Position]:
            try:
                return self._source.read(begin, most_rows, most_bytes)
            except AwayError as error:
                reason = f"the input could not be read in time: {error}"
                if self._control.wanted is Wanted.CANCEL:
                    raise _CancelHeardError(reason) from None
                if self._is_late:
                    raise JobFailedError(reason) from None
                raise

        return self._patiently(read)

    def _parsed(self, contents: Sequence[RowContent]) -> list[ParsedRow]:
        spec, tenant = self._job.spec, self._job.tenant
        return [parse_row(content, tenant, spec.defaults, spec.openai_url) for content in contents]

    def _send(self, plan: ChunkPlan, rows: Sequence[ParsedRow]) -> None:
        """Publish the rows of an open chunk, or give them up if that takes until they may not be sent any more."""

        def publish() -> None:
            if self._may_send:
                if records := self._records(plan, rows):
                    self._publisher.publish(plan.number, records)
            # A try that failed may be in the log all the same: its replies are waited for.
            elif plan.number >= self._publisher.start():
                self._ledger.give_up(self._unsent, plan.number)

        self._patiently(publish)

    def _records(
        self, plan: ChunkPlan, rows: Sequence[ParsedRow], only: frozenset[int] | None = None
    ) -> list[tuple[str, bytes]]:
        """Request ids and encoded requests; a row that is too large for the topic is answered."""
        records, refused = self._requests.of(plan, rows, self._clock(), only)
        for number, bad in refused.items():
            self._ledger.refuse(plan.number, number, bad)
        return records

    def _send_again(self) -> None:
        for plan, numbers in self._ledger.due(self._clock()).items():
            # Rows are not kept: those that were refused for now are few, and are read once more.
            with suppress(_CancelHeardError):
                self._patiently(partial(self._publish_again, plan, self._rows_of(plan), numbers))

    def _publish_again(self, plan: ChunkPlan, rows: Sequence[ParsedRow], numbers: frozenset[int]) -> None:
        # Otherwise nobody knows whether a try that failed is in the log: a reply is waited for, as long as for others.
        if self._may_send:
            self._publisher.send_again(self._records(plan, rows, numbers))

    def _doubt_if_lost(self, now_ms: int) -> None:
        """Once everything is read that is left of replies of which some were removed, the rows without one are sent
        again under their ids: the dispatcher answers an id that it answered before with the same reply."""
        if self._replies.losses != self._losses:
            self._doubt_ends = self._patiently(self._replies.end)
            self._losses, self._doubtful = self._replies.losses, self._ledger.numbers
        if self._doubtful and self._replies.position >= self._doubt_ends:
            self._ledger.ask_again(self._doubtful, now_ms)
            self._doubtful = ()

    def _cancel(self) -> None:
        self._patiently(lambda: self._log.move(Status.CANCELLING))
        awaited = self._ledger.awaited()
        if awaited:
            self._patiently(lambda: self._publisher.cancel(awaited))
        self._cancelled_at_ms = self._clock()

    def _end_cancelled(self, reason: str) -> Status:
        if self._cancelled_at_ms is None:
            with suppress(JobFailedError):
                self._cancel()
        self._cancelled_at_ms = self._cancelled_at_ms or self._clock()
        self._ledger.give_up(Outcome.CANCELLED)
        self._finish_complete()
        return self._finalize(reason)

    def _give_up_if_late(self) -> None:
        late_from_ms = self._job.deadline_at_ms if self._cancelled_at_ms is None else self._cancelled_at_ms
        if late_from_ms is None or self._clock() < max(late_from_ms, self._begun_at_ms) + self._grace_ms:
            return
        if not self._ledger.chunks:
            return
        # A runner that comes late, or reads slowly, takes first whatever was answered until now.
        if self._replies_end is None:
            self._replies_end = self._patiently(self._replies.end)
        if self._replies.position >= self._replies_end:
            self._ledger.give_up(self._unsent)

    def _finish_complete(self) -> None:
        for plan in self._ledger.complete():
            self._finish(plan)

    def _finish(self, plan: ChunkPlan) -> None:
        answers = self._ledger.answers_of(plan.number, ordered=self._job.spec.ordered)
        tally = tally_of(answers)
        part = self._patiently(lambda: self._parts.write(plan.number, answers))
        self._patiently(lambda: self._log.finish(plan, part, tally))
        self._ledger.close(plan.number)
        self._came_on = True
        self._done += tally
        self._on_progress(self._done)

    def _finalize(self, reason: str | None = None) -> Status:
        # By what is durable, so that however long the parts take, and whoever joins them, it is the same.
        status = Status.EXPIRED if self._done.expired else Status.COMPLETED
        if self._control.wanted is Wanted.CANCEL:
            status = Status.CANCELLED
        self._patiently.is_ending = True
        self._patiently(lambda: self._log.move(Status.FINALIZING))
        self._patiently(lambda: self._parts.join(self._done_parts))
        self._patiently(lambda: self._log.move(status, reason))
        self._clean_up()
        return status

    def _done_parts(self) -> Iterator[str]:
        """A process that is to end does not wait until gigabytes are joined."""
        for part in self._log.parts(ordered=self._job.spec.ordered):
            if self._control.stopping:
                raise LeftError
            yield part

    def _clean_up(self) -> None:
        try:
            self._patiently(self._parts.clean_up)
        except Exception as error:  # noqa: BLE001 - the job has ended, whatever becomes of its parts
            log.warning("parts_left_behind", job_id=self._job.job_id, reason=type(error).__name__)


_ANY_BYTES = 2**62


class _CancelHeardError(JobFailedError):
    """The input does not answer, and the job is to be cancelled: that can be done without it."""
