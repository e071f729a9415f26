"""``fairlane users``: roles and status of users who present tokens or own keys."""

from dataclasses import asdict
from typing import Annotated

import typer

from fairlane_server.api_keys.api_key import Role
from fairlane_server.cli.keys import opened
from fairlane_server.cli.output import AsJson, OneTenant, Tenant, printable, show, show_list

Subject = Annotated[
    str, typer.Argument(metavar="SUBJECT", help="`sub` of the tokens of this user.", show_default=False)
]
OfRole = Annotated[Role, typer.Option("--role", help="What the user may do, whatever the tokens say.")]
Disabled = Annotated[bool, typer.Option("--disabled", help="Refuse the user's tokens and keys.")]

app = typer.Typer(help="Users of the gateway, as POSTGRES_OWNER_DSN (else POSTGRES_DSN).", no_args_is_help=True)


@app.command("set")
def set_command(
    subject: Subject, tenant: Tenant, role: OfRole = Role.TENANT, *, disabled: Disabled = False, as_json: AsJson = False
) -> None:
    """Set a user's role and status. Users without an entry have the permissions of their tokens."""
    with opened() as keys:
        user = keys.set_user(tenant, subject, role, disabled=disabled)
    state = "disabled" if user.disabled else user.role
    text = f"user {printable(user.subject)} of tenant {user.tenant}: {state}"
    show({"user": asdict(user)}, text, as_json=as_json)


@app.command("list")
def list_command(tenant: OneTenant = None, *, as_json: AsJson = False) -> None:
    """List the users that something was said of."""
    with opened() as keys:
        found = keys.users(tenant)
    show_list(
        "users",
        found,
        ("tenant", "user", "role", "disabled"),
        lambda user: (user.tenant, user.subject, user.role, "yes" if user.disabled else "no"),
        to_json=asdict,
        empty="there are no users",
        as_json=as_json,
    )
