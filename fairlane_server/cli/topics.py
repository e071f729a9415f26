"""``fairlane topics``: the topics of a cluster, held against topics.yaml."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.cli.output import (
    CHANGES_PENDING,
    FAILURE,
    AsJson,
    BootstrapServers,
    Force,
    ModelsFile,
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
from fairlane_server.control.published_tenants import all_tenants
from fairlane_server.kafka.cluster_admin import ClusterAdmin
from fairlane_server.models.models_file import load_models
from fairlane_server.topics.admin import Applied, apply_plan, read_state
from fairlane_server.topics.families import TopicFamily, TopicSpec, expand, load_families
from fairlane_server.topics.plan import Change, Deviation, TopicPlan, plan, unknown_override_tenants

app = typer.Typer(help="The topics of a cluster, held against topics.yaml.", no_args_is_help=True)

Delete = Annotated[
    bool, typer.Option("--delete", help="Delete topics of tenants and pools that no file names any more.")
]
Shrink = Annotated[
    bool, typer.Option("--shrink", help="Allow shorter retention and another cleanup policy, which delete records.")
]


@app.command("plan")
def plan_command(
    bootstrap_servers: BootstrapServers = None,
    topics_file: TopicsFile = None,
    tenants_file: TenantsFile = None,
    models_file: ModelsFile = None,
    replication_factor: ReplicationFactor = None,
    *,
    delete: Delete = False,
    shrink: Shrink = False,
    as_json: AsJson = False,
) -> None:
    """Show what `apply` would change.

    Exit status: 0 nothing to change, 2 changes pending, 1 an error (also one that the plan found).
    """
    settings = settings_with(
        kafka_bootstrap_servers=bootstrap_servers, tenants_file=tenants_file, models_file=models_file
    )
    _, wanted, made, findings = _plan(settings, topics_file, replication_factor, delete=delete, shrink=shrink)
    if as_json:
        show_json(
            {"changes": [change_json(change) for change in made.changes], "findings": list(map(asdict, findings))}
        )
    else:
        if made.changes:
            show_table(("topic", "change", ""), [(item.topic, item.action, item.detail) for item in made.changes])
        else:
            say(f"{len(wanted)} topics, nothing to change")
        show_findings(findings)
    if made.errors:
        raise typer.Exit(FAILURE)
    raise typer.Exit(CHANGES_PENDING if made.changes else 0)


@app.command("apply")
def apply_command(
    bootstrap_servers: BootstrapServers = None,
    topics_file: TopicsFile = None,
    tenants_file: TenantsFile = None,
    models_file: ModelsFile = None,
    replication_factor: ReplicationFactor = None,
    *,
    delete: Delete = False,
    shrink: Shrink = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make the cluster's topics as they should be, and wait until new ones have leaders.

    May be repeated, and run by several at once. Nothing is deleted or shrunk without its option.
    """
    settings = settings_with(
        kafka_bootstrap_servers=bootstrap_servers, tenants_file=tenants_file, models_file=models_file
    )
    cluster, wanted, made, findings = _plan(settings, topics_file, replication_factor, delete=delete, shrink=shrink)
    applied = carry_out(cluster, made, force=force)
    if as_json:
        show_json({"applied": [applied_json(item) for item in applied], "findings": list(map(asdict, findings))})
    else:
        show_applied(applied, len(wanted))
        show_findings(findings)
    fail_if_any_failed(applied)


def make_plan(
    cluster: ClusterAdmin,
    families: Iterable[TopicFamily],
    wanted: tuple[TopicSpec, ...],
    replication_factor: int | None,
    *,
    delete: bool = False,
    shrink: bool = False,
) -> TopicPlan:
    """Read the cluster and decide. Raises ClusterError."""
    state = read_state(cluster, [topic.name for topic in wanted])
    return plan(
        wanted,
        state.topics,
        families=families,
        broker_config=state.broker_config,
        replication_factor=replication_factor or state.default_replication_factor,
        delete=delete,
        shrink=shrink,
    )


def carry_out(cluster: ClusterAdmin, made: TopicPlan, *, force: bool) -> tuple[Applied, ...]:
    """Apply a plan, unless it contains an error and ``force`` is not set. Raises ClusterError."""
    if made.errors and not force:
        fail(f"{made.errors[0].message} (--force applies all the same)")
    return apply_plan(cluster, made)


def show_applied(applied: tuple[Applied, ...], topics: int) -> None:
    if not applied:
        say(f"{topics} topics, nothing to change")
        return
    show_table(
        ("topic", "change", "result", ""),
        [(item.change.topic, item.change.action, item.result, item.reason or item.change.detail) for item in applied],
    )


def show_findings(findings: Iterable[Deviation]) -> None:
    """Warnings and errors, a line each, on stderr."""
    for finding in findings:
        if finding.level == "error":
            typer.echo(f"error: {finding.message}", err=True)
        else:
            warn(finding.message)


def fail_if_any_failed(applied: tuple[Applied, ...]) -> None:
    failed = [item for item in applied if item.result == "failed"]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        fail(f"{failed[0].change.topic}: {failed[0].change.action} failed: {failed[0].reason}{more}")


def change_json(change: Change) -> dict[str, Any]:
    return {"action": change.action, **asdict(change)}


def applied_json(item: Applied) -> dict[str, Any]:
    return {**change_json(item.change), "result": item.result, "reason": item.reason}


def _plan(
    settings: Settings, topics_file: Path | None, replication_factor: int | None, *, delete: bool, shrink: bool
) -> tuple[ClusterAdmin, tuple[TopicSpec, ...], TopicPlan, tuple[Deviation, ...]]:
    """The cluster, the desired topics, the plan, and the findings of the files and of the plan."""
    families = load_families(topics_file)
    tenants = all_tenants(settings, codec_for(settings))
    wanted = expand(families, tenants, load_models(settings.models_file))
    cluster = ClusterAdmin(settings)
    made = make_plan(cluster, families, wanted, replication_factor, delete=delete, shrink=shrink)
    notes = unknown_override_tenants(families, [tenant.tenant for tenant in tenants])
    return cluster, wanted, made, (*notes, *made.findings)
