"""``fairlane models``: what the pools serve."""

from dataclasses import asdict
from typing import Annotated

import typer

from fairlane.names import CONTROL_MODELS
from fairlane.records import ModelVersion
from fairlane.settings import Settings
from fairlane_server.cli.output import (
    AsJson,
    BootstrapServers,
    Force,
    ModelsFile,
    ReplicationFactor,
    TopicsFile,
    settings_with,
    show_json,
    show_table,
)
from fairlane_server.cli.publishing import apply, control_topic
from fairlane_server.control.publisher import ControlTopic
from fairlane_server.models import load_models
from fairlane_server.topics.families import expand, load_families

app = typer.Typer(help="The models and their pools, from deploy/models.yaml.", no_args_is_help=True)

Delete = Annotated[
    bool, typer.Option("--delete", help="Withdraw models that the file no longer names. Topics of pools stay.")
]


@app.command("apply")
def apply_command(
    bootstrap_servers: BootstrapServers = None,
    models_file: ModelsFile = None,
    topics_file: TopicsFile = None,
    replication_factor: ReplicationFactor = None,
    *,
    delete: Delete = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Create the pools' priority topics, then tell every process about the models that are new or changed.

    May be repeated.
    """
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers, models_file=models_file)
    models = load_models(settings.models_file)
    families = tuple(
        family
        for family in load_families(topics_file)
        if "pool" in family.placeholders or family.name == CONTROL_MODELS
    )
    apply(
        settings,
        # A pool that no model names may be a tenant's own: `topics plan` reports extra topics.
        (),
        expand(families, (), models),
        _topic(settings),
        {model.model: model for model in models},
        "model",
        replication_factor=replication_factor,
        delete=delete,
        force=force,
        as_json=as_json,
    )


@app.command("list")
def list_command(bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False) -> None:
    """Show the models that the cluster's processes know."""
    found = _topic(settings_with(kafka_bootstrap_servers=bootstrap_servers)).read()
    if as_json:
        show_json({"models": [{"model": name} if model is None else asdict(model) for name, model in found.items()]})
        return
    show_table(
        ("model", "version", "pool", "engine", "tasks", "context", "output", "batch", "smaller"),
        [(name, "(unreadable)") if model is None else _row(model) for name, model in sorted(found.items())],
    )


def _topic(settings: Settings) -> ControlTopic[ModelVersion]:
    return control_topic(settings, CONTROL_MODELS, ModelVersion, lambda model: model.model)


def _row(model: ModelVersion) -> tuple[str, ...]:
    return (
        model.model,
        model.version,
        ", ".join((model.pool, *model.dedicated_pools)),
        model.engine,
        ", ".join(model.tasks),
        f"{model.max_context_tokens} tokens",
        f"{model.max_output_tokens} tokens",
        f"{model.max_batch_size} items, {model.max_batch_tokens} tokens",
        model.smaller_model or "-",
    )
