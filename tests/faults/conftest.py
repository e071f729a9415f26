"""What the fault tests share: a seed that is printed and can be given, and lines that are seen while a test runs."""

import os
import random
from collections.abc import Callable
from time import monotonic

import pytest

SEED_VARIABLE = "FAIRLANE_FAULT_SEED"


@pytest.fixture
def seed() -> int:
    """Decides who is killed and when; FAIRLANE_FAULT_SEED repeats a run's choices, though never its exact timing."""
    given = os.environ.get(SEED_VARIABLE)
    return random.SystemRandom().randrange(1_000_000) if given is None else int(given)


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line with the seconds since the start: at once in a long test, in the captured output of others."""
    started = monotonic()
    capture = request.config.pluginmanager.getplugin("capturemanager")
    live = request.node.get_closest_marker("long") is not None

    def write(line: str) -> None:
        text = f"  {monotonic() - started:6.1f} s  {line}"
        if live and capture is not None:
            with capture.global_and_fixture_disabled():
                print(text, flush=True)  # noqa: T201 - a person watches
        else:
            print(text)  # noqa: T201 - shown when the test fails

    return write
