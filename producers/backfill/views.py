"""A job as JSON, as a table row and as one line."""

from pathlib import Path
from typing import Any

from producers.backfill.estimate import Estimate
from producers.backfill.files import LocalFile, blob_of, blocks_of
from producers.backfill.job import Job

COLUMNS = ("job", "tenant", "status", "rows", "ok", "failed", "expired", "cancelled", "cost tokens", "reason")


def job_json(job: Job) -> dict[str, Any]:
    """Everything that its owner may know."""
    tally = job.tally
    return {
        "job_id": job.job_id,
        "tenant": job.tenant,
        "status": job.status.value,
        "wanted": job.wanted.value,
        "reason": job.reason,
        "input": job.spec.input,
        "output": job.spec.output,
        "errors": job.spec.errors,
        "rows": {
            "total": job.total_rows,
            "planned": job.planned,
            "done": tally.rows,
            "ok": tally.ok,
            "failed": tally.failed,
            "expired": tally.expired,
            "cancelled": tally.cancelled,
        },
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "cost_tokens": tally.cost_tokens,
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
    """What a job would cost."""
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
    """The same in words."""
    found = estimate_json(estimate, None)
    bad = f", about {found['bad_rows']} of them bad" if found["bad_rows"] else ""
    return (
        f"{found['rows']} rows{bad}; about {found['prompt_tokens']} prompt and {found['output_tokens']} output tokens, "
        f"{found['cost_tokens']} cost tokens"
    )


def copy_output(job: Job, out: Path) -> None:
    """Copy the output of a job that has ended. Raises AwayError, JobFailedError."""
    output = blob_of(job.spec.output, job.spec.endpoint)
    LocalFile(out).write(blocks_of(output, output.fingerprint()))
