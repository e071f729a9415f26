"""``fairlane schemas``: the committed schemas in a schema registry."""

from dataclasses import asdict
from typing import Annotated

import typer

from fairlane.schema_files import committed_schemas
from fairlane.schema_registry import RegistryClient
from fairlane_server.cli.output import AsJson, fail, settings_with, show_list

app = typer.Typer(help="The committed schemas, in a schema registry.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Keep `register` a subcommand: typer would make a lone command the group itself."""


@app.command("register")
def register_command(
    registry_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Confluent-compatible schema registry. [env: SCHEMA_REGISTRY_URL]")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Register every committed schema, older versions first, under the subjects `fairlane.<Record>`.

    New subjects admit only FULL_TRANSITIVE compatible schemas. The ids are the registry's own. May be repeated.
    """
    settings = settings_with(schema_registry_url=registry_url)
    if settings.schema_registry_url is None:
        fail("SCHEMA_REGISTRY_URL is not set, and there is no --registry-url")
    registry = RegistryClient(settings.schema_registry_url)
    committed = committed_schemas()
    registered = [item for name in committed.record_names for item in registry.register(name, committed.versions(name))]
    show_list(
        "registered",
        registered,
        ("subject", "version", "id", ""),
        lambda item: (item.subject, str(item.version), str(item.schema_id), "registered" if item.new else "was there"),
        to_json=asdict,
        empty="there are no schemas",
        as_json=as_json,
    )
