"""What a benchmark says: figures with an aim each, from several runs on one machine."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

Bound = Literal["at most", "at least"]
REPETITIONS = 3


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


@dataclass(frozen=True, slots=True)
class Result:
    """A benchmark's figures, and what each was made from."""

    benchmark: str
    figures: tuple[Figure, ...]
    runs: tuple[dict[str, float], ...]

    @property
    def met(self) -> bool:
        return all(figure.met is not False for figure in self.figures)

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "figures": [figure.as_json() for figure in self.figures],
            "runs": [{name: round(value, 4) for name, value in run.items()} for run in self.runs],
            "machine": asdict(machine()),
        }


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured."""

    cores: int
    memory_gib: int
    python: str
    system: str


def machine() -> Machine:
    """This machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(os.cpu_count() or 0, round(memory / 2**30), platform.python_version(), platform.system())


def repeated(run: Callable[[int], dict[str, float]], repetitions: int = REPETITIONS) -> tuple[dict[str, float], ...]:
    """The same measurement several times, numbered from 0."""
    return tuple(run(number) for number in range(repetitions))


def median_of(runs: Sequence[dict[str, float]], name: str) -> float:
    """The middle value of a figure over the runs."""
    return median(run[name] for run in runs)
