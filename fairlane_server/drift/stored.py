"""States of drift as JSON values, for a column. Pure.

A value that cannot be read, such as one of another version, is no state: its statistic begins anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fairlane.records import SourceCoordinate
from fairlane_server.drift.distances import CategoryReference, DriftReference, NumberReference, VectorReference
from fairlane_server.drift.evidence import DriftEvidence
from fairlane_server.drift.figures import Figure
from fairlane_server.drift.monitor import FigureBlock, MonitorPhase, StatisticMonitor
from fairlane_server.drift.streams import OpenBlock, SampledRequest

_NEVER = None
"""Minus infinity, which JSON has not."""


def plain_block(block: OpenBlock) -> dict[str, Any]:
    """An open block as JSON values."""
    return asdict(block)


def block_of(plain: Mapping[str, Any]) -> OpenBlock:
    """The block that ``plain_block`` was given; an empty one if it cannot be read."""
    try:
        sample = tuple(
            SampledRequest(
                one["place"],
                one["answered_at_ms"],
                {name: _figure(value) for name, value in one["figures"].items()},
                None if one["work"] is None else SourceCoordinate(**one["work"]),
            )
            for one in plain["sample"]
        )
        return OpenBlock(plain["not_before_ms"], plain["began_ms"], plain["ended_ms"], sample)
    except (KeyError, TypeError, AttributeError):
        return OpenBlock()


def plain_monitors(monitors: Mapping[str, StatisticMonitor]) -> dict[str, Any]:
    """Monitors by statistic, as JSON values."""
    return {name: _plain_monitor(monitor) for name, monitor in monitors.items()}


def monitors_of(plain: Mapping[str, Any]) -> dict[str, StatisticMonitor]:
    """The monitors that ``plain_monitors`` was given, but for those that cannot be read."""
    found = {}
    for name, one in plain.items():
        try:
            found[name] = _monitor(one)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return found


def _plain_monitor(monitor: StatisticMonitor) -> dict[str, Any]:
    evidence = monitor.evidence
    return {
        "phase": monitor.phase.value,
        "since_ms": monitor.since_ms,
        "blocks": monitor.blocks,
        "collected": monitor.collected,
        "reference": None if monitor.reference is None else _plain_reference(monitor.reference),
        "scores": {
            str(part): {str(score): count for score, count in counts.items()} for part, counts in monitor.scores.items()
        },
        "evidence": {
            "logs": [_NEVER if log == float("-inf") else log for log in evidence.logs],
            "gains": evidence.gains,
            "began_ms": evidence.began_ms,
        },
        "judged": monitor.judged,
        "recent": [asdict(block) for block in monitor.recent],
    }


def _monitor(plain: Mapping[str, Any]) -> StatisticMonitor:
    phase, evidence = MonitorPhase(plain["phase"]), plain["evidence"]
    reference = None if plain["reference"] is None else _reference(plain["reference"])
    if (reference is None) != (phase is MonitorPhase.REFERENCE):
        raise ValueError(f"no reference in the phase {phase}")
    return StatisticMonitor(
        phase,
        plain["since_ms"],
        plain["blocks"],
        _figures(plain["collected"]),
        reference,
        {int(part): {int(score): count for score, count in counts.items()} for part, counts in plain["scores"].items()},
        DriftEvidence(
            tuple(float("-inf") if log is _NEVER else log for log in evidence["logs"]),
            tuple(evidence["gains"]),
            tuple(evidence["began_ms"]),
        ),
        plain["judged"],
        tuple(FigureBlock(one["began_ms"], one["ended_ms"], _figures(one["figures"])) for one in plain["recent"]),
    )


def _plain_reference(reference: DriftReference) -> dict[str, Any]:
    match reference:
        case NumberReference(kept):
            return {"kept": kept}
        case CategoryReference(counts):
            return {"counts": dict(counts)}
        case VectorReference(centroid, spread):
            return {"centroid": centroid, "spread": spread}
    raise TypeError(f"no reference is a {type(reference).__name__}")


def _reference(plain: Mapping[str, Any]) -> DriftReference:
    if "kept" in plain:
        return NumberReference(tuple(plain["kept"]))
    if "counts" in plain:
        return CategoryReference(plain["counts"])
    return VectorReference(tuple(plain["centroid"]), tuple(plain["spread"]))


def _figures(plain: Sequence[Any]) -> tuple[Figure, ...]:
    return tuple(map(_figure, plain))


def _figure(plain: Any) -> Figure:
    return tuple(plain) if isinstance(plain, list) else plain
