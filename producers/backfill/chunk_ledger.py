"""The chunks of a job that are open: which of their rows were answered, and which are to be tried again. Pure.

A row is answered once. Whatever else comes under its id is a copy, of a row that was sent twice, and changes nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fairlane.backoff import Backoff, jittered_ms
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply
from producers.backfill import answers
from producers.backfill.answers import RowAnswer
from producers.backfill.job import ChunkPlan
from producers.backfill.row import BadRow, ParsedRow, RowIds

MOST_TRIES = 5
_BACKOFF = Backoff(first_s=1.0, longest_s=60.0)


@dataclass(slots=True)
class _Awaited:
    row_id: str | None
    url: str | None
    tries: int = 1
    retry_at_ms: int | None = None
    is_sent_once: bool = True
    """By this runner. Of what was sent again, or by another runner, more than one copy may be under way."""
    is_refused: bool = False
    """Nothing of it is under way."""


@dataclass(slots=True)
class _OpenChunk:
    plan: ChunkPlan
    awaited: dict[int, _Awaited] = field(default_factory=dict)
    answers: dict[int, RowAnswer] = field(default_factory=dict)
    """In the order in which they came."""
    held_bytes: int = 0

    def answer(self, answer: RowAnswer) -> None:
        self.awaited.pop(answer.row, None)
        self.answers[answer.row] = answer
        self.held_bytes += answer.size_bytes


@dataclass(slots=True)
class ChunkLedger:
    """Open chunks of one job. Every step is O(1) except those that name a chunk."""

    tenant: str
    ids: RowIds
    most_tries: int = MOST_TRIES
    _open: dict[int, _OpenChunk] = field(default_factory=dict, init=False)
    _complete: dict[int, None] = field(default_factory=dict, init=False)
    _retries_due: dict[int, int] = field(default_factory=dict, init=False)
    """By chunk: when the first of its rows is to be tried again."""

    @property
    def chunks(self) -> int:
        """Number of open chunks."""
        return len(self._open)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of those that are open."""
        return tuple(self._open)

    @property
    def open_rows(self) -> int:
        """Rows of open chunks."""
        return sum(chunk.plan.rows for chunk in self._open.values())

    @property
    def held_bytes(self) -> int:
        """About what the answers take that are not written yet."""
        return sum(chunk.held_bytes for chunk in self._open.values())

    def open(self, plan: ChunkPlan, rows: Iterable[ParsedRow], *, is_new: bool = True) -> None:
        """Wait for the replies to these rows; ``is_new``: no other runner sent them.

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
        self._note(chunk)

    def take(self, reply: InferenceReply, now_ms: int) -> bool:
        """Take in a reply. False if it changes nothing: it is not for this job, or for a row that is answered."""
        if reply.tenant != self.tenant:
            return False
        row = self.ids.row_of(reply.request_id)
        chunk = None if row is None else self._chunk_of(row)
        if row is None or chunk is None or row not in chunk.awaited:
            return False
        waiting = chunk.awaited[row]
        if self._may_try_again(reply, waiting):
            self._try_again(chunk, row, waiting, reply.retry_after_ms or 0, now_ms)
            waiting.is_refused = waiting.is_sent_once
            return True
        chunk.answer(answers.of_reply(row, waiting.row_id, waiting.url, reply, now_ms // 1000))
        self._note(chunk)
        return True

    def refuse(self, number: int, row: int, bad: BadRow) -> None:
        """A row of this chunk turned out to be none that can be sent."""
        chunk = self._open[number]
        if row in chunk.awaited:
            chunk.answer(answers.of_bad_row(row, bad))
            self._note(chunk)

    def due(self, now_ms: int) -> Mapping[ChunkPlan, frozenset[int]]:
        """Rows to send once more now, by chunk. Each is returned once."""
        due: dict[ChunkPlan, frozenset[int]] = {}
        for number in [number for number, at_ms in self._retries_due.items() if at_ms <= now_ms]:
            chunk = self._open[number]
            rows = {
                row: one
                for row, one in chunk.awaited.items()
                if one.retry_at_ms is not None and one.retry_at_ms <= now_ms
            }
            for one in rows.values():
                one.retry_at_ms, one.is_sent_once, one.is_refused = None, False, False
            if rows:
                due[chunk.plan] = frozenset(rows)
            self._plan_retries(chunk)
        return due

    def ask_again(self, numbers: Iterable[int], now_ms: int) -> None:
        """The rows of these chunks that are not answered are due to be sent once more, whatever was tried before."""
        for number in numbers:
            chunk = self._open.get(number)
            if chunk is None or not chunk.awaited:
                continue
            for one in chunk.awaited.values():
                one.retry_at_ms = now_ms
            self._retries_due[number] = now_ms

    def awaited(self) -> list[str]:
        """The request ids of all rows that are not answered."""
        return [self.ids.id_of(row) for chunk in self._open.values() for row in chunk.awaited]

    def give_up(self, outcome: Outcome, number: int | None = None) -> None:
        """Give up unanswered rows of one chunk or of all: they expired, or were cancelled."""
        for chunk in list(self._open.values()) if number is None else [self._open[number]]:
            for row, one in list(chunk.awaited.items()):
                chunk.answer(answers.unfinished(row, one.row_id, one.url, self.ids.id_of(row), outcome))
            self._note(chunk)

    def give_up_refused(self, outcome: Outcome) -> None:
        """Give up rows that were refused for now: none is in flight, so no reply can arrive."""
        for number in list(self._retries_due):
            chunk = self._open[number]
            for row, one in [found for found in chunk.awaited.items() if found[1].is_refused]:
                chunk.answer(answers.unfinished(row, one.row_id, one.url, self.ids.id_of(row), outcome))
            self._plan_retries(chunk)
            self._note(chunk)

    def complete(self) -> list[ChunkPlan]:
        """Chunks whose every row is answered, in the order in which they became so."""
        return [self._open[number].plan for number in self._complete]

    def answers_of(self, number: int, *, ordered: bool) -> list[RowAnswer]:
        """The answers of a chunk in the order of its rows, or else as they came."""
        found = self._open[number].answers
        return [found[row] for row in sorted(found)] if ordered else list(found.values())

    def close(self, number: int) -> None:
        """Its answers are written."""
        del self._open[number]
        self._complete.pop(number, None)
        self._retries_due.pop(number, None)

    def _chunk_of(self, row: int) -> _OpenChunk | None:
        for chunk in self._open.values():
            if 0 <= row - chunk.plan.first_row < chunk.plan.rows:
                return chunk
        return None

    def _may_try_again(self, reply: InferenceReply, waiting: _Awaited) -> bool:
        refused_for_now = reply.outcome == Outcome.REJECTED and reply.retry_after_ms is not None
        return refused_for_now and waiting.tries < self.most_tries

    def _try_again(self, chunk: _OpenChunk, row: int, waiting: _Awaited, after_ms: int, now_ms: int) -> None:
        if waiting.retry_at_ms is not None:
            return
        pause_ms = max(after_ms, round(1000 * _BACKOFF.delay_s(waiting.tries, 0)))
        waiting.tries += 1
        waiting.retry_at_ms = now_ms + jittered_ms(pause_ms, 0.5, self.ids.id_of(row))
        number = chunk.plan.number
        self._retries_due[number] = min(waiting.retry_at_ms, self._retries_due.get(number, waiting.retry_at_ms))

    def _plan_retries(self, chunk: _OpenChunk) -> None:
        times = [one.retry_at_ms for one in chunk.awaited.values() if one.retry_at_ms is not None]
        if times:
            self._retries_due[chunk.plan.number] = min(times)
        else:
            self._retries_due.pop(chunk.plan.number, None)

    def _note(self, chunk: _OpenChunk) -> None:
        if not chunk.awaited:
            self._complete[chunk.plan.number] = None
            self._retries_due.pop(chunk.plan.number, None)
