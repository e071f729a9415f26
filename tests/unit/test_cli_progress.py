"""The progress bar: where a person watches, and nowhere else."""

import io
import sys

import pytest

from fairlane.cli.output import say
from fairlane.cli.progress import progress_bar


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
