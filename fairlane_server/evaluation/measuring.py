"""Measures models on stored sets: composes the tenant's client on Kafka and its rows in Postgres.

>>> with Measuring(settings, tenant="acme", author="ops@desk") as measuring:
...     run = measuring.start("holdout", None, MeasureWish("digits/2", "accuracy"))
...     measuring.go_on(run, stopping=lambda: False)
"""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fairlane.client.sync import Client
from fairlane.clock import now_ms
from fairlane.closing import Closing
from fairlane.logs import get_logger
from fairlane.outcomes import Outcome
from fairlane.settings import Settings
from fairlane_server.evaluation.asking import (
    BACKFILL,
    OFFLINE_PATIENCE_S,
    ONLINE_PATIENCE_S,
    RunAsking,
    asked_once,
)
from fairlane_server.evaluation.calibration import RatedGrade, agreement_of
from fairlane_server.evaluation.calibration_store import JudgeCalibration, JudgeCalibrations
from fairlane_server.evaluation.grading import (
    JudgePlan,
    MeasurePlan,
    asked_for_calibration,
    check_example,
)
from fairlane_server.evaluation.judge import JUDGE, Rubric, grade_of, read_rubric
from fairlane_server.evaluation.run import answer_of
from fairlane_server.evaluation.run_store import EvaluationRuns, RunTakenError, StoredRun, new_run_id
from fairlane_server.evaluation.schedule_store import EvaluationSchedules
from fairlane_server.evaluation.schedules import EvaluationSchedule, due_versions
from fairlane_server.evaluation.set_store import EvaluationSets, EvaluationStoreError, UnknownEvaluationError
from fairlane_server.evaluation.stored_runs import JudgeUse, RunHead
from fairlane_server.models.routes import model_of, version_key

log = get_logger(__name__)

Stopping = Callable[[], bool]
Tell = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class JudgeWish:
    """A judge that is asked for.

    Attributes:
        reference: the model, as requests name it.
        rubric: what it is told.
        against: a model to compare with; None: answers are graded.
        calibration_id: None: the latest one of this judge and rubric.
        is_uncalibrated_allowed: measure also if the judge cannot be relied on, and say so in the run.
    """

    reference: str
    rubric: Rubric
    against: str | None = None
    calibration_id: str | None = None
    is_uncalibrated_allowed: bool = False


@dataclass(frozen=True, slots=True)
class MeasureWish:
    """What is to be measured: a model by a scorer, or by a judge."""

    reference: str
    scorer: str
    top: int | None = None
    max_tokens: int | None = None
    priority: str = "low"
    judge: JudgeWish | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """As they are stored: those that are given."""
        found = {"top": self.top, "max_tokens": self.max_tokens, "priority": self.priority}
        return {name: value for name, value in found.items() if value is not None}


class Measuring(Closing):
    """Runs of one tenant by one process. For one thread. Every call raises StoreError: Postgres cannot be used;
    EvaluationStoreError: what is asked for cannot be done."""

    def __init__(self, settings: Settings, tenant: str, author: str) -> None:
        """Raises ValueError for what cannot be a tenant's name."""
        dsn = settings.postgres_dsn.get_secret_value()
        self._settings = settings
        self._author = author
        self._runner = f"{os.getpid()}-{secrets.token_hex(8)}"
        self.sets = EvaluationSets(dsn, tenant)
        self.runs = EvaluationRuns(dsn, tenant)
        self.schedules = EvaluationSchedules(dsn, tenant)
        self.calibrations = JudgeCalibrations(dsn, tenant)

    def close(self) -> None:
        for store in (self.sets, self.runs, self.schedules, self.calibrations):
            store.close()

    def start(self, set_name: str, version: int | None, wish: MeasureWish) -> StoredRun:
        """Begin a run on a version of a set, the latest without a number. Raises ExampleError for an example that
        makes no request."""
        return self._begin(self._head(set_name, version, wish))

    def take_over(self, run_id: str) -> StoredRun:
        """Go on with a run that was left. Raises RunTakenError."""
        return self.runs.claim(run_id, self._runner)

    def go_on(
        self, run: StoredRun, stopping: Stopping, tell: Tell = lambda _stored: None, *, may_be_baseline: bool = False
    ) -> StoredRun | None:
        """Ask what has no score, and end the run. None: it was to stop, and may be taken over. Raises RunTakenError,
        and FairlaneError if Kafka cannot be used; it may then be taken over as well."""
        head = run.head
        examples = self.sets.examples(head.set_name, head.set_version)
        priority = str(head.parameters.get("priority", "low"))
        with self._client(priority) as client:
            asking = RunAsking(
                *(self.runs, client.submit, run, self._runner, plan_of(head), priority, stopping, tell),
                patience_s=_patience_s(priority),
            )
            try:
                if not asking.ask(examples):
                    return None
            except BaseException:
                self.runs.release(run.run_id, self._runner)
                raise
        requests = self.schedules.state(head.model).requests if head.is_scheduled else None
        return self.runs.finish(run.run_id, self._runner, requests, may_be_baseline=may_be_baseline)

    def go_on_with_due(self, stopping: Stopping) -> Iterator[StoredRun]:
        """Run what schedules of the tenant have due, and what was left unfinished; yields the runs that ended. A
        schedule that cannot be run is logged, and keeps no other from running."""
        for schedule in self.schedules.list():
            if stopping():
                return
            try:
                yield from self._due(schedule, stopping)
            except RunTakenError:
                log.info("evaluation_under_way", model=schedule.model)
            except (EvaluationStoreError, ValueError) as error:
                log.warning("evaluation_not_run", model=schedule.model, reason=str(error))

    def calibrate(
        self, set_name: str, version: int | None, judge: JudgeWish, priority: str = "low"
    ) -> JudgeCalibration:
        """Have a judge grade answers that people have rated, and store how well it agrees. Raises EvaluationStoreError
        without such answers, or if several versions answered."""
        stored = self.sets.find(set_name, version)
        examples = self.sets.examples(stored.name, stored.version)
        plan, secret = JudgePlan(judge.reference, judge.rubric), new_run_id()
        asked = {
            place: request
            for place, one in examples.items()
            if (request := asked_for_calibration(one, plan, f"{secret}\0{place}")) is not None
        }
        rated: list[RatedGrade] = []
        versions: set[str] = set()
        with self._client(priority) as client:
            replies = asked_once(client.submit, asked.items(), secret, priority, _patience_s(priority))
            for place, reply in replies:
                is_answer = reply.outcome == Outcome.OK
                text = answer_of(reply) if is_answer else None
                versions |= {reply.model_version or ""} if is_answer else set()
                rating = examples[place].rating
                assert rating is not None  # noqa: S101 - without one nothing was asked
                rated.append(RatedGrade(rating, grade_of(text if isinstance(text, str) else None)))
        if not rated:
            raise EvaluationStoreError("no example of the set has a question, an output and a rating", "set")
        if len(versions) != 1:
            what = ", ".join(sorted(versions)) or "none"
            raise EvaluationStoreError(f"one version of the judge must answer; these did: {what}", "judge")
        made = (judge.reference, versions.pop(), judge.rubric, stored, agreement_of(rated))
        return self.calibrations.add(*made, self._author)

    def _due(self, schedule: EvaluationSchedule, stopping: Stopping) -> Iterator[StoredRun]:
        state = self.schedules.state(schedule.model)
        champion = state.versions[0] if state.versions else None
        for left in self.runs.list(model=schedule.model, state="running", scheduled=True):
            run = self.take_over(left.run_id)
            yield from self._ended(run, champion, stopping)
        if stopping():
            return
        stored = self.sets.find(schedule.set_name)
        last_runs = self.schedules.last_runs(schedule, stored.digest)
        for version in due_versions(schedule, state.versions, last_runs, state.requests, now_ms()):
            if stopping():
                return
            wish = wish_of(schedule, version_key(schedule.model, version))
            head = self._head(schedule.set_name, stored.version, wish, is_scheduled=True)
            run = self._begin(self._with_baseline(head))
            yield from self._ended(run, champion, stopping)

    def _ended(self, run: StoredRun, champion: str | None, stopping: Stopping) -> Iterator[StoredRun]:
        is_champion = champion is not None and run.head.reference == version_key(run.head.model, champion)
        ended = self.go_on(run, stopping, may_be_baseline=is_champion)
        if ended is not None:
            log.info(
                "evaluation_ended", model=run.head.reference, run=run.run_id, mean=ended.result and ended.result.mean
            )
            yield ended

    def _with_baseline(self, head: RunHead) -> RunHead:
        """The head with the baseline of its schedule; a baseline that measured something else is forgotten."""
        baseline_run = next((one.baseline_run for one in self.schedules.list() if one.model == head.model), None)
        if baseline_run is None:
            return head
        try:
            is_same = self.runs.find(baseline_run).head.measure == head.measure
        except UnknownEvaluationError:
            is_same = False
        if not is_same:
            log.info("evaluation_baseline_forgotten", model=head.model, run=baseline_run)
            self.schedules.set_baseline(head.model, None)
            return head
        return replace(head, baseline_run=baseline_run)

    def _begin(self, head: RunHead) -> StoredRun:
        return self.runs.find(self.runs.begin(head, self._author, self._runner))

    def _head(self, set_name: str, version: int | None, wish: MeasureWish, *, is_scheduled: bool = False) -> RunHead:
        stored = self.sets.find(set_name, version)
        judge = None if wish.judge is None else self.judge_use(wish.judge, is_refused=not is_scheduled)
        head = RunHead(
            set_name=stored.name,
            set_version=stored.version,
            set_digest=stored.digest,
            examples=stored.present,
            reference=wish.reference,
            model=model_of(wish.reference),
            scorer=wish.scorer,
            parameters=wish.parameters,
            judge=judge,
            is_scheduled=is_scheduled,
        )
        plan, examples = plan_of(head), self.sets.examples(stored.name, stored.version)
        if not examples:
            raise EvaluationStoreError(f"{stored.name}:{stored.version} has no example left", "set")
        for one in examples.values():
            check_example(one, plan)
        return head

    def judge_use(self, wish: JudgeWish, *, is_refused: bool = True) -> JudgeUse:
        """The judge with its calibration. ``is_refused``: raise EvaluationStoreError for one that cannot be relied on,
        unless the wish allows it."""
        found = (
            self.calibrations.latest(wish.reference, wish.rubric)
            if wish.calibration_id is None
            else self.calibrations.find(wish.calibration_id)
        )
        use = judge_use_of(wish, found)
        if use.refusal is not None and is_refused and not wish.is_uncalibrated_allowed:
            raise EvaluationStoreError(f"judge {wish.reference}: {use.refusal}", "judge")
        return use

    def _client(self, priority: str) -> Client:
        return Client(self.runs.tenant, settings=self._settings, offline=priority == BACKFILL)


def judge_use_of(wish: JudgeWish, found: JudgeCalibration | None) -> JudgeUse:
    """A judge with what its calibration says of it. Pure."""
    refusal: str | None
    if found is None:
        refusal = "it was never calibrated with this rubric"
    elif (found.judge, found.rubric_digest) != (wish.reference, wish.rubric.digest):
        refusal = f"calibration {found.calibration_id} is of another judge or rubric"
    else:
        refusal = found.agreement.refusal
    return JudgeUse(
        reference=wish.reference,
        rubric=wish.rubric.text,
        rubric_digest=wish.rubric.digest,
        calibration_id=None if found is None else found.calibration_id,
        version=None if found is None else found.judge_version,
        against=wish.against,
        kappa_low=None if found is None else found.agreement.kappa_low,
        refusal=refusal,
        # Grades that agree with nobody are worth what they say.
        scores=found.agreement.scores if found is not None and refusal is None else (),
    )


def plan_of(head: RunHead) -> MeasurePlan:
    """What a stored run asks. Pure."""
    judge = head.judge
    return MeasurePlan(
        reference=head.reference,
        scorer=head.scorer,
        top=head.parameters.get("top"),
        max_tokens=head.parameters.get("max_tokens"),
        judge=None
        if judge is None
        else JudgePlan(
            judge.reference, Rubric(judge.rubric), judge.against, judge.calibration_id, judge.version, judge.scores
        ),
    )


def wish_of(schedule: EvaluationSchedule, reference: str) -> MeasureWish:
    """What a schedule asks of one version. Pure. Raises ValueError for a rubric that cannot be one."""
    judge: Mapping[str, Any] | None = schedule.judge
    return MeasureWish(
        reference=reference,
        scorer=JUDGE if judge is not None else schedule.scorer,
        top=schedule.parameters.get("top"),
        max_tokens=schedule.parameters.get("max_tokens"),
        priority=schedule.parameters.get("priority", "low"),
        judge=None
        if judge is None
        else JudgeWish(judge["reference"], read_rubric(judge["rubric"]), judge.get("against")),
    )


def _patience_s(priority: str) -> float:
    return OFFLINE_PATIENCE_S if priority == BACKFILL else ONLINE_PATIENCE_S
