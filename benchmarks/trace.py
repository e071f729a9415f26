"""Sizes and arrival gaps of real requests to a production LLM service.

The rows are those of ``data/azure_llm_code_2023.csv`` (attribution in ``data/README.md``). Sizes are drawn with
replacement and multiplied by one factor, so that the longest context fits the simulated model. Gaps are drawn from the
trace and scaled to the wanted rate, without the longest hundredth: silences of up to 217 s would leave a minute's
measurement empty. The rest is still bursty, with a coefficient of variation of 1.7 (a Poisson process has 1).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from producers.replay.trace import PlanOptions, TraceRow, read_trace, tokens_of

TRACE_FILE = Path(__file__).with_name("data") / "azure_llm_code_2023.csv"
SCALE = 0.25
"""The longest context of the trace, 7,437 tokens, becomes 1,859: the simulated model holds 2,048."""
MAX_CONTEXT_TOKENS = 2_048
_KEPT_GAPS = 0.99


@dataclass(frozen=True, slots=True)
class RequestSize:
    """What a request asks of the engine."""

    prompt_tokens: int
    output_tokens: int

    @property
    def cost_tokens(self) -> int:
        """In the dispatcher's unit of cost."""
        return self.prompt_tokens + 2 * self.output_tokens


def load_trace(path: Path = TRACE_FILE) -> tuple[TraceRow, ...]:
    """The rows in the order of their arrival."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(read_trace(file, str(path)))


class TraceSampler:
    """Draws sizes and arrival times; the same seed draws the same."""

    def __init__(
        self, rows: Sequence[TraceRow], seed: int, *, scale: float = SCALE, max_tokens: int = MAX_CONTEXT_TOKENS
    ) -> None:
        """``max_tokens`` bounds prompt and answer together: the answer gives way."""
        self._random = random.Random(seed)
        self._max_tokens = max_tokens
        options = PlanOptions(scale=scale, max_tokens=max_tokens)
        self._sizes = [RequestSize(*tokens_of(row, options)) for row in rows]
        gaps = sorted(later.arrived_at_s - earlier.arrived_at_s for earlier, later in pairwise(rows))
        kept = gaps[: max(1, int(len(gaps) * _KEPT_GAPS))]
        mean = sum(kept) / len(kept)
        self._gaps = [gap / mean for gap in kept]
        self.mean_cost_tokens = sum(size.cost_tokens for size in self._sizes) / len(self._sizes)
        self.largest_cost_tokens = max(size.cost_tokens for size in self._sizes)

    def size(self) -> RequestSize:
        """The size of one request."""
        return self._random.choice(self._sizes)

    def bounded(self, prompt_tokens: int, output_tokens: int) -> RequestSize:
        """A size that fits the model: the answer gives way, to one token at least."""
        return RequestSize(prompt_tokens, max(1, min(output_tokens, self._max_tokens - prompt_tokens)))

    def arrivals(self, rate_per_s: float, seconds: float, *, steady: bool = False) -> list[float]:
        """Arrival times in seconds from 0 to before ``seconds``, ``rate_per_s`` on average; in the trace's bursts, or
        steady: no gap is less than half or more than one and a half of the mean."""
        times: list[float] = []
        at = 0.0
        while rate_per_s > 0:
            gap = self._random.uniform(0.5, 1.5) if steady else self._random.choice(self._gaps)
            at += gap / rate_per_s
            if at >= seconds:
                break
            times.append(at)
        return times
