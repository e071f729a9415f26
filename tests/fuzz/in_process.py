"""Runs a target in a child process and watches it: a crash, a hang and a finding all leave the input that did it."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import corpus, worker
from tests.fuzz.report import Outcome

_COMMAND = (sys.executable, "-m", worker.__name__)
_START_TIMEOUT_S = 120.0
_STALL_S = 30.0
"""Of wall time, on a busy machine; the child measures its CPU time itself."""
_POLL_S = 0.05


def run(target: str, seconds: float, seed: int, replay: Path | None = None) -> Outcome:
    """Fuzz a target for so long, or try one input again."""
    began = time.monotonic()
    with tempfile.NamedTemporaryFile(prefix="fairlane-fuzz-") as slot:
        slot.truncate(worker.SLOT_BYTES)
        arguments = [target, slot.name, "--seed", str(seed), "--seconds", str(seconds)]
        arguments += [] if replay is None else ["--input", str(replay)]
        child = subprocess.Popen((*_COMMAND, *arguments), stdout=subprocess.PIPE)
        try:
            stalled = _watch(child, Path(slot.name))
        finally:
            child.kill()
            printed, _ = child.communicate()
        number, data = _current(Path(slot.name))
    taken_s = time.monotonic() - began
    said = json.loads(printed) if printed else None
    if said is not None and said["reason"] is None and child.returncode == 0:
        return Outcome(target, said["cases"], taken_s)
    if not number:
        raise RuntimeError(f"{target}: the process tried nothing and ended with {child.returncode}")
    reason = stalled or (said["reason"] if said else f"the process ended with {child.returncode}")
    file = corpus.keep(target, data) if replay is None else replay
    return Outcome(target, number, taken_s, reason, file, f"python -m tests.fuzz --input {file}")


def _watch(child: subprocess.Popen[bytes], slot: Path) -> str | None:
    """Wait for its end. Returns why it did not come, if it has to be killed."""
    last, since, limit = 0, time.monotonic(), _START_TIMEOUT_S
    while child.poll() is None:
        number = worker.SLOT.unpack(_head(slot))[0]
        if number != last:
            last, since, limit = number, time.monotonic(), _STALL_S
        elif time.monotonic() - since > limit:
            return f"did not end within {limit:g} s"
        time.sleep(_POLL_S)
    return None


def _head(slot: Path) -> bytes:
    with slot.open("rb") as file:
        return file.read(worker.SLOT.size)


def _current(slot: Path) -> tuple[int, bytes]:
    content = slot.read_bytes()
    number, length = worker.SLOT.unpack_from(content)
    return number, content[worker.SLOT.size : worker.SLOT.size + length]
