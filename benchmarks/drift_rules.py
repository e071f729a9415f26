"""Rules that find drift in blocks of figures: ours, and two that are in common use."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from scipy.stats import chi2_contingency, ks_2samp

from benchmarks.drift_traffic import BLOCK_MS, FIGURE_OF, Values
from fairlane_server.drift.evidence import NO_EVIDENCE
from fairlane_server.drift.figures import FigureKind
from fairlane_server.drift.monitor import FigureBlock, StatisticMonitor, after_block

WINDOW_BLOCKS = 8
"""Of the other rules: 512 requests."""
MOST_PSI = 0.2
"""From 0.2 a change counts as large (Siddiqi 2006, "Credit Risk Scorecards")."""
LEVEL = 0.01
_BINS = 10
_LEAST_PART = 1e-4

DriftRule = Callable[[Values, FigureKind, int], Iterator[int]]
"""From blocks, their kind and the number that is known to be usual: the blocks behind these at which it alarms."""


def sequential(log_needed: float, phase_blocks: int) -> DriftRule:
    """Ours. An alarm takes the evidence back, and keeps the reference."""

    def alarms(values: Values, kind: FigureKind, usual: int) -> Iterator[int]:
        drawn = np.random.default_rng(usual)
        monitor = StatisticMonitor()
        for number, block in enumerate(values.tolist()):
            began_ms = number * BLOCK_MS
            figures = tuple(map(FIGURE_OF[kind], block))
            found = FigureBlock(began_ms, began_ms + BLOCK_MS, figures)
            monitor = after_block(monitor, found, kind, phase_blocks * BLOCK_MS, 1.0 - drawn.random())
            if monitor.evidence.log >= log_needed:
                monitor = replace(monitor, evidence=NO_EVIDENCE)
                if number >= usual:
                    yield number - usual

    return alarms


def fixed_threshold(values: Values, kind: FigureKind, usual: int) -> Iterator[int]:
    """The population stability index of a window, in tenths of the reference or by category."""
    known = values[:usual].ravel()
    edges = np.unique(np.quantile(known, np.arange(1, _BINS) / _BINS)) if kind is FigureKind.NUMBER else [0.5]
    expected = _parts(known, edges)
    for end, window in _windows(values, usual):
        seen = _parts(window, edges)
        if float(np.sum((seen - expected) * np.log(seen / expected))) > MOST_PSI:
            yield end


def repeated_test(values: Values, kind: FigureKind, usual: int) -> Iterator[int]:
    """A test of Kolmogorov and Smirnov for each window, or of Pearson, made for one look."""
    known = values[:usual].ravel()
    for end, window in _windows(values, usual):
        if kind is FigureKind.NUMBER:
            p = float(ks_2samp(known, window).pvalue)
        else:
            counts = [[one.sum(), len(one) - one.sum()] for one in (known, window)]
            p = 1.0 if not counts[0][0] + counts[1][0] else float(chi2_contingency(counts).pvalue)
        if p < LEVEL:
            yield end


def log_needed_of(watched: int, false_alarms_per_month: float = 1.0) -> float:
    """As a deployment that watches so many statistics needs it."""
    return math.log(watched * 30 * 86_400_000 / BLOCK_MS / false_alarms_per_month)


def _parts(values: Values, edges: object) -> Values:
    counts = np.bincount(np.digitize(values, np.asarray(edges)), minlength=len(np.asarray(edges)) + 1)
    return np.maximum(counts / len(values), _LEAST_PART)


def _windows(values: Values, usual: int) -> Iterator[tuple[int, Values]]:
    """The last block of each window behind the usual ones, and its values."""
    for end in range(usual + WINDOW_BLOCKS, len(values) + 1, WINDOW_BLOCKS):
        yield end - usual - 1, values[end - WINDOW_BLOCKS : end].ravel()
