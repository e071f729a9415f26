"""Throughput of a job and its remaining time, from what is stored. Pure."""

from typing import Any

from fairlane_server.cli.pace import rate_per_s
from fairlane_server.cli.progress import hours, rate_text
from producers.backfill.job import Job, Status

_AT_WORK = (Status.RUNNING, Status.CANCELLING, Status.FINALIZING)


def job_pace(job: Job, now_ms: int) -> tuple[float | None, float | None]:
    """Rows a second since it was first run, what it waited included, and the seconds that are left of a job that runs.

    None is what cannot be told: of a job that waits nobody knows for how long it will, and the rate of one that was
    left and taken again, which counts what it waited between, does not say how fast it is now.
    """
    until_ms = job.ended_at_ms if job.status not in _AT_WORK else now_ms
    if job.started_at_ms is None or until_ms is None:
        return None, None
    per_s = rate_per_s(job.tally.rows, (until_ms - job.started_at_ms) / 1_000)
    if per_s is None or job.status is not Status.RUNNING or job.token > 1:
        return per_s, None
    return per_s, max(0, job.total_rows - job.tally.rows) / per_s


def pace_json(job: Job, now_ms: int) -> dict[str, Any]:
    """The same, to a thousandth."""
    per_s, remaining_s = job_pace(job, now_ms)
    return {"rows_per_s": rounded(per_s), "remaining_s": rounded(remaining_s)}


def pace_line(job: Job, now_ms: int) -> str | None:
    """The same in words; None if nothing can be told."""
    per_s, remaining_s = job_pace(job, now_ms)
    if per_s is None:
        return None
    return f"{rate_text(per_s)} rows/s" + ("" if remaining_s is None else f", about {hours(remaining_s)} left")


def rounded(value: float | None) -> float | None:
    """To a thousandth, for a report."""
    return None if value is None else round(value, 3)
