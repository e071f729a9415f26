"""Throughput and progress of jobs: JSON, table rows, log lines and progress bars."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from time import monotonic
from typing import Any

from fairlane.logs import get_logger
from fairlane_server.cli.progress import Bars, Pace, hours, rate_per_s, rate_text
from producers.backfill.app import OnProgress
from producers.backfill.job import Job, RowTally, Status
from producers.backfill.submission import Estimate

_AT_WORK = (Status.RUNNING, Status.CANCELLING, Status.FINALIZING)


def job_pace(job: Job, now_ms: int) -> tuple[float | None, float | None]:
    """Rows per second since the job was first run, pauses included, and the remaining seconds of a running job.

    None is unknown. The remaining time of a job that was taken more than once is unknown: its rate includes pauses.
    """
    until_ms = job.ended_at_ms if job.status not in _AT_WORK else now_ms
    if job.started_at_ms is None or until_ms is None:
        return None, None
    per_s = rate_per_s(job.tally.rows, (until_ms - job.started_at_ms) / 1_000)
    if per_s is None or job.status is not Status.RUNNING or job.token > 1:
        return per_s, None
    return per_s, max(0, job.total_rows - job.tally.rows) / per_s


def pace_json(job: Job, now_ms: int) -> dict[str, Any]:
    """``job_pace`` as JSON, rounded to a thousandth."""
    per_s, remaining_s = job_pace(job, now_ms)
    return {"rows_per_s": rounded(per_s), "remaining_s": rounded(remaining_s)}


def pace_line(job: Job, now_ms: int) -> str | None:
    """``job_pace`` as text; None if unknown."""
    per_s, remaining_s = job_pace(job, now_ms)
    if per_s is None:
        return None
    return f"{rate_text(per_s)} rows/s" + ("" if remaining_s is None else f", about {hours(remaining_s)} left")


def rounded(value: float | None) -> float | None:
    """Rounded to a thousandth."""
    return None if value is None else round(value, 3)


COLUMNS = ("job", "tenant", "status", "rows", "ok", "failed", "expired", "cancelled", "cost tokens", "reason")


def job_json(job: Job) -> dict[str, Any]:
    """A job as JSON, for its owner."""
    tally = asdict(job.tally)
    rows = {name: tally.pop(name) for name in ("ok", "failed", "expired", "cancelled")}
    return {
        "job_id": job.job_id,
        "tenant": job.tenant,
        "status": job.status.value,
        "wanted": job.wanted.value,
        "reason": job.reason,
        "input": job.spec.input,
        "output": job.spec.output,
        "errors": job.spec.errors,
        "rows": {"total": job.total_rows, "planned": job.planned, "done": job.tally.rows, **rows},
        **tally,
        "max_cost_tokens": job.spec.max_cost_tokens,
        "created_at_ms": job.created_at_ms,
        "started_at_ms": job.started_at_ms,
        "deadline_at_ms": job.deadline_at_ms,
        "cancelling_at_ms": job.cancelling_at_ms,
        "finalizing_at_ms": job.finalizing_at_ms,
        "ended_at_ms": job.ended_at_ms,
        "runner": job.runner,
    }


def cells(job: Job) -> tuple[str, ...]:
    """A row under COLUMNS."""
    tally = job.tally
    numbers = (tally.ok, tally.failed, tally.expired, tally.cancelled, tally.cost_tokens)
    rows = f"{tally.rows} of {job.total_rows}"
    return (job.job_id, job.tenant, job.status.value, rows, *map(str, numbers), job.reason or "")


def estimate_json(estimate: Estimate, max_cost_tokens: int | None) -> dict[str, Any]:
    """Estimated cost of a job."""
    return {
        "rows": estimate.rows,
        "rows_looked_at": estimate.looked_at,
        "bad_rows": estimate.of_all(estimate.bad),
        "prompt_tokens": estimate.of_all(estimate.prompt_tokens),
        "output_tokens": estimate.of_all(estimate.output_tokens),
        "cost_tokens": estimate.cost_tokens,
        "too_expensive": max_cost_tokens is not None and estimate.cost_tokens > max_cost_tokens,
    }


def estimate_line(estimate: Estimate) -> str:
    """``estimate_json`` as text."""
    found = estimate_json(estimate, None)
    bad = f", about {found['bad_rows']} of them bad" if found["bad_rows"] else ""
    return (
        f"{found['rows']} rows{bad}; about {found['prompt_tokens']} prompt and {found['output_tokens']} output tokens, "
        f"{found['cost_tokens']} cost tokens"
    )


log = get_logger(__name__)

LINE_S = 60.0
"""Shortest time between two log lines of a job."""

Show = Callable[[RowTally], None]


class JobWatch:
    """Shows progress as bars, or as log lines if ``bars`` is None; ``clock`` is in seconds. Thread-safe."""

    def __init__(self, bars: Bars | None, clock: Callable[[], float] = monotonic) -> None:
        self._bars = bars
        self._clock = clock

    @contextmanager
    def job(self) -> Iterator[OnProgress]:
        """Yields a callback for one job's progress, first called when its runner begins; until the context ends."""
        with ExitStack() as shown:
            show: Show | None = None

            def heard(job: Job, done: RowTally) -> None:
                nonlocal show
                show = show or self._begun(job, done, shown)
                show(done)

            yield heard

    def _begun(self, job: Job, done: RowTally, shown: ExitStack) -> Show:
        if self._bars is None:
            return self._lines(job, done)
        tell = shown.enter_context(self._bars.bar(job.job_id, job.total_rows, done.rows))
        return lambda done: tell(done.rows, f"{done.cost_tokens:,} cost tokens")

    def _lines(self, job: Job, done: RowTally) -> Show:
        said_s = self._clock()
        pace = Pace(job.total_rows, done.rows, said_s)

        def show(done: RowTally) -> None:
            nonlocal said_s
            now_s = self._clock()
            pace.step(done.rows, now_s)
            if now_s - said_s < LINE_S:
                return
            said_s = now_s
            log.info(
                "job_progress",
                job_id=job.job_id,
                tenant=job.tenant,
                rows=done.rows,
                of_rows=job.total_rows,
                rows_per_s=rounded(pace.per_s(now_s)),
                remaining_s=rounded(pace.remaining_s(now_s)),
                cost_tokens=done.cost_tokens,
            )

        return show
