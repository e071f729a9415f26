"""Size of the next transaction: halved after a time-out, grown slowly after successes. Pure."""

from dataclasses import dataclass, field

BATCH_BYTES = 8 * 1024 * 1024
"""Of the records' values. As rows and as what is sent to Postgres they may take many times as much memory."""

_GROWTH = 1 / 8


@dataclass(slots=True)
class BatchSize:
    """Half as many records after a batch that took Postgres too long, down to one, and an eighth more after each that
    is stored: slowly, since what is too much costs a time-out.

    Attributes:
        most_records: of one batch.
        records: of the next one, at most.
    """

    most_records: int
    records: int = field(init=False)

    def __post_init__(self) -> None:
        self.records = self.most_records

    def timed_out(self, records: int) -> None:
        """A batch of so many records was not stored in time."""
        if records:
            self.records = max(1, min(self.records, records // 2))

    def stored(self, records: int) -> None:
        """A batch of so many records was stored."""
        if records:
            self.records = min(self.most_records, self.records + max(1, int(self.records * _GROWTH)))
