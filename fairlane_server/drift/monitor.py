"""One statistic of one stream: its reference, how far blocks usually are from it, and the evidence of a change. Pure.

First the reference is collected, then the distances of further blocks from it, and then every block is judged by the
rank of its distance. Each of the first two takes a number of blocks and a time, so that both have all hours of the day.
A block is ranked among blocks of the same part of the day, since nights differ from days without drift. Ranks within
categories are as valid (Vovk, Gammerman and Shafer 2022, chapter 4, "Mondrian").
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from fairlane_server.drift.distances import CategoryReference, DriftReference, NumberReference, VectorReference
from fairlane_server.drift.evidence import NO_EVIDENCE, DriftEvidence, p_value, score_bin
from fairlane_server.drift.figures import DriftStatistic, Figure, FigureKind

REFERENCE_BLOCKS = 32
CALIBRATION_BLOCKS = 64
RECENT_BLOCKS = 16
"""Of which figures are kept, to say what changed."""

_DAY_MS = 86_400_000
_PART_OF_DAY_MS = _DAY_MS // 8
_LONGER = 8
_MOST_COLLECTED: Mapping[FigureKind, int] = {
    FigureKind.NUMBER: 4_096,
    FigureKind.CATEGORY: 4_096,
    FigureKind.VECTOR: 1_024,
}


class MonitorPhase(StrEnum):
    """What blocks are for."""

    REFERENCE = "reference"
    CALIBRATION = "calibration"
    WATCHING = "watching"


@dataclass(frozen=True, slots=True)
class FigureBlock:
    """Figures of one statistic from a block of requests. All blocks of a statistic have equally many."""

    began_ms: int
    ended_ms: int
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class StatisticMonitor:
    """State of one statistic of one stream.

    Attributes:
        since_ms: when the phase began; None before the first block.
        blocks: of the phase.
        collected: figures of the reference, as long as it is collected.
        scores: numbers of the blocks behind the reference, by part of the day and by the bin of their distance.
        judged: blocks that were judged.
        recent: the latest blocks behind the reference.
    """

    phase: MonitorPhase = MonitorPhase.REFERENCE
    since_ms: int | None = None
    blocks: int = 0
    collected: tuple[Figure, ...] = ()
    reference: DriftReference | None = None
    scores: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    evidence: DriftEvidence = NO_EVIDENCE
    judged: int = 0
    recent: tuple[FigureBlock, ...] = ()

    @property
    def is_watching(self) -> bool:
        return self.phase is MonitorPhase.WATCHING


def after_block(
    monitor: StatisticMonitor, block: FigureBlock, kind: FigureKind, phase_ms: int, chance: float
) -> StatisticMonitor:
    """The state with one more block of figures of a kind. ``phase_ms`` is the least duration of the reference, and of
    the calibration; ``chance``, uniform on (0, 1], orders equal distances."""
    since_ms = block.began_ms if monitor.since_ms is None else monitor.since_ms
    counted = replace(monitor, since_ms=since_ms, blocks=monitor.blocks + 1)
    lasted = block.ended_ms - since_ms >= phase_ms
    if monitor.phase is MonitorPhase.REFERENCE:
        collected = _thinned((*monitor.collected, *block.figures), _MOST_COLLECTED[kind])
        if lasted and counted.blocks >= REFERENCE_BLOCKS:
            return StatisticMonitor(MonitorPhase.CALIBRATION, reference=_REFERENCES[kind](collected))
        return replace(counted, collected=collected)
    assert monitor.reference is not None  # noqa: S101 - the first phase made it
    score = score_bin(monitor.reference.distance(block.figures))
    part = part_of_day(block)
    comparable = monitor.scores.get(part, {})
    after = replace(
        counted,
        scores={**monitor.scores, part: {**comparable, score: comparable.get(score, 0) + 1}},
        recent=(*monitor.recent, block)[-RECENT_BLOCKS:],
    )
    if monitor.phase is MonitorPhase.CALIBRATION:
        is_enough = lasted and counted.blocks >= CALIBRATION_BLOCKS
        return replace(after, phase=MonitorPhase.WATCHING, since_ms=None, blocks=0) if is_enough else after
    p = p_value(comparable, score, chance)
    return replace(after, judged=monitor.judged + 1, evidence=monitor.evidence.after(p, block.began_ms))


def part_of_day(block: FigureBlock) -> int:
    """Which eighth of the day (UTC) a block began in; one number for all that last longer than that."""
    if block.ended_ms - block.began_ms >= _PART_OF_DAY_MS:
        return _LONGER
    return block.began_ms % _DAY_MS // _PART_OF_DAY_MS


def chance_of(*names: object) -> float:
    """A number on (0, 1] that these names determine, as good as drawn: several recorders, and one that repeats a look,
    draw the same."""
    digest = hashlib.sha256("\0".join(map(str, names)).encode()).digest()
    return (int.from_bytes(digest[:8]) + 1) / 2**64


@dataclass(frozen=True, slots=True)
class DriftFinding:
    """A change of one statistic.

    Attributes:
        effect: how much figures of today differ from the reference: the largest difference of the distribution
            functions, the part in other categories, or standard deviations by direction.
        log_evidence: logarithm of the evidence; ``log_needed``: what it had to reach.
        since_ms: the estimated time of the change.
        blocks: judged since then.
        before, now: for people: quantiles of numbers, parts of categories.
        reference: what the figures were like.
    """

    statistic: str
    effect: float
    log_evidence: float
    log_needed: float
    since_ms: int
    until_ms: int
    blocks: int
    before: Mapping[str, float]
    now: Mapping[str, float]
    reference: DriftReference


def finding_of(monitor: StatisticMonitor, statistic: DriftStatistic, log_needed: float) -> DriftFinding | None:
    """What the evidence shows, once it reaches ``log_needed``."""
    if not monitor.is_watching or monitor.reference is None or monitor.evidence.log < log_needed:
        return None
    since_ms = monitor.evidence.changed_at_ms
    changed = [block for block in monitor.recent if block.began_ms >= since_ms]
    figures = [figure for block in changed for figure in block.figures]
    return DriftFinding(
        statistic.name,
        monitor.reference.effect(figures),
        monitor.evidence.log,
        log_needed,
        since_ms,
        changed[-1].ended_ms,
        len(changed),
        *_summaries(monitor.reference, figures),
        monitor.reference,
    )


_SHOWN_QUANTILES = (0.05, 0.5, 0.95)
_MOST_SHOWN = 5


def _summaries(reference: DriftReference, figures: Sequence[Any]) -> tuple[dict[str, float], dict[str, float]]:
    if isinstance(reference, NumberReference):
        present = NumberReference.of(figures)
        before, now = (
            {f"p{100 * part:g}": one.quantile(part) for part in _SHOWN_QUANTILES} for one in (reference, present)
        )
        return before, now
    if isinstance(reference, CategoryReference):
        usual, today = (_parts(one.counts) for one in (reference, CategoryReference.of(figures)))
        shown = sorted(usual.keys() | today.keys(), key=lambda name: -abs(usual.get(name, 0) - today.get(name, 0)))
        before, now = ({name: one.get(name, 0.0) for name in shown[:_MOST_SHOWN]} for one in (usual, today))
        return before, now
    return {}, {}


def _parts(counts: Mapping[str, int]) -> dict[str, float]:
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items() if count}


def _thinned(figures: tuple[Figure, ...], most: int) -> tuple[Figure, ...]:
    """Every second one, when there are too many."""
    return figures[::2] if len(figures) > most else figures


_REFERENCES: Mapping[FigureKind, Callable[[Sequence[Any]], DriftReference]] = {
    FigureKind.NUMBER: NumberReference.of,
    FigureKind.CATEGORY: CategoryReference.of,
    FigureKind.VECTOR: VectorReference.of,
}
