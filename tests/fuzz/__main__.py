"""``python -m tests.fuzz --seconds N``: fuzz what tenants and strangers may send; exit status 1 for a finding.

First within a process, fast; then live, against real processes with another tenant's requests beside it.
"""

import argparse
import json
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz import hostile_calls, hostile_records, in_process, live
from tests.fuzz.report import Outcome

_IN_PROCESS_PART = 0.3
_TARGETS = {
    "records": (("records",), ("records", "codecs", "odd-parts", "counts", "bombs", "cancels")),
    "batches": (("batches",), ("codecs", "header-bytes", "batches")),
    "http": (("bodies",), hostile_calls.KINDS),
    "all": (("records", "bodies", "batches"), (*hostile_records.KINDS, *hostile_calls.KINDS)),
}
"""Of each the targets within a process, and the kinds of live actions."""


def main(arguments: list[str] | None = None) -> int:
    """Fuzz, and say what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together, beside starting servers")
    parser.add_argument("--seed", type=int, help="of all choices; printed when none is given")
    parser.add_argument("--target", choices=tuple(_TARGETS), default="all")
    parser.add_argument("--level", choices=("process", "live", "both"), default="both")
    parser.add_argument(
        "--without", nargs="*", choices=live.KINDS, default=(), help="kinds of live actions to leave out"
    )
    parser.add_argument("--input", type=Path, help="try the input of a finding again")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    outcomes = []
    for outcome in _again(options.input) if options.input else _run(options, seed):
        outcomes.append(outcome)
        if not options.json:
            print("\n".join(outcome.lines()), flush=True)  # noqa: T201 - what the command says
    found = any(outcome.reason for outcome in outcomes)
    if options.json:
        print(json.dumps({"seed": seed, "outcomes": [outcome.as_json() for outcome in outcomes]}))  # noqa: T201
    else:
        print(f"seed {seed}")  # noqa: T201
    return 1 if found else 0


def _run(options: argparse.Namespace, seed: int) -> Iterator[Outcome]:
    targets, kinds = _TARGETS[options.target]
    kinds = tuple(kind for kind in kinds if kind not in options.without)
    inside_s = 0.0 if options.level == "live" else options.seconds
    if options.level == "both":
        inside_s *= _IN_PROCESS_PART
    if options.level != "live":
        for target in targets:
            yield in_process.run(target, inside_s / len(targets), seed)
    if options.level != "process" and kinds:
        yield live.run(options.seconds - inside_s, seed, kinds)


def _again(file: Path) -> Iterator[Outcome]:
    kind = file.name.partition("-")[0]
    yield live.run(0.0, 0, (), file) if kind == "live" else in_process.run(kind, 0.0, 0, file)


if __name__ == "__main__":
    sys.exit(main())
