"""A process that serves a consumer over a pipe: an engine's or a check's. Started and ended alike."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path

from inference_consumers.engine_process.messages import Channel

_ROOT = Path(__file__).resolve().parents[1]


def start_child(
    python: str, module: str, name: str, environment: Mapping[str, str], output: int
) -> "tuple[subprocess.Popen[bytes], Channel]":
    """Start ``python -m module DESCRIPTOR name``, with this package on its path, and return our end of the line.
    ``output`` is where its standard streams lead, a descriptor or ``subprocess.DEVNULL``. Raises OSError."""
    search_path = os.pathsep.join(filter(None, [str(_ROOT), environment.get("PYTHONPATH", "")]))
    ours, theirs = Pipe()
    with theirs:
        try:
            process = subprocess.Popen(
                [python, "-m", module, str(theirs.fileno()), name],
                env={**environment, "PYTHONPATH": search_path},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # It is ended with its own children, and a terminal's Ctrl-C does not reach it.
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
    return process, Channel(ours)


def kill_child(process: "subprocess.Popen[bytes]") -> None:
    """End the process and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
