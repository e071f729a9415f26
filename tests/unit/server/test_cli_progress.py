"""The progress bar: where a person watches, and nowhere else."""

import io
import sys

import pytest

from fairlane_server.cli.output import say
from fairlane_server.cli.progress import Pace, pace_text, progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(monkeypatch: pytest.MonkeyPatch, stdout: io.StringIO, stderr: io.StringIO, *, as_json: bool = False) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress_bar("reading [b]it[/b]", 3, as_json=as_json) as advance:
        for done in range(1, 4):
            say(f"line {done}")
            advance(done)


def test_a_terminal_shows_a_bar_below_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    run(monkeypatch, screen, screen)
    text = screen.getvalue()
    assert "reading [b]it[/b]" in text
    assert "3/3" in text
    assert all(f"\x1b[2Kline {number}\n" in text for number in (1, 2, 3)), "each on a line that was cleared for it"


def test_what_goes_into_a_file_is_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    file, screen = io.StringIO(), Terminal()
    run(monkeypatch, file, screen)
    assert file.getvalue() == "line 1\nline 2\nline 3\n"
    assert "3/3" in screen.getvalue()


@pytest.mark.parametrize(("stderr", "as_json"), [(io.StringIO(), False), (Terminal(), True)])
def test_nothing_is_shown_to_nobody(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, as_json: bool) -> None:
    file = io.StringIO()
    run(monkeypatch, file, stderr, as_json=as_json)
    assert (file.getvalue(), stderr.getvalue()) == ("line 1\nline 2\nline 3\n", "")


def test_a_rate_is_of_all_that_was_done_here() -> None:
    pace = Pace(10_000, 4_000, now_s=50.0)
    assert (pace.per_s(50.0), pace.remaining_s(60.0)) == (None, None)
    pace.step(5_000, 150.0)

    assert pace.per_s(150.0) == pytest.approx(10)
    assert pace.remaining_s(150.0) == pytest.approx(500)


def test_steps_that_come_in_bunches_do_not_make_the_time_that_is_left_jump() -> None:
    pace, guesses = Pace(40_000, 0, now_s=0.0), []
    for second in range(1, 301):
        if second % 100 == 0:
            for _ in range(8):
                pace.step(pace.done + 1_000, float(second))
        guess = pace.remaining_s(float(second))
        if guess is not None:
            guesses.append(guess + second)

    assert len(guesses) == 201
    assert guesses == [pytest.approx(500)] * len(guesses)


def test_what_comes_to_a_stop_takes_longer_and_longer() -> None:
    pace = Pace(1_000, 0, now_s=0.0)
    pace.step(100, 10.0)
    guesses = [pace.remaining_s(now_s) for now_s in (20.0, 40.0, 80.0)]

    assert guesses == [pytest.approx(80), pytest.approx(160), pytest.approx(320)]


def test_what_is_nearly_done_takes_no_less_than_nothing() -> None:
    pace = Pace(150, 0, now_s=0.0)
    pace.step(100, 10.0)
    assert pace.remaining_s(20.0) == 0


@pytest.mark.parametrize(
    ("per_s", "remaining_s", "text"),
    [
        (None, None, "-/s ETA -:--:--"),
        (0.01234, 59.6, "0.0123/s ETA 0:01:00"),
        (12.34, 3_599.0, "12.3/s ETA 0:59:59"),
        (12_345.6, 360_000.0, "12,346/s ETA 100:00:00"),
    ],
)
def test_a_pace_takes_few_characters(per_s: float | None, remaining_s: float | None, text: str) -> None:
    assert pace_text(per_s, remaining_s) == text
