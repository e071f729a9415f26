"""What a benchmark says: figures with an aim each, from several runs on one machine."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
