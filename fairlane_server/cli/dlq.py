"""``fairlane dlq``: list and show dead letters, send them again as new requests, delete them.

Deletion goes from the oldest up to a place or a time: Kafka deletes a partition only from its beginning.
"""

import getpass
import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from types import FrameType
from typing import Annotated
from uuid import uuid4

import typer

from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.dead_letters import position_name
from fairlane.names import DEAD_LETTER_REQUESTS, DEAD_LETTER_WORK
from fairlane.records import SourceCoordinate
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.cli.output import (
    AsJson,
    BootstrapServers,
    Yes,
    confirm,
    fail,
    printable,
    say,
    settings_with,
    show_json,
    show_table,
    utc,
    warn,
)
from fairlane_server.cli.progress import progress_bar
from fairlane_server.dead_letters.describe import contents, facts, flat
from fairlane_server.dead_letters.letters import Letter
from fairlane_server.dead_letters.log import DeadLetterReader, PartitionRange
from fairlane_server.dead_letters.replay import (
    NotReplayableError,
    NotReplayedError,
    Replay,
    Replayer,
    ReplayRate,
    make_replay,
)
from fairlane_server.dead_letters.selection import (
    ALL_OFFSETS,
    OffsetRange,
    OffsetSet,
    Selection,
    Survey,
    parse_offsets,
    parse_time,
)


class DeadLetters(StrEnum):
    """The dead-letter topics, as the command line calls them."""

    REQUESTS = "requests"
    WORK = "work"


TOPICS = {DeadLetters.REQUESTS: DEAD_LETTER_REQUESTS, DeadLetters.WORK: DEAD_LETTER_WORK}

Topic = Annotated[
    DeadLetters | None, typer.Option("--topic", help="dead-letter.requests or dead-letter.work; by default both.")
]
Partition = Annotated[int | None, typer.Option(metavar="N", min=0, help="Only this partition.")]
Tenant = Annotated[str | None, typer.Option(metavar="TENANT", help="Only letters of this tenant.")]
Model = Annotated[str | None, typer.Option(metavar="MODEL", help="Only letters that ask for this model.")]
ExceptionClass = Annotated[
    str | None, typer.Option("--exception", metavar="TEXT", help="Only where the exception's class contains this.")
]
RequestId = Annotated[str | None, typer.Option(metavar="ID", help="Only letters of this request.")]
Since = Annotated[
    str | None, typer.Option(metavar="TIME", help="Only what died at or after: 2h (ago), or ISO 8601 (UTC).")
]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="Only what died before: 2h (ago), or ISO 8601 (UTC).")]
Offsets = Annotated[
    str | None, typer.Option(metavar="RANGE", help="Only these offsets: 12, 12-40, 12- or -40. Needs --topic.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


def select(
    topic: DeadLetters | None,
    *,
    tenant: str | None,
    model: str | None,
    exception: str | None,
    request_id: str | None,
    since: str | None,
    until: str | None,
    offsets: str | None,
) -> Selection:
    """The selection made by the options. Ends the command if one of them is invalid."""
    if offsets is not None and topic is None:
        fail("--offsets: each topic has its own offsets, so it needs --topic as well")
    try:
        found = ALL_OFFSETS if offsets is None else parse_offsets(offsets)
    except ValueError as error:
        fail(f"--offsets {offsets}: {error}")
    return Selection(tenant, model, exception, request_id, time_of("--since", since), time_of("--until", until), found)


def time_of(option: str, text: str | None) -> int | None:
    """The time that an option names, milliseconds since the epoch. Ends the command when it names none."""
    try:
        return None if text is None else parse_time(text, now_ms())
    except ValueError as error:
        fail(f"{option} {text}: {error}")


def topics_of(topic: DeadLetters | None) -> list[str]:
    return list(TOPICS.values()) if topic is None else [TOPICS[topic]]


def short_name(place: SourceCoordinate) -> str:
    """A letter's place as the commands write it: ``work-0@12``."""
    short = next((name for name, topic in TOPICS.items() if topic == place.topic), place.topic)
    return f"{short}-{place.partition}@{place.offset}"


_COLUMNS = ("letter", "died (UTC)", "tenant", "model", "request", "exception", "message", "replayed")

app = typer.Typer(help="The dead letters: look at them, send them again, delete them.", no_args_is_help=True)

Shown = Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Show so many, the oldest first.")]
Offset = Annotated[int, typer.Argument(metavar="OFFSET", min=0, help="As `list` shows it.", show_default=False)]
WithInput = Annotated[
    bool, typer.Option("--with-input", help="Show what the tenant wrote as well: the prompt, and every other text.")
]
OnePartition = Annotated[int, typer.Option(metavar="N", min=0, help="The partition of the topic.")]


@app.command("list")
def list_command(
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
    limit: Shown = 100,
    *,
    as_json: AsJson = False,
) -> None:
    """List the current dead letters and which of them were replayed. Never shows text of a request."""
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
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    listing = _Listing(selection, limit)
    with DeadLetterReader(settings, codec_for(settings)) as log:
        for stretch in log.stretches(topics_of(topic), since_ms=selection.since_ms, partition=partition):
            listing.read(log, stretch, as_json=as_json)
    if as_json:
        show_json({"letters": list(listing.rows.values()), "found": listing.found})
        return
    if not listing.found:
        say("no dead letters")
        return
    show_table(_COLUMNS, [_row(place, row) for place, row in listing.rows.items()])
    if (hidden := listing.found - len(listing.rows)) > 0:
        say(f"and {hidden} more: --limit shows more at once, --since and --offsets the later ones")


@app.command("show")
def show_command(
    offset: Offset,
    bootstrap_servers: BootstrapServers = None,
    topic: Topic = None,
    partition: OnePartition = 0,
    *,
    with_input: WithInput = False,
    as_json: AsJson = False,
) -> None:
    """Show one dead letter: its headers, and of the record in it what is no text of the tenant's."""
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    with DeadLetterReader(settings, codec_for(settings)) as log:
        places = [SourceCoordinate(name, partition, offset) for name in topics_of(topic)]
        found = [letter for place in places if (letter := log.find(place)) is not None]
    if not found:
        fail(f"no dead letter stands at {' or '.join(map(short_name, places))}")
    if len(found) > 1:
        fail(f"there is one at each of {' and '.join(map(short_name, places))}: say which with --topic")
    (letter,) = found
    told = facts(letter)
    written = {name: value.decode(errors="replace") for name, value in letter.record.headers.items()}
    content = contents(letter, with_input=with_input)
    if as_json:
        show_json({**told, "headers": written, "content": content})
        return
    say(f"{short_name(letter.place)}, died {utc(letter.died_at_ms)} UTC, {len(letter.record.value)} bytes")
    say(f"holds {letter.kind}" if letter.problem is None else f"cannot be read: {printable(letter.problem)}")
    for title, lines in (("headers", list(written.items())), ("content", flat(content))):
        if lines:
            say(f"\n{title}")
        for name, value in lines:
            # Line by line: printable takes the ends of lines out as well.
            say(f"  {printable(name)}: " + "\n    ".join(map(printable, value.split("\n"))))


class _Listing:
    """The first letters that are meant, as rows, and how many there are."""

    def __init__(self, selection: Selection, limit: int) -> None:
        self.rows: dict[SourceCoordinate, dict[str, object]] = {}
        self.found = 0
        self._selection = selection
        self._limit = limit
        self._replays: dict[SourceCoordinate, list[str]] = {}

    def read(self, log: DeadLetterReader, stretch: PartitionRange, *, as_json: bool) -> None:
        """Take in a partition. Raises ClusterError."""
        with progress_bar(f"reading {stretch.name}", len(stretch), as_json=as_json) as advance:
            for offset, found in log.read(stretch):
                advance(offset + 1 - stretch.first)
                if not isinstance(found, Letter):
                    # It stands behind its letter, so the row is there already.
                    self._replays.get(found.letter, []).append(found.request_id)
                elif self._selection.takes(found):
                    self._add(found)

    def _add(self, letter: Letter) -> None:
        self.found += 1
        if len(self.rows) < self._limit:
            replays = self._replays[letter.place] = []
            self.rows[letter.place] = {**facts(letter), "replayed_as": replays}


def _row(place: SourceCoordinate, row: Mapping[str, object]) -> tuple[str, ...]:
    replays = row["replayed_as"]
    return (
        short_name(place),
        utc(row["died_at_ms"] if isinstance(row["died_at_ms"], int) else None),
        *(_text(row[name]) for name in ("tenant", "model", "request_id")),
        _text(row["exception"]).rpartition(".")[2],
        _text(row["message"]),
        f"{len(replays)} times" if isinstance(replays, list) and len(replays) > 1 else "yes" if replays else "-",
    )


def _text(value: object) -> str:
    return "-" if value is None else str(value)


# No wait is longer, so that Ctrl-C is answered at once.
_NAP_S = 0.1

Limit = Annotated[int | None, typer.Option(metavar="N", min=1, help="Send at most so many, the oldest first.")]
Rate = Annotated[float, typer.Option(metavar="N", min=0.01, max=1_000.0, help="Send at most so many a second.")]
Everything = Annotated[bool, typer.Option("--all", help="Replay everything; needed when no option says what to.")]
Again = Annotated[bool, typer.Option("--again", help="Also what was replayed before.")]


@app.command("replay")
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


_WHY_NOT = (
    "Kafka deletes a partition only from its beginning, so nothing but --until and --offsets -N can say what goes"
)

OneTopic = Annotated[
    DeadLetters | None, typer.Option("--topic", help="dead-letter.requests or dead-letter.work; needed.")
]
UpToOffset = Annotated[str | None, typer.Option(metavar="RANGE", help="Up to and with an offset: -40.")]
Refused = Annotated[str | None, typer.Option(hidden=True)]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Records to delete of a partition: those before ``before_offset``, of which ``letters`` are dead letters."""

    topic: str
    partition: int
    before_offset: int
    letters: int
    replayed: int


@app.command("purge")
def purge_command(
    bootstrap_servers: BootstrapServers = None,
    topic: OneTopic = None,
    partition: Partition = None,
    until: Until = None,
    offsets: UpToOffset = None,
    tenant: Refused = None,
    model: Refused = None,
    exception: Refused = None,
    request_id: Refused = None,
    since: Refused = None,
    limit: Refused = None,
    *,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete the oldest dead letters of a topic, those before a time or up to an offset, for good."""
    given = {"tenant": tenant, "model": model, "exception": exception, "request-id": request_id}
    for name, value in {**given, "since": since, "limit": limit}.items():
        if value is not None:
            fail(f"--{name}: {_WHY_NOT}")
    if topic is None:
        fail("say where: --topic requests or --topic work")
    if until is None and offsets is None:
        fail("say up to where: --until TIME or --offsets -N (--until 0s is everything)")
    selection = select(
        topic, tenant=None, model=None, exception=None, request_id=None, since=None, until=until, offsets=offsets
    )
    if selection.offsets.first > 0:
        fail(f"--offsets {offsets}: {_WHY_NOT}")
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    with DeadLetterReader(settings, codec_for(settings)) as log:
        stretches = log.stretches(topics_of(topic), partition=partition)
        cuts = [cut for stretch in stretches if (cut := _cut(log, stretch, selection, as_json=as_json)).before_offset]
        letters, replayed = sum(cut.letters for cut in cuts), sum(cut.replayed for cut in cuts)
        what = f"{letters} dead letters of {topics_of(topic)[0]}, {letters - replayed} of them never replayed"
        if cuts and not dry_run:
            confirm(f"Delete {what}?", yes=yes)
            for cut in cuts:
                log.delete_before(cut.topic, cut.partition, cut.before_offset)
    if as_json:
        show_json(
            {"deleted": [] if dry_run else list(map(asdict, cuts)), "dry_run": dry_run, "cuts": list(map(asdict, cuts))}
        )
    elif not cuts:
        say("nothing to delete")
    else:
        say(f"{'would delete' if dry_run else 'deleted'} {what}")


def _cut(log: DeadLetterReader, stretch: PartitionRange, selection: Selection, *, as_json: bool) -> _Cut:
    """Where to cut a partition, and what goes; before offset 0 when nothing does."""
    end = stretch.end
    if selection.offsets.last is not None:
        end = min(end, selection.offsets.last + 1)
    if selection.until_ms is not None:
        until = log.offset_at(stretch.topic, stretch.partition, selection.until_ms)
        end = end if until is None else min(end, until)
    if end <= stretch.first:
        return _Cut(stretch.topic, stretch.partition, 0, 0, 0)
    # Marks of what goes may stand behind it.
    survey = Survey.begin(Selection(offsets=OffsetRange(last=end - 1)), stretch.first)
    with progress_bar(f"reading {stretch.name}", len(stretch), as_json=as_json) as advance:
        for offset, found in log.read(stretch):
            survey.take(found)
            advance(offset + 1 - stretch.first)
    replayed = sum(offset in survey.replayed for offset in survey.meant)
    return _Cut(stretch.topic, stretch.partition, end, len(survey.meant), replayed)
