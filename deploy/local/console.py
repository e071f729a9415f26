"""Terminal output of the stack: events, logs with a coloured prefix, a table of the parts."""

import sys
import threading
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console as RichConsole
from rich.table import Table

from deploy.local.status import PartStatus, StackStatus

COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
"""ANSI foreground colours of the prefixes, in the order in which processes first say something."""

RESET = "\033[0m"


class Console:
    """Writes whole lines, from any thread.

    Args:
        out: where to write.
        follow: whether lines of logs are shown at all.
    """

    def __init__(self, out: TextIO | None = None, *, follow: bool = True) -> None:
        self._out = out or sys.stdout
        self._colour_of: dict[str, int] = {}
        self._in_colour = self._out.isatty()
        self._follow = follow
        self._following = False
        self._lock = threading.Lock()

    def report(self, name: str, message: str) -> None:
        """Show what happened to a process."""
        first, *rest = message.splitlines() or [""]
        self._write(name, first if not self._in_colour else f"\033[1m{first}{RESET}")
        for line in rest:
            self._write(name, line)

    def log_line(self, name: str, line: str) -> None:
        """Show a line of a log, once `begin_to_follow` was called; before that the logs only hold how servers start."""
        if self._following:
            self._write(name, line)

    def begin_to_follow(self) -> None:
        """Show the logs from now on, if they are to be shown."""
        self._following = self._follow

    def _write(self, name: str, text: str) -> None:
        with self._lock:
            colour = self._colour_of.setdefault(name, COLOURS[len(self._colour_of) % len(COLOURS)])
            prefix = f"{name:<20} | "
            shown = f"\033[{colour}m{prefix}{RESET}{text}" if self._in_colour else f"{prefix}{text}"
            self._out.write(shown + "\n")
            self._out.flush()


def print_status(status: StackStatus) -> None:
    """Print the parts of a stack as a table."""
    if not status.running:
        print(f"no stack is running in {status.data_dir}")
        return
    table = Table(title=f"Fairlane in {status.data_dir}, supervisor {status.supervisor_pid}", title_justify="left")
    for column in ("part", "state", "pid", "deaths", "address", "health"):
        table.add_column(column, overflow="fold")
    for part in status.parts:
        table.add_row(*_row(part))
    RichConsole().print(table)


def _row(part: PartStatus) -> Sequence[str]:
    health = "-" if part.problem is None and not part.checked else (part.problem or "ok")
    pid = "" if part.pid is None else str(part.pid)
    return (part.name, part.state, pid, str(part.deaths), part.address, health)
