"""``fairlane access``: users and rights on Kafka, held against the files that they follow from, and on Redis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.access.admin import AccessApplied, apply_access, read_access
from fairlane_server.access.credentials import (
    given_passwords,
    keep_passwords,
    prepare_passwords,
    remove_credentials,
)
from fairlane_server.access.plan import (
    AccessChange,
    AccessPlan,
    AccessState,
    CreateUser,
    DeleteUser,
    by_kafkas_names,
    plan,
)
from fairlane_server.access.users import KafkaUser, first_users
from fairlane_server.cli.output import (
    CHANGES_PENDING,
    AsJson,
    BootstrapServers,
    DryRun,
    ModelsFile,
    TenantsFile,
    TopicsFile,
    fail,
    say,
    settings_with,
    show_json,
    show_table,
    warn,
)
from fairlane_server.control.published_tenants import all_tenants
from fairlane_server.control.tenants_file import KafkaQuotas, load_kafka_quotas
from fairlane_server.kafka.cluster_admin import ClusterAdmin
from fairlane_server.models.models_file import load_models
from fairlane_server.redis.credentials import acl_file
from fairlane_server.redis.rights import RedisServer
from fairlane_server.topics.families import load_families, pools_of

app = typer.Typer(
    help="Kafka's users, ACLs and client quotas, held against topics.yaml, tenants.yaml and models.yaml; needs a user "
    "that may change them. And the users of Redis.",
    no_args_is_help=True,
)

Credentials = Annotated[
    Path,
    typer.Option("--credentials", metavar="DIR", help="Folder that gets a file USER.env with each new password."),
]
Delete = Annotated[
    bool, typer.Option("--delete", help="Delete users of tenants and pools that no file names any more.")
]
UserName = Annotated[str, typer.Argument(metavar="USER", help="Name of a Kafka user.", show_default=False)]


@app.command("plan")
def plan_command(
    bootstrap_servers: BootstrapServers = None,
    topics_file: TopicsFile = None,
    tenants_file: TenantsFile = None,
    models_file: ModelsFile = None,
    *,
    delete: Delete = False,
    as_json: AsJson = False,
) -> None:
    """Show what `apply` would change, and what users of others may do with this pipeline's topics.

    Exit status: 0 nothing to change, 2 changes pending, 1 an error that `apply` would end with.
    """
    opened = _open(bootstrap_servers, topics_file, tenants_file, models_file)
    made = opened.plan(delete=delete)
    opened.show(made, as_json=as_json)
    raise typer.Exit(CHANGES_PENDING if made.changes else 0)


@app.command("check")
def check_command(
    bootstrap_servers: BootstrapServers = None,
    topics_file: TopicsFile = None,
    tenants_file: TenantsFile = None,
    models_file: ModelsFile = None,
    *,
    as_json: AsJson = False,
) -> None:
    """As `plan --delete`, and an error if anything differs from the files, users of others have rights here, what no
    ACL names may be open to everybody, or a listener takes clients without a password or a certificate.

    Exit status: 0 all is as it should be, 1 it is not.
    """
    opened = _open(bootstrap_servers, topics_file, tenants_file, models_file)
    made = opened.plan(delete=True)
    opened.show(made, as_json=as_json)
    if made.changes or made.foreign:
        fail(f"{len(made.changes)} changes pending, {len(made.foreign)} rights that do not follow from the files")
    if opened.state.allows_unlisted:
        fail(_OPEN_TO_ALL)
    if opened.state.open_listeners:
        fail(_open_listeners(opened.state))


@app.command("apply")
def apply_command(
    credentials: Credentials,
    bootstrap_servers: BootstrapServers = None,
    topics_file: TopicsFile = None,
    tenants_file: TenantsFile = None,
    models_file: ModelsFile = None,
    *,
    delete: Delete = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Create missing users, give and take rights, set quotas.

    Users of removed tenants and pools keep their rights without `--delete`; with it, the rights are taken before the
    users are deleted. May be repeated. The rights of users that are none of this pipeline's stay as they are.
    """
    opened = _open(bootstrap_servers, topics_file, tenants_file, models_file)
    opened.finish(opened.plan(delete=delete), credentials, dry_run=dry_run, as_json=as_json)


@app.command("rotate")
def rotate_command(
    user: UserName,
    credentials: Credentials,
    bootstrap_servers: BootstrapServers = None,
    topics_file: TopicsFile = None,
    tenants_file: TenantsFile = None,
    models_file: ModelsFile = None,
    *,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Create a second user with the rights of this one and a new password. Both are valid until `retire`."""
    opened = _open(bootstrap_servers, topics_file, tenants_file, models_file)
    existing = opened.user(user)
    if user not in opened.state.users:
        fail(f"{user}: does not exist; `fairlane access apply` creates it")
    if existing.other.name in opened.state.users:
        fail(f"{existing.other.name} exists already: `fairlane access retire` the one that is no longer used")
    made = opened.plan(added=existing.other).only((existing, existing.other))
    opened.finish(made, credentials, dry_run=dry_run, as_json=as_json)


@app.command("retire")
def retire_command(
    user: UserName,
    credentials: Credentials,
    bootstrap_servers: BootstrapServers = None,
    topics_file: TopicsFile = None,
    tenants_file: TenantsFile = None,
    models_file: ModelsFile = None,
    *,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take the rights of a user and delete it, after `rotate` and once nobody uses it any more. May be repeated."""
    opened = _open(bootstrap_servers, topics_file, tenants_file, models_file)
    retired = opened.user(user)
    if retired.other.name not in opened.state.users:
        fail(f"{user}: there is no {retired.other.name} in its place; `fairlane access rotate` creates it")
    made = opened.plan(retired=retired).only((retired, retired.other))
    opened.finish(made, credentials, dry_run=dry_run, as_json=as_json)


@app.command("redis")
def redis_command(
    server: Annotated[RedisServer, typer.Argument(help="The server for state or the one for caches.")],
    credentials: Annotated[
        Path, typer.Option("--credentials", metavar="DIR", help="Folder with a file USER.redis.env of each user.")
    ],
) -> None:
    """Print the ACL file of a Redis server (7 or newer), and write the URL of each of its users, with a password, to
    its file.

    The address of the server, without user and password, is taken from REDIS_URL or REDIS_CACHE_URL. May be repeated:
    passwords stay. To replace one, rename USER.redis.env to USER.redis.env.old, whose password stays valid, until the
    user's processes have the new one.
    """
    given = getattr(settings_with(), server.setting.lower())
    if given is None:
        fail(f"{server.setting}: set it to the address of the server")
    try:
        typer.echo(acl_file(credentials, server, given.get_secret_value()), nl=False)
    except (OSError, ValueError) as error:
        fail(str(error))


_OPEN_TO_ALL = (
    "the brokers set allow.everyone.if.no.acl.found: what no ACL names may be open to everybody; remove that setting"
)


def _open_listeners(state: AccessState) -> str:
    return (
        f"the brokers listen on {', '.join(state.open_listeners)} without a password or a certificate: whoever "
        "reaches that is User:ANONYMOUS; close it, or let it ask for SASL"
    )


@dataclass(frozen=True, slots=True)
class _Access:
    """A cluster's state, and the files that it is held against. ``users``: those of the files, the first of each
    pair."""

    settings: Settings
    cluster: ClusterAdmin
    state: AccessState
    users: Sequence[KafkaUser]
    topics_file: Path | None
    quotas: Mapping[str, Mapping[str, float]]

    def plan(
        self, *, added: KafkaUser | None = None, retired: KafkaUser | None = None, delete: bool = False
    ) -> AccessPlan:
        families = load_families(self.topics_file)
        prefix = self.settings.group_prefix
        try:
            return plan(
                *(self.state, self.users, families, prefix, self.quotas), added=added, retired=retired, delete=delete
            )
        except ValueError as error:
            fail(str(error))

    def user(self, name: str) -> KafkaUser:
        """The user of this name. Ends the command if it follows from no file."""
        known = {one.name: one for user in self.users for one in (user, user.other)}
        if name not in known:
            existing = ", ".join(sorted(known.keys() & set(self.state.users)))
            fail(f"{name}: the files name no such user; there are {existing or 'none'}")
        return known[name]

    def show(self, made: AccessPlan, *, as_json: bool) -> None:
        """Show a plan. Ends the command when it must not be carried out."""
        if as_json:
            show_json({"changes": [*map(_change_json, made.changes)], **self._findings(made)})
        else:
            rows = [(one.user, one.action, one.detail) for one in made.changes]
            _show_rows(("user", "change", ""), rows)
            self._warn(made)
        _refuse_unknown_users(made)

    def given_passwords(self) -> Mapping[str, str]:
        """The passwords of the setting. Ends the command if one is of no user of this pipeline."""
        given = self.settings.kafka_user_passwords
        try:
            passwords = {} if given is None else given_passwords(given.get_secret_value())
        except ValueError as error:
            fail(f"KAFKA_USER_PASSWORDS: {error}")
        known = {one.name for user in self.users for one in (user, user.other)}
        if unknown := sorted(passwords.keys() - known):
            fail(f"KAFKA_USER_PASSWORDS: {unknown[0]}: the files name no such user")
        return passwords

    def finish(self, made: AccessPlan, credentials: Path, *, dry_run: bool, as_json: bool) -> None:
        """Apply the plan and show what was done; with ``dry_run`` only show it. Ends the command when a change
        failed."""
        if dry_run:
            self.show(made, as_json=as_json)
            return
        _refuse_unknown_users(made)
        new = [change.user for change in made.changes if isinstance(change, CreateUser)]
        try:
            keep_passwords(credentials, (user for user in self.state.users if KafkaUser.parse(user) is not None))
            passwords = prepare_passwords(credentials, new, self.given_passwords())
        except (OSError, ValueError) as error:
            fail(f"--credentials: {error}")
        applied = apply_access(self.cluster, self.settings, made.changes, passwords)
        if as_json:
            done = [{**_change_json(one.change), "result": one.result, "reason": one.reason} for one in applied]
            show_json({"applied": done, **self._findings(made)})
        else:
            rows = [
                (one.change.user, one.change.action, one.result, one.reason or one.change.detail) for one in applied
            ]
            _show_rows(("user", "change", "result", ""), rows)
            self._warn(made)
        try:
            _follow(applied, credentials)
        except OSError as error:
            fail(f"--credentials: {error}")
        failed = [one for one in applied if one.result == "failed"]
        if failed:
            first, more = failed[0], f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            fail(f"{first.change.user}: {first.change.action} {first.change.detail} failed: {first.reason}{more}")

    def _findings(self, made: AccessPlan) -> dict[str, Any]:
        return {
            "removals": [*map(_change_json, made.removals)],
            "foreign": [{"user": grant.user, "right": str(grant)} for grant in made.foreign],
            "unknown_users": [*made.unknown_users],
            "allows_unlisted": self.state.allows_unlisted,
            "open_listeners": [*self.state.open_listeners],
        }

    def _warn(self, made: AccessPlan) -> None:
        for grant in made.foreign:
            warn(f"{grant.user} may {grant}, which does not follow from the files")
        for user in sorted({change.user for change in made.removals}):
            warn(f"{user}: no file names its tenant or pool any more; `fairlane access apply --delete` deletes it")
        if self.state.allows_unlisted:
            warn(_OPEN_TO_ALL)
        if self.state.open_listeners:
            warn(_open_listeners(self.state))


def _open(
    bootstrap_servers: str | None, topics_file: Path | None, tenants_file: Path | None, models_file: Path | None
) -> _Access:
    settings = settings_with(
        kafka_bootstrap_servers=bootstrap_servers, tenants_file=tenants_file, models_file=models_file
    )
    tenants = all_tenants(settings, codec_for(settings))
    pools = pools_of(tenants, load_models(settings.models_file))
    cluster = ClusterAdmin(settings)
    users = first_users([tenant.tenant for tenant in tenants], pools)
    given = {tenant.tenant: KafkaQuotas() for tenant in tenants} | {**load_kafka_quotas(settings.tenants_file)}
    quotas = {tenant: by_kafkas_names(one) for tenant, one in given.items()}
    return _Access(settings, cluster, read_access(cluster, settings), users, topics_file, quotas)


def _refuse_unknown_users(made: AccessPlan) -> None:
    if made.unknown_users:
        fail(
            f"{', '.join(made.unknown_users)}: exists and has none of the rights of this pipeline, so others may know "
            "its password; delete it, or use another TOPIC_PREFIX"
        )


def _follow(applied: Sequence[AccessApplied], credentials: Path) -> None:
    """Bring the files of passwords in line with the users. Raises OSError."""
    done = [one.change for one in applied if one.result == "done"]
    failed = {one.change.user for one in applied if one.result == "failed"}
    keep_passwords(credentials, [change.user for change in done if isinstance(change, CreateUser)])
    for change in done:
        if isinstance(change, DeleteUser) and change.user not in failed:
            remove_credentials(credentials, change.user)


def _show_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        show_table(columns, rows)
    else:
        say("nothing to change")


def _change_json(change: AccessChange) -> dict[str, Any]:
    return {"action": change.action, "user": change.user, "detail": change.detail}
