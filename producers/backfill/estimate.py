"""Estimated cost of a job, from a sample of its rows. Pure."""

from dataclasses import dataclass

from fairlane.outcomes import Task
from fairlane.records import InferenceRequest
from fairlane_server.cost_tokens import cost_tokens
from fairlane_server.text import estimated_tokens
from producers.backfill.row import BadRow, ParsedRow

EXPECTED_OUTPUT_TOKENS = 256
"""Of a generated text whose row names no ``max_tokens``."""

ALL_OF_THE_FIRST = 1_000
ONE_IN = 101
"""Of the rows after them; a prime, so that no pattern in the input is met or missed each time."""


@dataclass(slots=True)
class Estimate:
    """Counts every row and looks into some of them.

    Attributes:
        rows: so far.
        looked_at: of them.
        bad: of those that were looked at: they will not be sent.
        prompt_tokens: of those that were looked at.
        output_tokens: that they are expected to have.
    """

    rows: int = 0
    looked_at: int = 0
    bad: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def wants_next(self) -> bool:
        """Whether the next row is one to look into."""
        return self.rows < ALL_OF_THE_FIRST or self.rows % ONE_IN == 0

    def skip(self) -> None:
        """Count a row without looking."""
        self.rows += 1

    def add(self, row: ParsedRow) -> None:
        """Count a row and look into it."""
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
        """Cost tokens of a row, on average."""
        return cost_tokens(self.prompt_tokens, self.output_tokens) / self.looked_at if self.looked_at else 0.0

    def of_all(self, looked_at: int) -> int:
        """Total over all rows, extrapolated from the sampled rows."""
        return round(looked_at * self.rows / self.looked_at) if self.looked_at else 0

    @property
    def cost_tokens(self) -> int:
        """Of the whole job."""
        return self.of_all(cost_tokens(self.prompt_tokens, self.output_tokens))


def _prompt_tokens(request: InferenceRequest) -> int:
    content = request.input
    texts = [message.content for message in content.messages or ()]
    texts += [text for text in (content.prompt, content.query) if text is not None]
    texts += [*(content.texts or ()), *(content.documents or ())]
    return sum(map(estimated_tokens, texts))
