"""``fairlane models``: the versions of the models, and the aliases that say which of them get requests."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any

import typer

from fairlane.clock import now_ms
from fairlane.names import CONTROL_MODELS
from fairlane.records import ModelRoute, ModelVersion
from fairlane.schema_registry import codec_for
from fairlane_server.cli.control import apply_records
from fairlane_server.cli.output import (
    AsJson,
    BootstrapServers,
    Force,
    ModelsFile,
    ReplicationFactor,
    TopicsFile,
    fail,
    settings_with,
    show,
    show_json,
    show_list,
    show_table,
    utc,
)
from fairlane_server.command_author import command_author
from fairlane_server.control.published_models import model_topic
from fairlane_server.control.route_change import change_route, model_changes
from fairlane_server.kafka.cluster_admin import ClusterAdmin
from fairlane_server.models.catalog import ModelCatalog, ModelRecord
from fairlane_server.models.changes import (
    Author,
    ImmutableVersionError,
    Published,
    check_all,
    managed_by_api,
    of_file,
    versions_of,
    with_alias,
    with_stopped,
    without_alias,
)
from fairlane_server.models.models_file import read_models
from fairlane_server.postgres.model_history import RouteChange, read_model_history
from fairlane_server.topics.families import expand, load_families

models = typer.Typer(help="The models: their versions, aliases and pools.", no_args_is_help=True)

DeleteModels = Annotated[
    bool, typer.Option("--delete", help="Withdraw versions that the file no longer names. Topics of pools stay.")
]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="The name of the model.")]
VersionName = Annotated[str, typer.Argument(metavar="VERSION", help="The name of the version.")]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why; it is kept with the change.")]


@models.command("apply")
def apply_models(
    bootstrap_servers: BootstrapServers = None,
    models_file: ModelsFile = None,
    topics_file: TopicsFile = None,
    replication_factor: ReplicationFactor = None,
    *,
    delete: DeleteModels = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Create the pools' priority topics, then publish the new and the changed versions and aliases to every process.

    May be repeated. Versions and aliases that commands or the admin API manage stay as they are; with --force those of
    the file are taken over from them.
    """
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers, models_file=models_file)
    file = read_models(settings.models_file)
    author = author_of(f"models apply {settings.models_file.name}")
    families = [
        family
        for family in load_families(topics_file)
        if "pool" in family.placeholders or family.name == CONTROL_MODELS
    ]
    topics = expand(families, (), file.versions)
    control = model_topic(settings, codec_for(settings))

    def wanted(published: Published) -> Mapping[str, ModelRecord]:
        try:
            return of_file(file, published, author)
        except ImmutableVersionError as error:
            fail(f"{settings.models_file}: {error}")

    def foreign(published: Published) -> set[str]:
        of_api = managed_by_api(published)
        return of_api - wanted(published).keys() if force else of_api

    # No extra topics are reported: a pool without a model may be a tenant's own, and `topics plan` reports them.
    apply_records(
        *(ClusterAdmin(settings), (), topics, replication_factor, control, wanted),
        foreign=foreign,
        change=model_changes(settings),
        check=_check,
        force=force,
        delete=delete,
        as_json=as_json,
    )


@models.command("list")
def list_models(bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False) -> None:
    """Show the versions and aliases that the cluster's processes know."""
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    published = model_topic(settings, codec_for(settings)).read()
    catalog = ModelCatalog.of({key: record for key, record in published.items() if record is not None})
    unreadable = sorted(key for key, record in published.items() if record is None)
    if as_json:
        found: dict[str, Any] = {
            "models": [asdict(version) for version in catalog.versions.values()],
            "routes": [asdict(route) for route in catalog.routes.values()],
            "unreadable": unreadable,
        }
        show_json(found)
        return
    columns = ("model", "version", "aliases", "pool", "engine", "tasks", "context", "output", "batch", "smaller")
    rows = [_row(version, catalog) for _, version in sorted(catalog.versions.items())]
    show_table(columns, [*rows, *((key, "(unreadable)") for key in unreadable)])


@models.command("alias")
def set_alias(
    model: ModelName,
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="champion, candidate or another name.")],
    version: VersionName,
    reason: Reason = "",
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Move an alias to a version. The champion gets the requests that name the model alone."""
    _change_route(
        *(model, bootstrap_servers, as_json),
        lambda published, author: with_alias(published, model, alias, version, author),
        reason,
    )


@models.command("unalias")
def remove_alias(
    model: ModelName,
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="Any but champion.")],
    reason: Reason = "",
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Remove an alias. Requests that name it are refused from then on."""
    _change_route(
        *(model, bootstrap_servers, as_json),
        lambda published, author: without_alias(published, model, alias, author),
        reason,
    )


@models.command("stop")
def stop_version(
    model: ModelName,
    version: VersionName,
    reason: Reason = "",
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Give a version no more requests, at once: those that wait for it are routed again."""
    _change_route(
        *(model, bootstrap_servers, as_json),
        lambda published, author: with_stopped(published, model, version, author, stopped=True),
        reason,
    )


@models.command("resume")
def resume_version(
    model: ModelName,
    version: VersionName,
    reason: Reason = "",
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Let a stopped version have requests again."""
    _change_route(
        *(model, bootstrap_servers, as_json),
        lambda published, author: with_stopped(published, model, version, author, stopped=False),
        reason,
    )


@models.command("diff")
def diff_versions(
    model: ModelName,
    version: VersionName,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The version to compare it with.")],
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show in what two versions differ."""
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    known = versions_of(model_topic(settings, codec_for(settings)).read(), model)
    for name in (version, other):
        if name not in known:
            fail(f"{model} has no version {name!r}; known: {', '.join(sorted(known)) or 'none'}")
    one, two = asdict(known[version]), asdict(known[other])
    names = [field.name for field in fields(ModelVersion) if field.name != "version"]
    different = {name: (one[name], two[name]) for name in names if one[name] != two[name]}
    if as_json:
        show_json({name: {version: before, other: after} for name, (before, after) in different.items()})
    else:
        show_table(("field", version, other), [(name, *map(str, values)) for name, values in different.items()])


@models.command("history")
def show_history(
    model: ModelName,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="At most so many changes.")] = 50,
    *,
    as_json: AsJson = False,
) -> None:
    """Show who changed the aliases and rules of a model, when and why; the newest first.

    From the table that the recorder fills (POSTGRES_DSN), so a change of a moment ago may not be there yet.
    """
    show_list(
        "changes",
        read_model_history(settings_with(), model, limit),
        ("revision", "at (UTC)", "by", "aliases", "rules", "stopped", "reason"),
        _change_row,
        to_json=asdict,
        empty=f"nothing is recorded of {model}",
        as_json=as_json,
    )


def _change_row(change: RouteChange) -> tuple[str, ...]:
    aliases = [
        f"{alias} {version}" + (f" (before: {before})" if (before := change.previous.get(alias)) else "")
        for alias, version in sorted(change.aliases.items())
    ]
    return (
        str(change.revision) if change.revision else "withdrawn",
        utc(change.changed_at_ms),
        change.changed_by,
        ", ".join(aliases) or "-",
        ", ".join(rule["rule"] for rule in change.rules) or "-",
        ", ".join(change.stopped) or "-",
        change.reason or "-",
    )


def _change_route(
    model: str,
    bootstrap_servers: str | None,
    as_json: bool,
    decide: Callable[[Published, Author], ModelRoute],
    reason: str,
) -> None:
    """Publish a changed route and show it. Ends the command when it is not valid."""
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    author = author_of(reason)
    try:
        route = change_route(settings, codec_for(settings), model, lambda published: decide(published, author))
    except ValueError as error:
        fail(f"{model}: {error}")
    aliases = ", ".join(f"{alias} {version}" for alias, version in sorted(route.aliases.items()))
    stopped = f"; stopped: {', '.join(route.stopped)}" if route.stopped else ""
    show(asdict(route), f"{model}: revision {route.revision}, {aliases}{stopped}", as_json=as_json)


def author_of(reason: str) -> Author:
    """The author of a change that this command makes now."""
    return Author(command_author(), now_ms(), reason)


def _check(published: Published, changed: Mapping[str, ModelRecord], withdrawn: Iterable[str]) -> None:
    try:
        check_all(published, changed, withdrawn)
    except ValueError as error:
        fail(str(error))


def _row(model: ModelVersion, catalog: ModelCatalog) -> tuple[str, ...]:
    route = catalog.routes.get(model.model)
    aliases = [] if route is None else sorted(a for a, version in route.aliases.items() if version == model.version)
    return (
        model.model,
        model.version + (" (stopped)" if catalog.is_stopped(model) else ""),
        ", ".join(aliases) or "-",
        ", ".join((model.pool, *model.dedicated_pools)),
        model.engine,
        ", ".join(model.tasks),
        f"{model.max_context_tokens} tokens",
        f"{model.max_output_tokens} tokens",
        f"{model.max_batch_size} items, {model.max_batch_tokens} tokens",
        model.smaller_model or "-",
    )
