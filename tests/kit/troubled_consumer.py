"""``python -m tests.kit.troubled_consumer``: an inference consumer whose engines get into trouble."""

from unittest import mock

import typer

from inference_consumers import __main__ as service

if __name__ == "__main__":
    with mock.patch("inference_consumers.engine_process.host.MODULE", "tests.kit.troubled_engine"):
        typer.run(service.run)
