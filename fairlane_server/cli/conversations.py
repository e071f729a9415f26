"""``fairlane conversations``: the stored conversations of a tenant."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane.names import is_name
from fairlane_server.cli.output import AsJson, fail, printable, say, settings_with, show_json, show_table
from fairlane_server.postgres.migrations import missing_extra

if TYPE_CHECKING:
    from fairlane_server.conversations.conversations import Conversations
    from fairlane_server.conversations.turns import StoredTurn

Name = Annotated[str, typer.Argument(metavar="ID", help="Of the conversation.", show_default=False)]
Tenant = Annotated[
    str, typer.Option("--tenant", metavar="TENANT", help="Whose conversation it is.", show_default=False)
]
Most = Annotated[int, typer.Option("--last", metavar="N", min=1, help="At most so many, the newest.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

app = typer.Typer(help="What was said in conversations, that later turns are answered from.", no_args_is_help=True)


@app.command("list")
def list_command(tenant: Tenant, *, last: Most = 1_000, as_json: AsJson = False) -> None:
    """List the conversations of a tenant, the one that was gone on with last first."""
    with opened(tenant) as conversations:
        found = conversations.list(last)
    if as_json:
        show_json({"conversations": [asdict(one) for one in found]})
    elif not found:
        say(f"tenant {tenant} has no conversations")
    else:
        show_table(
            ("conversation", "turns", "tokens", "first (UTC)", "last (UTC)"),
            [
                (
                    one.conversation_id,
                    f"{one.turns:,}",
                    f"{one.tokens:,}",
                    _time(one.first_at_ms),
                    _time(one.last_at_ms),
                )
                for one in found
            ],
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
        _show(turn)


@app.command("delete")
def delete_command(conversation: Name, tenant: Tenant, *, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete the turns of one conversation. Later requests start it anew."""
    with opened(tenant) as conversations:
        turns = len(conversations.turns(conversation))
        if not yes:
            question = f"Delete {printable(conversation)} of tenant {tenant} with {_counted(turns)}?"
            typer.confirm(question, abort=True, err=True)
        gone = conversations.delete(conversation)
    if as_json:
        show_json({"deleted": {"conversation_id": conversation, "turns": gone}})
    else:
        say(f"deleted {printable(conversation)} of tenant {tenant} with {_counted(gone)}")


@contextmanager
def opened(tenant: str) -> "Iterator[Conversations]":
    """Open the tenant's conversations; an error that the operator can fix ends the command with one line."""
    if not is_name(tenant):
        fail(f"--tenant {printable(tenant)}: no tenant can have this name")
    try:
        from fairlane_server.conversations.conversations import Conversations
        from fairlane_server.store_error import StoreError
    except ImportError as error:
        fail(str(missing_extra(error)))
    try:
        with Conversations(settings_with().postgres_dsn.get_secret_value(), tenant) as conversations:
            yield conversations
    except (StoreError, ValueError) as error:
        fail(printable(str(error)))


def _show(turn: "StoredTurn") -> None:
    say(f"--- {_time(turn.replied_at_ms)} UTC, request {printable(turn.request_id)}")
    for message in turn.messages:
        _say_lines(message.role, message.content)
    _say_lines("assistant", turn.answer)


def _say_lines(role: str, text: str) -> None:
    first, *rest = text.split("\n")
    say(f"{printable(role)}: {printable(first)}")
    for line in rest:
        say(f"    {printable(line)}")


def _counted(turns: int) -> str:
    return f"{turns:,} turn{'' if turns == 1 else 's'}"


def _time(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1_000, UTC):%Y-%m-%d %H:%M:%S}"
