"""``fairlane audit``: who administered what."""

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane.clock import now_ms
from fairlane_server.api_keys.api_key import DEPLOYMENT
from fairlane_server.cli.output import AsJson, OneTenant, fail, settings_with, show_list, utc
from fairlane_server.dead_letters.selection import parse_time

if TYPE_CHECKING:
    from fairlane_server.administration.events import RecordedEvent


def _time(option: str, text: str) -> int:
    try:
        return parse_time(text, now_ms())
    except ValueError as error:
        fail(f"{option} {text}: {error}")


OfDeployment = Annotated[bool, typer.Option("--deployment", help="Only what concerns no single tenant.")]
EventName = Annotated[str | None, typer.Option("--event", metavar="EVENT", help="Only these, such as tenant_set.")]
ByAuthor = Annotated[str | None, typer.Option("--author", metavar="AUTHOR", help="Only by this author.")]
Since = Annotated[
    int | None,
    typer.Option(metavar="TIME", parser=partial(_time, "--since"), help="Then or later: 2h (ago), or ISO 8601 (UTC)."),
]
Until = Annotated[int | None, typer.Option(metavar="TIME", parser=partial(_time, "--until"), help="Before then.")]
Shown = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=10_000, help="Show so many, the latest.")]


def audit_command(
    tenant: OneTenant = None,
    event: EventName = None,
    author: ByAuthor = None,
    since: Since = None,
    until: Until = None,
    limit: Shown = 100,
    *,
    deployment: OfDeployment = False,
    as_json: AsJson = False,
) -> None:
    """Show who changed keys, users and tenants, replayed or purged dead letters, or read a payload; the latest first.

    As POSTGRES_OWNER_DSN (else POSTGRES_DSN).
    """
    from fairlane_server.administration.events import AdminAudit, EventFilter

    if deployment and tenant is not None:
        fail("--deployment and --tenant exclude one another")
    settings = settings_with()
    dsn = settings.postgres_owner_dsn or settings.postgres_dsn
    wanted = EventFilter(DEPLOYMENT if deployment else tenant, event, author, since, until)
    with AdminAudit(dsn.get_secret_value()) as audit:
        found = audit.list(wanted, None, limit)
    show_list(
        "events",
        found,
        ("at (UTC)", "tenant", "event", "outcome", "about", "author", "details"),
        _row,
        to_json=asdict,
        empty="there are no events",
        as_json=as_json,
    )


def _row(event: "RecordedEvent") -> tuple[str, ...]:
    return (
        utc(event.occurred_at_ms),
        event.tenant,
        event.event,
        event.outcome,
        event.key_id or event.subject or "-",
        event.author,
        json.dumps(event.details, ensure_ascii=False),
    )
