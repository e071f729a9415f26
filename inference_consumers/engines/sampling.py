"""The next token of every row of a batch, each by its own parameters and its own randomness."""

from dataclasses import dataclass

import torch

from fairlane.records import Parameters


@dataclass(frozen=True, slots=True)
class Sampler:
    """How one row chooses. ``generator`` is its own: a seeded row draws the same numbers in any batch."""

    temperature: float
    top_p: float
    generator: torch.Generator

    @classmethod
    def of(cls, parameters: Parameters) -> "Sampler | None":
        """None means greedy."""
        if parameters.temperature == 0:
            return None
        generator = torch.Generator()
        if parameters.seed is None:
            generator.seed()
        else:
            generator.manual_seed(parameters.seed)
        return cls(parameters.temperature, parameters.top_p, generator)

    def choose(self, logits: torch.Tensor) -> int:
        """A token for float32 ``logits`` of shape (vocabulary,); one random number is drawn.

        Nucleus sampling: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
        """
        # Subtracting the maximum first keeps a tiny temperature from overflowing.
        weights = torch.exp((logits - logits.max()).double() / self.temperature)
        order: torch.Tensor | None = None
        if self.top_p < 1:
            weights, order = weights.sort(descending=True, stable=True)
            mass_before = weights.cumsum(0) - weights
            kept = max(1, int((mass_before < self.top_p * weights.sum()).sum()))
            weights = weights[:kept]
        cumulative = weights.cumsum(0)
        point = torch.rand((), generator=self.generator, dtype=torch.float64) * cumulative[-1]
        index = min(int(torch.searchsorted(cumulative, point, right=True)), len(weights) - 1)
        return index if order is None else int(order[index])


def choose_tokens(logits: torch.Tensor, samplers: list[Sampler | None]) -> list[int | None]:
    """One token per row of float32 ``logits`` (rows, vocabulary); None where no finite maximum exists."""
    best, greedy = logits.max(dim=-1)
    usable = torch.isfinite(best).tolist()
    tokens: list[int | None] = []
    for row, sampler in enumerate(samplers):
        if not usable[row]:
            tokens.append(None)
        elif sampler is None:
            tokens.append(int(greedy[row]))
        else:
            tokens.append(sampler.choose(logits[row]))
    return tokens
