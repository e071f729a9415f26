"""docs/benchmarks.md, made from results."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.result import Result, machine

_HEAD = """# Benchmarks

Made by `make bench`. Every ratio is taken in one run beside its baseline, three repetitions, median reported; absolute
times depend on the machine ({cores} cores, {memory_gib} GiB, Python {python}) and on whatever else it did.
`python -m benchmarks NAME` repeats one; what each measures stands at the top of its module in `benchmarks/`.

| benchmark | figure | value | aim | met |
|---|---|---|---|---|
"""


def write_markdown(path: Path, results: Sequence[Result]) -> None:
    """Write the table of all figures."""
    where = machine()
    lines = [_HEAD.format(cores=where.cores, memory_gib=where.memory_gib, python=where.python)]
    for result in results:
        for figure in result.figures:
            aim = "" if figure.aim is None else f"{figure.bound} {figure.aim:g}"
            met = {None: "", True: "yes", False: "no"}[figure.met]
            lines.append(f"| {result.benchmark} | {figure.name} | {figure.value:.3g} {figure.unit} | {aim} | {met} |\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
