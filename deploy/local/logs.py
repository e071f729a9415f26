"""The log files of the stack: kept at a bounded size, followed line by line, and read from the end."""

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

MAX_LOG_BYTES = 8 * 1024 * 1024
FOLLOW_INTERVAL_S = 0.1
MAX_READ_BYTES = 1024 * 1024
TAIL_BYTES = 64 * 1024

LineSink = Callable[[str, str], None]
"""Receives the name of a process and one line of its log, without the line end."""


def log_path(folder: Path, name: str) -> Path:
    """The log file of the process `name`."""
    return folder / f"{name}.log"


def rotate(path: Path) -> None:
    """Move a log of the last run out of the way, as `NAME.log.1`; only one old log is kept."""
    if path.exists():
        path.replace(path.with_name(path.name + ".1"))


def tail(path: Path, lines: int) -> list[str]:
    """The last `lines` lines of a log (of its last 64 KiB); empty if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


class LogKeeper:
    """Follows the logs and cuts each that grows past the bound, in a thread of its own.

    Args:
        sink: receives every new line; None: the logs are only cut.
        max_bytes: a longer log is moved to `NAME.log.1` and begins again; None: the logs are only followed.
        from_end: skip the present lines.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        sink: LineSink | None = None,
        max_bytes: int | None = MAX_LOG_BYTES,
        *,
        from_end: bool = False,
    ) -> None:
        self._followed = [_Followed(name, log_path(folder, name), from_end) for name in names]
        self._sink = sink
        self._max_bytes = max_bytes
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Pass on what is left and end."""
        self._stopping.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stopping.wait(FOLLOW_INTERVAL_S):
            self._pass()
        self._pass()
        for followed in self._followed:
            followed.flush(self._sink)

    def _pass(self) -> None:
        for followed in self._followed:
            followed.read(self._sink)
            if self._max_bytes is not None:
                followed.cut(self._max_bytes)


class _Followed:
    """One log file and how far it was read."""

    def __init__(self, name: str, path: Path, from_end: bool) -> None:
        self._name = name
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._partial = b""

    def read(self, sink: LineSink | None) -> None:
        if sink is None:
            return
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:  # cut, or begun anew by the next run
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(MAX_READ_BYTES)
        except OSError:
            return
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            sink(self._name, line.decode("utf-8", errors="replace").rstrip("\r"))

    def flush(self, sink: LineSink | None) -> None:
        if sink is not None and self._partial:
            sink(self._name, self._partial.decode("utf-8", errors="replace"))
            self._partial = b""

    def cut(self, max_bytes: int) -> None:
        # Copied and truncated rather than renamed: the process goes on writing to the file it has open.
        # A line written between the two is lost, which a log can bear.
        try:
            if self._path.stat().st_size <= max_bytes:
                return
            shutil.copyfile(self._path, self._path.with_name(self._path.name + ".1"))
            os.truncate(self._path, 0)
        except OSError:
            return
        self._offset = 0
