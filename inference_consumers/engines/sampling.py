"""Next-token sampling, per row with its own parameters and randomness."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fairlane.records import Parameters

# Nearly every nucleus lies within the first of these, and finding so few costs a fraction of sorting a vocabulary.
_NUCLEUS_SIZES = (256, 4096, 1 << 62)
# On the CPU numbers of more rows than this leave its caches, which made 32 rows take three times as long.
_ROWS_AT_ONCE = 8
# Keeps a temperature above zero when it becomes float32.
_COLDEST = 1e-30


@dataclass(frozen=True, slots=True)
class Sampler:
    """Sampling of one row. ``generator`` is its own: a seeded row draws the same numbers in any batch."""

    temperature: float
    top_p: float
    generator: torch.Generator

    @classmethod
    def of(cls, parameters: Parameters) -> "Sampler | None":
        if parameters.temperature == 0:
            return None
        generator = torch.Generator()
        if parameters.seed is None:
            generator.seed()
        else:
            generator.manual_seed(parameters.seed)
        return cls(parameters.temperature, parameters.top_p, generator)

    def draw(self) -> float:
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log probabilities at one position, of the model's own distribution: before any temperature.

    ``top`` are the likeliest tokens with theirs, likeliest first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


def choose_tokens(logits: torch.Tensor, samplers: Sequence[Sampler | None]) -> list[int | None]:
    """One token per row of float32 ``logits`` (rows, vocabulary); None where no finite maximum exists."""
    best, tokens = logits.max(dim=-1)
    sampled = [row for row, sampler in enumerate(samplers) if sampler is not None]
    together = len(sampled) if logits.is_cuda else _ROWS_AT_ONCE
    for start in range(0, len(sampled), max(together, 1)):
        rows = sampled[start : start + together]
        wanted = [sampler for sampler in (samplers[row] for row in rows) if sampler is not None]
        tokens[rows] = _sample(logits[rows], best[rows], wanted)
    tokens = torch.where(torch.isfinite(best), tokens, -1)
    return [None if token < 0 else token for token in tokens.tolist()]


def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int | None], wanted: Sequence[int | None]
) -> list[Logprobs | None]:
    """For every row with a token that asks for them: ``wanted`` is how many top tokens, None for none at all."""
    found: list[Logprobs | None] = [None] * len(tokens)
    asking = [row for row, count in enumerate(wanted) if count is not None and tokens[row] is not None]
    if not asking:
        return found
    logprobs = logits[asking].log_softmax(dim=-1)
    chosen_ids = torch.tensor([[tokens[row]] for row in asking], device=logits.device)
    chosen = logprobs.gather(1, chosen_ids)[:, 0].tolist()
    most = min(max(wanted[row] or 0 for row in asking), logits.shape[1])
    likeliest = logprobs.topk(most, dim=-1)
    ids, values = likeliest.indices.tolist(), likeliest.values.tolist()
    for place, row in enumerate(asking):
        top = [pair for pair in zip(ids[place], values[place], strict=True) if math.isfinite(pair[1])]
        found[row] = Logprobs(chosen[place], tuple(top[: wanted[row]]))
    return found


def _sample(logits: torch.Tensor, best: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """int64 of shape (rows,). ``best`` are the rows' largest logits.

    Nucleus sampling: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    device = logits.device
    temperatures = torch.tensor([max(sampler.temperature, _COLDEST) for sampler in samplers], device=device)
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    weights = torch.exp((logits - best[:, None]) / temperatures[:, None])
    draws = torch.tensor([sampler.draw() for sampler in samplers], dtype=torch.float64, device=device)
    tokens = torch.zeros(len(samplers), dtype=torch.int64, device=device)
    whole = [row for row, sampler in enumerate(samplers) if sampler.top_p >= 1]
    if whole:
        tokens[whole] = _pick(weights[whole], draws[whole])
    left = [row for row, sampler in enumerate(samplers) if sampler.top_p < 1]
    for size in _NUCLEUS_SIZES:
        if not left:
            break
        of_rows = weights[left]
        shares = torch.tensor([samplers[row].top_p for row in left], dtype=torch.float64, device=device)
        mass = shares * of_rows.sum(dim=-1, dtype=torch.float64)
        heaviest = of_rows.topk(min(size, of_rows.shape[1]), dim=-1)
        tokens[left] = _pick_in_nucleus(heaviest.values, heaviest.indices, mass, draws[left])
        if size < of_rows.shape[1]:
            covered = (heaviest.values.sum(dim=-1, dtype=torch.float64) >= mass).tolist()
            left = [row for row, is_covered in zip(left, covered, strict=True) if not is_covered]
        else:
            left = []
    return tokens


def _pick_in_nucleus(
    weights: torch.Tensor, token_ids: torch.Tensor, mass: torch.Tensor, draws: torch.Tensor
) -> torch.Tensor:
    """Among the fewest of the ``weights``, which fall, that hold the ``mass``, at least one."""
    before = weights.cumsum(dim=-1, dtype=torch.float64) - weights
    outside = before >= mass[:, None]
    outside[:, 0] = False
    places = _pick(weights.masked_fill(outside, 0.0), draws)
    return token_ids.gather(1, places[:, None])[:, 0]


def _pick(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The place in each row of ``weights`` where its draw falls; never one of weight 0."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    totals = cumulative[:, -1:]
    points = torch.minimum(draws[:, None] * totals, torch.nextafter(totals, torch.zeros_like(totals)))
    return torch.searchsorted(cumulative, points, right=True)[:, 0].clamp(max=weights.shape[1] - 1)
