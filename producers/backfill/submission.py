"""Registers a job: reads its input once, estimates its cost, rejects it beyond the budget."""

from collections.abc import Callable
from contextlib import closing

from fairlane.clock import ClockMs
from fairlane.names import is_name
from producers.backfill.estimate import Estimate
from producers.backfill.files import blob_of
from producers.backfill.inputs import source_of
from producers.backfill.job import Fingerprint, Job, JobSpec, Position
from producers.backfill.job_store import JobStore, new_job_id
from producers.backfill.outputs import check_places
from producers.backfill.ports import JobFailedError
from producers.backfill.row import MOST_ROWS
from producers.backfill.rows import parse_row


class TooExpensiveError(Exception):
    """The estimate is above the cost limit of the job."""

    def __init__(self, estimate: Estimate, max_cost_tokens: int) -> None:
        super().__init__(f"estimated at {estimate.cost_tokens} cost tokens, more than --max-cost {max_cost_tokens}")
        self.estimate = estimate


def survey(
    tenant: str, spec: JobSpec, check_commands: Callable[[], None] = lambda: None
) -> tuple[Estimate, Fingerprint]:
    """Read the whole input once: count its rows, and sample some. ``check_commands`` is called for every chunk; it may
    raise to end the survey. Raises UnavailableError and JobFailedError."""
    if not is_name(tenant):
        raise JobFailedError("tenant: not a name of one")
    check_places(spec)
    blob = blob_of(spec.input, spec.endpoint)
    fingerprint = blob.fingerprint()
    estimate, position = Estimate(), Position()
    with closing(source_of(blob, fingerprint, spec)) as source:
        while True:
            check_commands()
            contents, position = source.read(position, spec.chunk_rows, spec.chunk_bytes)
            if not contents:
                break
            for content in contents:
                if estimate.wants_next:
                    estimate.add(parse_row(content, tenant, spec.defaults, spec.openai_url))
                else:
                    estimate.skip()
    if estimate.rows > MOST_ROWS:
        raise JobFailedError(f"{estimate.rows} rows are more than {MOST_ROWS}")
    return estimate, fingerprint


def submit(
    store: JobStore,
    tenant: str,
    spec: JobSpec,
    surveyed: tuple[Estimate, Fingerprint],
    partitions: int,
    clock: ClockMs,
) -> Job:
    """Queue a job for a surveyed input. Raises TooExpensiveError, UnavailableError, JobFailedError."""
    estimate, fingerprint = surveyed
    if spec.max_cost_tokens is not None and estimate.cost_tokens > spec.max_cost_tokens:
        raise TooExpensiveError(estimate, spec.max_cost_tokens)
    created_at_ms = clock()
    job = Job(
        new_job_id(),
        tenant,
        spec,
        fingerprint,
        estimate.rows,
        partitions,
        created_at_ms=created_at_ms,
        deadline_at_ms=created_at_ms + spec.window_ms,
    )
    store.add(job, estimated_row_cost=estimate.row_cost)
    return job
