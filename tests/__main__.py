"""``python -m tests [ARGUMENTS OF PYTEST]``: the whole test run, in two parts.

Most of a test's time is waiting, so two are under way at once, each worker with servers of its own; a file is one
worker's, in order. Then come those marked ``alone``, one after another: they hold a rate or a time against a bound, and
what another test does to the machine would be measured too.

Among some six thousand tests on real servers one fails now and then of what the machine did. So a few that failed are
run once more with nothing beside them, and those that pass are named at the end as ``unsteady``: each is a defect to be
found, of the test or of the product. No second run is there for what needs no servers, nor for ``tests/faults``: a
promise that is broken once is broken.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from types import FrameType

import pytest

from tests.stack import CHOICE_VARIABLE, FAILURES_VARIABLE

PYTEST = (sys.executable, "-m", "pytest")
# The files in their order, which has the short ones last: both workers end at about the same time.
TOGETHER = ("--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder", "--alone=never")
# One worker where both would have the same servers: every dispatcher there hears of every tenant.
ON_GIVEN_SERVERS = ("--numprocesses=0", "--alone=never")
ALONE = ("--numprocesses=0", "--alone=only")
AGAIN = ("--numprocesses=0",)
LIVE = ("tests/integration/", "tests/hostile/", "tests/e2e/")
MOST_FILES_AGAIN = 2
"""In more of them it is not the machine."""
# Some thirty brokers are started, few of which live long enough to be worth the second compiler's work.
ENVIRONMENT = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"}
_WORDS = {
    pytest.ExitCode.OK: "passed",
    pytest.ExitCode.TESTS_FAILED: "failed",
    pytest.ExitCode.NO_TESTS_COLLECTED: "none selected",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A test that failed, by its node id, and why."""

    test: str
    reason: str


def main(arguments: Sequence[str]) -> int:
    """Run both parts: the second one too when tests of the first failed, but not when that could not run or was ended.

    Returns:
        The exit status of pytest: that of the part that failed, or that no test was selected if neither had one. A part
        whose failures all passed alone has passed.
    """
    first = ON_GIVEN_SERVERS if os.environ.get(CHOICE_VARIABLE) == "external" else TOGETHER
    with NamedTemporaryFile("r", encoding="utf-8", prefix="fairlane-failures-") as told_failures:
        environment = {FAILURES_VARIABLE: told_failures.name}
        together = run((*PYTEST, *first, *arguments), environment)
        if together not in _WORDS:
            return together
        # Its own options last: who asks for more workers does not mean these tests.
        alone = run((*PYTEST, *arguments, *ALONE), environment)
        failures = [Failure(**json.loads(line)) for line in told_failures]
    status = combined(together, alone)
    unsteady = status == pytest.ExitCode.TESTS_FAILED and may_run_again(failures) and pass_now(failures)
    # Once more and last, since what servers and clients said meanwhile is long.
    for failure in failures:
        sys.stderr.write(f"{'unsteady: ' if unsteady else ''}{failure.test}\n{failure.reason}\n")
    again = "; again: passed" if unsteady else ""
    sys.stderr.write(f"together: {told(together)}; alone: {told(alone)}{again}\n")
    return pytest.ExitCode.OK if unsteady else status


def may_run_again(failures: Sequence[Failure]) -> bool:
    """Whether all of these may have failed of what the machine did."""
    files = {failure.test.partition("::")[0] for failure in failures}
    return 0 < len(files) <= MOST_FILES_AGAIN and all(file.startswith(LIVE) for file in files)


def pass_now(failures: Sequence[Failure]) -> bool:
    """Run these tests once more, with nothing beside them."""
    tests = dict.fromkeys(failure.test for failure in failures)
    return run((*PYTEST, *tests, *AGAIN), {}) == pytest.ExitCode.OK


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit status of a program, with this added to its environment. It is told of SIGTERM; of Ctrl-C the terminal
    tells it."""
    process: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, _frame: FrameType | None) -> None:
        if process is None:
            sys.exit(128 + number)
        process.send_signal(number)

    def wait_on(_number: int, _frame: FrameType | None) -> None:
        """The program ends its servers and says what it knows; this one only waits for it."""

    # Before it starts, since it inherits no handler: what a shell runs in the background would inherit that Ctrl-C is
    # ignored, and so would all that the tests end with it.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, wait_on)
    signal.signal(signal.SIGTERM, hand_on)
    try:
        process = subprocess.Popen(command, env={**ENVIRONMENT, **os.environ, **environment})
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def combined(*statuses: int) -> int:
    """The exit status of a run of several parts."""
    ran = [status for status in statuses if status != pytest.ExitCode.NO_TESTS_COLLECTED]
    if not ran:
        return pytest.ExitCode.NO_TESTS_COLLECTED
    return next((status for status in ran if status != pytest.ExitCode.OK), pytest.ExitCode.OK)


def told(status: int) -> str:
    """An exit status in words."""
    return next((words for code, words in _WORDS.items() if code == status), f"ended with {status}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
