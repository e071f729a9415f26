"""``fairlane dlq``: look at dead letters."""

from collections.abc import Mapping
from typing import Annotated

import typer

from fairlane.dead_letters import Letter
from fairlane.records import SourceCoordinate
from fairlane.schema_registry import codec_for
from fairlane_server.cli import dlq_purge, dlq_replay
from fairlane_server.cli.dlq_options import (
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
from fairlane_server.cli.output import (
    AsJson,
    BootstrapServers,
    fail,
    printable,
    say,
    settings_with,
    show_json,
    show_table,
    utc,
)
from fairlane_server.cli.progress import progress_bar
from fairlane_server.dead_letters.describe import contents, facts, flat
from fairlane_server.dead_letters.log import DeadLetterReader, PartitionRange
from fairlane_server.dead_letters.selection import Selection

_COLUMNS = ("letter", "died (UTC)", "tenant", "model", "request", "exception", "message", "replayed")

app = typer.Typer(help="The dead letters: look at them, send them again, delete them.", no_args_is_help=True)

Limit = Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Show so many, the oldest first.")]
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
    limit: Limit = 100,
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


app.command("replay")(dlq_replay.replay_command)
app.command("purge")(dlq_purge.purge_command)


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
