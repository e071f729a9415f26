"""Runs of one tenant's evaluations in Postgres: who asks, the score of each example as it comes, and what came of it.

A run belongs to one runner at a time, for ``LEASE_MS`` from its last sign of life. Whoever takes it over asks what has
no score; what its predecessor stored meanwhile is refused, and each example is stored once.

>>> with EvaluationRuns(dsn, tenant="acme") as runs:
...     run_id = runs.begin(head, author="ops@desk", runner=runner)
...     runs.add(run_id, runner, {0: ExampleScore(1.0)})
...     runs.finish(run_id, runner)
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from fairlane_server.evaluation.grading import ExampleScore
from fairlane_server.evaluation.set_store import (
    EvaluationStoreError,
    UnknownEvaluationError,
)
from fairlane_server.evaluation.stored_runs import JudgeUse, RunHead, RunResult, fall_of, request_id_of, result_of
from fairlane_server.evaluation.tenant_store import TenantStore

LEASE_MS = 60_000
MOST_RUNS = 500
"""Of a model, the newest ones are kept, and those that a schedule compares with."""

_HEAD = """
set_name, set_version, set_digest, examples, reference, model, scorer, parameters, judge, is_scheduled, baseline_run
"""
_COLUMNS = f"""
run_id, {_HEAD}, state, started_at_ms, started_by, lease_until_ms, finished_at_ms, result, fall,
(SELECT count(*) FROM evaluation_scores AS score WHERE score.tenant = run.tenant AND score.run_id = run.run_id)
"""  # noqa: S608 - our own names
_BEGIN = f"""
INSERT INTO evaluation_runs (tenant, run_id, {_HEAD}, started_at_ms, started_by, runner, lease_until_ms)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""  # noqa: S608 - our own names
_CLAIM = """
UPDATE evaluation_runs SET runner = %(runner)s, lease_until_ms = %(until_ms)s
WHERE tenant = %(tenant)s AND run_id = %(run_id)s AND state = 'running'
    AND (runner = %(runner)s OR coalesce(lease_until_ms, 0) <= %(now_ms)s)
"""
_RENEW = """
UPDATE evaluation_runs SET lease_until_ms = %s
WHERE tenant = %s AND run_id = %s AND state = 'running' AND runner = %s
"""
_ADD = """
INSERT INTO evaluation_scores (tenant, run_id, place, score, reason, failure, model_version, request_id, judged,
    prompt_tokens, completion_tokens, costs, is_degraded)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (tenant, run_id, place) DO NOTHING
"""
_SCORES = """
SELECT place, score, reason, failure, model_version, judged, prompt_tokens, completion_tokens, costs, is_degraded
FROM evaluation_scores WHERE tenant = %s AND run_id = %s ORDER BY place
"""
_PLACES = "SELECT place FROM evaluation_scores WHERE tenant = %s AND run_id = %s"
_LOCK = """
SELECT FROM evaluation_runs WHERE tenant = %s AND run_id = %s AND state = 'running' AND runner = %s FOR UPDATE
"""
_FINISH = """
UPDATE evaluation_runs SET state = 'finished', finished_at_ms = %s, result = %s, fall = %s, model_requests = %s,
    runner = NULL, lease_until_ms = NULL
WHERE tenant = %s AND run_id = %s
"""
_CANCEL = """
UPDATE evaluation_runs SET state = 'cancelled', finished_at_ms = %s, runner = NULL, lease_until_ms = NULL
WHERE tenant = %s AND run_id = %s AND state = 'running'
"""
_FIRST_BASELINE = """
UPDATE evaluation_schedules SET baseline_run = %(run_id)s
WHERE tenant = %(tenant)s AND model = %(model)s AND baseline_run IS NULL
"""
# What the schedule compares with stays. The scores go with the runs.
_PRUNE = """
DELETE FROM evaluation_runs WHERE tenant = %(tenant)s AND run_id IN (
    SELECT run_id FROM evaluation_runs AS run WHERE tenant = %(tenant)s AND model = %(model)s AND state <> 'running'
        AND NOT EXISTS (
            SELECT FROM evaluation_schedules AS schedule
            WHERE schedule.tenant = run.tenant AND schedule.baseline_run = run.run_id
        )
    ORDER BY started_at_ms DESC OFFSET %(most)s
)
"""
_FIND = f"SELECT {_COLUMNS} FROM evaluation_runs AS run WHERE tenant = %s AND run_id = %s"  # noqa: S608 - our own names
_LIST = f"""
SELECT {_COLUMNS} FROM evaluation_runs AS run
WHERE tenant = %(tenant)s AND (%(model)s::text IS NULL OR model = %(model)s)
    AND (%(set_name)s::text IS NULL OR set_name = %(set_name)s)
    AND (%(state)s::text IS NULL OR state = %(state)s) AND (NOT %(scheduled)s OR is_scheduled)
    AND (%(before_ms)s::bigint IS NULL OR (started_at_ms, run_id) < (%(before_ms)s, %(before_id)s))
ORDER BY started_at_ms DESC, run_id DESC LIMIT %(most)s
"""  # noqa: S608 - our own names


class RunTakenError(EvaluationStoreError):
    """Another runner has the run, or it has ended."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as it is stored. ``stored``: examples with a score, or the reason why they have none."""

    run_id: str
    head: RunHead
    state: str
    started_at_ms: int
    started_by: str
    lease_until_ms: int | None
    finished_at_ms: int | None
    result: RunResult | None
    fall: Mapping[str, Any] | None
    stored: int


def new_run_id() -> str:
    """16 hexadecimal digits that nobody can guess: what a judge reads is marked by them."""
    return secrets.token_hex(8)


class EvaluationRuns(TenantStore):
    """Every call raises StoreError: Postgres cannot be used, and it is unknown whether it was done;
    EvaluationStoreError: as each call says."""

    @property
    def tenant(self) -> str:
        """Whose runs they are."""
        return self._tenant

    def begin(self, head: RunHead, author: str, runner: str) -> str:
        """Store the beginning of a run, for this runner. Returns its id. Raises RunTakenError for a scheduled run while
        another one of its model is under way."""
        run_id, now = new_run_id(), self._wall_clock()
        try:
            with self._transaction() as connection:
                connection.execute(
                    _BEGIN, (self._tenant, run_id, *_head_row(head), now, author, runner, now + LEASE_MS)
                )
        except _TakenError:
            raise RunTakenError(f"a scheduled run of {head.model} is under way") from None
        return run_id

    def claim(self, run_id: str, runner: str) -> StoredRun:
        """Go on with a run. Raises RunTakenError, UnknownEvaluationError."""
        now = self._wall_clock()
        asked = {
            "tenant": self._tenant,
            "run_id": run_id,
            "runner": runner,
            "now_ms": now,
            "until_ms": now + LEASE_MS,
        }
        with self._transaction() as connection:
            is_taken = connection.execute(_CLAIM, asked).rowcount != 1
            found = self._found(connection, run_id)
        if is_taken:
            why = "another process asks" if found.state == "running" else f"it is {found.state}"
            raise RunTakenError(f"{run_id}: {why}")
        return found

    def renew(self, run_id: str, runner: str) -> None:
        """Say that the run goes on. Raises RunTakenError."""
        with self._transaction() as connection:
            self._renew(connection, run_id, runner)

    def release(self, run_id: str, runner: str) -> None:
        """Leave a run to whoever goes on with it, at once."""
        with self._transaction() as connection:
            connection.execute(_RENEW, (0, self._tenant, run_id, runner))

    def add(self, run_id: str, runner: str, scores: Mapping[int, ExampleScore]) -> None:
        """Store scores by the place of their examples. Raises RunTakenError."""
        rows = [
            (
                *(self._tenant, run_id, place, one.value, one.reason, one.failure, one.model_version),
                request_id_of(run_id, place, "answer"),
                *(None if one.judged is None else Jsonb(dict(one.judged)), one.prompt_tokens, one.completion_tokens),
                *(Jsonb(dict(one.costs)), one.is_degraded),
            )
            for place, one in scores.items()
        ]
        with self._transaction() as connection:
            self._renew(connection, run_id, runner)
            connection.cursor().executemany(_ADD, rows)

    def places(self, run_id: str) -> frozenset[int]:
        """The examples that are stored."""
        with self._transaction() as connection:
            return frozenset(int(place) for (place,) in connection.execute(_PLACES, (self._tenant, run_id)))

    def finish(
        self, run_id: str, runner: str, model_requests: int | None = None, *, may_be_baseline: bool = False
    ) -> StoredRun:
        """Sum up and end a run; compare it with its baseline. ``may_be_baseline``: it becomes that of its model's
        schedule if there is none. Raises RunTakenError."""
        with self._transaction() as connection:
            if connection.execute(_LOCK, (self._tenant, run_id, runner)).fetchone() is None:
                raise RunTakenError(f"{run_id}: another process asks, or it has ended")
            head = self._found(connection, run_id).head
            scores = self._scores(connection, run_id)
            result = result_of(list(scores.values()), head.judge)
            fall = self._fall(connection, head, scores, result)
            ended = (self._wall_clock(), Jsonb(asdict(result)), fall, model_requests, self._tenant, run_id)
            connection.execute(_FINISH, ended)
            whose = {"tenant": self._tenant, "model": head.model, "run_id": run_id, "most": MOST_RUNS}
            if may_be_baseline and result.mean is not None:
                connection.execute(_FIRST_BASELINE, whose)
            connection.execute(_PRUNE, whose)
            return self._found(connection, run_id)

    def cancel(self, run_id: str) -> None:
        """End a run that is under way. Raises RunTakenError for one that has ended, UnknownEvaluationError."""
        with self._transaction() as connection:
            found = self._found(connection, run_id)
            if connection.execute(_CANCEL, (self._wall_clock(), self._tenant, run_id)).rowcount != 1:
                raise RunTakenError(f"{run_id}: it is {found.state}")

    def find(self, run_id: str) -> StoredRun:
        """One run. Raises UnknownEvaluationError."""
        with self._transaction() as connection:
            return self._found(connection, run_id)

    def scores(self, run_id: str) -> dict[int, ExampleScore]:
        """By the place of the example. Raises UnknownEvaluationError."""
        with self._transaction() as connection:
            self._found(connection, run_id)
            return self._scores(connection, run_id)

    def list(
        self,
        model: str | None = None,
        set_name: str | None = None,
        state: str | None = None,
        before: tuple[int, str] | None = None,
        most: int = 50,
        *,
        scheduled: bool = False,
    ) -> Sequence[StoredRun]:
        """The newest first: behind the one with this beginning and id, of a model, a set and a state."""
        before_ms, before_id = before or (None, None)
        asked = {
            "tenant": self._tenant,
            "model": model,
            "set_name": set_name,
            "state": state,
            "scheduled": scheduled,
            "before_ms": before_ms,
            "before_id": before_id,
            "most": most,
        }
        with self._transaction() as connection:
            return [_run(row) for row in connection.execute(_LIST.encode(), asked)]

    def _renew(self, connection: psycopg.Connection, run_id: str, runner: str) -> None:
        until_ms = self._wall_clock() + LEASE_MS
        if connection.execute(_RENEW, (until_ms, self._tenant, run_id, runner)).rowcount != 1:
            raise RunTakenError(f"{run_id}: another process asks, or it has ended")

    def _fall(
        self, connection: psycopg.Connection, head: RunHead, scores: Mapping[int, ExampleScore], result: RunResult
    ) -> Jsonb | None:
        if head.baseline_run is None:
            return None
        found = fall_of(values_of(self._scores(connection, head.baseline_run)), values_of(scores))
        if found is None:
            return None
        # A judge that cannot be relied on raises no alarm.
        is_fall = found.is_fall and result.judge_refusal is None
        return Jsonb({**asdict(found.comparison), "is_fall": is_fall})

    def _scores(self, connection: psycopg.Connection, run_id: str) -> dict[int, ExampleScore]:
        rows = connection.execute(_SCORES, (self._tenant, run_id))
        return {int(place): ExampleScore(*rest) for place, *rest in rows}

    def _found(self, connection: psycopg.Connection, run_id: str) -> StoredRun:
        row = connection.execute(_FIND.encode(), (self._tenant, run_id)).fetchone()
        if row is None:
            raise UnknownEvaluationError(f"{self._tenant} has no evaluation run {run_id}", "run")
        return _run(row)

    @contextmanager
    def _transaction(self, tenant: str | None = None) -> Iterator[psycopg.Connection]:
        with super()._transaction(tenant) as connection:
            try:
                yield connection
            except psycopg.errors.UniqueViolation:
                raise _TakenError from None


class _TakenError(Exception):
    """A scheduled run of the model is under way."""


def values_of(scores: Mapping[int, ExampleScore]) -> dict[int, float | None]:
    """The values alone."""
    return {place: one.value for place, one in scores.items()}


def _head_row(head: RunHead) -> tuple[Any, ...]:
    judge = None if head.judge is None else Jsonb(asdict(head.judge))
    return (
        *(head.set_name, head.set_version, head.set_digest, head.examples, head.reference, head.model, head.scorer),
        *(Jsonb(dict(head.parameters)), judge, head.is_scheduled, head.baseline_run),
    )


def _run(row: Sequence[Any]) -> StoredRun:
    run_id, *head = row[:12]
    state, started_at_ms, started_by, lease_until_ms, finished_at_ms, result, fall, stored = row[12:]
    return StoredRun(
        run_id=run_id,
        head=_head(head),
        state=state,
        started_at_ms=started_at_ms,
        started_by=started_by,
        lease_until_ms=lease_until_ms,
        finished_at_ms=finished_at_ms,
        result=None if result is None else RunResult(**result),
        fall=fall,
        stored=stored,
    )


def _head(row: Sequence[Any]) -> RunHead:
    *first, judge, is_scheduled, baseline_run = row
    use = None if judge is None else JudgeUse(**{**judge, "scores": tuple(judge["scores"])})
    return RunHead(*[*first, use, is_scheduled, baseline_run])
