"""Options that several commands share, and the settings they override."""

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from fairlane.settings import Settings
from fairlane_server.cli.output import fail

BootstrapServers = Annotated[
    str | None,
    typer.Option(
        metavar="HOSTS", help="Brokers to start from, host:port, comma-separated. [env: KAFKA_BOOTSTRAP_SERVERS]"
    ),
]
TenantsFile = Annotated[Path | None, typer.Option(metavar="FILE", help="The tenants. [env: TENANTS_FILE]")]
ModelsFile = Annotated[Path | None, typer.Option(metavar="FILE", help="The models and their pools. [env: MODELS_FILE]")]
TopicsFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The topic families; by default those that are installed.")
]
ReplicationFactor = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Copies of each new topic; by default 3, or 1 on fewer than 3 brokers."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Force = Annotated[bool, typer.Option("--force", help="Apply although the plan holds an error.")]


def settings_with(**overrides: Any) -> Settings:
    """The settings from the environment, with the options that were given. Ends the command when one is wrong."""
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        # The values stay out of the message: one of them may be a secret.
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        fail("; ".join(_sentence(problem["loc"], problem["msg"]) for problem in problems))


def _sentence(location: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, location)).upper()}: {message}" if location else message
