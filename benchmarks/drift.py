"""drift: false alarms in long streams without drift, and requests until a change is found, by three rules.

Streams are simulated figures of requests in blocks of 64, one block each five minutes; lengths are those of the trace.
Ours learns for two days and is set as a deployment with 20 statistics has it: one false alarm a month for all of them.
The others know the same two days: the population stability index of 512 requests against a threshold, and tests of
Kolmogorov and Smirnov of 512 requests, made for one look.

Alarms without drift are also counted with a low threshold, of one alarm in 1,000 blocks, so that there are some to
count. The stated rate holds where blocks are exchangeable. Where they are not, as with hours of the day and slow waves,
and in the trace as it came, the figures show what happens. Requests until a change is found are the stream's; a change
that is not found within 12,800 requests counts as that many.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np

from benchmarks.drift_rules import DriftRule, fixed_threshold, log_needed_of, repeated_test, sequential
from benchmarks.drift_traffic import (
    BLOCK,
    BLOCKS_OF_DAY,
    CHANGES,
    QUIET,
    DriftChange,
    QuietStream,
    Values,
    trace_blocks,
)
from benchmarks.result import Figure, Result
from fairlane_server.drift.figures import FigureKind
from fairlane_server.drift.monitor import CALIBRATION_BLOCKS, REFERENCE_BLOCKS

NAME = "drift"
RUNS = 10
DAYS = 5
SEED = 58
HOW = f"{RUNS} simulated streams of each kind; the same on every machine"

OURS, THRESHOLD, REPEATED = "", "fixed threshold: ", "repeated test: "
LOW_BLOCKS = 1_000
LEARNING = 2 * BLOCKS_OF_DAY
MOST_BLOCKS = 200
QUIET_BLOCKS_BEFORE = 100
TRACE_BLOCK = 32
WATCHED = 20
RULES: Mapping[str, DriftRule] = {
    OURS: sequential(log_needed_of(WATCHED), BLOCKS_OF_DAY),
    THRESHOLD: fixed_threshold,
    REPEATED: repeated_test,
}
_LOW = sequential(math.log(LOW_BLOCKS), BLOCKS_OF_DAY)


def run(*, runs: int = RUNS, days: int = DAYS, changes: Sequence[DriftChange] = CHANGES) -> Result:
    """Simulate all streams."""
    figures = [figure for stream in QUIET for figure in quiet_figures(stream, runs, days)]
    figures += trace_figures()
    cells: list[dict[str, float]] = []
    for change in changes:
        found = {name: requests_until_found(change, rule, runs) for name, rule in rules_for(change.kind).items()}
        figures += [figure for name, one in found.items() for figure in change_figures(f"{name}{change.name}", one)]
        cells.append({f"{name}{change.name}: median requests": float(median(one)) for name, one in found.items()})
    return Result(NAME, tuple(figures), tuple(cells))


def rules_for(kind: FigureKind) -> Mapping[str, DriftRule]:
    """The others know no vectors."""
    return {OURS: RULES[OURS]} if kind is FigureKind.VECTOR else RULES


def quiet_figures(stream: QuietStream, runs: int, days: int) -> Iterator[Figure]:
    """Alarms in a stream without drift, per 1,000 blocks behind those that are learned from."""
    blocks = days * BLOCKS_OF_DAY
    drawn = [stream.draw(SEED + number, LEARNING + blocks) for number in range(runs)]
    judged = runs * blocks
    low = _alarms(_LOW, drawn)
    aim = stream.is_exchangeable
    rate = Figure(f"{stream.name}: alarms per 1,000 blocks, one stated", 1_000 * low / judged, "alarms")
    yield Figure(rate.name, rate.value, rate.unit, "at most", 1.0) if aim else rate
    for name, rule in RULES.items():
        value = 1_000 * _alarms(rule, drawn) / judged
        yield Figure(f"{name}{stream.name}: alarms per 1,000 blocks", value, "alarms")


def trace_figures() -> Iterator[Figure]:
    """The hour of the trace as it came, with smaller blocks, since it is short."""
    values = trace_blocks(TRACE_BLOCK)
    usual = REFERENCE_BLOCKS + CALIBRATION_BLOCKS
    rules = {**RULES, OURS: sequential(log_needed_of(WATCHED), 0)}
    for name, rule in rules.items():
        found = sum(1 for _ in rule(values, FigureKind.NUMBER, usual))
        yield Figure(f"{name}hour of the trace: alarms", float(found), "alarms")


def requests_until_found(change: DriftChange, rule: DriftRule, runs: int) -> list[int]:
    """Of each run, the requests from the change to the first alarm behind it, those of the last block included."""
    usual = LEARNING + QUIET_BLOCKS_BEFORE
    found = []
    for number in range(runs):
        values = change.draw(SEED + number, usual, MOST_BLOCKS)
        block = next(rule(values, change.kind, usual), MOST_BLOCKS - 1)
        found.append((block + 1) * BLOCK)
    return found


def change_figures(name: str, requests: Sequence[int]) -> Iterator[Figure]:
    """Requests until a change was found, and the part of the runs in which it was."""
    yield Figure(f"{name}: found", sum(one < MOST_BLOCKS * BLOCK for one in requests) / len(requests), "ratio")
    yield Figure(f"{name}: requests until then, median", float(median(requests)), "requests")
    yield Figure(f"{name}: requests until then, p95", float(np.quantile(requests, 0.95)), "requests")


def _alarms(rule: DriftRule, streams: Sequence[Values]) -> int:
    return sum(1 for values in streams for _ in rule(values, FigureKind.NUMBER, LEARNING))
