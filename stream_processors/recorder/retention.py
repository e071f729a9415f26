"""Retention of rows: which are too old to store, and when old ones are removed. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairlane.settings import Settings
from stream_processors.recorder.projection import Projection
from stream_processors.recorder.tables import AUDIT_LOGS, RESULTS, TURNS, USAGE, Table

INTERVAL_S = 60.0
"""Between two looks at a table in which nothing more is old."""

_PAUSE_S = 0.05
_RETRY_S = 5.0
_LEAST_AT_ONCE = 50
_JITTER = 0.5


@dataclass(frozen=True, slots=True)
class Rule:
    """How long the rows of one table are kept.

    Attributes:
        table: whose rows.
        column: milliseconds since the epoch, from which a row's age counts; indexed.
        keep_s: age that rows reach.
    """

    table: Table
    column: str
    keep_s: int

    @property
    def name(self) -> str:
        """Of the table."""
        return self.table.name

    def before_ms(self, epoch_ms: int) -> int:
        """Rows from before this are old."""
        return epoch_ms - 1_000 * self.keep_s


def rules_of(settings: Settings) -> tuple[Rule, ...]:
    """One for each table that grows with the requests."""
    return (
        Rule(RESULTS, "replied_at_ms", settings.results_ttl_s),
        Rule(TURNS, "replied_at_ms", settings.conversation_ttl_s),
        Rule(USAGE, "occurred_at_ms", settings.usage_ttl_s),
        Rule(AUDIT_LOGS, "occurred_at_ms", settings.audit_ttl_s),
    )


def drop_old(projection: Projection, rules: Sequence[Rule], epoch_ms: int) -> None:
    """Take out the rows that would be removed at once: those of a log that is read again from its beginning."""
    for rule in rules:
        layers = projection.layers.get(rule.name)
        if layers is None:
            continue
        at, before_ms = list(rule.table.columns).index(rule.column), rule.before_ms(epoch_ms)
        kept = [[row for row in layer if row[at] >= before_ms] for layer in layers]
        projection.layers[rule.name] = [layer for layer in kept if layer]


class RemovalLag:
    """By how much old rows of each table outstay their time.

    It counts from the oldest row that the last removal left, or else from the time before which that removal left none.
    A table whose removals fail therefore lags more and more, whatever it holds: nobody can look.

    Args:
        rules: of the tables.
        started_ms: milliseconds since the epoch; a table that was never looked at counts as clean then.
    """

    def __init__(self, rules: Sequence[Rule], started_ms: int) -> None:
        self._rules = {rule.name: rule for rule in rules}
        self._clean_until_ms = {rule.name: rule.before_ms(started_ms) for rule in rules}

    def removed(self, name: str, before_ms: int, oldest_ms: int | None) -> None:
        """Rows from before ``before_ms`` were removed; the oldest of those that were left is from ``oldest_ms``."""
        self._clean_until_ms[name] = before_ms if oldest_ms is None else oldest_ms

    def lags_ms(self, epoch_ms: int) -> dict[str, int]:
        """Of each table, by name."""
        return {
            name: max(0, rule.before_ms(epoch_ms) - self._clean_until_ms[name]) for name, rule in self._rules.items()
        }


@dataclass(slots=True)
class _Pace:
    due_at: float = 0.0
    at_once: int = 0


class RemovalSchedule:
    """Which table is due, and how many rows are removed at once.

    Each removal is followed by a pause as long as itself, so that it takes half of one connection's time at most. A
    table in which nothing more is old rests for about ``INTERVAL_S``.

    Args:
        names: of the tables.
        at_once: most rows of one removal, so that it holds nothing up; halved while removals take too long.
    """

    def __init__(self, names: Sequence[str], at_once: int = 1_000) -> None:
        self._at_once = at_once
        self._paces: Mapping[str, _Pace] = {name: _Pace(at_once=at_once) for name in names}

    def next_due(self) -> tuple[str, float, int]:
        """The table that is due first, when it is, and how many rows to remove."""
        name = min(self._paces, key=lambda name: self._paces[name].due_at)
        pace = self._paces[name]
        return name, pace.due_at, pace.at_once

    def removed(self, name: str, count: int, took_s: float, now: float, chance: float) -> None:
        """So many rows were removed just now. ``chance`` is from 0 to 1; ``now`` any clock that never goes back."""
        pace = self._paces[name]
        is_all = count < pace.at_once
        pace.due_at = now + (INTERVAL_S * (1 + _JITTER * (chance - 0.5)) if is_all else max(_PAUSE_S, took_s))
        pace.at_once = min(self._at_once, 2 * pace.at_once)

    def failed(self, name: str, now: float, chance: float, *, was_late: bool) -> None:
        """It was not removed; ``was_late``: because it took too long."""
        pace = self._paces[name]
        pace.due_at = now + _RETRY_S * (1 + _JITTER * (chance - 0.5))
        if was_late:
            pace.at_once = max(_LEAST_AT_ONCE, pace.at_once // 2)
