"""Kafka, Postgres, files and a cluster in memory, for the loop of a job. Each step of them may kill the runner, before
or after it took effect, or say that nothing answers.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply, InferenceRequest, Output, TokenUsage
from fairlane.schema_files import default_codec
from producers.backfill.answers import RowAnswer
from producers.backfill.errors import LeaseLostError, UnavailableError
from producers.backfill.files import LocalFile
from producers.backfill.inputs import RowSource
from producers.backfill.job import (
    ChunkPlan,
    Fingerprint,
    InputPosition,
    Job,
    JobSpec,
    RowContent,
    RowTally,
    Status,
    Wanted,
)
from producers.backfill.runner import Runner

TENANT = "acme"
PARTITIONS = 12
CODEC = default_codec()
GOOD_ROW = b'{"id": "%d", "prompt": "a question", "model": "words", "max_tokens": 2}'
Answer = Callable[[InferenceRequest], InferenceReply | None]


class KilledError(BaseException):
    """SIGKILL: nothing of the runner goes on, not even what catches errors."""


@dataclass(slots=True)
class Trouble:
    """What goes wrong, at which step; steps are counted over all runners.

    Attributes:
        kills: steps at which the runner is killed. Each effect has two: before and after it.
        away: steps at which nothing answers; likewise.
    """

    kills: frozenset[int] = frozenset()
    away: frozenset[int] = frozenset()
    step: int = 0

    def pass_by(self) -> None:
        """Raises KilledError or UnavailableError if it is time."""
        self.step += 1
        if self.step in self.kills:
            raise KilledError
        if self.step in self.away:
            raise UnavailableError("nothing answers")


def ok(request: InferenceRequest) -> InferenceReply:
    """What a cluster answers when all is well."""
    return InferenceReply(
        request.request_id, TENANT, Outcome.OK, model="words", output=Output(text="yes"), usage=TokenUsage(3, 2)
    )


@dataclass
class World:
    """Everything that outlives a runner."""

    job: Job
    rows: Sequence[RowContent]
    trouble: Trouble = field(default_factory=Trouble)
    answer: Answer = ok
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    now_ms: int = 1_000_000
    plans: dict[int, ChunkPlan] = field(default_factory=dict)
    done: dict[int, str] = field(default_factory=dict)
    marker: int = 0
    sent: list[InferenceRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    unanswered: list[InferenceRequest] = field(default_factory=list)
    replies: list[InferenceReply] = field(default_factory=list)
    removed: int = 0
    """Replies that retention has removed, from the first on."""
    is_input_away: bool = False
    parts: dict[str, list[RowAnswer]] = field(default_factory=dict)
    output: list[RowAnswer] | None = None
    most_open: int = 0

    def effect(self, do: Callable[[], None]) -> None:
        """Something durable, with a chance to be killed before and after it."""
        self.trouble.pass_by()
        do()
        self.trouble.pass_by()

    def take(self) -> "Member":
        """The next runner takes the lease."""
        self.job = replace(self.job, token=self.job.token + 1, status=Status.RUNNING)
        return Member(self, self.job.token)

    def run(self) -> Status:
        """One runner, to its end or its death."""
        return self.take().runner().run()

    def run_until_done(self, most: int = 10_000) -> Status:
        """As many runners as it takes."""
        for _ in range(most):
            if self.job.status.is_final:
                # Nobody takes a job that has ended, though its last runner was killed before it had cleaned up.
                return self.job.status
            try:
                return self.run()
            except KilledError:
                continue
        raise AssertionError(f"{most} runners were killed")


@dataclass
class Member:
    """One runner's side of the world: every seam of the loop."""

    world: World
    token: int
    wanted: Wanted = Wanted.RUN
    stopping: bool = False
    gives_way: bool = False
    lost: bool = False
    max_cost_tokens: int | None = None
    answered_rows: int = 0
    position: int = 0
    on_wait: Callable[[], None] = lambda: None
    waits: int = 0

    def runner(self, *, grace_ms: int = 1_000, row_cost: float = 0.0, max_timeout_ms: int = 86_400_000) -> Runner:
        world = self.world
        self.max_cost_tokens = self.max_cost_tokens or world.job.spec.max_cost_tokens
        return Runner(
            world.job,
            JobLogInMemory(self),  # type: ignore[arg-type]  # a double
            SourceInMemory(world),
            PublisherInMemory(self),  # type: ignore[arg-type]  # a double
            RepliesInMemory(self),  # type: ignore[arg-type]  # a double
            PartsInMemory(self),  # type: ignore[arg-type]  # a double
            self,  # type: ignore[arg-type]  # a double
            lambda: world.now_ms,
            CODEC.encode,
            row_cost=row_cost,
            max_timeout_ms=max_timeout_ms,
            grace_ms=grace_ms,
        )

    def wait(self, timeout_s: float) -> None:
        self.world.now_ms += round(timeout_s * 1000)
        self.waits += 1
        assert self.waits < 1_000, "it waits for ever"
        self.on_wait()

    def fence(self) -> None:
        if self.token != self.world.job.token:
            raise LeaseLostError


@dataclass
class JobLogInMemory:
    member: Member

    def open_chunks(self) -> list[ChunkPlan]:
        world = self.member.world
        return [plan for number, plan in sorted(world.plans.items()) if number not in world.done]

    def plan(self, chunk: ChunkPlan) -> None:
        world = self.member.world

        def do() -> None:
            self.member.fence()
            world.plans.setdefault(chunk.number, chunk)
            if world.job.next_chunk == chunk.number:
                world.job = replace(
                    world.job,
                    planned=chunk.first_row + chunk.rows,
                    next_chunk=chunk.number + 1,
                    next_position=chunk.end,
                )
            world.most_open = max(world.most_open, len(world.plans) - len(world.done))

        world.effect(do)

    def finish(self, chunk: ChunkPlan, part: str, tally: RowTally) -> None:
        world = self.member.world

        def do() -> None:
            self.member.fence()
            if chunk.number not in world.done:
                world.done[chunk.number] = part
                world.job = replace(world.job, tally=world.job.tally + tally)

        world.effect(do)

    def parts(self, *, ordered: bool) -> Iterator[str]:
        done = self.member.world.done
        yield from [done[number] for number in sorted(done)] if ordered else list(done.values())

    def move(self, status: Status, reason: str | None = None) -> None:
        world = self.member.world

        def do() -> None:
            self.member.fence()
            world.job = replace(world.job, status=status, reason=reason)

        world.effect(do)


class SourceInMemory(RowSource):
    def __init__(self, world: World) -> None:
        self.world = world
        super().__init__(LocalFile(Path(world.job.spec.input)), world.job.fingerprint, world.job.spec)

    def _check_unchanged(self) -> None:
        self.world.trouble.pass_by()
        if self.world.is_input_away:
            raise UnavailableError("the storage does not answer")

    def _rows_from(self, begin: InputPosition) -> Iterator[tuple[RowContent, int, InputPosition]]:
        for number, content in enumerate(self.world.rows[begin.offset :], begin.offset + 1):
            yield content, 0, InputPosition(0, number)


@dataclass
class PublisherInMemory:
    member: Member

    def start(self) -> int:
        self.member.world.trouble.pass_by()
        return self.member.world.marker

    def publish(self, chunk: int, records: Sequence[tuple[str, bytes]]) -> None:
        world = self.member.world

        def do() -> None:
            if chunk >= world.marker:
                self._send(records)
                world.marker = chunk + 1

        world.effect(do)

    def send_again(self, records: Sequence[tuple[str, bytes]]) -> None:
        self.member.world.effect(lambda: self._send(records))

    def cancel(self, request_ids: Sequence[str]) -> None:
        world = self.member.world
        world.effect(lambda: world.cancelled.extend(request_ids))

    def _send(self, records: Sequence[tuple[str, bytes]]) -> None:
        requests = [CODEC.decode_as(InferenceRequest, value) for _, value in records]
        assert [request.request_id for request in requests] == [request_id for request_id, _ in records]
        self.member.world.sent += requests
        self.member.world.unanswered += requests


@dataclass
class RepliesInMemory:
    member: Member
    losses: int = 0

    @property
    def position(self) -> int:
        return self.member.position

    def start(self, offset: int | None) -> None:
        self.member.position = len(self.member.world.replies) if offset is None else offset
        self._pass_over()

    def read(self, timeout_s: float) -> list[InferenceReply]:
        world = self.member.world
        world.trouble.pass_by()
        world.now_ms += max(1, round(timeout_s * 1000))
        world.dice.shuffle(world.unanswered)
        for _ in range(min(len(world.unanswered), world.dice.randint(0, 5))):
            reply = world.answer(world.unanswered.pop())
            if reply is not None:
                world.replies.append(reply)
        self._pass_over()
        found = world.replies[self.member.position : self.member.position + world.dice.randint(1, 4)]
        self.member.position += len(found)
        return found

    def _pass_over(self) -> None:
        if self.member.position < self.member.world.removed:
            self.losses += 1
            self.member.position = self.member.world.removed

    def end(self) -> int:
        self.member.world.trouble.pass_by()
        return len(self.member.world.replies)


@dataclass
class PartsInMemory:
    member: Member

    def write(self, chunk: int, answers: Sequence[RowAnswer]) -> str:
        world, name = self.member.world, f"{chunk}-{self.member.token}"
        world.effect(lambda: world.parts.update({name: list(answers)}))
        return name

    def join(self, parts: Callable[[], Iterator[str]]) -> None:
        world = self.member.world
        joined = [answer for name in parts() for answer in world.parts[name]]

        def do() -> None:
            world.output = joined

        world.effect(do)

    def clean_up(self) -> None:
        world = self.member.world
        world.effect(world.parts.clear)


def world_of(
    rows: Sequence[RowContent],
    *,
    trouble: Trouble | None = None,
    answer: Answer = ok,
    seed: int = 0,
    deadline_at_ms: int | None = None,
    **spec: object,
) -> World:
    """A job of these rows that nobody has run yet."""
    made = JobSpec.from_json({"input": "in", "output": "out", **spec})
    job = Job("00c0ffee00c0ffee", TENANT, made, Fingerprint(1, "1"), len(rows), PARTITIONS)
    job = replace(job, deadline_at_ms=deadline_at_ms)
    return World(job, rows, trouble or Trouble(), answer, random.Random(seed))


def good_rows(count: int) -> list[RowContent]:
    return [GOOD_ROW % number for number in range(count)]
