"""``fairlane db``: the tables of the projection, and who may do what with them."""

from dataclasses import asdict

import typer

from fairlane_server.cli.output import CHANGES_PENDING, AsJson, settings_with, show
from fairlane_server.postgres.migrations import status, upgrade

app = typer.Typer(help="The tables that the recorder fills.", no_args_is_help=True)


@app.command("upgrade")
def upgrade_command(*, as_json: AsJson = False) -> None:
    """Bring the tables to the newest revision and the services' roles to their rights, as POSTGRES_OWNER_DSN (else
    POSTGRES_DSN). May be repeated."""
    done = upgrade(settings_with())
    text = f"applied {', '.join(done.applied)}" if done.applied else f"nothing to do, revision {done.after}"
    if done.rights_changed:
        text += f"; rights of {', '.join(done.roles)}"
    if done.missing_roles:
        text += f"; there is no role {', '.join(done.missing_roles)}"
    show(asdict(done), f"{done.database}: {text}", as_json=as_json)


@app.command("status")
def status_command(*, as_json: AsJson = False) -> int:
    """Show the revision of the tables. Exit status 2 when revisions are still to be applied."""
    state = status(settings_with())
    pending = f"to be applied: {', '.join(state.pending)}" if state.pending else "newest"
    show(asdict(state), f"{state.database}: revision {state.revision or 'none'}, {pending}", as_json=as_json)
    return CHANGES_PENDING if state.pending else 0
