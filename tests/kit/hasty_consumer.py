"""``python -m tests.kit.hasty_consumer``: an inference consumer that its group gives seconds between two polls,
not minutes."""

from functools import partial
from unittest import mock

import typer

from inference_consumers import __main__ as service
from inference_consumers.group import PoolMember

POLL_INTERVAL_S = 6

if __name__ == "__main__":
    member = partial(PoolMember, max_poll_interval_ms=POLL_INTERVAL_S * 1_000)
    with mock.patch("inference_consumers.app.PoolMember", member):
        typer.run(service.run)
