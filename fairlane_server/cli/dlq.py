"""``fairlane dlq``: list and show dead letters, send them again as new requests, delete them.

Deletion goes from the oldest up to a place or a time: Kafka deletes a partition only from its beginning.
"""

import getpass
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated

import typer

from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.dead_letters import position_name
from fairlane.records import SourceCoordinate
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.cli.output import (
    AsJson,
    BootstrapServers,
    DryRun,
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
from fairlane_server.cli.progress import interruptible, progress_bar
from fairlane_server.dead_letters.bulk import (
    REPLAYED,
    SELECTED,
    DeadLetters,
    Surveys,
    cut_of,
    due_letters,
    replay_letter,
    short_name,
    surveys_of,
    topics_of,
)
from fairlane_server.dead_letters.describe import contents, facts, flat
from fairlane_server.dead_letters.letters import Letter, ReplayMark
from fairlane_server.dead_letters.log import DeadLetterReader, PartitionRange
from fairlane_server.dead_letters.replay import Replay, Replayer, ReplayRate
from fairlane_server.dead_letters.selection import ALL_OFFSETS, OffsetRange, Selection, parse_offsets, parse_time


def _time(option: str, text: str) -> int:
    """The time that an option names, milliseconds since the epoch. Ends the command when it names none."""
    try:
        return parse_time(text, now_ms())
    except ValueError as error:
        fail(f"{option} {text}: {error}")


def _offsets(text: str) -> OffsetRange:
    try:
        return parse_offsets(text)
    except ValueError as error:
        fail(f"--offsets {text}: {error}")


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
    int | None,
    typer.Option(
        metavar="TIME",
        parser=partial(_time, "--since"),
        help="Only what died at or after: 2h (ago), or ISO 8601 (UTC).",
    ),
]
Until = Annotated[
    int | None,
    typer.Option(
        metavar="TIME", parser=partial(_time, "--until"), help="Only what died before: 2h (ago), or ISO 8601 (UTC)."
    ),
]
Offsets = Annotated[
    OffsetRange | None,
    typer.Option(metavar="RANGE", parser=_offsets, help="Only these offsets: 12, 12-40, 12- or -40. Needs --topic."),
]


def _checked(selection: Selection, topic: DeadLetters | None) -> Selection:
    if selection.offsets != ALL_OFFSETS and topic is None:
        fail("--offsets: each topic has its own offsets, so it needs --topic as well")
    return selection


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
    filters = Selection(tenant, model, exception, request_id, since, until, offsets or ALL_OFFSETS)
    selection = _checked(filters, topic)
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    rows: dict[SourceCoordinate, dict[str, object]] = {}
    replays: dict[SourceCoordinate, list[str]] = {}
    count = 0
    with DeadLetterReader(settings, codec_for(settings)) as log:
        for stretch in log.stretches(topics_of(topic), since_ms=selection.since_ms, partition=partition):
            for found in _read(log, stretch, as_json=as_json):
                if isinstance(found, ReplayMark):
                    # It comes after its letter, so a row that is shown exists already.
                    replays.get(found.letter, []).append(found.request_id)
                elif selection.takes(found):
                    count += 1
                    if count <= limit:
                        replays[found.place] = []
                        rows[found.place] = {**facts(found), "replayed_as": replays[found.place]}
    if as_json:
        show_json({"letters": list(rows.values()), "found": count})
        return
    if not rows:
        say("no dead letters")
        return
    show_table(_COLUMNS, [_row(place, row) for place, row in rows.items()])
    if (hidden := count - len(rows)) > 0:
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
    described = facts(letter)
    written = {name: value.decode(errors="replace") for name, value in letter.record.headers.items()}
    content = contents(letter, with_input=with_input)
    if as_json:
        show_json({**described, "headers": written, "content": content})
        return
    say(f"{short_name(letter.place)}, died {utc(letter.died_at_ms)} UTC, {len(letter.record.value)} bytes")
    say(f"holds {letter.kind}" if letter.problem is None else f"cannot be read: {printable(letter.problem)}")
    for title, lines in (("headers", list(written.items())), ("content", flat(content))):
        if lines:
            say(f"\n{title}")
        for name, value in lines:
            # Line by line: printable takes the ends of lines out as well.
            say(f"  {printable(name)}: " + "\n    ".join(map(printable, value.split("\n"))))


def _read(log: DeadLetterReader, stretch: PartitionRange, *, as_json: bool) -> Iterator[Letter | ReplayMark]:
    """The letters and marks of a partition, below a progress bar. Raises ClusterError."""
    with progress_bar(f"reading {stretch.name}", len(stretch), as_json=as_json) as advance:
        for offset, found in log.read(stretch):
            advance(offset + 1 - stretch.first)
            yield found


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
    A letter without a request in it is skipped and named. The reply to the first request remains valid; the reply to
    the new one names it as `replay_of`. With --json one object a line, the last with the counts.
    """
    filters = Selection(tenant, model, exception, request_id, since, until, offsets or ALL_OFFSETS)
    selection = _checked(filters, topic)
    if selection == Selection() and topic is None and limit is None and not everything:
        fail("say what to replay: --topic or another filter, --limit, or --all")
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    codec = codec_for(settings)
    run = _Run(ReplayRate(rate), limit, as_json=as_json)
    with DeadLetterReader(settings, codec) as log, _replayer(settings, codec, dry_run=dry_run) as replayer:
        read = partial(_read, log, as_json=as_json)
        surveys = surveys_of(log, replayer, topics_of(topic), selection, partition, read)
        try:
            run.replay(log, surveys, replayer, again=again)
        finally:
            run.report(dry_run=dry_run)
    if run.counts["failed"] or run.stopping():
        raise typer.Exit(1)


def _replayer(settings: Settings, codec: Codec, *, dry_run: bool) -> AbstractContextManager[Replayer | None]:
    if dry_run:
        return nullcontext()
    return Replayer(settings, codec, f"dlq:{settings.kafka_sasl_username or getpass.getuser()}", now_ms)


@dataclass(slots=True)
class _Run:
    """One run of the command and its counts."""

    pace: ReplayRate
    limit: int | None
    as_json: bool
    stopping: Callable[[], bool] = lambda: False
    counts: Counter[str] = field(default_factory=Counter)
    """Letters by result: replayed, skipped, failed, replayed_before; and left, which are due and were not reached."""

    def replay(
        self,
        log: DeadLetterReader,
        surveys: Surveys,
        replayer: Replayer | None,
        *,
        again: bool,
    ) -> None:
        """Send what is due; only say so without a replayer. Raises ClusterError when it cannot go on."""
        if again:
            surveys = [(stretch, marks.replace(b"\2", b"\1")) for stretch, marks in surveys]
        left = sum(marks.count(SELECTED) for _, marks in surveys)
        self.counts.update(left=left, replayed_before=sum(marks.count(REPLAYED) for _, marks in surveys))
        total = left if self.limit is None else min(left, self.limit)
        with interruptible() as self.stopping, progress_bar("replaying", total, as_json=self.as_json) as advance:
            for letter in due_letters(log, surveys):
                sent = self.counts["replayed"] + self.counts["failed"]
                if self.stopping() or (self.limit is not None and sent >= self.limit):
                    return
                self._one(letter, replayer)
                advance(left - self.counts["left"])

    def report(self, *, dry_run: bool) -> None:
        if self.as_json:
            counts = {name: self.counts[name] for name in ("replayed", "skipped", "failed", "replayed_before", "left")}
            _line({"summary": counts, "dry_run": dry_run, "interrupted": self.stopping()})
            return
        parts = [f"{self.counts['replayed']} {'would be replayed' if dry_run else 'replayed'}"]
        parts += [f"{self.counts[name]} {name}" for name in ("skipped", "failed", "left") if self.counts[name]]
        if before := self.counts["replayed_before"]:
            parts.append(f"{before} replayed before (--again sends them once more)")
        say(("stopped: " if self.stopping() else "") + ", ".join(parts))

    def _one(self, letter: Letter, replayer: Replayer | None) -> None:
        found = replay_letter(letter, replayer, self._wait)
        if found is None:
            return
        if found.result == "replayed" and found.replay is not None:
            self._show(found.replay, found.place)
        elif self.as_json:
            _line({"letter": position_name(letter.place), "result": found.result, "reason": found.reason})
        else:
            warn(f"{short_name(letter.place)}: {found.result}: {printable(found.reason or '')}")
        self.counts.update({found.result: 1, "left": -1})

    def _wait(self) -> bool:
        """Wait for the next turn. False when there will be none."""
        while (wait_s := self.pace.wait_s(time.monotonic())) > 0 and not self.stopping():
            time.sleep(min(_NAP_S, wait_s))
        self.pace.went(time.monotonic())
        return not self.stopping()

    def _show(self, replay: Replay, place: SourceCoordinate | None) -> None:
        request = replay.request
        if self.as_json:
            done = {} if place is None else {"request_id": request.request_id, "place": position_name(place)}
            line = {"letter": position_name(replay.letter), "result": "replayed" if place else "would be replayed"}
            _line({**line, "topic": replay.topic, "replay_of": request.replay_of, **done})
            return
        where = f"sent as {request.request_id} to {position_name(place)}" if place else f"would go to {replay.topic}"
        say(f"{short_name(replay.letter)}: {where}, replay of {request.replay_of}")


def _line(value: object) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))


_WHY_NOT = (
    "Kafka deletes a partition only from its beginning, so nothing but --until and --offsets -N can say what goes"
)

OneTopic = Annotated[
    DeadLetters | None, typer.Option("--topic", help="dead-letter.requests or dead-letter.work; needed.")
]
UpToOffset = Annotated[
    OffsetRange | None, typer.Option(metavar="RANGE", parser=_offsets, help="Up to and with an offset: -40.")
]
Refused = Annotated[str | None, typer.Option(hidden=True)]


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
    offsets = offsets or ALL_OFFSETS
    if offsets.first > 0:
        shown = "" if offsets.last is None else offsets.last
        fail(f"--offsets {offsets.first}-{shown}: {_WHY_NOT}")
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    with DeadLetterReader(settings, codec_for(settings)) as log:
        stretches = log.stretches(topics_of(topic), partition=partition)
        cuts = [
            cut
            for stretch in stretches
            if (cut := cut_of(log, stretch, until, offsets.last, partial(_read, log, as_json=as_json))).before_offset
        ]
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
