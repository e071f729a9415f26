"""What a run came to, for people and as JSON."""

from dataclasses import dataclass, field

from tests.hostile_tenant.tally import Tally


@dataclass(slots=True)
class Report:
    """Of all rounds.

    Attributes:
        changed: what is no longer as it was, and what no longer works.
        missed: requests that the broker offers and nobody tries.
    """

    seed: int
    tally: Tally = field(default_factory=Tally)
    changed: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    attack_s: float = 0.0
    whole_s: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether everything held, and the broker permitted and refused something."""
        tally = self.tally
        return not (tally.kinds or self.changed or self.missed) and bool(tally.permitted and tally.refused)

    def as_json(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "seed": self.seed,
            "tries": self.tally.tries,
            "permitted": dict(sorted(self.tally.permitted.items())),
            "refused": dict(sorted(self.tally.refused.items())),
            "findings": dict(self.tally.kinds),
            "examples": list(map(str, self.tally.findings)),
            "changed": self.changed,
            "missed": self.missed,
            "attack_s": round(self.attack_s, 1),
            "whole_s": round(self.whole_s, 1),
            "clean": self.is_clean,
        }

    def lines(self) -> list[str]:
        """A table of the operations, then what was found."""
        permitted, refused = self.tally.permitted, self.tally.refused
        names = sorted({*permitted, *refused})
        width = max(map(len, names), default=0)
        verdict = "no crossing" if self.is_clean else "NOT CLEAN"
        times = f"{self.attack_s:.0f} s ({self.whole_s:.0f} s with the broker and the checks)"
        return [
            f"{'operation':<{width}} {'permitted':>9} {'refused':>9}",
            *(f"{name:<{width}} {permitted[name]:>9,} {refused[name]:>9,}" for name in names),
            f"{'together':<{width}} {permitted.total():>9,} {refused.total():>9,}",
            "",
            *(f"FOUND {finding}" for finding in self.tally.findings),
            *(f"CHANGED {what}" for what in self.changed),
            *(f"NOT TRIED {name}" for name in self.missed),
            f"{self.tally.tries:,} tries in {times}: {verdict}",
            f"seed {self.seed}",
        ]
