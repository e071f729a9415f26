"""Report of a run per tenant and in total, as tables and Markdown; memory does not grow with the calls."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from producers.replay.calls import INTERRUPTED, NOT_SENT, OK, Answer

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


_MOST_CODES = 64
_OTHER = "other"


@dataclass(frozen=True, slots=True)
class Ended:
    """One call that is over. Times are seconds from the start of the run.

    Attributes:
        due_s: when it should have gone out; its time counts from there.
        sent_s: when it did; None if it never did.
        ended_s: when the last of its answer was here.
        first_text_s: when the first text of a stream was here; None without a stream or text.
    """

    tenant: str
    due_s: float
    sent_s: float | None
    ended_s: float
    answer: Answer
    first_text_s: float | None = None


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
        calls: that were due.
        calls_per_s: that went out.
        outcomes: how many ended in each way; ``ok`` is an answer.
        latency_ms: of the answers, from when the call was due to the last of its answer.
        first_text_ms: of the streams, from when the call was due to its first text.
        late_ms: how much later than due calls went out.
        most_late_ms: the worst of those.
        in_time: answers within the time a call had.
        answers_in_time_per_s: goodput.
        output_tokens_per_s: of the answers in time.
        tokens_per_s: the same with their prompts.
        shed: calls refused because there was too much to do.
        degraded: answers with less than was asked for.
        failed: calls that were neither answered nor shed; those that were interrupted do not count.
        failure_rate: ``failed`` divided by ``calls``.
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


class Tally:
    """Counts calls as they end."""

    def __init__(self, in_time_s: float) -> None:
        """``in_time_s``: an answer that took longer is not good for anything."""
        self._in_time_s = in_time_s
        self._latency = Histogram()
        self._first_text = Histogram()
        self._late = Histogram()
        self._outcomes: Counter[str] = Counter()
        self._sent = self._in_time = self._shed = self._degraded = self._failed = 0
        self._prompt_tokens = self._output_tokens = 0

    def add(self, ended: Ended) -> None:
        """Take what became of one call."""
        answer = ended.answer
        known = answer.code in self._outcomes or len(self._outcomes) < _MOST_CODES
        self._outcomes[answer.code if known else _OTHER] += 1
        if ended.sent_s is not None:
            self._sent += 1
            self._late.add((ended.sent_s - ended.due_s) * 1_000)
        if ended.first_text_s is not None:
            self._first_text.add((ended.first_text_s - ended.due_s) * 1_000)
        if answer.code == OK:
            took_s = ended.ended_s - ended.due_s
            self._latency.add(took_s * 1_000)
            self._degraded += answer.degraded
            if took_s <= self._in_time_s:
                self._in_time += 1
                self._prompt_tokens += answer.prompt_tokens
                self._output_tokens += answer.output_tokens
        elif answer.shed:
            self._shed += 1
        elif answer.code != INTERRUPTED:
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
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run.

    Attributes:
        elapsed_s: from the start to the end of the last call.
        interrupted: it was ended before its time.
    """

    elapsed_s: float
    interrupted: bool
    total: Summary
    tenants: dict[str, Summary]

    @property
    def not_sent(self) -> int:
        """Calls that the generator itself had to leave out: the load was less than was asked for."""
        return self.total.outcomes.get(NOT_SENT, 0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"elapsed_s": round(self.elapsed_s, 3)}


class Tallies:
    """One tally for each tenant and one for all of them."""

    def __init__(self, tenants: Sequence[str], in_time_s: float) -> None:
        self._total = Tally(in_time_s)
        self._tenants = {tenant: Tally(in_time_s) for tenant in tenants}

    def add(self, ended: Ended) -> None:
        """Take what became of one call. Raises KeyError: of a tenant that is not in the run."""
        self._tenants[ended.tenant].add(ended)
        self._total.add(ended)

    def report(self, elapsed_s: float, *, interrupted: bool) -> Report:
        """The figures so far."""
        tenants = {tenant: tally.summary(elapsed_s) for tenant, tally in self._tenants.items()}
        return Report(elapsed_s, interrupted, self._total.summary(elapsed_s), tenants)


COLUMNS = (
    "tenant", "calls", "in time/s", "tokens/s", "p50 ms", "p95 ms", "p99 ms", "first text p50 ms", "shed", "failed",
)  # fmt: skip
_MARKDOWN = (
    "scenario", "users", "RPS", "p50 ms", "p95 ms", "p99 ms", "failure rate", "shed", "degraded",
)  # fmt: skip
_ALL = "all"


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
        named[_ALL] = report.total
    return [_row(name, summary) for name, summary in named.items()]


def outcome_lines(report: Report) -> list[str]:
    """How calls ended, and how late the generator was."""
    ended = ", ".join(f"{code} {count:,}" for code, count in report.total.outcomes.items())
    late = report.total.late_ms
    lines = [
        f"{report.total.calls:,} calls in {report.elapsed_s:.1f} s: {ended or 'none'}",
        f"sent later than due: p50 {_ms(late.p50)} ms, p99 {_ms(late.p99)} ms, worst {report.total.most_late_ms:g} ms",
    ]
    if report.not_sent:
        lines.append(f"{report.not_sent:,} calls were not sent: the load was less than was asked for")
    if report.interrupted:
        lines.append("interrupted: the figures are those of the part that was run")
    return lines


def markdown(scenarios: Iterable[Scenario]) -> str:
    """The result table. Failure rate, shed and degraded are shares of the calls."""
    head, *rows = (f"| {' | '.join(row)} |\n" for row in (_MARKDOWN, *map(_scenario_row, scenarios)))
    return "".join((head, "|---" * len(_MARKDOWN), "|\n", *rows))


def _scenario_row(scenario: Scenario) -> tuple[str, ...]:
    total = scenario.report.total
    latency = total.latency_ms
    shares = (total.failure_rate, *(count / max(1, total.calls) for count in (total.shed, total.degraded)))
    return (
        scenario.name,
        f"{scenario.most_users:,}",
        f"{total.calls_per_s:.1f}",
        *(_ms(value) for value in (latency.p50, latency.p95, latency.p99)),
        *(f"{share:.1%}" for share in shares),
    )


def _row(name: str, summary: Summary) -> tuple[str, ...]:
    latency = summary.latency_ms
    return (
        name,
        f"{summary.calls:,}",
        f"{summary.answers_in_time_per_s:.1f}",
        f"{summary.tokens_per_s:,.0f}",
        *(_ms(value) for value in (latency.p50, latency.p95, latency.p99, summary.first_text_ms.p50)),
        f"{summary.shed:,}",
        f"{summary.failed:,}",
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
