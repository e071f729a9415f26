"""Bars for what takes its time: on stderr, and only where a person watches. A bar shows how much is done, how fast it
goes, how long it will take yet, and a note.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from types import FrameType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text


@dataclass(slots=True)
class Pace:
    """Pace of a task that reports progress in steps of any size; what was ``done`` before does not count.

    The rate is an average since the beginning, so that no step makes it jump. Between two steps work is assumed to go
    on at that rate, for as long as the longest pause between steps was; after that the rate falls.
    """

    total: int
    done: int
    now_s: float
    _begun_at: int = field(init=False)
    _begun_s: float = field(init=False)
    _longest_pause_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._begun_at, self._begun_s = self.done, self.now_s

    def step(self, done: int, now_s: float) -> None:
        if done != self.done:
            self._longest_pause_s = max(self._longest_pause_s, now_s - self.now_s)
            self.done, self.now_s = done, now_s

    def per_s(self, now_s: float) -> float | None:
        """The rate; None before anything was done."""
        return rate_per_s(self.done - self._begun_at + self._assumed(now_s), now_s - self._begun_s)

    def remaining_s(self, now_s: float) -> float | None:
        """Predicted remaining time at the present pace; None before any progress."""
        rate = self.per_s(now_s)
        return None if rate is None else max(0.0, self.total - self.done - self._assumed(now_s)) / rate

    def _assumed(self, now_s: float) -> float:
        """Estimated progress since the last step."""
        until_then = rate_per_s(self.done - self._begun_at, self.now_s - self._begun_s)
        return 0.0 if until_then is None else until_then * min(now_s - self.now_s, self._longest_pause_s)


def rate_per_s(done: float, elapsed_s: float) -> float | None:
    """None of nothing, and of no time."""
    return done / elapsed_s if done > 0 and elapsed_s > 0 else None


class Tell(Protocol):
    """Receives the amount done, and optionally a short remark."""

    def __call__(self, done: int, note: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars one below the other. May be used from several threads."""

    progress: Progress
    clock: Callable[[], float]

    @contextmanager
    def bar(self, what: str, total: int, done: int = 0) -> Iterator[Tell]:
        """Add a bar until the context ends; ``done`` is its initial value. Yields a function that takes how much of
        ``total`` is done."""
        pace = Pace(total, done, self.clock())
        task = self.progress.add_task(what, total=total, completed=done, pace=pace)

        def tell(done: int, note: str = "") -> None:
            pace.step(done, self.clock())
            self.progress.update(task, completed=done, description=f"{what} {note}".rstrip())

        try:
            yield tell
        finally:
            self.progress.refresh()
            self.progress.remove_task(task)


@contextmanager
def progress_bars(*, as_json: bool = False, clock: Callable[[], float] = monotonic) -> Iterator[Bars | None]:
    """Yields a factory of progress bars; None with ``as_json``, or when stderr is no terminal. Lines printed in the
    meantime appear above the bars. ``clock`` is in seconds."""
    if as_json or not sys.stderr.isatty():
        yield None
        return
    shown = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        _PaceColumn(clock),
        console=Console(stderr=True),
        transient=True,
        # Into a file or a pipe they go as they are.
        redirect_stdout=sys.stdout.isatty(),
    )
    with shown:
        yield Bars(shown, clock)


@contextmanager
def progress_bar(what: str, total: int, *, as_json: bool = False) -> Iterator[Tell]:
    """A single progress bar under the same conditions. Yields a function that takes how much of ``total`` is done."""
    with progress_bars(as_json=as_json) as bars:
        if bars is None:
            yield lambda done, note="": None  # noqa: ARG005 - nobody watches
            return
        with bars.bar(what, total) as tell:
            yield tell


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether to stop: after the first Ctrl-C or SIGTERM. A second one ends the
    command."""
    stopping = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pace_text(per_s: float | None, remaining_s: float | None) -> str:
    """A rate and the time that is left, in a few characters; what is not known yet is a dash."""
    rate = "-" if per_s is None else rate_text(per_s)
    return f"{rate}/s ETA {'-:--:--' if remaining_s is None else hours(remaining_s)}"


def rate_text(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def hours(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}"


class _PaceColumn(ProgressColumn):
    """Not rich's own: that forgets what was done more than half a minute ago, and steps may be farther apart."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(Column(no_wrap=True))
        self._clock = clock

    def render(self, task: Task) -> Text:
        pace: Pace = task.fields["pace"]
        now_s = self._clock()
        return Text(pace_text(pace.per_s(now_s), pace.remaining_s(now_s)), style="progress.remaining")
