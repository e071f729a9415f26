"""The run of all tests in two parts: which part has which tests, and what comes of both."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from deploy.local.layout import PROJECT_ROOT
from tests import __main__ as whole_run
from tests.stack import CHOICE_VARIABLE, FAILURES_VARIABLE
from tests.waiting import eventually

PASSED, FAILED, ENDED, NONE = 0, 1, 2, 5
ONE_OF_BOTH_KINDS = "tests/integration/test_transactions.py"


@pytest.mark.parametrize(
    ("together", "alone", "both"),
    [
        (PASSED, PASSED, PASSED),
        (FAILED, PASSED, FAILED),
        (PASSED, FAILED, FAILED),
        (PASSED, NONE, PASSED),
        (NONE, PASSED, PASSED),
        (NONE, FAILED, FAILED),
        (FAILED, NONE, FAILED),
        (NONE, NONE, NONE),
        (PASSED, -signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_it_fails_when_a_part_does_or_when_neither_has_a_test(
    monkeypatch: pytest.MonkeyPatch, together: int, alone: int, both: int
) -> None:
    statuses = iter((together, alone))
    monkeypatch.setattr(whole_run, "run", lambda _command, _environment: next(statuses))
    assert whole_run.main(()) == both
    assert list(statuses) == []


@pytest.mark.parametrize("status", [ENDED, 3, 4, -signal.SIGTERM])
def test_after_a_part_that_did_not_finish_there_is_no_other(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    statuses = iter((status, PASSED))
    monkeypatch.setattr(whole_run, "run", lambda _command, _environment: next(statuses))
    assert whole_run.main(()) == status
    assert list(statuses) == [PASSED]


def test_both_parts_get_the_arguments_and_only_one_gets_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], _environment: Mapping[str, str]) -> int:
        commands.append(command)
        return PASSED

    monkeypatch.setattr(whole_run, "run", run)
    monkeypatch.delenv(CHOICE_VARIABLE, raising=False)
    whole_run.main(("-k", "docs", "-n4"))
    together, alone = commands
    assert "--numprocesses=2" in together
    assert together[-3:] == ("-k", "docs", "-n4")
    assert alone[alone.index("-k") :] == ("-k", "docs", "-n4", "--numprocesses=0", "--alone=only")
    make = shutil.which("make") or "make"
    command = (
        make,
        "--no-print-directory",
        "--dry-run",
        "--old-file=.venv/.installed",
        "test",
        "SKIP_VLLM=1",
        "ARGS=-k docs",
    )
    done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[-1] == "exec .venv/bin/python -m tests -k docs"


def test_servers_that_somebody_else_runs_have_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], _environment: Mapping[str, str]) -> int:
        commands.append(command)
        return NONE

    monkeypatch.setattr(whole_run, "run", run)
    monkeypatch.setenv(CHOICE_VARIABLE, "external")
    assert whole_run.main(()) == NONE
    assert [option for command in commands for option in command if "processes" in option] == ["--numprocesses=0"] * 2


def test_every_test_is_of_one_part() -> None:
    def selected(*options: str) -> set[str]:
        command = (*whole_run.PYTEST, "--collect-only", "-q", "-p", "no:cacheprovider", *options, ONE_OF_BOTH_KINDS)
        done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60, check=True)
        return set(re.findall(r"^tests/\S+::\S+$", done.stdout, re.MULTILINE))

    both, together, alone = selected(), selected("--alone=never"), selected("--alone=only")
    assert together
    assert alone
    assert together | alone == both
    assert not together & alone


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    (mask,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_sigterm_ends_what_it_runs_and_an_interrupt_is_waited_for(tmp_path: Path) -> None:
    """Of an interrupt the terminal tells the program under it, too: here nobody does, and it goes on."""
    ready, interrupted = tmp_path / "ready", tmp_path / "interrupted"
    program = (
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: pathlib.Path(sys.argv[2]).touch())\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while True: signal.pause()\n"
    )
    under = (sys.executable, "-c", program, str(ready), str(interrupted))
    outer = f"import sys; from tests.__main__ import run; sys.exit(-run({under!r}, {{}}))"
    with subprocess.Popen((sys.executable, "-c", outer), cwd=PROJECT_ROOT, env=os.environ) as process:
        eventually(ready.exists, 20, "the program")
        eventually(lambda: catches(process.pid, signal.SIGTERM), what="its being waited for")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == signal.SIGTERM
    assert not interrupted.exists()


def failure(test: str) -> whole_run.Failure:
    return whole_run.Failure(test, "the reason")


@pytest.mark.parametrize(
    ("tests", "may"),
    [
        ([], False),
        (["tests/integration/test_a.py::test_it"], True),
        (["tests/integration/test_a.py::test_it", "tests/integration/test_a.py::test_that"], True),
        (["tests/integration/test_a.py::test_it", "tests/e2e/test_b.py::test_it"], True),
        ([f"tests/integration/test_{name}.py::test_it" for name in "abc"], False),
        (["tests/faults/test_kills.py::test_it"], False),
        (["tests/unit/test_offsets.py::test_it"], False),
        (["tests/integration/test_a.py::test_it", "tests/unit/test_offsets.py::test_it"], False),
    ],
)
def test_only_a_few_tests_of_live_servers_may_run_again(tests: list[str], may: bool) -> None:
    assert whole_run.may_run_again([failure(test) for test in tests]) is may


@pytest.mark.parametrize(("again", "both"), [(PASSED, PASSED), (FAILED, FAILED), (NONE, FAILED), (3, FAILED)])
@pytest.mark.parametrize("of_part", [0, 1])
def test_what_failed_once_and_passes_alone_is_named_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], again: int, both: int, of_part: int
) -> None:
    test = "tests/integration/test_a.py::test_it"
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
        commands.append(command)
        if len(commands) > 2:
            return again
        if len(commands) != of_part + 1:
            return PASSED
        with Path(environment[FAILURES_VARIABLE]).open("a", encoding="utf-8") as out:
            out.write(json.dumps({"test": test, "reason": "the reason"}) + "\n")
        return FAILED

    monkeypatch.setattr(whole_run, "run", run)
    assert whole_run.main(("-k", "it")) == both
    assert commands[2] == (*whole_run.PYTEST, test, "--numprocesses=0")
    said = capfd.readouterr().err.splitlines()
    assert said[-3:-1] == [f"unsteady: {test}" if both == PASSED else test, "the reason"]
    assert said[-1].endswith("; again: passed") is (both == PASSED)


def test_why_a_test_failed_is_said_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "test_broken.py"
    broken.write_text("def test_it():\n    raise RuntimeError('the reason')\n")
    pytest_of = whole_run.run

    def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
        alone = "--numprocesses=0" in command
        return (
            NONE
            if alone
            else pytest_of((*whole_run.PYTEST, "-p", "tests.conftest", "-q", "--tb=no", str(broken)), environment)
        )

    monkeypatch.setattr(whole_run, "run", run)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.chdir(PROJECT_ROOT)
    assert whole_run.main(()) == FAILED
    said = capfd.readouterr().err.splitlines()
    assert said[-3].endswith("test_broken.py::test_it")
    assert said[-2].endswith("test_broken.py:2: RuntimeError: the reason")
    assert said[-1] == "together: failed; alone: none selected"
