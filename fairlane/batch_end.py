"""Where a batch ends that cannot be read, found by looking at other offsets. Pure: which one to look at next.

A broker answers a fetch from within a batch with the whole batch, so an offset is either inside, where the reader fails
as it did at the first, or beyond, where it reads on. The steps grow until one lands beyond, and are halved from there:
some twenty looks for a batch of a thousand records.
"""


class BatchEnd:
    """The search from ``base``, the first offset of the batch, up to ``log_end``, which is beyond it for certain."""

    def __init__(self, base: int, log_end: int) -> None:
        if log_end <= base:
            raise ValueError(f"the log ends at {log_end}, before the batch at {base}")
        self._inside = base
        self._beyond = log_end
        self._step: int | None = 1
        """None once an offset beyond was found by looking."""

    @property
    def next_look(self) -> int | None:
        """The offset to look at; None when the end is found."""
        if self._beyond - self._inside == 1:
            return None
        if self._step is not None:
            return min(self._inside + self._step, self._beyond - 1)
        return (self._inside + self._beyond) // 2

    @property
    def end(self) -> int:
        """The first offset known to be beyond; that of the next batch when ``next_look`` is None."""
        return self._beyond

    def saw_inside(self, offset: int) -> None:
        """The batch reaches this far."""
        self._inside = max(self._inside, offset)
        if self._step is not None:
            self._step *= 2

    def saw_beyond(self, offset: int) -> None:
        """The batch ends before this offset."""
        if offset <= self._inside:
            raise ValueError(f"{offset} is inside of the batch, which reaches to {self._inside} at least")
        self._beyond = min(self._beyond, offset)
        self._step = None
