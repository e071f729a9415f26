"""Where a job stands, as OpenAI's client reads it: the status, and which of its times are known by then."""

from dataclasses import replace

import pytest
from openai.types import Batch as OpenAIBatch

from producers.backfill.batches import StoredBatch
from producers.backfill.job import Fingerprint, Job, JobSpec, RowTally, Status, Wanted
from producers.gateway.openai.batches import batch_answer

CREATED, STARTED, CANCELLING, FINALIZING, ENDED, DEADLINE = 1_000, 1_010, 1_020, 1_030, 1_040, 87_400

VALIDATING = Job(
    "0" * 16,
    "acme",
    JobSpec("in", "out", openai_url="/v1/embeddings"),
    Fingerprint(1, "1"),
    total_rows=0,
    partitions=12,
    created_at_ms=CREATED * 1000,
    deadline_at_ms=DEADLINE * 1000,
    counted=False,
)
BEGUN = replace(VALIDATING, status=Status.RUNNING, counted=True, total_rows=4, started_at_ms=STARTED * 1000)
CANCELLED = replace(BEGUN, status=Status.CANCELLING, wanted=Wanted.CANCEL, cancelling_at_ms=CANCELLING * 1000)


def joining(job: Job) -> Job:
    return replace(job, status=Status.FINALIZING, finalizing_at_ms=FINALIZING * 1000)


def ended(job: Job, status: Status, tally: RowTally, reason: str | None = None) -> Job:
    return replace(job, status=status, tally=tally, ended_at_ms=ENDED * 1000, reason=reason)


IN_PROGRESS = {"in_progress_at": STARTED}
CASES: list[tuple[Job, str, dict[str, int]]] = [
    (VALIDATING, "validating", {}),
    (replace(VALIDATING, status=Status.RUNNING), "validating", {}),
    (replace(VALIDATING, status=Status.PAUSED), "validating", {}),
    (replace(CANCELLED, counted=False, started_at_ms=None), "cancelling", {"cancelling_at": CANCELLING}),
    (BEGUN, "in_progress", IN_PROGRESS),
    (replace(BEGUN, status=Status.QUEUED), "in_progress", IN_PROGRESS),
    (replace(BEGUN, status=Status.PAUSED), "in_progress", IN_PROGRESS),
    (joining(BEGUN), "finalizing", {**IN_PROGRESS, "finalizing_at": FINALIZING}),
    (
        ended(joining(BEGUN), Status.COMPLETED, RowTally(ok=3, failed=1)),
        "completed",
        {**IN_PROGRESS, "finalizing_at": FINALIZING, "completed_at": ENDED},
    ),
    (
        ended(joining(BEGUN), Status.EXPIRED, RowTally(ok=3, expired=1)),
        "expired",
        {**IN_PROGRESS, "finalizing_at": FINALIZING, "expired_at": ENDED},
    ),
    (CANCELLED, "cancelling", {**IN_PROGRESS, "cancelling_at": CANCELLING}),
    (
        ended(joining(CANCELLED), Status.CANCELLED, RowTally(ok=3, cancelled=1)),
        "cancelled",
        {**IN_PROGRESS, "cancelling_at": CANCELLING, "finalizing_at": FINALIZING, "cancelled_at": ENDED},
    ),
    (ended(VALIDATING, Status.FAILED, RowTally(), "in: there is no such file"), "failed", {"failed_at": ENDED}),
    (ended(BEGUN, Status.FAILED, RowTally(), "the input has changed"), "failed", {**IN_PROGRESS, "failed_at": ENDED}),
]


def read(job: Job) -> OpenAIBatch:
    """As the client of OpenAI has it; refuses what its types do not allow."""
    made = batch_answer(StoredBatch("batch_" + "0" * 16, "file-1", "file-2", "file-3", None, job))
    return OpenAIBatch.model_validate(made.model_dump(), strict=True)


@pytest.mark.parametrize(("job", "status", "times"), CASES)
def test_a_batch_says_where_it_stands_and_when_it_came_there(job: Job, status: str, times: dict[str, int]) -> None:
    batch = read(job)

    assert batch.status == status
    known = {name: at for name, at in batch if name.endswith("_at") and at is not None}
    assert known == {"created_at": CREATED, "expires_at": DEADLINE, **times}
    is_over = status in ("completed", "expired", "cancelled")
    assert (batch.output_file_id, batch.error_file_id) == (("file-2", "file-3") if is_over else (None, None))
    assert (batch.errors is not None) == (status == "failed")


def test_every_status_is_among_them() -> None:
    assert {job.status for job, _, _ in CASES} == set(Status)
    assert {status for _, status, _ in CASES} == set(OpenAIBatch.model_fields["status"].annotation.__args__)  # type: ignore[union-attr]  # a Literal
