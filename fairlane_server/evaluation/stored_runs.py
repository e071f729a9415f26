"""Values of stored runs: what was measured, what came of it, and comparisons with another run. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from fairlane_server.evaluation.comparison import PairedComparison, compare, mean_score
from fairlane_server.evaluation.grading import ExampleScore

FALL_P_VALUE = 0.01
"""A run that differs from its baseline by chance alone is taken for a fall at most so often, looked at once."""


@dataclass(frozen=True, slots=True)
class JudgeUse:
    """The judge of a run, as it is stored.

    Attributes:
        reference: as requests name it; ``version``: the one that was calibrated.
        rubric_digest: of what it was told.
        calibration_id: None without one.
        against: what a pair was compared with; None if answers were graded.
        kappa_low: the lower bound of its agreement with people.
        refusal: why its scores must not be relied on; None if they may be.
    """

    reference: str
    rubric: str
    rubric_digest: str
    calibration_id: str | None = None
    version: str | None = None
    against: str | None = None
    kappa_low: float | None = None
    refusal: str | None = None
    scores: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RunHead:
    """What a run measures. Two runs are comparable if they have the same set digest, scorer, parameters and judge.

    Attributes:
        set_digest: of all examples that the version of the set was made with.
        examples: how many it has now.
        reference: the model as requests name it; ``model``: its name alone.
        parameters: ``top``, ``max_tokens`` and ``priority``, where they are given.
    """

    set_name: str
    set_version: int
    set_digest: str
    examples: int
    reference: str
    model: str
    scorer: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    judge: JudgeUse | None = None
    is_scheduled: bool = False
    baseline_run: str | None = None

    @property
    def measure(self) -> tuple[Any, ...]:
        """Equal for runs whose scores can be compared."""
        judge = self.judge
        asked = {name: value for name, value in self.parameters.items() if name != "priority"}
        whose = None if judge is None else (judge.reference, judge.rubric_digest, judge.calibration_id, judge.against)
        return (self.set_digest, self.scorer, tuple(sorted(asked.items())), whose)


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came of a run. Scores are from 0 to 1.

    Attributes:
        mean: with its interval at 95 %; None if no example has a score.
        scored: examples with a score; ``not_scored``: the others, which count in no mean.
        failed: how many have no answer, by code or outcome.
        versions: how many answers each version gave.
        prompt_tokens, completion_tokens: of the answers; ``judge_tokens``: of a judge, both together.
        costs: of all requests, by currency, in billionths of its unit, as far as prices are known.
        degraded: answers that the service saved on, since it was under load.
        judge_refusal: why the judge's scores must not be relied on; None if they may be, or nothing was judged.
        follows_order: of the pairs, how many got the verdict of a place and not of an answer.
    """

    mean: float | None
    low: float
    high: float
    scored: int
    not_scored: int
    failed: Mapping[str, int]
    versions: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int
    judge_tokens: int = 0
    judge_refusal: str | None = None
    follows_order: int = 0
    costs: Mapping[str, int] = field(default_factory=dict)
    degraded: int = 0


def result_of(scores: Sequence[ExampleScore], judge: JudgeUse | None) -> RunResult:
    """Of all examples of a run."""
    mean = mean_score([one.value for one in scores])
    judged = [one.judged for one in scores if one.judged is not None]
    costs = sum((Counter(one.costs) for one in scores), Counter[str]())
    answered_by = {version for one in judged for version in one["versions"]}
    return RunResult(
        mean=mean.mean,
        low=mean.low,
        high=mean.high,
        scored=mean.count,
        not_scored=len(scores) - mean.count,
        failed=dict(sorted(Counter(one.failure for one in scores if one.failure is not None).items())),
        versions=dict(sorted(Counter(one.model_version for one in scores if one.model_version is not None).items())),
        prompt_tokens=sum(one.prompt_tokens for one in scores),
        completion_tokens=sum(one.completion_tokens for one in scores),
        judge_tokens=sum(one["prompt_tokens"] + one["completion_tokens"] for one in judged),
        judge_refusal=None if judge is None else _judge_refusal(judge, answered_by),
        follows_order=sum(bool(one.get("follows_order")) for one in judged),
        costs=dict(sorted(costs.items())),
        degraded=sum(one.is_degraded for one in scores),
    )


def _judge_refusal(judge: JudgeUse, answered_by: set[str]) -> str | None:
    if judge.refusal is None and answered_by - {judge.version}:
        return f"version {', '.join(sorted(answered_by))} judged, and {judge.version} was calibrated"
    return judge.refusal


@dataclass(frozen=True, slots=True)
class ScoreFall:
    """A run beside its baseline. ``is_fall``: it is worse, by more than chance explains."""

    comparison: PairedComparison
    is_fall: bool


def fall_of(
    baseline: Mapping[int, float | None], scores: Mapping[int, float | None], *, seed: int = 0
) -> ScoreFall | None:
    """Compare the scores of a run with those of its baseline, by the place of the example. A fall needs an interval
    wholly below 0 and a p-value below ``FALL_P_VALUE``: of few changed examples a bootstrap is too sure. None if they
    share no scored example."""
    found = compare_by_place(baseline, scores, seed=seed)
    return None if found is None else ScoreFall(found, found.high < 0 and found.p_value < FALL_P_VALUE)


def compare_by_place(
    baseline: Mapping[int, float | None], candidate: Mapping[int, float | None], *, seed: int = 0
) -> PairedComparison | None:
    """The scores of two runs on the examples that both have. None if they share none."""
    places = sorted(baseline.keys() & candidate.keys())
    try:
        return compare([baseline[one] for one in places], [candidate[one] for one in places], seed=seed)
    except ValueError:
        return None


def request_id_of(run_id: str, place: int, part: str) -> str:
    """The id of a request of an example: the same whenever it is asked, so that a run that goes on asks nothing twice.
    A UUID of version 8 (RFC 9562)."""
    digits = sha256(f"{run_id}\0{place}\0{part}".encode()).hexdigest()
    return (
        f"{digits[:8]}-{digits[8:12]}-8{digits[13:16]}-{'89ab'[int(digits[16], 16) % 4]}{digits[17:20]}-{digits[20:32]}"
    )
