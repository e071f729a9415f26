"""docs/benchmarks.md: a section for each benchmark. The tables are made here; what a person wrote below one stays.

``updated`` replaces the tables of the results it is given, and leaves the other sections as they are.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.result import Result

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
