"""Length buckets: items of similar length run together, so that padding is small. Pure.

A batch is prefilled as a rectangle: prompts are padded to the longest of them, unless the engine says that it computes
less than that. Rows that end early leave it, so answers need no padding; but a run goes on until its longest answer, so
like answers are put together where it costs nothing.

Items wait in cells, by the class of their prompt's length and of their expected answer's. A batch takes the cell of the
item that leads it, then the nearest, for as long as its padding stays below MAX_PADDING.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from inference_consumers.batching.received_work import ReceivedWork

MAX_PADDING = 0.125
"""Padding's part of a batch's prefill, at most, unless a run of its own would cost more than the padding does."""

_MAX_PADDING_OVER_TIME = 0.14
"""What it may be over many batches when some were padded for that reason: they use up what others left over."""

_KEPT_PER_BATCH = 0.95
_TRUST_TOKENS = 100.0
"""How much rectangle must be seen before what the engine says of it counts for half."""

_PROMPT_CLASSES_PER_DOUBLING = 4
"""Prompts of one class differ by 19 % at most, and waste a twelfth of the rectangle when evenly spread. Measured on the
lengths of the load benchmarks: with 256 items waiting 6 % of the prefill is padding with 4 classes, 8 % with 3 and 9 %
with 2; with 32 waiting it is 9 % with any. More classes bring a point and twice the cells."""

_SHORTEST = 16
"""Below that a prompt is as good as another."""
_LONGEST = 2**21
_PROMPT_BOUNDARIES = tuple(
    round(_SHORTEST * 2 ** (step / _PROMPT_CLASSES_PER_DOUBLING))
    for step in range(_PROMPT_CLASSES_PER_DOUBLING * (_LONGEST // _SHORTEST).bit_length())
)
_OUTPUT_BOUNDARIES = (16, 64, 256, 1_024, 4_096)


class Cell(NamedTuple):
    """Classes of prompt and answer."""

    prompt_class: int
    output_class: int

    def distance(self, other: "Cell") -> tuple[int, int]:
        """How unlike two cells are: prompts first, because only they are padded."""
        return abs(self.prompt_class - other.prompt_class), abs(self.output_class - other.output_class)

    @property
    def longest_prompt_tokens(self) -> int:
        """No prompt of this class is longer, but for the last class."""
        return _PROMPT_BOUNDARIES[min(self.prompt_class, len(_PROMPT_BOUNDARIES) - 1)]


def output_tokens(work: ReceivedWork) -> int:
    """The expected answer, from the dispatcher's estimate of cost: prompt plus twice the answer."""
    return max(0, work.item.cost_tokens - work.item.prompt_tokens) // 2


def cell_of(work: ReceivedWork) -> Cell:
    return Cell(
        bisect_right(_PROMPT_BOUNDARIES, work.item.prompt_tokens), bisect_right(_OUTPUT_BOUNDARIES, output_tokens(work))
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """The items of a batch, added up. Tokens; ``padded_tokens`` is their cost with the padding."""

    items: int = 0
    longest_prompt: int = 0
    prompt_tokens: int = 0
    cost_tokens: int = 0

    def plus(self, work: ReceivedWork) -> "Shape":
        prompt = work.item.prompt_tokens
        return Shape(
            self.items + 1,
            max(self.longest_prompt, prompt),
            self.prompt_tokens + prompt,
            self.cost_tokens + work.item.cost_tokens,
        )

    def merged(self, other: "Shape") -> "Shape":
        return Shape(
            self.items + other.items,
            max(self.longest_prompt, other.longest_prompt),
            self.prompt_tokens + other.prompt_tokens,
            self.cost_tokens + other.cost_tokens,
        )

    @property
    def padding_tokens(self) -> int:
        return self.items * self.longest_prompt - self.prompt_tokens

    @property
    def padded_tokens(self) -> int:
        return self.cost_tokens + self.padding_tokens

    def padding_share(self, weight: float = 1.0) -> float:
        """Padding's part of the prefill, when the engine computes this part of the padding."""
        padding_tokens = weight * self.padding_tokens
        return padding_tokens / (self.prompt_tokens + padding_tokens) if padding_tokens else 0.0


@dataclass(slots=True)
class PaddingRecord:
    """What the batches of one model were padded with of late, and how much of it the engine really computes: one that
    prefills in parts, or without a rectangle, wastes less. Older batches count less."""

    _prefill_tokens: float = 0.0
    _padding_tokens: float = 0.0
    _rectangle_tokens: float = _TRUST_TOKENS
    _computed_tokens: float = _TRUST_TOKENS
    _latest: Shape = field(default_factory=Shape)

    @property
    def weight(self) -> float:
        """The part of a rectangle's padding that the engine computes, 0 to 1; 1 for one that says nothing."""
        return min(1.0, self._computed_tokens / self._rectangle_tokens)

    def made(self, batch: Shape) -> None:
        self._prefill_tokens, self._padding_tokens = self._with(batch)
        self._latest = batch

    def ran(self, items: int, padding_tokens: int) -> None:
        """A run of so many items came back, in which the engine computed so many tokens of padding. Only the latest
        batch is known; a run of other items, which came back before, says nothing."""
        if items != self._latest.items:
            return
        self._rectangle_tokens = _KEPT_PER_BATCH * self._rectangle_tokens + self._latest.padding_tokens
        self._computed_tokens = _KEPT_PER_BATCH * self._computed_tokens + padding_tokens

    def allows(self, batch: Shape) -> bool:
        """Whether padding would still be within _MAX_PADDING_OVER_TIME."""
        prefill_tokens, padding_tokens = self._with(batch)
        return padding_tokens <= _MAX_PADDING_OVER_TIME * prefill_tokens

    def _with(self, batch: Shape) -> tuple[float, float]:
        padding_tokens = self.weight * batch.padding_tokens
        prefill_tokens = batch.prompt_tokens + padding_tokens
        return (
            _KEPT_PER_BATCH * self._prefill_tokens + prefill_tokens,
            _KEPT_PER_BATCH * self._padding_tokens + padding_tokens,
        )
