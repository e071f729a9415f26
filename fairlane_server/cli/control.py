"""``fairlane tenants``, and what all commands that publish the records of a file have in common: topics first."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Annotated, TypeVar

import typer

from fairlane.names import CONTROL_TENANTS
from fairlane.records import ModelPrices, TenantGroup, TenantSpec
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.cli.output import (
    AsJson,
    BootstrapServers,
    Force,
    ReplicationFactor,
    TenantsFile,
    TopicsFile,
    fail,
    say,
    settings_with,
    show_json,
    show_table,
    warn,
)
from fairlane_server.cli.topics import (
    applied_json,
    carry_out,
    fail_if_any_failed,
    make_plan,
    show_applied,
    show_findings,
)
from fairlane_server.command_author import command_author
from fairlane_server.control.exclusive_change import ExclusiveChange
from fairlane_server.control.published_tenants import managed_by_api, tenant_topic, with_api_tenants
from fairlane_server.control.publisher import ControlTopic, Publication, compare
from fairlane_server.control.tenants_file import load_tenants
from fairlane_server.kafka.cluster_admin import ClusterAdmin
from fairlane_server.kafka.open_kafka import check_open_kafka
from fairlane_server.models.catalog import ModelRecord
from fairlane_server.topics.families import TopicFamily, TopicSpec, expand, load_families

RecordT = TypeVar("RecordT", bound=TenantSpec | ModelRecord | ModelPrices)

State = Mapping[str, RecordT | None]
Recorded = Callable[[State[RecordT], State[RecordT]], AbstractContextManager[None]]
"""Records a change: published records as they were, and those that change as they will be; None is none."""

Wanted = Callable[[State[RecordT]], Mapping[str, RecordT]]
"""The records that a file stands for, given the published ones, by key and in the order of publication."""
Foreign = Callable[[State[RecordT]], Collection[str]]
Check = Callable[[State[RecordT], Mapping[str, RecordT], Iterable[str]], None]
"""Ends the command if these changed records and withdrawn keys must not be published."""

tenants = typer.Typer(help="The tenants, from deploy/tenants.yaml.", no_args_is_help=True)

DeleteTenants = Annotated[
    bool, typer.Option("--delete", help="Withdraw tenants that the file no longer names. Their topics stay.")
]
NoAudit = Annotated[
    bool, typer.Option("--no-audit", help="Publish without a record in the audit, for instance without Postgres.")
]


@tenants.command("apply")
def apply_tenants(
    bootstrap_servers: BootstrapServers = None,
    tenants_file: TenantsFile = None,
    topics_file: TopicsFile = None,
    replication_factor: ReplicationFactor = None,
    *,
    delete: DeleteTenants = False,
    force: Force = False,
    no_audit: NoAudit = False,
    as_json: AsJson = False,
) -> None:
    """Create the tenants' topics, then publish the tenants that are new or changed to every process.

    Running processes know a new tenant within seconds. May be repeated. Tenants that the admin API manages stay as they
    are; with --force those of the file are taken over from it. What is published is recorded in the audit, as
    POSTGRES_OWNER_DSN (else POSTGRES_DSN).
    """
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers, tenants_file=tenants_file)
    specs = {spec.tenant: spec for spec in load_tenants(settings.tenants_file)}
    families = [
        family for family in load_families(topics_file) if family.placeholders or family.name == CONTROL_TENANTS
    ]
    control = tenant_topic(settings, codec_for(settings))
    published = control.read_if_there()
    of_api = managed_by_api(published)
    check_open_kafka(settings, specs.keys() | (of_api.keys() if delete else published.keys()))
    foreign = of_api.keys() - specs.keys() if force else of_api.keys()
    # Without the models, the pools are those that are dedicated to tenants.
    topics = expand(families, with_api_tenants(specs.values(), {} if force else published), models=())
    reported = [family for family in families if "tenant" in family.placeholders]
    cluster = ClusterAdmin(settings)
    apply_records(
        *(cluster, reported, topics, replication_factor, control, lambda _published: specs),
        recorded=_warned if no_audit else partial(_recorded, settings),
        foreign=lambda _published: foreign,
        force=force,
        delete=delete,
        as_json=as_json,
    )


@contextmanager
def _warned(_before: State[TenantSpec], after: State[TenantSpec]) -> Iterator[None]:
    yield
    if after:
        warn(f"the audit has no record of the changes of {', '.join(after)}")


@contextmanager
def _recorded(settings: Settings, before: State[TenantSpec], after: State[TenantSpec]) -> Iterator[None]:
    """Record the changes as they begin and end. Ends the command if that cannot be begun."""
    if not after:
        yield
        return
    from fairlane_server.administration.events import AdminAudit, AuditError
    from fairlane_server.administration.recorded_change import recorded_change
    from fairlane_server.administration.tenants import TenantChange, tenant_event

    author, user = command_author(), settings.kafka_sasl_username
    events = [
        tenant_event(TenantChange(name, before.get(name), spec), author, kafka_user=user)
        for name, spec in after.items()
    ]
    dsn = settings.postgres_owner_dsn or settings.postgres_dsn
    with AdminAudit(dsn.get_secret_value()) as audit, ExitStack() as stack:
        try:
            stack.enter_context(recorded_change(audit, *events))
        except AuditError as error:
            fail(f"{error}: no tenant was published (--no-audit publishes without a record)")
        yield


def apply_records(
    cluster: ClusterAdmin,
    families: Iterable[TopicFamily],
    topics: tuple[TopicSpec, ...],
    replication_factor: int | None,
    control: ControlTopic[RecordT],
    wanted: "Wanted[RecordT]",
    *,
    recorded: "Recorded[RecordT]" = lambda _before, _after: nullcontext(),
    foreign: "Foreign[RecordT]" = lambda _published: (),
    change: ExclusiveChange | None = None,
    check: "Check[RecordT]" = lambda _published, _changed, _withdrawn: None,
    force: bool,
    delete: bool,
    as_json: bool,
) -> None:
    """Create ``topics``, then publish changed records and, with ``delete``, withdraw removed ones; print what was done.

    ``families`` are those whose extra topics are reported; ``recorded`` records what is published; ``foreign`` are
    keys of records that something else manages. With ``change`` no other one of that kind comes between reading and
    publishing, and ``check`` may refuse it. Raises ClusterError.
    """
    plan = make_plan(cluster, families, topics, replication_factor)
    applied = carry_out(cluster, plan, force=force)
    if not as_json:
        show_applied(applied, len(topics))
    show_findings(plan.findings)
    fail_if_any_failed(applied)
    made: list[Publication[RecordT]] = []

    def decide(published: State[RecordT]) -> tuple[Iterable[RecordT], Iterable[str]]:
        made[:] = [compare(wanted(published), published, foreign(published))]
        withdrawn = made[0].unknown if delete else ()
        check(published, made[0].changed, withdrawn)
        return made[0].changed.values(), withdrawn

    if change is None:
        published = control.read()
        _, withdrawn = decide(published)
        with recorded(published, {**made[0].changed, **dict.fromkeys(withdrawn)}):
            control.publish(made[0].changed.values(), withdrawn)
    else:
        change.make(control, decide)
    publication = made[0]
    withdrawn = publication.unknown if delete else ()
    if as_json:
        show_json(
            {
                "topics": [applied_json(item) for item in applied],
                "published": list(publication.changed),
                "unchanged": list(publication.unchanged),
                "unknown": list(publication.unknown),
                "foreign": list(publication.foreign),
                "withdrawn": list(withdrawn),
            }
        )
        return
    for name in publication.changed:
        say(f"{control.kind} {name}: published")
    for name in withdrawn:
        say(f"{control.kind} {name}: withdrawn")
    say(f"{len(publication.unchanged)} unchanged")
    for name in publication.foreign:
        warn(f"{control.kind} {name} is managed by the admin API and stays as it is; --force takes it over")
    for name in () if delete else publication.unknown:
        warn(f"{control.kind} {name} is published but not in the file; --delete withdraws it")


@tenants.command("list")
def list_tenants(bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False) -> None:
    """Show the tenants that the cluster's processes know."""
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    control = tenant_topic(settings, codec_for(settings))
    own = ("managed by", "weight", "classes", "models", "services", "pool")
    columns = (*own, "queue", "quotas", "groups", "forbids", "cache")
    list_records(control, columns, _tenant_row, as_json=as_json)


def list_records(
    control: ControlTopic[RecordT],
    columns: tuple[str, ...],
    row: Callable[[RecordT], tuple[str, ...]],
    *,
    as_json: bool,
) -> None:
    kind, found = control.kind, control.read()
    if as_json:
        show_json({f"{kind}s": [asdict(record) if record else {kind: name} for name, record in found.items()]})
        return
    rows = [(name, *(row(record) if record else ("(unreadable)",))) for name, record in sorted(found.items())]
    show_table((kind, *columns), rows)


def _tenant_row(spec: TenantSpec) -> tuple[str, ...]:
    quotas = {
        "requests/s": spec.requests_per_s,
        "burst": spec.burst_requests,
        "tokens/min": spec.tokens_per_minute,
        "tokens/day": spec.tokens_per_day,
    }
    return (
        spec.managed_by,
        f"{spec.weight:g}",
        ", ".join(spec.classes),
        ", ".join(spec.models) or "all",
        ", ".join(spec.services) or "-",
        spec.pool or "shared",
        f"{spec.max_queue_requests} requests, {spec.max_queue_bytes} bytes",
        ", ".join(f"{value:g} {name}" for name, value in quotas.items() if value is not None) or "none",
        ", ".join(map(_group, spec.groups)) or "-",
        ", ".join(spec.forbidden_degradations) or "-",
        spec.cache,
    )


def _group(group: TenantGroup) -> str:
    name = group.group if group.parent is None else f"{group.parent}/{group.group}"
    return f"{name} {group.weight:g}"
