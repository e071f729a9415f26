"""What the fault tests share: a seed that is printed and can be given, and lines that are seen while a test runs."""

from collections.abc import Callable, Iterator
from time import monotonic

import pytest

from benchmarks.faults.plan import fault_seed
from tests.kit.stack import choose_stack


@pytest.fixture(scope="package")
def broker() -> Iterator[str]:
    """A broker of their own: they write so much that every later test on it would be slower."""
    stack = choose_stack()
    yield stack.kafka()
    stack.close()


@pytest.fixture
def seed() -> int:
    """Decides who is struck and when; FAIRLANE_FAULT_SEED repeats a run's choices, though never its exact timing."""
    return fault_seed()


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
