"""``fairlane tenants``: who may use the pipeline."""

from dataclasses import asdict
from typing import Annotated

import typer

from fairlane.names import CONTROL_TENANTS
from fairlane.records import TenantGroup, TenantSpec
from fairlane.settings import Settings
from fairlane_server.cli.output import (
    AsJson,
    BootstrapServers,
    Force,
    ReplicationFactor,
    TenantsFile,
    TopicsFile,
    settings_with,
    show_json,
    show_table,
)
from fairlane_server.cli.publishing import apply, control_topic
from fairlane_server.control.publisher import ControlTopic
from fairlane_server.control.tenants_file import load_tenants
from fairlane_server.topics.families import expand, load_families, of_scope

app = typer.Typer(help="The tenants, from deploy/tenants.yaml.", no_args_is_help=True)

Delete = Annotated[
    bool, typer.Option("--delete", help="Withdraw tenants that the file no longer names. Their topics stay.")
]


@app.command("apply")
def apply_command(
    bootstrap_servers: BootstrapServers = None,
    tenants_file: TenantsFile = None,
    topics_file: TopicsFile = None,
    replication_factor: ReplicationFactor = None,
    *,
    delete: Delete = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Create the tenants' topics, then tell every process about the tenants that are new or changed.

    Processes that run pick a tenant up within seconds. May be repeated.
    """
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers, tenants_file=tenants_file)
    tenants = load_tenants(settings.tenants_file)
    families = tuple(
        family for family in load_families(topics_file) if family.placeholders or family.name == CONTROL_TENANTS
    )
    # Without the models, the pools are those that tenants have to themselves.
    wanted = expand(families, tenants, models=())
    apply(
        settings,
        of_scope(families, "tenant"),
        wanted,
        _topic(settings),
        {tenant.tenant: tenant for tenant in tenants},
        "tenant",
        replication_factor=replication_factor,
        delete=delete,
        force=force,
        as_json=as_json,
    )


@app.command("list")
def list_command(bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False) -> None:
    """Show the tenants that the cluster's processes know."""
    found = _topic(settings_with(kafka_bootstrap_servers=bootstrap_servers)).read()
    if as_json:
        show_json({"tenants": [{"tenant": name} if spec is None else asdict(spec) for name, spec in found.items()]})
        return
    show_table(
        ("tenant", "weight", "classes", "models", "services", "pool", "queue", "quotas", "groups", "forbids", "cache"),
        [(name, "(unreadable)") if spec is None else _row(spec) for name, spec in sorted(found.items())],
    )


def _topic(settings: Settings) -> ControlTopic[TenantSpec]:
    return control_topic(settings, CONTROL_TENANTS, TenantSpec, lambda spec: spec.tenant)


def _row(spec: TenantSpec) -> tuple[str, ...]:
    quotas = {
        "requests/s": spec.requests_per_s,
        "burst": spec.burst_requests,
        "tokens/min": spec.tokens_per_minute,
        "tokens/day": spec.tokens_per_day,
    }
    return (
        spec.tenant,
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
