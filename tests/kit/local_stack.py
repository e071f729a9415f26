"""`make up` with the simulated engine, as a user runs it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from deploy.local.layout import PROJECT_ROOT

LAST_LINE = "Stop it with Ctrl-C."
_OF_THE_STACK = ("KAFKA_", "POSTGRES_", "REDIS_", "FILES_", "TOPIC_", "GROUP_", "ALLOW_")


def user_environment() -> dict[str, str]:
    """The environment without the addresses of the tests' own servers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_STACK)}


def up(data_dir: Path) -> subprocess.Popen[str]:
    command = (sys.executable, "-m", "deploy.local", "up", "--engine", "simulated", "--no-tail", "--data-dir")
    return subprocess.Popen(
        (*command, str(data_dir)), cwd=PROJECT_ROOT, env=user_environment(), stdout=subprocess.PIPE, text=True
    )


@contextmanager
def running(data_dir: Path) -> Iterator[str]:
    """What it prints until it is ready; stopped at the end."""
    with up(data_dir) as process:
        try:
            yield _read_until(process.stdout, LAST_LINE)
        finally:
            process.terminate()
            process.communicate(timeout=90)


def _read_until(out: IO[str] | None, last_line: str) -> str:
    assert out is not None
    lines = []
    for line in out:
        lines.append(line)
        if last_line in line:
            return "".join(lines)
    raise AssertionError(f"it ended without {last_line!r}:\n{''.join(lines)}")
