"""Taking a job that another runner may have, from a Postgres that may not answer."""

from collections.abc import Iterator, Sequence

import pytest

from fairlane.service import StopSignal
from fairlane.settings import Settings
from producers.backfill import app
from producers.backfill.app import JobRunner, NotToBeRunError
from producers.backfill.job import Job
from producers.backfill.seams import AwayError

AWAY = AwayError("Postgres: canceling statement due to statement timeout")


class ScriptedStore:
    """Says what it is told to each look; a job that is not there ends the wait for it."""

    def __init__(self, looks: Sequence[AwayError | None]) -> None:
        self._looks: Iterator[AwayError | None] = iter(looks)
        self.closed = False

    def take(self, job_id: str, runner: str, lease_s: float, now_ms: int) -> None:
        error = next(self._looks)
        if error is not None:
            raise error

    def find(self, job_id: str) -> Job | None:
        return None

    def close(self) -> None:
        self.closed = True


def run(monkeypatch: pytest.MonkeyPatch, looks: Sequence[AwayError | None], wait_s: float) -> ScriptedStore:
    store = ScriptedStore(looks)
    monkeypatch.setattr(app, "JobStore", lambda _dsn: store)
    with pytest.raises(NotToBeRunError):
        JobRunner(Settings(), StopSignal()).run("0" * 16, wait_s=wait_s)
    return store


def test_a_job_that_is_locked_by_a_stopped_runner_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, [AWAY, AWAY, None], wait_s=60.0).closed


def test_who_will_not_wait_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AwayError):
        run(monkeypatch, [AWAY, None], wait_s=0.0)


def test_who_waits_is_told_when_the_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_LOCKED_S", -60.0)
    with pytest.raises(AwayError):
        run(monkeypatch, [AWAY, None], wait_s=1.0)
