"""``python -m tests.fuzz.worker``: one target in a process of its own, which may crash, hang or grow."""

import argparse
import json
import mmap
import os
import resource
import struct
import sys
import time
import traceback
from pathlib import Path

from tests.fuzz import checks
from tests.fuzz.mutation import MOST_BYTES

SLOT = struct.Struct("<QQ")
SLOT_BYTES = SLOT.size + 64 * MOST_BYTES
MOST_CPU_S = 2.0
MOST_GROWTH_BYTES = 128 * 1024 * 1024
FOUND = 3
_ADDRESS_SPACE_BYTES = 6 * 1024**3


def target_of(name: str) -> checks.Target:
    """A target that runs within a process."""
    match name:
        case "records":
            return checks.records()
        case "bodies":
            return checks.bodies()
        case "batches":
            return checks.batches()
    raise SystemExit(f"no target within a process: {name}")


def main() -> int:
    """Run cases until the time is over, each written to the slot before it is tried. Prints one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("slot", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--input", type=Path)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    target = target_of(options.target)
    if options.input is not None:
        target = checks.Target((options.input.read_bytes(),), target.mutated, target.check)
        options.seconds = 0.0
    descriptor = os.open(options.slot, os.O_RDWR)
    with mmap.mmap(descriptor, SLOT_BYTES) as slot:
        os.close(descriptor)
        reason, cases = _run(target, slot, options.seed, time.monotonic() + options.seconds)
    print(json.dumps({"cases": cases, "reason": reason}))  # noqa: T201 - read by the parent
    return FOUND if reason else 0


def _run(target: checks.Target, slot: mmap.mmap, seed: int, until_s: float) -> tuple[str | None, int]:
    # What is loaded and built once is no growth of an input.
    warm, number = target.seeds[-1], 0
    target.check(warm)
    while number < len(target.seeds) or time.monotonic() < until_s:
        data = target.case(seed, number)
        slot[SLOT.size : SLOT.size + len(data)] = data
        slot[: SLOT.size] = SLOT.pack(number + 1, len(data))
        if reason := _tried(target, data):
            return reason, number
        number += 1
    return None, number


def _tried(target: checks.Target, data: bytes) -> str | None:
    before, began = _most_bytes(), time.process_time()
    try:
        target.check(data)
    except checks.Finding as finding:
        return str(finding)
    except Exception as error:  # noqa: BLE001 - any exception is a finding
        *_, frame = traceback.extract_tb(error.__traceback__)
        return f"{type(error).__name__} at {frame.filename}:{frame.lineno}"
    taken_s, growth = time.process_time() - began, _most_bytes() - before
    if taken_s > MOST_CPU_S:
        return f"took {taken_s:.1f} s of CPU for {len(data)} bytes"
    if growth > MOST_GROWTH_BYTES:
        return f"took {growth >> 20} MiB of memory for {len(data)} bytes"
    return None


def _most_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1_024


if __name__ == "__main__":
    sys.exit(main())
