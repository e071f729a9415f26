"""``fairlane conversations``: the stored conversations of a tenant."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane_server.cli.output import (
    AsJson,
    Tenant,
    Yes,
    confirm,
    printable,
    say,
    settings_with,
    show,
    show_json,
    show_list,
    utc,
)

if TYPE_CHECKING:
    from fairlane_server.conversations.conversations import Conversations

Name = Annotated[str, typer.Argument(metavar="ID", help="Of the conversation.", show_default=False)]
Most = Annotated[int, typer.Option("--last", metavar="N", min=1, help="At most so many, the newest.")]

app = typer.Typer(help="What was said in conversations, that later turns are answered from.", no_args_is_help=True)


@app.command("list")
def list_command(tenant: Tenant, *, last: Most = 1_000, as_json: AsJson = False) -> None:
    """List the conversations of a tenant, the one that was gone on with last first."""
    with opened(tenant) as conversations:
        found = conversations.list(last)
    show_list(
        "conversations",
        found,
        ("conversation", "turns", "tokens", "first (UTC)", "last (UTC)"),
        lambda one: (
            *(one.conversation_id, f"{one.turns:,}", f"{one.tokens:,}"),
            *(utc(one.first_at_ms), utc(one.last_at_ms)),
        ),
        to_json=asdict,
        empty=f"tenant {tenant} has no conversations",
        as_json=as_json,
    )


@app.command("show")
def show_command(conversation: Name, tenant: Tenant, *, last: Most = 1_000, as_json: AsJson = False) -> None:
    """Show what was said in one, turn by turn."""
    with opened(tenant) as conversations:
        turns = conversations.turns(conversation, last)
    if as_json:
        show_json({"conversation_id": conversation, "turns": [asdict(turn) for turn in turns]})
        return
    for turn in turns:
        say(f"--- {utc(turn.replied_at_ms)} UTC, request {printable(turn.request_id)}")
        for message in turn.messages:
            _say_lines(message.role, message.content)
        _say_lines("assistant", turn.answer)


@app.command("delete")
def delete_command(conversation: Name, tenant: Tenant, *, yes: Yes = False, as_json: AsJson = False) -> None:
    """Erase one conversation: its turns and its results. Later requests start it anew; the log expires."""
    from fairlane_server.erasure.erasures import ErasureKind, Erasures
    from fairlane_server.erasure.expiry import tombstone_ms
    from fairlane_server.topics.families import load_families

    with opened(tenant) as conversations:
        turns = len(conversations.turns(conversation))
    confirm(f"Delete {printable(conversation)} of tenant {tenant} with {_counted(turns)}?", yes=yes)
    settings = settings_with()
    dsn, kept_ms = settings.postgres_dsn.get_secret_value(), tombstone_ms(load_families())
    with Erasures(dsn, tenant, kept_ms, settings.erasures_max_names) as erasures:
        erasure_id = erasures.request(ErasureKind.CONVERSATION, [conversation], "operator")
        # An operator may not touch the caches: their entries expire.
        while erasures.step(erasure_id):
            pass
        done = erasures.get(erasure_id)
    gone, results = (done.turns, done.results) if done is not None else (0, 0)
    text = (
        f"deleted {printable(conversation)} of tenant {tenant} with {_counted(gone)}; cached replies expire within "
        f"{settings.result_cache_ttl_s} s"
    )
    deleted = {"conversation_id": conversation, "turns": gone, "results": results, "erasure_id": erasure_id}
    show({"deleted": deleted}, text, as_json=as_json)


@contextmanager
def opened(tenant: str) -> "Iterator[Conversations]":
    from fairlane_server.conversations.conversations import Conversations

    with Conversations(settings_with().postgres_dsn.get_secret_value(), tenant) as conversations:
        yield conversations


def _say_lines(role: str, text: str) -> None:
    first, *rest = text.split("\n")
    say(f"{printable(role)}: {printable(first)}")
    for line in rest:
        say(f"    {printable(line)}")


def _counted(turns: int) -> str:
    return f"{turns:,} turn{'' if turns == 1 else 's'}"
