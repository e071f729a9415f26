"""Throughput and remaining time of a task. Pure; times in seconds."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Pace:
    """Of something that is told in steps of any size, some of which may come in bunches.

    The rate is that of all that was done since the beginning, so that no step makes it jump. Between two steps work is
    taken to go on at that rate, for as long as the longest pause between steps was; when nothing comes for longer, the
    rate falls.

    Args:
        total: how much there is to do.
        done: how much of it was done before; it says nothing about the rate.
        now_s: when it begins.
    """

    total: int
    done: int
    now_s: float
    _begun_at: int = field(init=False)
    _begun_s: float = field(init=False)
    _longest_pause_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._begun_at, self._begun_s = self.done, self.now_s

    def step(self, done: int, now_s: float) -> None:
        """So much is done now."""
        if done != self.done:
            self._longest_pause_s = max(self._longest_pause_s, now_s - self.now_s)
            self.done, self.now_s = done, now_s

    def per_s(self, now_s: float) -> float | None:
        """The rate; None before anything was done."""
        return rate_per_s(self.done - self._begun_at + self._assumed(now_s), now_s - self._begun_s)

    def remaining_s(self, now_s: float) -> float | None:
        """How long the rest will take, if it goes on like this; None before anything was done."""
        rate = self.per_s(now_s)
        return None if rate is None else max(0.0, self.total - self.done - self._assumed(now_s)) / rate

    def _assumed(self, now_s: float) -> float:
        """What was done since the last step, as far as can be told."""
        until_then = rate_per_s(self.done - self._begun_at, self.now_s - self._begun_s)
        return 0.0 if until_then is None else until_then * min(now_s - self.now_s, self._longest_pause_s)


def rate_per_s(done: float, elapsed_s: float) -> float | None:
    """None of nothing, and of no time."""
    return done / elapsed_s if done > 0 and elapsed_s > 0 else None
