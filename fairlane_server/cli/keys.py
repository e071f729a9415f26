"""``fairlane keys`` and ``fairlane users``: API keys of the gateway, and the users who own keys or present tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane import logs
from fairlane.clock import now_ms
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role, Scope
from fairlane_server.api_keys.permissions import GRANTABLE, Permission, refused_grants, refused_role, refused_scopes
from fairlane_server.cli.output import (
    AsJson,
    OneTenant,
    Tenant,
    fail,
    printable,
    say,
    settings_with,
    show,
    show_json,
    show_list,
    utc,
    warn,
)
from fairlane_server.text import span_ms

if TYPE_CHECKING:
    from fairlane_server.api_keys.key_store import ApiKey, ApiKeys, IssuedKey

_LONGEST_MS = 3_660 * 86_400_000

KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="Of the key: 16 digits and letters.", show_default=False)]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help="What it is for.", show_default=False)]
OfRole = Annotated[
    Role | None, typer.Option("--role", help="What it may do; by default tenant, or with --deployment viewer.")
]
Scopes = Annotated[
    list[Scope] | None,
    typer.Option("--scope", help="Narrow it to this; may be given several times. By default all its role may."),
]
OfDeployment = Annotated[
    bool, typer.Option("--deployment", help="It belongs to no tenant, and is for the admin API (in place of --tenant).")
]
Grants = Annotated[
    list[Permission] | None,
    typer.Option(
        "--grant",
        metavar="PERMISSION",
        help=f"Besides those of its role, with --deployment: {', '.join(sorted(GRANTABLE))}.",
    ),
]
OfUser = Annotated[
    str | None, typer.Option("--user", metavar="SUBJECT", help="The user it is for, who may then be disabled.")
]
Expires = Annotated[
    str | None, typer.Option("--expires", metavar="SPAN", help="How long it lives: 90s, 30m, 2h, 7d. By default ever.")
]
RotatedExpires = Annotated[
    str | None, typer.Option("--expires", metavar="SPAN", help="How long the new one lives; by default as the old one.")
]
Overlap = Annotated[str, typer.Option(metavar="SPAN", help="How long the old one still passes: 0s, 30m, 2h, 7d.")]
Ended = Annotated[bool, typer.Option("--all", help="Also what was revoked or has expired.")]

keys_app = typer.Typer(help="API keys of the gateway, as POSTGRES_OWNER_DSN (else POSTGRES_DSN).", no_args_is_help=True)


@keys_app.command("create")
def create_command(
    name: Name,
    tenant: OneTenant = None,
    role: OfRole = None,
    scope: Scopes = None,
    grant: Grants = None,
    user: OfUser = None,
    expires: Expires = None,
    *,
    deployment: OfDeployment = False,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it. It is shown this once: only a hash of it is kept."""
    owner = _owner(tenant, deployment=deployment)
    wanted = _role(owner, role, grant)
    if (why := refused_scopes(owner, scope or ())) is not None:
        fail(f"--scope: {why}")
    expires_in_ms = _span("--expires", expires, least_ms=1)
    with opened() as store:
        issued = store.create(
            *(owner, name, wanted, scope or ()), grants=grant or (), user=user, expires_in_ms=expires_in_ms
        )
    _show_issued(issued, as_json=as_json)


@keys_app.command("list")
def list_command(tenant: OneTenant = None, *, ended: Ended = False, as_json: AsJson = False) -> None:
    """List the keys, without their secrets, which are not stored."""
    with opened() as store:
        found = store.list(tenant, ended=ended)
    rights, times = ("role", "scopes", "grants"), ("created (UTC)", "expires", "last used")
    columns = ("key", "tenant", "name", *rights, "user", "state", *times)
    show_list("keys", found, columns, _row, to_json=asdict, empty="there are no keys", as_json=as_json)


@keys_app.command("revoke")
def revoke_command(key_id: KeyId, *, as_json: AsJson = False) -> None:
    """End a key. Every gateway that reaches Postgres refuses it within about a second."""
    with opened() as store:
        key = store.revoke(key_id)
    text = f"revoked {key.key_id} of tenant {key.tenant} ({printable(key.name)})"
    show({"revoked": asdict(key)}, text, as_json=as_json)


@keys_app.command("rotate")
def rotate_command(
    key_id: KeyId, overlap: Overlap = "0s", expires: RotatedExpires = None, *, as_json: AsJson = False
) -> None:
    """Make a key that may do what this one may, print it, and end this one after the overlap."""
    overlap_ms = _span("--overlap", overlap) or 0
    expires_in_ms = _span("--expires", expires, least_ms=1)
    with opened() as store:
        issued = store.rotate(key_id, overlap_ms, expires_in_ms)
    _show_issued(issued, as_json=as_json)


@keys_app.command("bar")
def bar_command(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """Refuse all keys, tokens and sessions of a tenant, within about a second. Its keys are revoked."""
    with opened() as store:
        keys = store.bar_tenant(tenant)
    text = f"barred tenant {tenant}, revoked {len(keys)} keys"
    show({"barred": tenant, "revoked": [asdict(key) for key in keys]}, text, as_json=as_json)


@keys_app.command("readmit")
def readmit_command(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """Accept tokens and sessions of a barred tenant again, and let it have new keys. The old ones stay revoked."""
    with opened() as store:
        was_barred = store.readmit_tenant(tenant)
    if not was_barred:
        fail(f"tenant {tenant} is not barred")
    show({"readmitted": tenant}, f"readmitted tenant {tenant}", as_json=as_json)


@contextmanager
def opened() -> "Iterator[ApiKeys]":
    """Open the key store as the tables' owner."""
    from fairlane_server.api_keys.key_store import ApiKeys

    settings = settings_with()
    # What is done to keys is logged, on stderr.
    logs.configure(settings, "keys")
    dsn = settings.postgres_owner_dsn or settings.postgres_dsn
    with ApiKeys(dsn.get_secret_value()) as store:
        yield store


def _owner(tenant: str | None, *, deployment: bool) -> str:
    """The tenant, or the deployment. Ends the command unless exactly one is given."""
    if deployment is (tenant is not None):
        fail("say whose it is: --tenant TENANT, or --deployment")
    return DEPLOYMENT if tenant is None else tenant


def _role(owner: str, role: Role | None, grants: Sequence[Permission] | None) -> Role:
    """The role, or that by default. Ends the command for a role or grants that the owner's identities cannot have."""
    wanted = role or (Role.VIEWER if owner == DEPLOYMENT else Role.TENANT)
    if (why := refused_role(owner, wanted)) is not None:
        fail(f"--role: {why}")
    if (why := refused_grants(owner, grants or ())) is not None:
        fail(f"--grant: {why}")
    return wanted


def _show_issued(issued: "IssuedKey", *, as_json: bool) -> None:
    if as_json:
        show_json({"key": asdict(issued.key), "api_key": issued.text})
        return
    say(issued.text)
    warn(f"key {issued.key.key_id} of tenant {issued.key.tenant} is shown this once: keep it where secrets are kept")


def _span(option: str, text: str | None, least_ms: int = 0) -> int | None:
    if text is None:
        return None
    found = span_ms(text)
    if found is None or not least_ms <= found <= _LONGEST_MS:
        fail(f"{option} {text}: no span of at most 3660 days (90s, 30m, 2h, 7d)")
    return found


def _row(key: "ApiKey") -> tuple[str, ...]:
    return (
        key.key_id,
        key.tenant,
        key.name,
        key.role,
        ", ".join(key.scopes) or "all",
        ", ".join(key.grants) or "-",
        key.user or "-",
        _state(key),
        *(utc(at_ms)[:16] for at_ms in (key.created_at_ms, key.expires_at_ms, key.last_used_at_ms)),
    )


def _state(key: "ApiKey") -> str:
    if key.revoked_at_ms is not None:
        return "revoked"
    return "expired" if key.expires_at_ms is not None and key.expires_at_ms <= now_ms() else "valid"


Subject = Annotated[
    str, typer.Argument(metavar="SUBJECT", help="`sub` of the tokens of this user.", show_default=False)
]
UserRole = Annotated[
    Role | None,
    typer.Option(
        "--role", help="What the user may do, whatever the tokens say; by default tenant, or with --deployment viewer."
    ),
]
Disabled = Annotated[bool, typer.Option("--disabled", help="Refuse the user's tokens and keys.")]

users_app = typer.Typer(help="Users of the gateway, as POSTGRES_OWNER_DSN (else POSTGRES_DSN).", no_args_is_help=True)


@users_app.command("set")
def set_user(
    subject: Subject,
    tenant: OneTenant = None,
    role: UserRole = None,
    grant: Grants = None,
    *,
    deployment: OfDeployment = False,
    disabled: Disabled = False,
    as_json: AsJson = False,
) -> None:
    """Set a user's role and status. Users without an entry have the permissions of their tokens."""
    owner = _owner(tenant, deployment=deployment)
    wanted = _role(owner, role, grant)
    with opened() as store:
        user = store.set_user(owner, subject, wanted, disabled=disabled, grants=grant or ())
    state = "disabled" if user.disabled else user.role
    text = f"user {printable(user.subject)} of tenant {user.tenant}: {state}"
    show({"user": asdict(user)}, text, as_json=as_json)


@users_app.command("list")
def list_users(tenant: OneTenant = None, *, as_json: AsJson = False) -> None:
    """List the users that have an entry."""
    with opened() as store:
        found = store.users(tenant)
    show_list(
        "users",
        found,
        ("tenant", "user", "role", "grants", "disabled"),
        lambda user: (
            *(user.tenant, user.subject, user.role, ", ".join(user.grants) or "-"),
            "yes" if user.disabled else "no",
        ),
        to_json=asdict,
        empty="there are no users",
        as_json=as_json,
    )
