"""Open chunks of a job: the results of their rows, and the rows to send again. Pure.

The first final reply to a row counts; a further one, to a row that was sent twice, changes nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fairlane.backoff import Backoff, jittered_ms
from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply
from producers.backfill import answers
from producers.backfill.answers import RowAnswer
from producers.backfill.job import BadRow, ChunkPlan, ParsedRow, RowIds

MOST_TRIES = 5
LONGEST_BUDGET_WAIT_MS = 300_000
"""Longest wait of a row that a budget refuses: an operator may raise the budget before it renews."""

_BUDGET_CODES = frozenset({Code.INSUFFICIENT_QUOTA, Code.BUDGET_UNKNOWN})
_BACKOFF = Backoff(first_s=1.0, longest_s=60.0)


@dataclass(slots=True)
class _Awaited:
    row_id: str | None
    url: str | None
    tries: int = 1
    retry_at_ms: int | None = None
    is_sent_once: bool = True
    """By this runner. Of a row that was sent again, or by another runner, several copies may be in flight."""
    is_refused: bool = False
    """No copy is in flight."""


@dataclass(slots=True)
class _OpenChunk:
    plan: ChunkPlan
    awaited: dict[int, _Awaited] = field(default_factory=dict)
    answers: dict[int, RowAnswer] = field(default_factory=dict)
    """By row, in the order of arrival."""
    held_bytes: int = 0
    retry_at_ms: int | None = None
    """Time of its earliest retry."""

    def answer(self, answer: RowAnswer) -> None:
        self.awaited.pop(answer.row, None)
        self.answers[answer.row] = answer
        self.held_bytes += answer.size_bytes

    def plan_retry(self) -> None:
        times = [one.retry_at_ms for one in self.awaited.values() if one.retry_at_ms is not None]
        self.retry_at_ms = min(times, default=None)


@dataclass(slots=True)
class ChunkLedger:
    """Open chunks of one job. Every step is O(1) except those that name a chunk."""

    tenant: str
    ids: RowIds
    spent_until_ms: int = field(default=0, init=False)
    """Until then a budget is used up: what is sent before would be refused."""
    _open: dict[int, _OpenChunk] = field(default_factory=dict, init=False)

    @property
    def chunks(self) -> int:
        """Number of open chunks."""
        return len(self._open)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the open chunks."""
        return tuple(self._open)

    @property
    def open_rows(self) -> int:
        """Rows of open chunks."""
        return sum(chunk.plan.rows for chunk in self._open.values())

    @property
    def answered_rows(self) -> int:
        """Rows of open chunks that have a result."""
        return sum(len(chunk.answers) for chunk in self._open.values())

    @property
    def held_bytes(self) -> int:
        """Approximate size of the unwritten results."""
        return sum(chunk.held_bytes for chunk in self._open.values())

    def open(self, plan: ChunkPlan, rows: Iterable[ParsedRow], *, is_new: bool = True) -> None:
        """Await the replies to these rows; ``is_new``: no other runner has sent them.

        Raises ValueError if the chunk is open, or has another number of rows.
        """
        if plan.number in self._open:
            raise ValueError(f"chunk {plan.number} is open already")
        chunk = _OpenChunk(plan)
        for number, row in enumerate(rows, plan.first_row):
            if isinstance(row, BadRow):
                chunk.answer(answers.of_bad_row(number, row))
            else:
                chunk.awaited[number] = _Awaited(row.row_id, row.url, is_sent_once=is_new)
        if len(chunk.awaited) + len(chunk.answers) != plan.rows:
            raise ValueError(f"chunk {plan.number} has {plan.rows} rows, not as many as were read")
        self._open[plan.number] = chunk

    def take(self, reply: InferenceReply, now_ms: int) -> bool:
        """Apply a reply. False if it changes nothing: it is of another job, or its row has a result."""
        if reply.tenant != self.tenant:
            return False
        row = self.ids.row_of(reply.request_id)
        chunk = None if row is None else self._chunk_of(row)
        if row is None or chunk is None or row not in chunk.awaited:
            return False
        waiting = chunk.awaited[row]
        if reply.outcome == Outcome.REJECTED and reply.retry_after_ms is not None:
            after_ms, is_of_budget = reply.retry_after_ms, reply.code in _BUDGET_CODES
            if is_of_budget:
                # However often: the row waits, as the whole job does, until there is a budget again.
                after_ms, waiting.tries = min(after_ms, LONGEST_BUDGET_WAIT_MS), 1
                self.spent_until_ms = max(self.spent_until_ms, now_ms + after_ms)
            if waiting.tries < MOST_TRIES:
                self._try_again(chunk, row, waiting, after_ms, now_ms)
                waiting.is_refused = waiting.is_sent_once
                return True
        chunk.answer(answers.of_reply(row, waiting.row_id, waiting.url, reply, now_ms // 1000))
        return True

    def refuse(self, number: int, row: int, bad: BadRow) -> None:
        """Give a row that cannot be sent its result."""
        chunk = self._open[number]
        if row in chunk.awaited:
            chunk.answer(answers.of_bad_row(row, bad))

    def due(self, now_ms: int) -> Mapping[ChunkPlan, frozenset[int]]:
        """Rows to send again now, by chunk. Each is returned once."""
        due: dict[ChunkPlan, frozenset[int]] = {}
        for chunk in self._open.values():
            if chunk.retry_at_ms is None or chunk.retry_at_ms > now_ms:
                continue
            rows = {
                row: one
                for row, one in chunk.awaited.items()
                if one.retry_at_ms is not None and one.retry_at_ms <= now_ms
            }
            for one in rows.values():
                one.retry_at_ms, one.is_sent_once, one.is_refused = None, False, False
            if rows:
                due[chunk.plan] = frozenset(rows)
            chunk.plan_retry()
        return due

    def ask_again(self, numbers: Iterable[int], now_ms: int) -> None:
        """Make all rows without a result in these chunks due now, however often they were sent."""
        for number in numbers:
            chunk = self._open.get(number)
            if chunk is None or not chunk.awaited:
                continue
            for one in chunk.awaited.values():
                one.retry_at_ms = now_ms
            chunk.retry_at_ms = now_ms

    def awaited(self) -> list[str]:
        """Request ids of all rows without a result."""
        return [self.ids.id_of(row) for chunk in self._open.values() for row in chunk.awaited]

    def give_up(self, outcome: Outcome, number: int | None = None) -> None:
        """Give rows without a result this one: those of one chunk, or all."""
        for chunk in list(self._open.values()) if number is None else [self._open[number]]:
            self._give_up(chunk, list(chunk.awaited), outcome)

    def give_up_refused(self, outcome: Outcome) -> None:
        """Likewise for rows that were rejected for now: none is in flight, so no reply can arrive."""
        for chunk in self._open.values():
            if chunk.retry_at_ms is not None:
                self._give_up(chunk, [row for row, one in chunk.awaited.items() if one.is_refused], outcome)
                chunk.plan_retry()

    def complete(self) -> list[ChunkPlan]:
        """Chunks with all their results."""
        return [chunk.plan for chunk in self._open.values() if not chunk.awaited]

    def answers_of(self, number: int, *, ordered: bool) -> list[RowAnswer]:
        """Results of a chunk in the order of its rows, or of their arrival."""
        found = self._open[number].answers
        return [found[row] for row in sorted(found)] if ordered else list(found.values())

    def close(self, number: int) -> None:
        """Forget a chunk whose results are written."""
        del self._open[number]

    def _chunk_of(self, row: int) -> _OpenChunk | None:
        for chunk in self._open.values():
            if 0 <= row - chunk.plan.first_row < chunk.plan.rows:
                return chunk
        return None

    def _try_again(self, chunk: _OpenChunk, row: int, waiting: _Awaited, after_ms: int, now_ms: int) -> None:
        if waiting.retry_at_ms is not None:
            return
        pause_ms = max(after_ms, round(1000 * _BACKOFF.delay_s(waiting.tries, 0)))
        waiting.tries += 1
        waiting.retry_at_ms = now_ms + jittered_ms(pause_ms, 0.5, self.ids.id_of(row))
        chunk.retry_at_ms = min(waiting.retry_at_ms, chunk.retry_at_ms or waiting.retry_at_ms)

    def _give_up(self, chunk: _OpenChunk, rows: Iterable[int], outcome: Outcome) -> None:
        for row in rows:
            one = chunk.awaited[row]
            chunk.answer(answers.unfinished(row, one.row_id, one.url, self.ids.id_of(row), outcome))
