"""Report of a run per tenant and in total, as tables and Markdown; memory does not grow with the calls."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from producers.replay.calls import INTERRUPTED, NOT_SENT, OK, CallOutcome

_GROWTH = 1.01
_LOG_GROWTH = math.log(_GROWTH)
_LEAST_MS = 0.01
_MOST_MS = 1e8


class Histogram:
    """Times in milliseconds, kept in buckets that grow by a hundredth: some 2,300 of them reach from 0.01 ms to a day.

    A percentile is never below the true one, and at most a hundredth above it.
    """

    __slots__ = ("_buckets", "count", "largest_ms")

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.largest_ms = 0.0

    def add(self, ms: float) -> None:
        """Take one more; what is out of bounds counts as the bound."""
        bounded = min(max(ms, _LEAST_MS), _MOST_MS)
        self._buckets[math.ceil(math.log(bounded) / _LOG_GROWTH)] += 1
        self.count += 1
        self.largest_ms = max(self.largest_ms, ms)

    def percentile_ms(self, part: float) -> float | None:
        """The smallest time that at least ``part`` (0 to 1) of them do not exceed; None of nothing."""
        wanted = max(1, math.ceil(part * self.count))
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return min(_GROWTH**bucket, max(self.largest_ms, _LEAST_MS))
        return None


_SOON = 2
_MOST_CODES = 64
_OTHER = "other"


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds; None where there was nothing to measure."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, histogram: Histogram) -> "Percentiles":
        """Those of a histogram, to a tenth of a millisecond."""
        found = (histogram.percentile_ms(part) for part in (0.5, 0.95, 0.99))
        return cls(*(None if ms is None else round(ms, 1) for ms in found))


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run, of one tenant or of all.

    Attributes:
        calls: that were due, whether or not they were sent.
        calls_per_s: sent calls.
        latency_ms: of the answers, from the due time to the end; ``first_text_ms``: of streams, to the first text.
        late_ms: from the due time until the call was sent.
        in_time: answers within the time of a call; their rate is the goodput.
        output_tokens_per_s: of the answers in time; ``tokens_per_s``: with their prompts.
        shed: calls refused because of load.
        failed: calls neither answered nor shed nor interrupted.
        shed_ms: time to a refusal because of load, from when the call was due.
        in_by_second_try: share of the questions of obedient users that were answered at the first or the second try;
            None without any.
    """

    calls: int
    calls_per_s: float
    outcomes: dict[str, int]
    latency_ms: Percentiles
    first_text_ms: Percentiles
    late_ms: Percentiles
    most_late_ms: float
    in_time: int
    answers_in_time_per_s: float
    output_tokens_per_s: float
    tokens_per_s: float
    shed: int
    degraded: int
    failed: int
    failure_rate: float
    shed_ms: Percentiles = Percentiles(None, None, None)
    in_by_second_try: float | None = None


class _CallCounts:
    """Counts calls as they end. ``in_time_s``: goodput has no answer that took longer."""

    def __init__(self, in_time_s: float) -> None:
        self._in_time_s = in_time_s
        self._latency = Histogram()
        self._first_text = Histogram()
        self._late = Histogram()
        self._refusal = Histogram()
        self._outcomes: Counter[str] = Counter()
        self._sent = self._in_time = self._shed = self._degraded = self._failed = 0
        self._prompt_tokens = self._output_tokens = 0
        self._asked = self._in_soon = 0

    def tried(self, tries: int, outcome: CallOutcome) -> None:
        # A question is decided by its second try at the latest: those that are asked again later count too.
        if tries == _SOON or (tries < _SOON and not outcome.shed):
            self._asked += 1
            self._in_soon += outcome.code == OK

    def add(
        self, outcome: CallOutcome, *, due_s: float, sent_s: float | None, ended_s: float, first_text_s: float | None
    ) -> None:
        known = outcome.code in self._outcomes or len(self._outcomes) < _MOST_CODES
        self._outcomes[outcome.code if known else _OTHER] += 1
        if sent_s is not None:
            self._sent += 1
            self._late.add((sent_s - due_s) * 1_000)
        if first_text_s is not None:
            self._first_text.add((first_text_s - due_s) * 1_000)
        if outcome.code == OK:
            self._latency.add((ended_s - due_s) * 1_000)
            self._degraded += outcome.degraded
            if ended_s - due_s <= self._in_time_s:
                self._in_time += 1
                self._prompt_tokens += outcome.prompt_tokens
                self._output_tokens += outcome.output_tokens
        elif outcome.shed:
            self._shed += 1
            self._refusal.add((ended_s - due_s) * 1_000)
        elif outcome.code != INTERRUPTED:
            self._failed += 1

    def summary(self, elapsed_s: float) -> Summary:
        """The figures of a run that took so long."""
        seconds = max(elapsed_s, 1e-9)
        calls = self._outcomes.total()
        return Summary(
            calls=calls,
            calls_per_s=round(self._sent / seconds, 3),
            outcomes=dict(sorted(self._outcomes.items())),
            latency_ms=Percentiles.of(self._latency),
            first_text_ms=Percentiles.of(self._first_text),
            late_ms=Percentiles.of(self._late),
            most_late_ms=round(self._late.largest_ms, 1),
            in_time=self._in_time,
            answers_in_time_per_s=round(self._in_time / seconds, 3),
            output_tokens_per_s=round(self._output_tokens / seconds, 3),
            tokens_per_s=round((self._prompt_tokens + self._output_tokens) / seconds, 3),
            shed=self._shed,
            degraded=self._degraded,
            failed=self._failed,
            failure_rate=round(self._failed / calls, 6) if calls else 0.0,
            shed_ms=Percentiles.of(self._refusal),
            in_by_second_try=round(self._in_soon / self._asked, 6) if self._asked else None,
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. ``elapsed_s``: from the start to the end of the last call."""

    elapsed_s: float
    interrupted: bool
    total: Summary
    tenants: dict[str, Summary]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"elapsed_s": round(self.elapsed_s, 3)}


class Tallies:
    """One tally for each tenant and one for all of them."""

    def __init__(self, tenants: Sequence[str], in_time_s: float) -> None:
        self._total = _CallCounts(in_time_s)
        self._tenants = {tenant: _CallCounts(in_time_s) for tenant in tenants}

    def add(
        self,
        tenant: str,
        outcome: CallOutcome,
        *,
        due_s: float,
        sent_s: float | None,
        ended_s: float,
        first_text_s: float | None = None,
    ) -> None:
        """Count a call that has ended. Times are seconds from the start of the run; latency counts from ``due_s``;
        ``sent_s`` is None for a call that was not sent. Raises KeyError for a tenant that is not in the run."""
        for counts in (self._tenants[tenant], self._total):
            counts.add(outcome, due_s=due_s, sent_s=sent_s, ended_s=ended_s, first_text_s=first_text_s)

    def tried(self, tenant: str, tries: int, outcome: CallOutcome) -> None:
        """Count the outcome of a try, from 1, of an obedient user's question. Raises KeyError for a tenant that is not
        in the run."""
        for counts in (self._tenants[tenant], self._total):
            counts.tried(tries, outcome)

    def report(self, elapsed_s: float, *, interrupted: bool) -> Report:
        """The figures so far."""
        tenants = {tenant: tally.summary(elapsed_s) for tenant, tally in self._tenants.items()}
        return Report(elapsed_s, interrupted, self._total.summary(elapsed_s), tenants)


COLUMNS = (
    "tenant", "calls", "in time/s", "tokens/s", "p50 ms", "p95 ms", "p99 ms", "first text p50 ms", "shed", "failed",
)  # fmt: skip
_MARKDOWN = (
    "scenario", "users", "RPS", "p50 ms", "p95 ms", "p99 ms", "failure rate", "shed", "degraded", "in by second try",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scenario:
    """A profile that was run."""

    name: str
    most_users: int
    report: Report


def tenant_rows(report: Report) -> list[tuple[str, ...]]:
    """A row for each tenant and, if there are several, one for all; the cells of COLUMNS."""
    named = dict(report.tenants)
    if len(named) != 1:
        named["all"] = report.total
    return [
        (
            name,
            f"{summary.calls:,}",
            f"{summary.answers_in_time_per_s:.1f}",
            f"{summary.tokens_per_s:,.0f}",
            *_percentiles(summary),
            _ms(summary.first_text_ms.p50),
            f"{summary.shed:,}",
            f"{summary.failed:,}",
        )
        for name, summary in named.items()
    ]


def outcome_lines(report: Report) -> list[str]:
    """How calls ended, and how late the generator was."""
    ended = ", ".join(f"{code} {count:,}" for code, count in report.total.outcomes.items())
    late = report.total.late_ms
    lines = [
        f"{report.total.calls:,} calls in {report.elapsed_s:.1f} s: {ended or 'none'}",
        f"sent later than due: p50 {_ms(late.p50)} ms, p99 {_ms(late.p99)} ms, worst {report.total.most_late_ms:g} ms",
    ]
    if report.total.shed:
        shed = report.total.shed_ms
        lines.append(f"time to a refusal because of load: p50 {_ms(shed.p50)} ms, p99 {_ms(shed.p99)} ms")
    if not_sent := report.total.outcomes.get(NOT_SENT):
        lines.append(f"{not_sent:,} calls were not sent: the load was less than was asked for")
    if report.interrupted:
        lines.append("interrupted: the figures are those of the part that was run")
    return lines


def markdown(scenarios: Iterable[Scenario]) -> str:
    """The result table. Failure rate, shed and degraded are shares of the calls."""
    table: list[Sequence[str]] = [_MARKDOWN]
    for scenario in scenarios:
        total = scenario.report.total
        shares = (total.failure_rate, *(count / max(1, total.calls) for count in (total.shed, total.degraded)))
        load = (scenario.name, f"{scenario.most_users:,}", f"{total.calls_per_s:.1f}")
        soon = "-" if total.in_by_second_try is None else f"{total.in_by_second_try:.1%}"
        table.append((*load, *_percentiles(total), *(f"{share:.1%}" for share in shares), soon))
    head, *rows = (f"| {' | '.join(row)} |\n" for row in table)
    return "".join((head, "|---" * len(_MARKDOWN), "|\n", *rows))


def _percentiles(summary: Summary) -> list[str]:
    latency = summary.latency_ms
    return [_ms(value) for value in (latency.p50, latency.p95, latency.p99)]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
