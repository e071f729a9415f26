"""``fairlane dlq purge``: dead letters deleted, from the oldest up to a place or a time."""

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from fairlane.schema_registry import codec_for
from fairlane_server.cli.dlq_options import DeadLetters, DryRun, Partition, Until, select, topics_of
from fairlane_server.cli.output import AsJson, BootstrapServers, Yes, confirm, fail, say, settings_with, show_json
from fairlane_server.cli.progress import progress_bar
from fairlane_server.dead_letters.log import DeadLetterReader, PartitionRange
from fairlane_server.dead_letters.selection import OffsetRange, Selection, Survey

_WHY_NOT = (
    "Kafka deletes a partition only from its beginning, so nothing but --until and --offsets -N can say what goes"
)

OneTopic = Annotated[
    DeadLetters | None, typer.Option("--topic", help="dead-letter.requests or dead-letter.work; needed.")
]
Offsets = Annotated[str | None, typer.Option(metavar="RANGE", help="Up to and with an offset: -40.")]
Refused = Annotated[str | None, typer.Option(hidden=True)]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Records to delete of a partition: those before ``before_offset``, of which ``letters`` are dead letters."""

    topic: str
    partition: int
    before_offset: int
    letters: int
    replayed: int


def purge_command(
    bootstrap_servers: BootstrapServers = None,
    topic: OneTopic = None,
    partition: Partition = None,
    until: Until = None,
    offsets: Offsets = None,
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
