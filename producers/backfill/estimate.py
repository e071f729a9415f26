"""Estimated cost of a job, from a sample of its rows. Pure."""

from dataclasses import dataclass

from fairlane.outcomes import Task
from fairlane.records import InferenceRequest
from fairlane_server.admission_rule import cost_tokens
from fairlane_server.text import estimated_tokens
from producers.backfill.row import BadRow, ParsedRow

EXPECTED_OUTPUT_TOKENS = 256
"""Per generated text without ``max_tokens``."""

ALL_OF_THE_FIRST = 1_000
ONE_IN = 101
"""Sampling after the first rows; a prime, so that it does not follow a pattern of the input."""


@dataclass(slots=True)
class Estimate:
    """Counts all ``rows``, and samples ``looked_at`` of them. ``bad`` and the tokens are of the sampled rows; output
    tokens are expected ones."""

    rows: int = 0
    looked_at: int = 0
    bad: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def wants_next(self) -> bool:
        """Whether to sample the next row."""
        return self.rows < ALL_OF_THE_FIRST or self.rows % ONE_IN == 0

    def skip(self) -> None:
        """Count a row that is not sampled."""
        self.rows += 1

    def add(self, row: ParsedRow) -> None:
        """Count and sample a row."""
        self.rows += 1
        self.looked_at += 1
        if isinstance(row, BadRow):
            self.bad += 1
            return
        self.prompt_tokens += _prompt_tokens(row.request)
        if row.request.task == Task.GENERATE:
            self.output_tokens += row.request.parameters.max_tokens or EXPECTED_OUTPUT_TOKENS

    @property
    def row_cost(self) -> float:
        """Average cost of a row, in cost tokens."""
        return cost_tokens(self.prompt_tokens, self.output_tokens) / self.looked_at if self.looked_at else 0.0

    def of_all(self, looked_at: int) -> int:
        """Total over all rows, extrapolated from the sampled rows."""
        return round(looked_at * self.rows / self.looked_at) if self.looked_at else 0

    @property
    def cost_tokens(self) -> int:
        """Estimated cost of the whole job."""
        return self.of_all(cost_tokens(self.prompt_tokens, self.output_tokens))


def _prompt_tokens(request: InferenceRequest) -> int:
    content = request.input
    texts = [message.content for message in content.messages or ()]
    texts += [text for text in (content.prompt, content.query) if text is not None]
    texts += [*(content.texts or ()), *(content.documents or ())]
    return sum(map(estimated_tokens, texts))
