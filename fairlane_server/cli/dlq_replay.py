"""``fairlane dlq replay``: dead letters sent again as new requests."""

import getpass
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Annotated
from uuid import uuid4

import typer

from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.dead_letters import Letter, position_name
from fairlane.records import SourceCoordinate
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.cli.dlq_options import (
    DryRun,
    ExceptionClass,
    Model,
    Offsets,
    Partition,
    RequestId,
    Since,
    Tenant,
    Topic,
    Until,
    select,
    short_name,
    topics_of,
)
from fairlane_server.cli.output import AsJson, BootstrapServers, fail, printable, say, settings_with, warn
from fairlane_server.cli.progress import progress_bar
from fairlane_server.dead_letters.log import DeadLetterReader, PartitionRange
from fairlane_server.dead_letters.replay import NotReplayableError, Replay, ReplayRate, make_replay
from fairlane_server.dead_letters.replayer import NotReplayedError, Replayer
from fairlane_server.dead_letters.selection import OffsetSet, Selection, Survey

# No wait is longer, so that Ctrl-C is answered at once.
_NAP_S = 0.1

Limit = Annotated[int | None, typer.Option(metavar="N", min=1, help="Send at most so many, the oldest first.")]
Rate = Annotated[float, typer.Option(metavar="N", min=0.01, max=1_000.0, help="Send at most so many a second.")]
Everything = Annotated[bool, typer.Option("--all", help="Replay everything; needed when no option says what to.")]
Again = Annotated[bool, typer.Option("--again", help="Also what was replayed before.")]


def replay_command(
    bootstrap_servers: BootstrapServers = None,
    topic: Topic = None,
    partition: Partition = None,
    tenant: Tenant = None,
    model: Model = None,
    exception: ExceptionClass = None,
    request_id: RequestId = None,
    since: Since = None,
    until: Until = None,
    offsets: Offsets = None,
    limit: Limit = None,
    rate: Rate = 10.0,
    *,
    everything: Everything = False,
    again: Again = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Send dead letters again, each as a new request with an id of its own, on the topic its tenant sent it on.

    Each once: what was replayed before is left out, and Ctrl-C loses nothing, for the same command goes on from there.
    A letter without a request in it is skipped and named. The reply to the first request stands; the new one's names
    it as `replay_of`. With --json one object a line, the last with the counts.
    """
    selection = select(
        topic,
        tenant=tenant,
        model=model,
        exception=exception,
        request_id=request_id,
        since=since,
        until=until,
        offsets=offsets,
    )
    if selection.is_everything and topic is None and limit is None and not everything:
        fail("say what to replay: --topic or another filter, --limit, or --all")
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    codec = codec_for(settings)
    run = _Run(selection, ReplayRate(rate), limit, again=again, as_json=as_json)
    with DeadLetterReader(settings, codec) as log, _replayer(settings, codec, dry_run=dry_run) as replayer:
        # Not before nobody else replays: what they did is then there to be read, up to the very end of the log.
        stretches = log.stretches(
            topics_of(topic), since_ms=selection.since_ms, partition=partition, whole=replayer is not None
        )
        due = [(stretch, run.survey(log, stretch)) for stretch in stretches]
        try:
            run.replay(log, due, replayer)
        finally:
            run.report(dry_run=dry_run)
    if run.failed or run.interrupted:
        raise typer.Exit(1)


@contextmanager
def _replayer(settings: Settings, codec: Codec, *, dry_run: bool) -> Iterator[Replayer | None]:
    if dry_run:
        yield None
        return
    replayer = Replayer(settings, codec, f"dlq:{settings.kafka_sasl_username or getpass.getuser()}", now_ms)
    try:
        yield replayer
    finally:
        replayer.close()


@dataclass(slots=True)
class _Run:
    """One run of the command, and what it came to."""

    selection: Selection
    pace: ReplayRate
    limit: int | None
    again: bool
    as_json: bool
    interrupted: bool = False
    replayed: int = 0
    skipped: int = 0
    failed: int = 0
    before: int = field(default=0)
    """Letters that are meant and were replayed before."""
    left: int = 0
    """Letters that are due and were not come to."""

    def survey(self, log: DeadLetterReader, stretch: PartitionRange) -> OffsetSet:
        """The letters of a partition that are due. Raises ClusterError."""
        survey = Survey.begin(self.selection, stretch.first)
        with progress_bar(f"reading {stretch.name}", len(stretch), as_json=self.as_json) as advance:
            for offset, found in log.read(stretch):
                survey.take(found)
                advance(offset + 1 - stretch.first)
        due = survey.meant
        if not self.again:
            for offset in survey.replayed:
                self.before += offset in due
                due.discard(offset)
        return due

    def replay(
        self, log: DeadLetterReader, due: list[tuple[PartitionRange, OffsetSet]], replayer: Replayer | None
    ) -> None:
        """Send what is due; only say so without a replayer. Raises ClusterError when it cannot go on."""
        self.left = sum(len(offsets) for _, offsets in due)
        total = self.left if self.limit is None else min(self.left, self.limit)
        with self._interruptible(), progress_bar("replaying", total, as_json=self.as_json) as advance:
            for letter in _letters(log, due):
                if self.interrupted or (self.limit is not None and self.replayed + self.failed >= self.limit):
                    return
                self._one(letter, replayer)
                advance(self.replayed + self.failed + self.skipped)

    def report(self, *, dry_run: bool) -> None:
        if self.as_json:
            counts = {
                "replayed": self.replayed,
                "skipped": self.skipped,
                "failed": self.failed,
                "replayed_before": self.before,
                "left": self.left,
            }
            _line({"summary": counts, "dry_run": dry_run, "interrupted": self.interrupted})
            return
        parts = [f"{self.replayed} {'would be replayed' if dry_run else 'replayed'}"]
        parts += [f"{self.skipped} skipped"] if self.skipped else []
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{self.left} left"] if self.left else []
        parts += [f"{self.before} replayed before (--again sends them once more)"] if self.before else []
        say(("stopped: " if self.interrupted else "") + ", ".join(parts))

    def _one(self, letter: Letter, replayer: Replayer | None) -> None:
        try:
            replay = make_replay(letter, str(uuid4()))
        except NotReplayableError as error:
            self.skipped += 1
            self.left -= 1
            self._tell(letter.place, "skipped", str(error))
            return
        if replayer is None:
            self.replayed += 1
            self.left -= 1
            self._tell_replay(replay, None)
            return
        if not self._wait():
            return
        try:
            place = replayer.send(replay)
        except NotReplayedError as error:
            self.failed += 1
            self._tell(letter.place, "failed", str(error))
        else:
            self.replayed += 1
            self._tell_replay(replay, place)
        self.left -= 1

    def _wait(self) -> bool:
        """Wait for the next turn. False when there will be none."""
        while (wait_s := self.pace.wait_s(time.monotonic())) > 0 and not self.interrupted:
            time.sleep(min(_NAP_S, wait_s))
        self.pace.went(time.monotonic())
        return not self.interrupted

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C ends after the letter that is under way; a second one at once."""

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _tell(self, place: SourceCoordinate, result: str, reason: str) -> None:
        if self.as_json:
            _line({"letter": position_name(place), "result": result, "reason": reason})
        else:
            warn(f"{short_name(place)}: {result}: {printable(reason)}")

    def _tell_replay(self, replay: Replay, place: SourceCoordinate | None) -> None:
        request = replay.request
        if self.as_json:
            done = {} if place is None else {"request_id": request.request_id, "place": position_name(place)}
            told = {"letter": position_name(replay.letter), "result": "replayed" if place else "would be replayed"}
            _line({**told, "topic": replay.topic, "replay_of": request.replay_of, **done})
        elif place is None:
            say(f"{short_name(replay.letter)}: would go to {replay.topic}, replay of {request.replay_of}")
        else:
            say(
                f"{short_name(replay.letter)}: sent as {request.request_id} to {position_name(place)}, "
                f"replay of {request.replay_of}"
            )


def _letters(log: DeadLetterReader, due: list[tuple[PartitionRange, OffsetSet]]) -> Iterator[Letter]:
    for stretch, offsets in due:
        if not len(offsets):
            continue
        due_stretch = PartitionRange(stretch.topic, stretch.partition, min(offsets), max(offsets) + 1)
        for offset, found in log.read(due_stretch):
            if offset in offsets and isinstance(found, Letter):
                yield found


def _line(value: object) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))
