"""What a run of a target came to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one target.

    Attributes:
        target: its name.
        cases: inputs that were tried.
        seconds: how long.
        reason: what did not hold; None when everything did.
        file: the failing input.
        command: what tries it again.
        figures: what was measured.
    """

    target: str
    cases: int
    seconds: float
    reason: str | None = None
    file: Path | None = None
    command: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "target": self.target,
            "cases": self.cases,
            "seconds": round(self.seconds, 1),
            "reason": self.reason,
            "file": None if self.file is None else str(self.file),
            "command": self.command,
            "figures": dict(self.figures),
        }

    def lines(self) -> list[str]:
        """For people."""
        said = [f"{self.target}: {self.cases} inputs in {self.seconds:.1f} s: {self.reason or 'nothing found'}"]
        said += [f"  {name}: {value:g}" for name, value in self.figures.items()]
        return said if self.command is None else [*said, f"  input: {self.file}", f"  again: {self.command}"]
