"""``python -m inference_consumers --pool NAME``"""

import sys
from typing import Annotated

import typer

from fairlane import logs
from fairlane.settings import Settings
from fairlane.yaml_config import ConfigError
from inference_consumers.app import ConsumerApp, NoSuchPoolError
from inference_consumers.engines.protocol import EngineLoadError


def run(
    pool: Annotated[str, typer.Option(help="The pool to serve; its models are those of models.yaml")],
    engine: Annotated[
        str | None, typer.Option(help="'simulated' answers without a model, for load tests; every reply says so")
    ] = None,
) -> None:
    """Serve one pool: read its work in micro-batches, run it, answer it."""
    settings = Settings() if engine is None else Settings(engine=engine)
    logs.configure(settings, f"consumer-{pool}")
    try:
        status = ConsumerApp(settings, pool).run()
    except (ConfigError, NoSuchPoolError, EngineLoadError) as error:
        typer.echo(f"inference_consumers: {error}", err=True)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    typer.run(run)
