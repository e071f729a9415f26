"""``python -m tests [core|full|faults] [ARGUMENTS OF PYTEST]``: the tests of one tier, and a report of the run.

Most of a test's time is waiting, so two are under way at once, each worker with servers of its own; a file is one
worker's, in order. The full tier has a second part, the tests marked ``alone``: they run one after another, because
they hold a rate or a time against a bound. No failed test is run again.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic
from types import FrameType

import pytest

from deploy.local.kafka_classes import archive_classes
from deploy.local.layout import PROJECT_ROOT, StackError
from tests.kit.stack import CHOICE_VARIABLE
from tests.run_report import PROCESSES_VARIABLE, read_processes, read_results, report
from tests.tiers import Tier

PYTEST = (sys.executable, "-m", "pytest")
REPORTS = PROJECT_ROOT / ".fairlane" / "reports"
"""The folder of the JUnit XML files, one for each part."""
PARTS = {Tier.CORE: (Tier.CORE,), Tier.FULL: (Tier.FULL, Tier.ALONE), Tier.FAULTS: (Tier.FAULTS,)}
TWO_WORKERS = ("--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder")
ONE_WORKER = ("--numprocesses=0",)
_WENT_ON = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


def main(arguments: Sequence[str]) -> int:
    """Run the parts of a tier. A part whose tests failed is followed by the next; one that was ended is not.

    Returns:
        The exit status of pytest: of the first part that failed, or "no tests collected" if no part had any.
    """
    tier, arguments = chosen(arguments)
    started_s = monotonic()
    # `make install` made one, but Java may be another one since then.
    with suppress(StackError):
        archive_classes()
    statuses = []
    files = {part: REPORTS / f"{part}.xml" for part in PARTS[tier]}
    with NamedTemporaryFile("r", encoding="utf-8", prefix="fairlane-processes-") as processes:
        for part, xml in files.items():
            xml.unlink(missing_ok=True)
            statuses.append(run(pytest_command(part, xml, arguments), {PROCESSES_VARIABLE: processes.name}))
            if statuses[-1] not in _WENT_ON:
                break
        results = [result for xml in files.values() for result in read_results(xml)]
        sys.stderr.write(report(results, read_processes(Path(processes.name)), monotonic() - started_s) + "\n")
    return combined(*statuses)


def chosen(arguments: Sequence[str]) -> tuple[Tier, Sequence[str]]:
    """The tier that the first argument names, `core` if it names none, and the other arguments."""
    if arguments and arguments[0] in PARTS:
        return Tier(arguments[0]), arguments[1:]
    return Tier.CORE, arguments


def pytest_command(part: Tier, xml: Path, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command of one part."""
    # Given servers have one worker: every dispatcher on them would serve the tenants of both.
    given_servers = os.environ.get(CHOICE_VARIABLE) == "external"
    two = part in (Tier.CORE, Tier.FULL) and not given_servers
    options = (f"--tier={part}", f"--junitxml={xml}", "--override-ini=junit_family=xunit1", "-m", "")
    # Without a second worker last, so that no `-n` among the arguments gives the others one.
    return (*PYTEST, *options, *TWO_WORKERS, *arguments) if two else (*PYTEST, *options, *arguments, *ONE_WORKER)


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit status of a program with this added to its environment. SIGTERM is passed on to it; it gets SIGINT from
    the terminal itself."""
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if process is None:
            sys.exit(128 + number)
        process.send_signal(number)

    def ignore(_number: int, _frame: FrameType | None) -> None:
        """The program ends its servers and reports; this process only waits for it."""

    # Installed before it starts: a program started in the background by a shell would inherit an ignored SIGINT, and so
    # would everything that the tests end with it.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, ignore)
    signal.signal(signal.SIGTERM, pass_on)
    try:
        process = subprocess.Popen(command, env={**os.environ, **environment})
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
