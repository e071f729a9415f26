"""Registers a job: reads its input once, estimates its cost, rejects it beyond the budget."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from fairlane.clock import ClockMs
from fairlane.names import is_name
from fairlane.outcomes import Task
from fairlane.records import InferenceRequest
from fairlane_server.admission_rule import cost_tokens
from fairlane_server.text import estimated_tokens
from producers.backfill.errors import JobFailedError
from producers.backfill.files import blob_of
from producers.backfill.inputs import source_of
from producers.backfill.job import MOST_ROWS, BadRow, Fingerprint, InputPosition, Job, JobSpec, ParsedRow
from producers.backfill.job_store import JobStore, new_job_id
from producers.backfill.outputs import check_places
from producers.backfill.rows import parse_row

EXPECTED_OUTPUT_TOKENS = 256
"""Per generated text without ``max_tokens``."""

ALL_OF_THE_FIRST = 1_000
ONE_IN = 101
"""Sampling after the first rows; a prime, so that it does not follow a pattern of the input."""


@dataclass(slots=True)
class Estimate:
    """Counts all ``rows``, and samples ``looked_at`` of them. ``bad`` and the tokens are of the sampled rows; output
    tokens are expected ones."""

    rows: int = 0
    looked_at: int = 0
    bad: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, parse: Callable[[], ParsedRow]) -> None:
        """Count a row, and sample it if it is one of the sample."""
        is_sampled = self.rows < ALL_OF_THE_FIRST or self.rows % ONE_IN == 0
        self.rows += 1
        if not is_sampled:
            return
        self.looked_at += 1
        row = parse()
        if isinstance(row, BadRow):
            self.bad += 1
            return
        self.prompt_tokens += prompt_tokens(row.request)
        if row.request.task == Task.GENERATE:
            self.output_tokens += row.request.parameters.max_tokens or EXPECTED_OUTPUT_TOKENS

    @property
    def row_cost(self) -> float:
        """Average cost of a row, in cost tokens."""
        return cost_tokens(self.prompt_tokens, self.output_tokens) / self.looked_at if self.looked_at else 0.0

    def of_all(self, looked_at: int) -> int:
        """Total over all rows, extrapolated from the sampled rows."""
        return round(looked_at * self.rows / self.looked_at) if self.looked_at else 0

    @property
    def cost_tokens(self) -> int:
        """Estimated cost of the whole job."""
        return self.of_all(cost_tokens(self.prompt_tokens, self.output_tokens))


def prompt_tokens(request: InferenceRequest) -> int:
    """Estimated tokens of the input."""
    content = request.input
    texts = [message.content for message in content.messages or ()]
    texts += [text for text in (content.prompt, content.query) if text is not None]
    texts += [*(content.texts or ()), *(content.documents or ())]
    return sum(map(estimated_tokens, texts))


class TooExpensiveError(Exception):
    """The estimate is above the cost limit of the job."""

    def __init__(self, estimate: Estimate, max_cost_tokens: int) -> None:
        super().__init__(f"estimated at {estimate.cost_tokens} cost tokens, more than --max-cost {max_cost_tokens}")


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
    estimate, position = Estimate(), InputPosition()
    with closing(source_of(blob, fingerprint, spec)) as source:
        while True:
            check_commands()
            contents, position = source.read(position, spec.chunk_rows, spec.chunk_bytes)
            if not contents:
                break
            for content in contents:
                estimate.add(partial(parse_row, content, tenant, spec.defaults, spec.openai_url))
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
