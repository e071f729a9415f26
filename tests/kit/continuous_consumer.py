"""``python -m tests.kit.continuous_consumer``: an inference consumer whose engines take items while others
run."""

from unittest import mock

import typer

from inference_consumers import __main__ as service

if __name__ == "__main__":
    with mock.patch("inference_consumers.engine_process.host.MODULE", "tests.kit.continuous_engine"):
        typer.run(service.run)
