"""The tiers: which command runs which test, the parts of a run, and its report."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from deploy.local.layout import PROJECT_ROOT
from tests import __main__ as command
from tests.kit.stack import CHOICE_VARIABLE
from tests.kit.waiting import eventually
from tests.run_report import Result, program_name, read_processes, read_results, report
from tests.tiers import Tier, may_hold, tiers_of

PASSED, FAILED, ENDED, NONE = 0, 1, 2, 5
PROPERTIES = "tests/unit/fairlane/test_offsets.py"
OF_EVERY_TIER = ("tests/faults/test_kills.py", "tests/integration/test_transactions.py", PROPERTIES)


@pytest.mark.parametrize(
    ("marks", "tiers"),
    [
        ([], {Tier.CORE}),
        (["broker", "timeout"], {Tier.CORE}),
        (["full"], {Tier.FULL}),
        (["alone"], {Tier.ALONE}),
        (["full", "alone"], {Tier.ALONE}),
        (["long", "alone", "full"], {Tier.FAULTS}),
        (["hypothesis"], {Tier.CORE, Tier.FULL}),
        (["hypothesis", "full"], {Tier.FULL}),
    ],
)
def test_marks_decide_the_tier(marks: list[str], tiers: set[Tier]) -> None:
    assert tiers_of(marks) == tiers


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        ("def test_it(): ...", {Tier.CORE}),
        ("@pytest.mark.full", {Tier.CORE, Tier.FULL}),
        ("pytestmark = [pytest.mark.full]", {Tier.FULL}),
        ("pytestmark = pytest.mark.full\n\n@pytest.mark.alone", {Tier.FULL, Tier.ALONE}),
        ("pytestmark = [\n    pytest.mark.broker,\n    pytest.mark.long,\n]", {Tier.FAULTS}),
        ("from hypothesis import given", {Tier.CORE, Tier.FULL}),
        ("@pytest.mark.alone", {Tier.CORE, Tier.ALONE}),
        ("marks=pytest.mark.long", {Tier.CORE, Tier.FAULTS}),
    ],
)
def test_a_file_is_imported_for_the_tiers_it_may_hold(tmp_path: Path, text: str, tiers: set[Tier]) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(text)
    assert {tier for tier in Tier if may_hold(file, tier)} == tiers


def test_every_test_is_in_a_tier_and_only_property_tests_are_in_two() -> None:
    def selected(*options: str) -> set[str]:
        arguments = (*command.PYTEST, "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "", *options)
        done = subprocess.run(
            (*arguments, *OF_EVERY_TIER), cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60, check=True
        )
        return set(re.findall(r"^tests/\S+::\S+$", done.stdout, re.MULTILINE))

    of_tier = {tier: selected(f"--tier={tier}") for tier in Tier}
    assert all(of_tier.values())
    assert set().union(*of_tier.values()) == selected()
    twice = {test for test, count in Counter(test for tests in of_tier.values() for test in tests).items() if count > 1}
    assert twice
    assert {test.partition("::")[0] for test in twice} == {PROPERTIES}
    assert twice <= of_tier[Tier.CORE] & of_tier[Tier.FULL]


# ------------------------------------------------------------------ the parts of a run


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Sequence[str]]:
    """The commands of a run, each of which returns the next of `statuses`."""
    monkeypatch.delenv(CHOICE_VARIABLE, raising=False)
    monkeypatch.setattr(command, "REPORTS", tmp_path)
    return []


def returns(monkeypatch: pytest.MonkeyPatch, ran: list[Sequence[str]], *statuses: int) -> None:
    def run(arguments: Sequence[str], _environment: Mapping[str, str]) -> int:
        ran.append(arguments)
        return statuses[len(ran) - 1]

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "archive_classes", lambda: None)


@pytest.mark.parametrize(
    ("full", "alone", "both"),
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
def test_a_run_fails_if_a_part_does_or_if_no_part_has_a_test(
    monkeypatch: pytest.MonkeyPatch, ran: list[Sequence[str]], full: int, alone: int, both: int
) -> None:
    returns(monkeypatch, ran, full, alone)
    assert command.main(("full",)) == both
    assert ["--tier=full" in ran[0], "--tier=alone" in ran[1]] == [True, True]


@pytest.mark.parametrize("status", [ENDED, 3, 4, -signal.SIGTERM])
def test_no_part_follows_one_that_was_ended(
    monkeypatch: pytest.MonkeyPatch, ran: list[Sequence[str]], status: int
) -> None:
    returns(monkeypatch, ran, status)
    assert command.main(("full",)) == status
    assert len(ran) == 1


def test_both_parts_get_the_arguments_and_the_second_has_one_worker(
    monkeypatch: pytest.MonkeyPatch, ran: list[Sequence[str]]
) -> None:
    returns(monkeypatch, ran, PASSED, PASSED)
    assert command.main(("full", "-k", "docs", "-n4")) == PASSED
    together, alone = ran
    assert "--numprocesses=2" in together
    assert together[-3:] == ("-k", "docs", "-n4")
    assert alone[-4:] == ("-k", "docs", "-n4", "--numprocesses=0")


@pytest.mark.parametrize("tier", ["core", "full", "faults"])
def test_each_tier_is_a_target_of_make(tier: str) -> None:
    target = {"core": "test", "full": "test-full", "faults": "faults"}[tier]
    make = shutil.which("make") or "make"
    options = ("--no-print-directory", "--dry-run", "--old-file=.venv/.installed")
    variables = ("SKIP_VLLM=1", "SKIP_NGINX=1", "ARGS=-k docs")
    done = subprocess.run(
        (make, *options, *variables, target), cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    words = " ".join(("exec .venv/bin/python -m tests", *([] if tier == "core" else [tier]), "-k docs"))
    assert done.stdout.splitlines()[-1] == words


def test_given_servers_have_one_worker(monkeypatch: pytest.MonkeyPatch, ran: list[Sequence[str]]) -> None:
    returns(monkeypatch, ran, NONE, NONE)
    monkeypatch.setenv(CHOICE_VARIABLE, "external")
    assert command.main(("full",)) == NONE
    assert [option for arguments in ran for option in arguments if "processes" in option] == ["--numprocesses=0"] * 2


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    (mask,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_sigterm_is_passed_on_and_an_interrupt_is_waited_for(tmp_path: Path) -> None:
    """A terminal sends the interrupt to the program itself; without a terminal nobody does, and it goes on."""
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
        eventually(lambda: catches(process.pid, signal.SIGTERM), what="its handler of SIGTERM")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == signal.SIGTERM
    assert not interrupted.exists()


# ------------------------------------------------------------------ the report


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["/usr/bin/java", "-Xmx512m", "kafka.Kafka", "server.properties"], "kafka.Kafka"),
        (["/x/.venv/bin/python3.11", "-m", "stream_processors.dispatcher"], "stream_processors.dispatcher"),
        (["python", "-c", "pass"], "python"),
        (["/usr/bin/redis-server", "--port", "1"], "redis-server"),
        ([], ""),
    ],
)
def test_a_process_is_named_by_what_it_runs(arguments: list[str], name: str) -> None:
    assert program_name(arguments) == name


def test_a_report_has_the_slowest_files_the_processes_and_last_the_failures() -> None:
    results = [Result("a.py::test_1", "a.py", 1.0), Result("b.py::test_1", "b.py", 2.5, "the reason")]
    lines = report(
        [*results, Result("a.py::test_2", "a.py", 2.0)], Counter({"kafka.Kafka": 2, "git": 1}), 4.4
    ).splitlines()
    assert [line.split() for line in lines[2:4]] == [["3.0", "a.py"], ["2.5", "b.py"]]
    assert "processes started: 3 (2 kafka.Kafka, 1 git)" in lines
    assert lines[-4:] == ["FAILED b.py::test_1", "the reason", "", "3 tests, 1 failed, 4 s"]


def test_results_are_read_from_the_file_that_pytest_wrote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "test_broken.py"
    broken.write_text(
        "import subprocess, pytest\n"
        "def test_it():\n    subprocess.run(['true'])\n    raise RuntimeError('the reason')\n"
        "@pytest.fixture\ndef setup():\n    raise RuntimeError('no setup')\n"
        "def test_error(setup): ...\n"
        "def test_ok(): ...\n"
    )
    monkeypatch.setattr(command, "REPORTS", tmp_path)
    monkeypatch.setattr(command, "archive_classes", lambda: None)
    monkeypatch.setenv(CHOICE_VARIABLE, "external")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.chdir(PROJECT_ROOT)
    assert command.main(("-p", "tests.conftest", "-q", str(broken))) == FAILED
    results = {result.test.partition("::")[2]: result for result in read_results(tmp_path / "core.xml")}
    assert results.keys() == {"test_it", "test_error", "test_ok"}
    assert "RuntimeError: the reason" in results["test_it"].reason
    assert "no setup" in results["test_error"].reason
    assert not results["test_ok"].reason
    said = capfd.readouterr().err
    assert "processes started: 1 (1 true)" in said
    assert said.splitlines()[-1].startswith("3 tests, 2 failed, ")


def test_a_part_without_a_report_has_no_results(tmp_path: Path) -> None:
    assert read_results(tmp_path / "none.xml") == []


def test_processes_of_all_workers_are_summed(tmp_path: Path) -> None:
    file = tmp_path / "processes"
    file.write_text('{"git": 1}\n{"git": 2, "true": 1}\n')
    assert read_processes(file) == {"git": 3, "true": 1}
