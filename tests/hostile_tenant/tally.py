"""What came of the tries."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.hostile_tenant.operation import Target

_MOST_FINDINGS = 50


@dataclass(frozen=True, slots=True)
class Finding:
    """An answer that should not have been given.

    Attributes:
        what: ``allowed`` without a right, ``refused`` in spite of one, ``told`` of what is not the attacker's,
            ``not told`` of what is, ``unanswered``.
    """

    what: str
    operation: str
    target: Target
    detail: str = ""

    def __str__(self) -> str:
        parts = {name: getattr(self.target, name) for name in ("topic", "group", "transactional_id", "user")}
        about = ", ".join(f"{name} {value!r}" for name, value in parts.items() if value)
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.operation} by {self.target.attacker} {self.what} ({about or 'nothing named'}){detail}"


@dataclass(slots=True)
class Tally:
    """What came of the tries.

    Attributes:
        permitted, refused: by operation, the tries that were answered as they must be.
        written: offsets of the records that were taken, by topic.
        kinds: how often each kind of finding was made.
    """

    permitted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    written: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    findings: list[Finding] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def tries(self) -> int:
        return self.permitted.total() + self.refused.total() + self.kinds.total()

    def found(self, finding: Finding) -> None:
        """Keep it; of very many only their number."""
        self.kinds[finding.what] += 1
        if len(self.findings) < _MOST_FINDINGS:
            self.findings.append(finding)
