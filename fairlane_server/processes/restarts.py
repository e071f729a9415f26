"""Decide when to restart a dead process, and when to give up. Pure: the caller passes `now` and the random number."""

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_NO_RESTART = 78
"""Exit status of a process that would fail again and do harm each time: EX_CONFIG of sysexits.h."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Exponential backoff with jitter, and a limit on deaths within a window.

    Attributes:
        max_deaths: deaths within the window that still lead to a restart.
        window_s: length of the window, in seconds.
        first_delay_s: delay after the first death in the window; doubled with each further one.
        max_delay_s: upper bound of the delay before jitter.
        jitter: the delay is multiplied by a factor between 1 - jitter and 1 + jitter.
    """

    max_deaths: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    jitter: float = 0.25

    def decide(self, deaths: Sequence[float], now: float, chance: float, status: int | None = None) -> float | str:
        """Seconds until a restart, or why there is none and the stack stops.

        ``deaths`` are in seconds by the clock of ``now``, ``status`` is of the last; ``chance`` is a random number in
        [0, 1)."""
        if status == EXIT_NO_RESTART:
            return "asked not to be started again"
        recent = len(self.within_window(deaths, now))
        if recent > self.max_deaths:
            return f"died {recent} times within {self.window_s:g} s"
        delay_s = min(self.max_delay_s, self.first_delay_s * 2.0 ** (max(recent, 1) - 1))
        return delay_s * (1 - self.jitter + 2 * self.jitter * chance)

    def within_window(self, deaths: Sequence[float], now: float) -> list[float]:
        return [death for death in deaths if now - death <= self.window_s]
