"""Answers and bodies of the routes of evaluations, with an example of each."""

from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fairlane.outcomes import Priority
from fairlane_server.evaluation.asking import BACKFILL
from fairlane_server.evaluation.run_store import StoredRun
from fairlane_server.evaluation.scorers import ScorerName
from fairlane_server.evaluation.set_store import SET_NAME_PATTERN
from producers.admin.deps import AT_MS
from producers.gateway.native.response_bodies import ResponseBody


class SetAnswer(ResponseBody):
    """A version of an evaluation set, without its examples."""

    name: str
    version: int
    digest: str = Field(description="SHA-256 of its content")
    examples: int = Field(description="What it was made with")
    present: int = Field(description="What erasures have left")
    labelled: int = Field(description="Made of requests, whose erasure reaches them")
    size_bytes: int
    created_at_ms: int
    created_by: str


class ExamplesAnswer(ResponseBody):
    """Examples of a set, as its lines have them."""

    data: tuple[dict[str, Any], ...]
    has_more: bool
    next_cursor: str | None = None


class RunAnswer(ResponseBody):
    """A run, without texts. `result` is left out until it ends."""

    run_id: str
    set_name: str
    set_version: int
    set_digest: str
    examples: int
    stored: int = Field(description="Examples with a score, or with the reason why they have none")
    reference: str = Field(description="The model as requests named it")
    scorer: str
    parameters: dict[str, Any]
    judge: dict[str, Any] | None = Field(None, description="Its reference, the digest of its rubric, its calibration")
    is_scheduled: bool
    state: str = Field(description="running, finished or cancelled")
    started_at_ms: int
    started_by: str
    finished_at_ms: int | None = None
    result: dict[str, Any] | None = None
    baseline_run: str | None = None
    fall: dict[str, Any] | None = Field(None, description="The comparison with the baseline, and `is_fall`")


class ComparisonAnswer(ResponseBody):
    """Two runs on the examples that both have a score of; left out if there is none."""

    pairs: int = 0
    better: int | None = None
    worse: int | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


class ScheduleBody(BaseModel):
    """How often a model is measured, and how."""

    model_config = ConfigDict(extra="forbid")

    set: str = Field(pattern=rf"^{SET_NAME_PATTERN.pattern}$", description="Its latest version is used")
    scorer: str = Field("exact", pattern=rf"^({'|'.join(ScorerName)})$")
    every_hours: float | None = Field(None, ge=0.1, le=10_000)
    every_requests: int | None = Field(None, ge=1, lt=2**53)
    top: int | None = Field(None, ge=1, le=10_000, description="For ndcg: the ranks that count")
    max_tokens: int | None = Field(None, ge=1, le=1_000_000)
    priority: str = Field("low", pattern=rf"^({'|'.join((*Priority, BACKFILL))})$")


class ScheduleAnswer(ResponseBody):
    """A schedule."""

    model: str
    set_name: str
    scorer: str
    parameters: dict[str, Any]
    every_hours: float | None = None
    every_requests: int | None = None
    baseline_run: str | None = None
    created_at_ms: int
    created_by: str


class SchedulesAnswer(ResponseBody):
    """The schedules of a tenant, by model."""

    data: tuple[ScheduleAnswer, ...]


class RemovedAnswer(ResponseBody):
    """Something that is not there any more."""

    name: str
    removed: bool = True


class CalibrationAnswer(ResponseBody):
    """How a judge agreed with people."""

    calibration_id: str
    judge: str
    judge_version: str
    rubric_digest: str
    set_name: str
    set_version: int
    agreement: dict[str, Any] = Field(description="`refusal` says why the judge must not be relied on")
    created_at_ms: int
    created_by: str


class CalibrationsAnswer(ResponseBody):
    """Calibrations, the newest first."""

    data: tuple[CalibrationAnswer, ...]


EXAMPLE_SET = SetAnswer(
    name="holdout",
    version=1,
    digest="9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    examples=2,
    present=2,
    labelled=0,
    size_bytes=172,
    created_at_ms=AT_MS,
    created_by="user:u-17",
)
EXAMPLE_EXAMPLES = ExamplesAnswer(
    data=({"id": "a", "input": {"prompt": "2 + 2 = ?"}, "expected": "4"},), has_more=False
)
EXAMPLE_RUN = RunAnswer(
    run_id="0123456789abcdef",
    set_name="holdout",
    set_version=1,
    set_digest=EXAMPLE_SET.digest,
    examples=2,
    stored=2,
    reference="digits/2",
    scorer="accuracy",
    parameters={"priority": "low"},
    is_scheduled=True,
    state="finished",
    started_at_ms=AT_MS,
    started_by="ops@desk",
    finished_at_ms=AT_MS,
    result={"mean": 0.98, "low": 0.97, "high": 0.99, "scored": 2, "not_scored": 0},
)
EXAMPLE_COMPARISON = ComparisonAnswer(
    pairs=400, better=3, worse=9, difference=-0.015, low=-0.032, high=0.0, p_value=0.15
)
EXAMPLE_SCHEDULE = ScheduleAnswer(
    model="digits",
    set_name="holdout",
    scorer="accuracy",
    parameters={"priority": "low"},
    every_hours=24.0,
    created_at_ms=AT_MS,
    created_by="user:u-17",
)
EXAMPLE_CALIBRATION = CalibrationAnswer(
    calibration_id="0123456789abcdef",
    judge="words",
    judge_version="2",
    rubric_digest=EXAMPLE_SET.digest,
    set_name="rated",
    set_version=1,
    agreement={"examples": 200, "graded": 198, "kappa": 0.62, "kappa_low": 0.51, "kappa_high": 0.71},
    created_at_ms=AT_MS,
    created_by="ops@desk",
)


def run_answer(run: StoredRun) -> RunAnswer:
    """A run as the API shows it: of its judge the digest of the rubric alone."""
    head, result = run.head, run.result
    judge = None
    if head.judge is not None:
        judge = {name: value for name, value in asdict(head.judge).items() if name != "rubric"}
    return RunAnswer(
        run_id=run.run_id,
        set_name=head.set_name,
        set_version=head.set_version,
        set_digest=head.set_digest,
        examples=head.examples,
        stored=run.stored,
        reference=head.reference,
        scorer=head.scorer,
        parameters=dict(head.parameters),
        judge=judge,
        is_scheduled=head.is_scheduled,
        state=run.state,
        started_at_ms=run.started_at_ms,
        started_by=run.started_by,
        finished_at_ms=run.finished_at_ms,
        result=None if result is None else asdict(result),
        baseline_run=head.baseline_run,
        fall=None if run.fall is None else dict(run.fall),
    )
