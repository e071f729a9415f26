"""Options shared by the commands of ``fairlane dlq``, and the selection they make."""

from enum import StrEnum
from typing import Annotated

import typer

from fairlane.clock import now_ms
from fairlane.names import DEAD_LETTER_REQUESTS, DEAD_LETTER_WORK
from fairlane.records import SourceCoordinate
from fairlane_server.cli.output import fail
from fairlane_server.dead_letters.selection import ALL_OFFSETS, Selection, parse_offsets, parse_time


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
