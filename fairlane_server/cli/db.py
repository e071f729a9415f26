"""``fairlane db``: the tables of the projection."""

from dataclasses import asdict

import typer

from fairlane_server.cli.output import AsJson, fail, say, settings_with, show_json
from fairlane_server.postgres.migrations import DatabaseError, status, upgrade

CHANGES_PENDING = 2

app = typer.Typer(help="The tables that the recorder fills.", no_args_is_help=True)


@app.command("upgrade")
def upgrade_command(*, as_json: AsJson = False) -> None:
    """Bring the tables to the newest revision, as POSTGRES_OWNER_DSN (else POSTGRES_DSN). May be repeated."""
    try:
        done = upgrade(settings_with())
    except DatabaseError as error:
        fail(str(error))
    if as_json:
        show_json(asdict(done))
    elif done.applied:
        say(f"{done.database}: applied {', '.join(done.applied)}")
    else:
        say(f"{done.database}: nothing to do, revision {done.after}")


@app.command("status")
def status_command(*, as_json: AsJson = False) -> int:
    """Show the revision of the tables. Exit status 2 when revisions are still to be applied."""
    try:
        state = status(settings_with())
    except DatabaseError as error:
        fail(str(error))
    if as_json:
        show_json(asdict(state))
    else:
        pending = f"to be applied: {', '.join(state.pending)}" if state.pending else "newest"
        say(f"{state.database}: revision {state.revision or 'none'}, {pending}")
    return CHANGES_PENDING if state.pending else 0
