"""What a benchmark says: figures with an aim each, from several runs on one machine.

``updated`` replaces the tables of the results it is given, and leaves the other sections as they are.
"""

import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self, get_args

Bound = Literal["at most", "at least"]
REPETITIONS = 3
MEDIAN_OF_REPETITIONS = f"{REPETITIONS} runs, the median of each figure"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured."""

    cores: int
    memory_gib: int
    python: str
    system: str

    def __str__(self) -> str:
        return f"{self.cores} cores, {self.memory_gib} GiB, Python {self.python}"


def this_machine() -> Machine:
    """This machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(os.cpu_count() or 0, round(memory / 2**30), platform.python_version(), platform.system())


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value and what it should be; ``aim`` None for a value that is only reported."""

    name: str
    value: float
    unit: str
    bound: Bound | None = None
    aim: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the aim was reached; None without an aim."""
        if self.aim is None:
            return None
        return self.value <= self.aim if self.bound == "at most" else self.value >= self.aim

    def as_json(self) -> dict[str, Any]:
        aim = None if self.aim is None else f"{self.bound} {self.aim:g}"
        return {"name": self.name, "value": round(self.value, 4), "unit": self.unit, "aim": aim, "met": self.met}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """What ``as_json`` made; the value is rounded. Raises KeyError or ValueError for anything else."""
        name, value, unit = str(found["name"]), float(found["value"]), str(found["unit"])
        if found["aim"] is None:
            return cls(name, value, unit)
        for bound in get_args(Bound):
            if found["aim"].startswith(f"{bound} "):
                return cls(name, value, unit, bound, float(found["aim"].removeprefix(bound)))
        raise ValueError(f"{found['aim']!r} is no aim")


@dataclass(frozen=True, slots=True)
class Result:
    """A benchmark's figures, what each was made from, and where."""

    benchmark: str
    figures: tuple[Figure, ...]
    runs: tuple[dict[str, float], ...]
    machine: Machine = field(default_factory=this_machine)

    @property
    def met(self) -> bool:
        return all(figure.met is not False for figure in self.figures)

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "figures": [figure.as_json() for figure in self.figures],
            "runs": [{name: round(value, 4) for name, value in run.items()} for run in self.runs],
            "machine": asdict(self.machine),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """What ``as_json`` made. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            str(found["benchmark"]),
            tuple(map(Figure.from_json, found["figures"])),
            tuple(found["runs"]),
            Machine(**found["machine"]),
        )


def repeated(run: Callable[[int], dict[str, float]], repetitions: int = REPETITIONS) -> tuple[dict[str, float], ...]:
    """The same measurement several times, numbered from 0."""
    return tuple(run(number) for number in range(repetitions))


def median_of(runs: Sequence[dict[str, float]], name: str) -> float:
    """The middle value of a figure over the runs."""
    return median(run[name] for run in runs)


_HEAD = """# Benchmarks

*Reference.* Made by `make bench`. How often each was measured and on which machine stands above its table. A ratio
compares things measured on one machine in one run of its benchmark, so it means the same elsewhere; absolute times
depend on the machine and on whatever else it did. What each measures stands at the top of its module in `benchmarks/`.

`python -m benchmarks NAME` repeats one; `python -m benchmarks NAME --json > FILE` and `python -m benchmarks report
FILE` put its figures here. The text below a table is written by hand and stays.
"""
_TABLE_HEAD = ("| figure | value | aim | met |", "|---|---|---|---|")
_MET = {None: "", True: "yes", False: "**no**"}


class ReportError(ValueError):
    """A file that does not hold results, or those of a benchmark that does not exist."""


def updated(document: str, results: Iterable[Result], how: Mapping[str, str]) -> str:
    """The document with these results.

    Args:
        document: as it is; may be empty.
        results: those to be shown instead of what stands there.
        how: by benchmark, in the order of the document, how often it is measured. Other sections are dropped.

    Raises:
        ReportError: a result is of no such benchmark.
    """
    _, *parts = re.split(r"^## ", document, flags=re.MULTILINE)
    bodies = {name.strip(): body.strip() for name, _, body in (part.partition("\n") for part in parts)}
    for result in results:
        if result.benchmark not in how:
            raise ReportError(f"no benchmark is called {result.benchmark!r}")
        table = _table(result, how[result.benchmark])
        remarks = _remarks(bodies.get(result.benchmark, ""))
        bodies[result.benchmark] = f"{table}\n\n{remarks}" if remarks else table
    sections = (f"\n## {name}\n\n{bodies[name]}\n" for name in how if name in bodies)
    return _HEAD + "".join(sections)


def write(path: Path, results: Iterable[Result], how: Mapping[str, str]) -> None:
    """``updated``, in a file that need not exist."""
    document = path.read_text(encoding="utf-8") if path.exists() else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(updated(document, results, how), encoding="utf-8")


def read_results(path: Path) -> list[Result]:
    """What ``--json`` printed, one result a line. Raises ReportError for anything else."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [Result.from_json(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path} does not hold what --json prints: {type(error).__name__}: {error}") from error


def _table(result: Result, how: str) -> str:
    rows = []
    for figure in result.figures:
        aim = "" if figure.aim is None else f"{figure.bound} {figure.aim:g}"
        rows.append(f"| {figure.name} | {_value(figure.value)} {figure.unit} | {aim} | {_MET[figure.met]} |")
    return "\n".join((f"{how[0].upper()}{how[1:]}. {result.machine}.", "", *_TABLE_HEAD, *rows))


def _value(value: float) -> str:
    """Three digits that count, and no powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def _remarks(body: str) -> str:
    """What stands below the table."""
    lines = body.splitlines()
    table = [number for number, line in enumerate(lines) if line.startswith("|")]
    return "\n".join(lines[table[-1] + 1 :] if table else lines).strip()
