"""Verdict on a replay: is the candidate's difference from the earlier answers larger than the champion's own? Pure.

The champion ran the same requests again, beside the candidate. How far its new answers are from its earlier ones is the
noise floor: batches of other sizes, sampling, passages that do not change. Of each request the two distances are
subtracted, and the mean of these differences of pairs is judged, so that what is hard to answer weighs on both sides.

The bounds are those of the means of a rollout (``rollouts.means``): a normal mixture with estimated variance, valid at
every look, asymptotically (Waudby-Smith et al. 2024). So a report may be read while a replay runs. A difference counts
as found if the lower bound is above 0 and the measured value beyond the tolerance, and as excluded if the upper bound
is within the tolerance, which is a test of equivalence (Schuirmann 1987). Everything else is not enough.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fairlane.outcomes import Code, Outcome, Task
from fairlane_server.evaluation.copies import CopyEnd
from fairlane_server.evaluation.pairs import Answer, agreement
from fairlane_server.rollouts.bounds import HarmBounds
from fairlane_server.rollouts.evidence import Moments
from fairlane_server.rollouts.means import paired_bounds

LEAST_PAIRS = 50
"""The bounds rest on the central limit theorem."""
FALSE_DIFFERENCE_RATE = 0.01
"""At most this part of the replays of candidates that differ in nothing ends as different or worse. It is divided
between the tasks and measures that decide."""
FALSE_SAME_RATE = 0.05
"""At most this part of the candidates that differ by more than a tolerance ends as the same. It is not divided: to be
the same, a candidate must be so in every measure."""


class ReplayVerdict(StrEnum):
    """What a replay says about a candidate."""

    SAME = "same"
    DIFFERENT = "different"
    WORSE = "worse"
    """It fails more often, or is right less often. Without that, nobody knows whether other answers are worse."""
    UNDECIDED = "not enough"


class ReplayMeasure(StrEnum):
    """What is compared."""

    DISTANCE = "distance"
    """From the earlier answer: 1 less the similarity."""
    ERRORS = "errors"
    LENGTH = "length"
    """Of the output, in tokens."""
    QUALITY = "quality"
    """Part of the wrong labels, where the right one is known."""
    ENGINE_TIME = "engine time"
    """For each token of prompt and output. It decides nothing: what is slower may be the same."""


TOLERANCES: Mapping[ReplayMeasure, float] = {
    ReplayMeasure.DISTANCE: 0.02,
    ReplayMeasure.ERRORS: 0.01,
    ReplayMeasure.LENGTH: 0.05,
    ReplayMeasure.QUALITY: 0.02,
    ReplayMeasure.ENGINE_TIME: 0.1,
}
_FOUND: Mapping[ReplayMeasure, ReplayVerdict] = {
    ReplayMeasure.DISTANCE: ReplayVerdict.DIFFERENT,
    ReplayMeasure.ERRORS: ReplayVerdict.WORSE,
    ReplayMeasure.LENGTH: ReplayVerdict.DIFFERENT,
    ReplayMeasure.QUALITY: ReplayVerdict.WORSE,
    ReplayMeasure.ENGINE_TIME: ReplayVerdict.DIFFERENT,
}
"""The verdict when a difference is found."""
_REQUIRED = frozenset({ReplayMeasure.DISTANCE, ReplayMeasure.ERRORS})
_BOTH_WAYS = frozenset({ReplayMeasure.LENGTH, ReplayMeasure.ENGINE_TIME})
"""Less is as different as more."""
_DECIDING = tuple(one for one in ReplayMeasure if one is not ReplayMeasure.ENGINE_TIME)
_WORST_FIRST = (ReplayVerdict.WORSE, ReplayVerdict.DIFFERENT, ReplayVerdict.UNDECIDED, ReplayVerdict.SAME)


_NOT_RUN = frozenset(
    {Code.UNKNOWN_MODEL, Code.OVERLOADED, Code.DEADLINE_UNMEETABLE, Code.DRAINING, Code.FORBIDDEN, Code.QUOTA_EXCEEDED}
)
"""Codes of copies that no engine ran: they say nothing of the version."""


@dataclass(frozen=True, slots=True)
class ReplayedAnswers:
    """One request: its earlier answer, None if that is not recorded any more, and the two new ones with how their
    copies ended. ``expected`` is the right label, where it is known."""

    task: str
    original: Answer | None
    candidate: Answer
    candidate_end: str
    champion: Answer
    champion_end: str
    expected: str | None = None


@dataclass(frozen=True, slots=True)
class ReplayFinding:
    """Finding of one measure.

    Attributes:
        measure: what is compared.
        pairs: requests that both have a value of.
        tolerance: of the excess.
        verdict: None without data, where none are required.
        candidate: the mean of the candidate; of length and engine time, tokens, and ms for each token.
        champion: the same of the champion.
        excess: mean of the differences, candidate less champion; of length and engine time, each by the larger value.
        lower: the excess is greater, but for the rate of false differences; None where nothing is known.
        upper: the excess is smaller, but for the rate of false equality.
    """

    measure: str
    pairs: int
    tolerance: float
    verdict: str | None = None
    candidate: float | None = None
    champion: float | None = None
    excess: float | None = None
    lower: float | None = None
    upper: float | None = None


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Comparison of the requests of one task.

    Attributes:
        pairs: requests that both versions ran.
        equal: part of the answers of each arm that equal the earlier ones, where there are such.
        dropped: requests of which a copy did not run.
    """

    task: str
    verdict: str
    reason: str
    pairs: int
    equal: Mapping[str, float | None]
    dropped: int
    findings: tuple[ReplayFinding, ...]


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The verdict of a replay, the worst of its tasks'."""

    verdict: str
    reason: str
    tasks: tuple[TaskReport, ...]


@dataclass(slots=True)
class _Series:
    """Values of both versions, and their differences."""

    differences: Moments = field(default_factory=Moments)
    candidate: float = 0.0
    champion: float = 0.0

    def add(self, candidate: float, champion: float, difference: float) -> None:
        self.differences += Moments(1, difference, difference * difference)
        self.candidate += candidate
        self.champion += champion


@dataclass(slots=True)
class ReplayTally:
    """Requests of one task, added one at a time. It keeps sums, so that it is as small for millions."""

    task: str
    pairs: int = 0
    dropped: int = 0
    _series: dict[ReplayMeasure, _Series] = field(default_factory=dict)
    _equal: dict[str, list[float]] = field(default_factory=lambda: {"candidate": [0.0, 0.0], "champion": [0.0, 0.0]})
    """Sum and count, by arm."""

    def add(self, one: ReplayedAnswers) -> None:
        """Add a request. One of which a copy did not run is counted, and not compared."""
        answers = one.candidate, one.champion
        if CopyEnd.DROPPED in (one.candidate_end, one.champion_end) or any(it.code in _NOT_RUN for it in answers):
            self.dropped += 1
            return
        self.pairs += 1
        failed = [float(answer.outcome != Outcome.OK) for answer in answers]
        self._add(ReplayMeasure.ERRORS, failed[0], failed[1])
        if any(failed):
            return
        self._add_agreements(one)
        if self.task == Task.GENERATE:
            self._add_relative(ReplayMeasure.LENGTH, *(float(answer.completion_tokens) for answer in answers))
        times = [_ms_per_token(answer) for answer in answers]
        if times[0] is not None and times[1] is not None:
            self._add_relative(ReplayMeasure.ENGINE_TIME, times[0], times[1])
        if one.expected is not None and self.task == Task.CLASSIFY:
            wrong = [float(_first_label(answer) != one.expected) for answer in answers]
            self._add(ReplayMeasure.QUALITY, wrong[0], wrong[1])

    def _add_agreements(self, one: ReplayedAnswers) -> None:
        earlier = None if one.original is None else one.original.output
        if one.original is None or one.original.outcome != Outcome.OK or earlier is None:
            return
        found = [
            None if answer.output is None else agreement(self.task, earlier, answer.output)
            for answer in (one.candidate, one.champion)
        ]
        for arm, its in zip(("candidate", "champion"), found, strict=True):
            if its is not None:
                self._equal[arm][0] += its.equal
                self._equal[arm][1] += 1
        distances = [None if its is None or its.similarity is None else 1.0 - its.similarity for its in found]
        if distances[0] is not None and distances[1] is not None:
            self._add(ReplayMeasure.DISTANCE, distances[0], distances[1])

    def report(self, deciding: int) -> TaskReport:
        """The report of this task. ``deciding``: measures of all tasks that decide, which share the rate of false
        differences."""
        findings = tuple(self._finding(measure, deciding) for measure in ReplayMeasure)
        verdict, reason = self._judged(findings)
        equal = {arm: total / count if count else None for arm, (total, count) in self._equal.items()}
        return TaskReport(self.task, verdict, reason, self.pairs, equal, self.dropped, findings)

    def _add(self, measure: ReplayMeasure, candidate: float, champion: float) -> None:
        self._series.setdefault(measure, _Series()).add(candidate, champion, candidate - champion)

    def _add_relative(self, measure: ReplayMeasure, candidate: float, champion: float) -> None:
        larger = max(candidate, champion)
        difference = (candidate - champion) / larger if larger > 0 else 0.0
        self._series.setdefault(measure, _Series()).add(candidate, champion, difference)

    def _finding(self, measure: ReplayMeasure, deciding: int) -> ReplayFinding:
        tolerance, series = TOLERANCES[measure], self._series.get(measure)
        verdict: ReplayVerdict | None = ReplayVerdict.UNDECIDED if measure in _REQUIRED else None
        if series is None:
            return ReplayFinding(measure, 0, tolerance, verdict)
        count = series.differences.count
        found = paired_bounds(series.differences, tolerance, (FALSE_DIFFERENCE_RATE / deciding, FALSE_SAME_RATE))
        if measure in _BOTH_WAYS:
            sides = (FALSE_DIFFERENCE_RATE / deciding / 2, FALSE_SAME_RATE)
            found = _either_way(series.differences, tolerance, sides)
        if count >= LEAST_PAIRS:
            verdict = _verdict_on(measure, found, tolerance)
        candidate, champion, excess = series.candidate / count, series.champion / count, series.differences.mean
        return ReplayFinding(measure, count, tolerance, verdict, candidate, champion, excess, found.lower, found.upper)

    def _judged(self, findings: Sequence[ReplayFinding]) -> tuple[ReplayVerdict, str]:
        deciding = [one for one in findings if one.measure in _DECIDING and one.verdict is not None]
        for verdict in _WORST_FIRST:
            named = [one for one in deciding if one.verdict == verdict]
            if named and verdict is not ReplayVerdict.SAME:
                return verdict, "; ".join(map(_described, named))
        return ReplayVerdict.SAME, "every measure is within its tolerance of the noise floor"


def judge_replay(tallies: Iterable[ReplayTally]) -> ReplayReport:
    """The report of all tasks. Without any request it is ``not enough``."""
    listed = sorted(tallies, key=lambda one: one.task)
    if not listed:
        return ReplayReport(ReplayVerdict.UNDECIDED, "no request was answered by both versions", ())
    tasks = tuple(one.report(len(_DECIDING) * len(listed)) for one in listed)
    worst = min(tasks, key=lambda one: _WORST_FIRST.index(ReplayVerdict(one.verdict)))
    return ReplayReport(worst.verdict, f"{worst.task}: {worst.reason}", tasks)


def _either_way(differences: Moments, tolerance: float, levels: tuple[float, float]) -> HarmBounds:
    """Bounds of the size of the mean, whatever its sign. ``levels``: of each side."""
    more = paired_bounds(differences, tolerance, levels)
    less = paired_bounds(
        Moments(differences.count, -differences.total, differences.total_of_squares), tolerance, levels
    )
    return HarmBounds(abs(more.harm), max(more.lower, less.lower), max(more.upper, less.upper))


def _verdict_on(measure: ReplayMeasure, found: HarmBounds, tolerance: float) -> ReplayVerdict:
    if found.lower > 0 and found.harm >= tolerance:
        return _FOUND[measure]
    return ReplayVerdict.SAME if found.upper <= tolerance else ReplayVerdict.UNDECIDED


def _described(finding: ReplayFinding) -> str:
    if finding.pairs < LEAST_PAIRS:
        return f"{finding.measure}: {finding.pairs} pairs are fewer than {LEAST_PAIRS}"
    return (
        f"{finding.measure}: an excess of {finding.excess:.4g}, between {finding.lower:.4g} and {finding.upper:.4g}, "
        f"of which {finding.tolerance:.4g} is tolerated"
    )


def _ms_per_token(answer: Answer) -> float | None:
    """Of the run that the answer was in; each request counts as a token at least."""
    if answer.engine_ms is None:
        return None
    return answer.engine_ms / max(1, answer.prompt_tokens + answer.completion_tokens)


def _first_label(answer: Answer) -> object:
    labels = None if answer.output is None else answer.output.get("labels")
    return labels[0].get("label") if labels else None
