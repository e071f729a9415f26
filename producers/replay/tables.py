"""Reports for people: tables of a run, and rows of Markdown for the result table in the documents. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from producers.replay.report import Report, Summary

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
    rows = [_MARKDOWN, ("---",) * len(_MARKDOWN), *(_scenario_row(one) for one in scenarios)]
    return "\n".join(f"|{'|'.join(_padded(row))}|" for row in rows) + "\n"


def _padded(row: Sequence[str]) -> list[str]:
    return [cell if cell == "---" else f" {cell} " for cell in row]


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
