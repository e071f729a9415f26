"""``python -m tests [ARGUMENTS OF PYTEST]``: the whole test run, in two parts.

Most of a test's time is waiting, so two are under way at once, each worker with servers of its own; a file is one
worker's, in order. Then come those marked ``alone``, one after another: they hold a rate or a time against a bound, and
what another test does to the machine would be measured too.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
# Some thirty brokers are started, few of which live long enough to be worth the second compiler's work.
ENVIRONMENT = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"}
_WORDS = {
    pytest.ExitCode.OK: "passed",
    pytest.ExitCode.TESTS_FAILED: "failed",
    pytest.ExitCode.NO_TESTS_COLLECTED: "none selected",
}


def main(arguments: Sequence[str]) -> int:
    """Run both parts: the second one too when tests of the first failed, but not when that could not run or was ended.

    Returns:
        The exit status of pytest: that of the part that failed, or that no test was selected if neither had one.
    """
    first = ON_GIVEN_SERVERS if os.environ.get(CHOICE_VARIABLE) == "external" else TOGETHER
    with NamedTemporaryFile("r", encoding="utf-8", prefix="fairlane-failures-") as failures:
        environment = {FAILURES_VARIABLE: failures.name}
        together = run((*PYTEST, *first, *arguments), environment)
        if together not in _WORDS:
            return together
        # Its own options last: who asks for more workers does not mean these tests.
        alone = run((*PYTEST, *arguments, *ALONE), environment)
        # Once more and last, since what servers and clients said meanwhile is long.
        sys.stderr.write(failures.read())
    sys.stderr.write(f"together: {told(together)}; alone: {told(alone)}\n")
    return combined(together, alone)


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
