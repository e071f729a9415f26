"""Evaluation sets, runs and schedules of tenants for callers of the admin API. Runs are made by commands: they act as
the tenant on Kafka, which the process of the admin API cannot."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fairlane_server.administration.events import AdminAudit, AdminEvent, AdminEventKind
from fairlane_server.evaluation.calibration_store import JudgeCalibration, JudgeCalibrations
from fairlane_server.evaluation.comparison import PairedComparison
from fairlane_server.evaluation.evaluation_set import EvaluationSet
from fairlane_server.evaluation.grading import ExampleScore
from fairlane_server.evaluation.run_store import EvaluationRuns, StoredRun, values_of
from fairlane_server.evaluation.schedule_store import EvaluationSchedules
from fairlane_server.evaluation.schedules import EvaluationSchedule
from fairlane_server.evaluation.set_store import EvaluationSets, EvaluationStoreError, StoredSet
from fairlane_server.evaluation.stored_runs import compare_by_place


class TenantEvaluations:
    """Of all tenants, one at a time. Each call connects anew; for one thread at a time. Every call raises StoreError,
    EvaluationStoreError and, if it changes something or shows texts, AuditError."""

    def __init__(self, dsn: str, audit: AdminAudit) -> None:
        self._dsn = dsn
        self._audit = audit

    def add_set(self, tenant: str, name: str, examples: EvaluationSet, author: str) -> tuple[StoredSet, bool]:
        """As ``EvaluationSets.add``."""
        with EvaluationSets(self._dsn, tenant) as sets:
            stored, is_new = sets.add(name, examples, author)
        if is_new:
            self._note(AdminEventKind.EVALUATION_SET_ADDED, tenant, author, _named(stored))
        return stored, is_new

    def sets(self, tenant: str, name: str | None, after: tuple[str, int], most: int) -> Sequence[StoredSet]:
        """Versions that are not removed, by name and version."""
        with EvaluationSets(self._dsn, tenant) as sets:
            return sets.list(name, after, most)

    def find_set(self, tenant: str, name: str, version: int | None) -> StoredSet:
        """A version; the latest without a number."""
        with EvaluationSets(self._dsn, tenant) as sets:
            return sets.find(name, version)

    def examples(
        self, tenant: str, name: str, version: int, after: int, most: int, author: str
    ) -> Sequence[tuple[int, dict[str, Any]]]:
        """Examples behind a place. That they were read is recorded first, once for each page from the beginning."""
        with EvaluationSets(self._dsn, tenant) as sets:
            stored = sets.find(name, version)
            self._note(AdminEventKind.EVALUATION_SET_READ, tenant, author, {**_named(stored), "after": after})
            return sets.lines(name, version, after, most)

    def remove_set(self, tenant: str, name: str, version: int, author: str) -> StoredSet:
        """Delete the examples of a version."""
        with EvaluationSets(self._dsn, tenant) as sets:
            stored = sets.find(name, version)
            self._note(AdminEventKind.EVALUATION_SET_REMOVED, tenant, author, _named(stored))
            sets.remove(name, version)
        return stored

    def runs(
        self, tenant: str, model: str | None, set_name: str | None, before: tuple[int, str] | None, most: int
    ) -> Sequence[StoredRun]:
        """The newest first."""
        with EvaluationRuns(self._dsn, tenant) as runs:
            return runs.list(model, set_name, before=before, most=most)

    def find_run(self, tenant: str, run_id: str) -> StoredRun:
        """One run."""
        with EvaluationRuns(self._dsn, tenant) as runs:
            return runs.find(run_id)

    def scores(self, tenant: str, run_id: str) -> dict[int, ExampleScore]:
        """By the place of the example."""
        with EvaluationRuns(self._dsn, tenant) as runs:
            return runs.scores(run_id)

    def comparison(self, tenant: str, baseline: str, run_id: str) -> PairedComparison | None:
        """Of two runs, example by example. None if they share no scored example."""
        with EvaluationRuns(self._dsn, tenant) as runs:
            found = [runs.find(one) for one in (baseline, run_id)]
            if found[0].head.measure != found[1].head.measure:
                raise EvaluationStoreError("they differ in the set, the scorer or its parameters", "baseline")
            return compare_by_place(*(values_of(runs.scores(one.run_id)) for one in found))

    def schedules(self, tenant: str) -> Sequence[EvaluationSchedule]:
        """By model."""
        with EvaluationSchedules(self._dsn, tenant) as schedules:
            return schedules.list()

    def set_schedule(self, tenant: str, schedule: EvaluationSchedule, author: str) -> EvaluationSchedule:
        """In place of that of its model, on a set that there is."""
        self.find_set(tenant, schedule.set_name, None)
        with EvaluationSchedules(self._dsn, tenant) as schedules:
            schedules.set(schedule)
        details = {name: value for name, value in asdict(schedule).items() if name != "judge" and value is not None}
        self._note(AdminEventKind.EVALUATION_SCHEDULE_SET, tenant, author, details)
        return schedule

    def remove_schedule(self, tenant: str, model: str, author: str) -> None:
        """Measure a model no longer."""
        with EvaluationSchedules(self._dsn, tenant) as schedules:
            schedules.remove(model)
        self._note(AdminEventKind.EVALUATION_SCHEDULE_REMOVED, tenant, author, {"model": model})

    def calibrations(self, tenant: str, most: int) -> Sequence[JudgeCalibration]:
        """Of judges, the newest first."""
        with JudgeCalibrations(self._dsn, tenant) as calibrations:
            return calibrations.list(most=most)

    def _note(self, kind: AdminEventKind, tenant: str, author: str, details: dict[str, Any]) -> None:
        self._audit.note(AdminEvent(kind, tenant, author, details=details))


def _named(stored: StoredSet) -> dict[str, Any]:
    return {"name": stored.name, "version": stored.version, "digest": stored.digest, "examples": stored.examples}
