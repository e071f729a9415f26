"""Schedule of calls from a trace and a factor. Pure, and lazy like the trace."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

from producers.replay.trace import TraceRow


@dataclass(frozen=True, slots=True)
class Call:
    """One request that is to be made.

    Attributes:
        number: counts from 0.
        due_s: seconds from the start.
        tenant: in whose name.
        prompt_tokens: what it sends.
        output_tokens: most tokens that it asks for.
    """

    number: int
    due_s: float
    tenant: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How a trace becomes calls.

    Attributes:
        factor: 2 plays it twice as fast.
        seconds: nothing is due from then on; None plays all of it.
        most_calls: no more than these; None plays all of it.
        scale: tokens are multiplied by it.
        max_tokens: bounds prompt and answer together: the answer gives way, down to one token.
    """

    factor: float = 1.0
    seconds: float | None = None
    most_calls: int | None = None
    scale: float = 1.0
    max_tokens: int = 2_048

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"factor: {self.factor:g} is not above 0")
        if not self.scale > 0:
            raise ValueError(f"scale: {self.scale:g} is not above 0")
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens: {self.max_tokens} is below 2")


def plan(rows: Iterable[TraceRow], tenants: Sequence[str], options: PlanOptions) -> Iterator[Call]:
    """The calls in the order in which they are due.

    A row that names one of ``tenants`` is that tenant's. Any other name always falls to the same one of them, and rows
    without a name go to each in turn.

    Raises:
        ValueError: there are no tenants.
    """
    if not tenants:
        raise ValueError("tenants: give at least one")
    known = frozenset(tenants)
    for number, row in enumerate(rows):
        due_s = row.arrived_at_s / options.factor
        if options.most_calls is not None and number >= options.most_calls:
            return
        if options.seconds is not None and due_s >= options.seconds:
            return
        yield Call(number, due_s, _tenant(row.tenant, number, tenants, known), *tokens_of(row, options))


def tokens_of(row: TraceRow, options: PlanOptions) -> tuple[int, int]:
    """Tokens of the prompt and of the answer, scaled and bounded; at least one of each."""
    prompt = min(max(1, round(row.context_tokens * options.scale)), options.max_tokens - 1)
    return prompt, min(max(1, round(row.generated_tokens * options.scale)), options.max_tokens - prompt)


def _tenant(name: str, number: int, tenants: Sequence[str], known: frozenset[str]) -> str:
    if name in known:
        return name
    return tenants[(crc32(name.encode()) if name else number) % len(tenants)]


def text_of(number: int, tokens: int) -> str:
    """A text of so many tokens as the simulated engine counts them: four bytes each. No two numbers below 100 million
    have the same, as far as their length allows, so that no cache answers for another call."""
    return (f"{number % 10**8:08d}" + "load" * max(0, tokens - 2))[: 4 * tokens]
