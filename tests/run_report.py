"""Report of a test run: failures, the slowest files and the processes it started, from the JUnit XML of its parts."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

PROCESSES_VARIABLE = "FAIRLANE_TEST_PROCESSES"
"""The file to which every pytest process of a run adds how many processes it started, by program."""
SLOWEST_FILES = 20
_MAX_REASON_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Result:
    """One test of a run.

    Attributes:
        reason: why it failed; empty unless it did.
        duration_s: with its setup and teardown.
    """

    test: str
    file: str
    duration_s: float
    reason: str = ""


def read_results(xml: Path) -> list[Result]:
    """The tests in a JUnit XML file that pytest wrote (family xunit1); none if it wrote no file."""
    if not xml.exists():
        return []
    # S314: written by pytest a moment ago, from our own tests.
    return [_result(case) for case in ElementTree.parse(xml).iter("testcase")]  # noqa: S314


def _result(case: ElementTree.Element) -> Result:
    file = case.get("file", "")
    problem = case.find("failure")
    if problem is None:
        problem = case.find("error")
    reason = "" if problem is None else (problem.get("message") or problem.text or "failed")[:_MAX_REASON_CHARS]
    return Result(f"{file}::{case.get('name', '')}", file, float(case.get("time", 0)), reason)


def program_name(command: Sequence[str]) -> str:
    """What a command runs: the module of Python, Kafka for its JVM, or else the name of the program."""
    name = Path(command[0]).name if command else ""
    if name.startswith("python") and "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    return "kafka.Kafka" if "kafka.Kafka" in command else name


def read_processes(file: Path) -> Counter[str]:
    """The processes that a run started, by program."""
    total: Counter[str] = Counter()
    for line in file.read_text(encoding="utf-8").splitlines():
        total.update(json.loads(line))
    return total


def report(results: Iterable[Result], processes: Counter[str], duration_s: float) -> str:
    """The text at the end of a run, with the failures last."""
    results = list(results)
    by_file: Counter[str] = Counter()
    for result in results:
        by_file[result.file] += result.duration_s  # type: ignore[assignment]  # a Counter sums floats as well
    lines = ["", f"slowest {SLOWEST_FILES} of {len(by_file)} files (s, all workers together)"]
    lines += [f"{seconds:8.1f}  {file}" for file, seconds in by_file.most_common(SLOWEST_FILES)]
    started = ", ".join(f"{count} {program}" for program, count in processes.most_common())
    lines += ["", f"processes started: {processes.total()}" + (f" ({started})" if started else "")]
    failed = [result for result in results if result.reason]
    for result in failed:
        lines += ["", f"FAILED {result.test}", result.reason]
    lines += ["", f"{len(results)} tests, {len(failed)} failed, {duration_s:.0f} s"]
    return "\n".join(lines)
