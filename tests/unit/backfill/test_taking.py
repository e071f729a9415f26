"""Taking a job that another runner may have, from a Postgres that may not answer."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fairlane.settings import Settings
from fairlane_server.processes.service import StopSignal
from producers.backfill import app
from producers.backfill.app import JobRunner, NotToBeRunError
from producers.backfill.errors import NoSuchInputError, UnavailableError
from producers.backfill.job import Fingerprint, Job, JobSpec, Status, Wanted
from producers.backfill.lease import LeaseKeeper
from tests.kit.waiting import eventually

AWAY = UnavailableError("Postgres: canceling statement due to statement timeout")


class ScriptedStore:
    """Says what it is told to each look; a job that is not there ends the wait for it."""

    def __init__(self, looks: Sequence[UnavailableError | None]) -> None:
        self._looks: Iterator[UnavailableError | None] = iter(looks)
        self.closed = False

    def take(self, job_id: str, runner: str, lease_s: float, now_ms: int) -> None:
        error = next(self._looks)
        if error is not None:
            raise error

    def find(self, job_id: str) -> Job | None:
        return None

    def close(self) -> None:
        self.closed = True


def run(monkeypatch: pytest.MonkeyPatch, looks: Sequence[UnavailableError | None], wait_s: float) -> ScriptedStore:
    store = ScriptedStore(looks)
    monkeypatch.setattr(app, "JobStore", lambda _dsn: store)
    with pytest.raises(NotToBeRunError):
        JobRunner(Settings(), StopSignal()).run("0" * 16, wait_s=wait_s)
    return store


def test_a_job_that_is_locked_by_a_stopped_runner_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, [AWAY, AWAY, None], wait_s=60.0).closed


def test_who_will_not_wait_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError):
        run(monkeypatch, [AWAY, None], wait_s=0.0)


def test_who_waits_is_told_when_the_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_LOCKED_S", -60.0)
    with pytest.raises(UnavailableError):
        run(monkeypatch, [AWAY, None], wait_s=1.0)


# ------------------------------------------------------------------ what cannot be begun


class LogOfOne:
    """What a job's log is told; its owner wants what it is made with."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.answered_rows = 0
        self.moves: list[tuple[Status, str | None]] = []

    def keep(self, lease_s: float, answered_rows: int) -> tuple[str, int | None]:
        self.answered_rows = answered_rows
        return self.wanted.value, None

    def move(self, status: Status, reason: str | None = None) -> None:
        self.moves.append((status, reason))

    def release(self) -> None: ...

    def close(self) -> None: ...


def begin(
    monkeypatch: pytest.MonkeyPatch, error: Exception, *, wanted: Wanted = Wanted.RUN, deadline_at_ms: int = 2**62
) -> LogOfOne:
    """Run a batch whose input cannot be looked at, for this reason."""
    found = Job("0" * 16, "acme", JobSpec("in", "out"), Fingerprint(1, "1"), 0, 12, counted=False)
    store = ScriptedStore([None])
    monkeypatch.setattr(store, "take", lambda *_: (replace(found, deadline_at_ms=deadline_at_ms), 0.0))
    log = LogOfOne(wanted)

    def survey(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr(app, "JobStore", lambda _dsn: store)
    monkeypatch.setattr(app, "PostgresJobLog", lambda *_: log)
    monkeypatch.setattr(app, "survey", survey)
    JobRunner(Settings(), StopSignal()).run("0" * 16)
    return log


def test_a_batch_whose_input_is_gone_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    log = begin(monkeypatch, NoSuchInputError("in: there is no such file"))
    assert log.moves == [(Status.FAILED, "in: there is no such file")]


def test_an_input_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError):
        begin(monkeypatch, UnavailableError("s3://bucket/in: GenericError"))


def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    log = begin(monkeypatch, UnavailableError("s3://bucket/in: GenericError"), deadline_at_ms=1)
    assert log.moves == [(Status.FAILED, "the input could not be read in time: s3://bucket/in: GenericError")]


def test_a_batch_that_was_never_begun_is_cancelled_without_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    log = begin(monkeypatch, AssertionError("it was read"), wanted=Wanted.CANCEL)
    assert log.moves == [(Status.CANCELLED, None)]


def test_a_batch_is_paused_before_its_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log = begin(monkeypatch, AssertionError("it was read"), wanted=Wanted.PAUSE)
    assert log.moves == [(Status.PAUSED, None)]


@pytest.mark.parametrize(
    ("reserved_nanos", "wanted", "times"),
    [(None, Wanted.RUN, 1), (0, Wanted.RUN, 0), (900, Wanted.RUN, 0), (None, Wanted.CANCEL, 0)],
)
def test_a_job_that_has_nothing_reserved_is_reserved_however_far_it_is(
    reserved_nanos: int | None, wanted: Wanted, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(
        *("0" * 16, "acme", JobSpec("in", "out"), Fingerprint(1, "1"), 10, 12), planned=5, reserved_nanos=reserved_nanos
    )
    store, reserved = ScriptedStore([None]), []
    monkeypatch.setattr(store, "take", lambda *_: (job, 0.0))
    monkeypatch.setattr(app, "JobStore", lambda _dsn: store)
    monkeypatch.setattr(app, "PostgresJobLog", lambda *_: LogOfOne(wanted))
    monkeypatch.setattr(app, "reserve_job", lambda *given: reserved.append(given[2]))
    runner = SimpleNamespace(job=job, source=None, run=lambda: Status.COMPLETED)
    monkeypatch.setattr(JobRunner, "_runner", lambda *_: runner)
    assert JobRunner(Settings(), StopSignal()).run(job.job_id) is Status.COMPLETED
    assert reserved == [job] * times


def test_the_rows_with_a_result_are_recorded_with_the_lease() -> None:
    log = LogOfOne(Wanted.RUN)
    with LeaseKeeper(log, StopSignal(), None, lease_s=0.004) as control:  # type: ignore[arg-type]  # what it needs of one
        control.answered_rows = 7
        eventually(lambda: log.answered_rows == 7, what="the next renewal")


def test_a_job_is_told_to_give_way_to_another() -> None:
    give_way = threading.Event()
    with LeaseKeeper(LogOfOne(Wanted.RUN), StopSignal(), None, give_way=give_way) as control:  # type: ignore[arg-type]  # what it needs of one
        assert (control.gives_way, control.stopping) == (False, False)
        give_way.set()
        assert (control.gives_way, control.stopping) == (True, False)
