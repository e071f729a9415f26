"""Predicted run time, learned from earlier runs. Pure.

A line through the runs' tokens and seconds, older ones counting less: what a run costs whatever it holds, and what a
token adds. It knows nothing of an engine but that larger batches take longer.
"""

from dataclasses import dataclass
from math import inf

KEPT_PER_RUN = 0.9
"""What the past counts for after another run: after 22 it is a tenth."""

LONGEST_RUN = 4.0
"""A run counts for at most so many times what was predicted: one stall must not make everything look hopeless. A
lasting slowdown of any size is still followed."""

_LEAST_SPREAD = 0.05
"""Runs whose sizes differ less than this (standard deviation to mean) say nothing about the slope."""


@dataclass(slots=True)
class RunTimes:
    """The runs of one model. Tokens are cost in the dispatcher's unit."""

    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens_squared: float = 0.0
    _tokens_seconds: float = 0.0

    def ran(self, tokens: int, seconds: float) -> None:
        """A run came back."""
        if self._weight > 0:
            seconds = min(seconds, LONGEST_RUN * max(self.predicted_s(tokens), 1e-6))
        self._weight = KEPT_PER_RUN * self._weight + 1
        self._tokens = KEPT_PER_RUN * self._tokens + tokens
        self._seconds = KEPT_PER_RUN * self._seconds + seconds
        self._tokens_squared = KEPT_PER_RUN * self._tokens_squared + tokens * tokens
        self._tokens_seconds = KEPT_PER_RUN * self._tokens_seconds + tokens * seconds

    def predicted_s(self, tokens: float) -> float:
        """What a run of so many tokens takes; 0 before the first."""
        base_s, per_token_s = self._line()
        return base_s + per_token_s * tokens

    @property
    def base_tokens(self) -> float:
        """How many tokens' time a run takes beside that of its tokens: so many may be wasted to save a run."""
        base_s, per_token_s = self._line()
        if base_s <= 0:
            return 0.0
        return base_s / per_token_s if per_token_s > 0 else inf

    def _line(self) -> tuple[float, float]:
        """Seconds of a run without tokens, and of one token; neither below 0."""
        if self._weight == 0:
            return 0.0, 0.0
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        variance = self._tokens_squared / self._weight - mean_tokens**2
        if variance <= (_LEAST_SPREAD * mean_tokens) ** 2:
            # All alike: that a token takes its part of the time is the guess that calls nothing short too long.
            return (0.0, mean_s / mean_tokens) if mean_tokens > 0 else (mean_s, 0.0)
        slope = (self._tokens_seconds / self._weight - mean_tokens * mean_s) / variance
        slope = min(max(0.0, slope), mean_s / mean_tokens)
        return mean_s - slope * mean_tokens, slope
