"""Search for the end of an unreadable batch. Pure: it says which offset to fetch next.

A broker answers a fetch from within a batch with the whole batch. So an offset is either inside, where the fetch fails
as it did at the first offset, or beyond, where reading works. Steps double until one lands beyond; from there the
interval is halved: about twenty fetches for a batch of a thousand records.
"""


class BatchEnd:
    """Search from ``base``, the first offset of the batch, up to ``log_end``, which is always beyond it."""

    def __init__(self, base: int, log_end: int) -> None:
        if log_end <= base:
            raise ValueError(f"the log ends at {log_end}, before the batch at {base}")
        self._inside = base
        self._beyond = log_end
        self._step: int | None = 1
        """None once a fetched offset was beyond."""

    @property
    def next_look(self) -> int | None:
        """The offset to fetch; None when the end is found."""
        if self._beyond - self._inside == 1:
            return None
        if self._step is not None:
            return min(self._inside + self._step, self._beyond - 1)
        return (self._inside + self._beyond) // 2

    @property
    def end(self) -> int:
        """The lowest offset known to be beyond the batch; the end of the batch once ``next_look`` is None."""
        return self._beyond

    def saw_inside(self, offset: int) -> None:
        """Record that ``offset`` is inside the batch."""
        self._inside = max(self._inside, offset)
        if self._step is not None:
            self._step *= 2

    def saw_beyond(self, offset: int) -> None:
        """Record that ``offset`` is beyond the batch. Raises ValueError if it is known to be inside."""
        if offset <= self._inside:
            raise ValueError(f"{offset} is inside of the batch, which reaches to {self._inside} at least")
        self._beyond = min(self._beyond, offset)
        self._step = None
