"""``fairlane prices``: publish the prices of the models."""

from pathlib import Path
from typing import Annotated

import typer

from fairlane.money import nanos_text
from fairlane.names import CONTROL_PRICES
from fairlane.records import ModelPrices, Price
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.cli.control import apply_records, list_records
from fairlane_server.cli.output import (
    AsJson,
    BootstrapServers,
    Force,
    ModelsFile,
    ReplicationFactor,
    TopicsFile,
    settings_with,
    utc,
    warn,
)
from fairlane_server.control.publisher import ControlTopic
from fairlane_server.costs.prices_file import load_prices
from fairlane_server.kafka.cluster_admin import ClusterAdmin
from fairlane_server.models.models_file import read_models
from fairlane_server.topics.families import expand, load_families

prices = typer.Typer(help="The prices of the models, from deploy/prices.yaml.", no_args_is_help=True)

PricesFile = Annotated[Path | None, typer.Option(metavar="FILE", help="The prices. [env: PRICES_FILE]")]
DeletePrices = Annotated[
    bool, typer.Option("--delete", help="Withdraw the prices of models that the file no longer names.")
]

_FAMILY = "control-prices"
_KINDS = {
    "input_nanos": "input",
    "cached_input_nanos": "cached input",
    "output_nanos": "output",
    "engine_second_nanos": "engine second",
    "image_nanos": "image",
    "cached_answer_nanos": "cached answer",
}


@prices.command("apply")
def apply_prices(
    bootstrap_servers: BootstrapServers = None,
    prices_file: PricesFile = None,
    models_file: ModelsFile = None,
    topics_file: TopicsFile = None,
    replication_factor: ReplicationFactor = None,
    *,
    delete: DeletePrices = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Publish the prices that are new or changed to every process that writes usage.

    They hold for requests that end from then on: recorded costs never change. May be repeated.
    """
    settings = settings_with(
        kafka_bootstrap_servers=bootstrap_servers, prices_file=prices_file, models_file=models_file
    )
    models = [*read_models(settings.models_file).aliases]
    records = {record.model: record for record in load_prices(settings.prices_file, models)}
    families = [family for family in load_families(topics_file) if family.family == _FAMILY]
    cluster, control = ClusterAdmin(settings), _price_topic(settings)
    topics = expand(families, (), ())
    apply_records(
        *(cluster, (), topics, replication_factor, control, lambda _published: records),
        force=force,
        delete=delete,
        as_json=as_json,
    )
    for model in models:
        if model not in records:
            warn(f"model {model} has no price in {settings.prices_file}: what it costs is not recorded")


@prices.command("list")
def list_prices(bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False) -> None:
    """Show the prices that the cluster's processes know."""
    control = _price_topic(settings_with(kafka_bootstrap_servers=bootstrap_servers))
    list_records(control, ("currency", "prices"), _row, as_json=as_json)


def _price_topic(settings: Settings) -> ControlTopic[ModelPrices]:
    return ControlTopic(settings, codec_for(settings), CONTROL_PRICES, ModelPrices, kind="model")


def _row(record: ModelPrices) -> tuple[str, ...]:
    return record.currency, "; ".join(map(_words, record.prices))


def _words(price: Price) -> str:
    kinds = [f"{name} {nanos_text(nanos)}" for field, name in _KINDS.items() if (nanos := getattr(price, field))]
    version = "" if price.version is None else f" version {price.version}"
    return f"from {utc(price.from_ms)}{version}: {', '.join(kinds) or 'free'}"
