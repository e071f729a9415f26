"""How far a job is, how fast it goes and what it has cost, for whoever watches it, and for whoever asks."""

import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from rich.progress import Progress
from structlog.testing import capture_logs

from fairlane_server.cli.progress import Bars, progress_bars
from producers.backfill.job import Fingerprint, Job, JobSpec, RowTally, Status
from producers.backfill.progress import LINE_S, JobWatch, job_json, job_pace, pace_json, pace_line

JOB = Job("ab" * 8, "acme", JobSpec("in", "out"), Fingerprint(1, "1"), 10_000, 12)


@dataclass
class Clock:
    now_s: float = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """What stderr is from now on."""
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def last_of(screen: Terminal, bars: Bars) -> str:
    """What stands there now."""
    screen.seek(0)
    screen.truncate()
    bars.progress.refresh()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())


def done(rows: int) -> RowTally:
    return RowTally(ok=rows, cost_tokens=5 * rows)


def test_a_bar_shows_the_time_that_is_left_and_the_cost_though_chunks_are_minutes_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, clock = terminal(monkeypatch), Clock()
    with progress_bars(clock=clock) as bars:
        assert bars is not None
        with JobWatch(bars).job() as heard:
            heard(JOB, done(2_000))
            assert "2000/10000 -/s ETA -:--:--" in last_of(screen, bars)
            for rows in (3_000, 4_000, 5_000):
                clock.now_s += 100
                heard(JOB, done(rows))
                assert "10/s ETA" in last_of(screen, bars)
            clock.now_s += 60
            text = last_of(screen, bars)

    assert JOB.job_id in text
    assert "25,000 cost tokens" in text
    assert "5000/10000" in text
    assert "10/s ETA 0:07:20" in text


def test_every_job_that_runs_has_a_bar_and_one_that_is_left_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    other = replace(JOB, job_id="cd" * 8)
    with progress_bars() as bars:
        assert bars is not None

        def shown(progress: Progress) -> list[str]:
            return [job.job_id for job in (JOB, other) for task in progress.tasks if job.job_id in task.description]

        watch = JobWatch(bars)
        with watch.job() as heard:
            heard(JOB, done(0))
            with watch.job() as also_heard:
                also_heard(other, done(0))
                assert shown(bars.progress) == [JOB.job_id, other.job_id]
            assert shown(bars.progress) == [JOB.job_id]
        assert not bars.progress.tasks


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with capture_logs() as found:
        yield found


def test_where_nobody_watches_the_log_has_a_line_now_and_then(lines: list[Any]) -> None:
    clock = Clock()
    with progress_bars(as_json=True) as bars, JobWatch(bars, clock).job() as heard:
        heard(JOB, done(0))
        for rows in range(100, 5_100, 100):
            clock.now_s += LINE_S / 20
            heard(JOB, done(rows))

    assert [line["event"] for line in lines] == ["job_progress"] * 2
    assert lines[0] == {
        "event": "job_progress",
        "log_level": "info",
        "job_id": JOB.job_id,
        "tenant": "acme",
        "rows": 2_000,
        "of_rows": 10_000,
        "rows_per_s": pytest.approx(2_000 / LINE_S, abs=0.001),
        "remaining_s": pytest.approx(4 * LINE_S),
        "cost_tokens": 10_000,
    }


@pytest.mark.parametrize(
    ("changes", "pace", "line"),
    [
        ({"status": Status.QUEUED}, (None, None), None),
        ({"status": Status.RUNNING}, (None, None), None),
        ({"status": Status.RUNNING, "tally": done(2_500)}, (25.0, 300.0), "25 rows/s, about 0:05:00 left"),
        ({"status": Status.RUNNING, "tally": done(2_500), "token": 2}, (25.0, None), "25 rows/s"),
        ({"status": Status.FINALIZING, "tally": done(10_000)}, (100.0, None), "100 rows/s"),
        ({"status": Status.PAUSED, "tally": done(2_500)}, (None, None), None),
        ({"status": Status.COMPLETED, "tally": done(10_000), "ended_at_ms": 51_000}, (200.0, None), "200 rows/s"),
        ({"status": Status.COMPLETED, "tally": done(0), "ended_at_ms": 1_000}, (None, None), None),
    ],
    ids=["queued", "no chunk yet", "running", "taken again", "finalizing", "paused", "ended", "empty"],
)
def test_what_is_stored_says_the_rate_and_the_time_that_is_left(
    changes: dict[str, Any], pace: tuple[float | None, float | None], line: str | None
) -> None:
    job = replace(JOB, **{"started_at_ms": 1_000, "token": 1, **changes})

    assert job_pace(job, 101_000) == pace
    assert pace_json(job, 101_000) == {"rows_per_s": pace[0], "remaining_s": pace[1]}
    assert pace_line(job, 101_000) == line
    assert job_pace(replace(job, started_at_ms=None), 101_000) == (None, None)


def test_whoever_asks_is_told_every_time_of_a_job() -> None:
    times: dict[str, Any] = {one.name: 5 for one in fields(Job) if one.name.endswith("_at_ms")}

    shown = job_json(replace(JOB, **times))

    assert {name: shown.get(name) for name in times} == times
