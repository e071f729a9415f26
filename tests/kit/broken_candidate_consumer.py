"""``python -m tests.kit.broken_candidate_consumer``: an inference consumer whose candidates are broken."""

from unittest import mock

import typer

from inference_consumers import __main__ as service

if __name__ == "__main__":
    with mock.patch("inference_consumers.engine_process.host.MODULE", "tests.kit.broken_candidate_engine"):
        typer.run(service.run)
