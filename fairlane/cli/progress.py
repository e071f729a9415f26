"""A bar for what takes its time: on stderr, and only where a person watches."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Tell(Protocol):
    """What is told how much is done, and what else is worth a few words."""

    def __call__(self, done: int, note: str = "") -> None: ...


@contextmanager
def progress_bar(what: str, total: int, *, as_json: bool = False) -> Iterator[Tell]:
    """Yields what is told how much of ``total`` is done. Nothing is shown with ``as_json``, or when stderr is no
    terminal. Lines that are printed meanwhile stand above the bar."""
    if as_json or not sys.stderr.isatty():
        yield lambda done, note="": None  # noqa: ARG005 - nobody watches
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        # Into a file or a pipe they go as they are.
        redirect_stdout=sys.stdout.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda done, note="": bar.update(task, completed=done, description=f"{what} {note}".rstrip())
