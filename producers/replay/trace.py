"""Load traces and their schedule: arrival times, lengths, tenants, and a factor. Pure, and lazy.

Read is CSV with the columns of the Azure LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens), or the same
under plain names (arrived_at_s, prompt_tokens, output_tokens), with a column ``tenant`` or without one. A time is a
date and time of ISO 8601, or seconds from any moment.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from zlib import crc32

_TIME = ("timestamp", "arrived_at_s")
_PROMPT = ("contexttokens", "prompt_tokens")
_OUTPUT = ("generatedtokens", "output_tokens")
_MOST_TOKENS = 10_000_000


class TraceError(ValueError):
    """An invalid trace; the message names the file, the line and the column."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of the trace; ``arrived_at_s`` counts from the first, ``tenant`` is empty where none is named."""

    arrived_at_s: float
    context_tokens: int
    generated_tokens: int
    tenant: str = ""


def read_trace(lines: Iterable[str], name: str) -> Iterator[TraceRow]:
    """The rows one by one: a trace need not fit into memory.

    Raises TraceError, which begins with the file's ``name``: not CSV in UTF-8, a missing column, an invalid value, or a
    request that arrived before the one above it.
    """
    rows = _Rows(lines)
    try:
        yield from _parsed(rows)
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from None
    except csv.Error as error:
        raise TraceError(f"{name}: line {rows.begin}: {error}") from None
    except UnicodeDecodeError:
        # Text is decoded by the block: the line itself is not known.
        raise TraceError(f"{name}: not UTF-8, at line {rows.begin} or below") from None


class _Rows:
    """The rows of a CSV file; ``begin``: first line of the latest row."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._reader = csv.reader(lines)
        self.begin = 1

    def __iter__(self) -> Iterator[list[str]]:
        return self

    def __next__(self) -> list[str]:
        # An open quote is noticed many lines below.
        self.begin = self._reader.line_num + 1
        return next(self._reader)


def _parsed(reader: _Rows) -> Iterator[TraceRow]:
    try:
        columns = [name.strip().lower() for name in next(reader)]
    except StopIteration:
        raise TraceError("line 1: the file is empty") from None
    time, prompt, output = (_column(columns, names) for names in (_TIME, _PROMPT, _OUTPUT))
    tenant = columns.index("tenant") if "tenant" in columns else None
    first_s, last_s = None, 0.0
    for values in reader:
        if not values:
            continue
        line = reader.begin
        if len(values) != len(columns):
            raise TraceError(f"line {line}: {len(values)} columns, and the first line has {len(columns)}")
        at_s = _time_s(values[time], line, columns[time])
        first_s = at_s if first_s is None else first_s
        arrived_at_s = at_s - first_s
        if arrived_at_s < last_s:
            raise TraceError(f"line {line}, column {columns[time]}: earlier than the line above it")
        last_s = arrived_at_s
        yield TraceRow(
            arrived_at_s,
            _tokens(values[prompt], line, columns[prompt]),
            _tokens(values[output], line, columns[output]),
            "" if tenant is None else values[tenant].strip(),
        )


def _column(columns: Sequence[str], names: Sequence[str]) -> int:
    for name in names:
        if name in columns:
            return columns.index(name)
    raise TraceError(f"line 1: no column is called {' or '.join(names)}")


def _time_s(text: str, line: int, column: str) -> float:
    text = text.strip()
    try:
        if text.replace(".", "", 1).isdecimal():
            return float(text)
        at = datetime.fromisoformat(text)
    except ValueError:
        raise TraceError(f"line {line}, column {column}: neither seconds nor a date and time of ISO 8601") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _tokens(text: str, line: int, column: str) -> int:
    text = text.strip()
    if not text.isdecimal() or int(text) > _MOST_TOKENS:
        raise TraceError(f"line {line}, column {column}: not a number of tokens up to {_MOST_TOKENS:,}")
    return int(text)


@dataclass(frozen=True, slots=True)
class Call:
    """A planned request. ``number`` counts from 0; ``due_s``: seconds from the start; ``output_tokens``: its limit."""

    number: int
    due_s: float
    tenant: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Plan of the calls of a trace. Raises ValueError.

    Attributes:
        factor: 2 plays it twice as fast.
        seconds: end of the plan; None: all of the trace, as for ``most_calls``.
        scale: factor of all tokens.
        max_tokens: bounds prompt and answer together; the answer is cut first, down to one token.
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
    """The calls in the order in which they are due. Raises ValueError if there are no tenants.

    A row that names one of ``tenants`` is that tenant's. Any other name is always mapped to the same one of them, and
    rows without a name to each in turn.
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
