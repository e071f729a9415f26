"""This dispatcher's share of a pool's window, from the backlogs of all dispatchers. Pure.

Classes with a backlog anywhere share the window by class weight; within a class the dispatchers share by backlogged
weight. With w the class weights, b[d][c] the backlogged weight of class c at dispatcher d, B[c] its sum over all d:

    share[d] = sum over c with B[c] > 0 of  w[c] / (sum of w over those classes)  x  b[d][c] / B[c]

The parts within a class add up to 1, and so do the classes: dispatchers with the same reports take the whole window and
no more. Within its share a dispatcher serves its classes by w[c] x b[d][c] / B[c], so the classes of the whole fleet
are served by w.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fairlane.records import DispatchReport

REPORT_TTL_MS = 800
"""A dispatcher counts for this long after its last report, from receipt by our own clock."""


@dataclass(frozen=True, slots=True)
class FleetShare:
    """This dispatcher's part of one pool.

    Attributes:
        share: of the window, 0 to 1; 0 when only others have a backlog.
        class_weights: for this dispatcher's own queue, all above 0. For a class without a backlog here: the weight it
            would have if a tenant of weight 1 came.
        weights_by_class: the backlogged weight of the whole fleet.
        dispatchers: their number, this one included.
        fleet_class_weights: by which the classes share the whole pool.
    """

    share: float
    class_weights: Mapping[str, float]
    weights_by_class: Mapping[str, float]
    dispatchers: int
    fleet_class_weights: Mapping[str, float]

    def entitled_share(self, priority_class: str, weight: float, *, waits: bool) -> float:
        """The part of the pool that a tenant of this weight gets in this class while every backlog lasts; ``waits``:
        whether the tenant is part of the backlog already."""
        backlogged = self.weights_by_class.get(priority_class, 0.0)
        backlogged = max(backlogged, weight) if waits else backlogged + weight
        sharing = sum(
            class_weight
            for name, class_weight in self.fleet_class_weights.items()
            if name == priority_class or self.weights_by_class.get(name, 0.0) > 0
        )
        return self.fleet_class_weights[priority_class] / sharing * weight / backlogged


@dataclass(frozen=True, slots=True)
class _Heard:
    at_ms: int
    reported_at_ms: int
    weights: Mapping[str, Mapping[str, float]]
    """Backlogged weight by pool and class."""


class Fleet:
    """The other dispatchers, by their last reports; reports of ``instance_id`` itself are ignored."""

    def __init__(self, instance_id: str) -> None:
        self._instance_id = instance_id
        self._heard: dict[str, _Heard] = {}

    def report(self, report: DispatchReport, now_ms: int) -> None:
        """Add a report. A draining dispatcher is removed at once; a report older than the last is ignored."""
        if report.instance_id == self._instance_id:
            return
        last = self._heard.get(report.instance_id)
        if report.draining:
            self._heard.pop(report.instance_id, None)
        elif last is None or report.reported_at_ms >= last.reported_at_ms:
            weights = {
                load.pool: {
                    waiting.priority_class: waiting.backlogged_weight
                    for waiting in load.classes
                    if waiting.backlogged_weight > 0
                }
                for load in report.pools
            }
            self._heard[report.instance_id] = _Heard(now_ms, report.reported_at_ms, weights)
        self._drop_silent(now_ms)

    def dispatchers(self, now_ms: int) -> int:
        """The number of dispatchers, this one included."""
        self._drop_silent(now_ms)
        return 1 + len(self._heard)

    def share(self, pool: str, own: Mapping[str, float], class_weights: Mapping[str, float], now_ms: int) -> FleetShare:
        """This dispatcher's part of ``pool``. ``own`` is its own backlogged weight by class. Without any backlog the
        dispatchers have equal parts."""
        self._drop_silent(now_ms)
        fleet = {name: own.get(name, 0.0) for name in class_weights}
        for heard in self._heard.values():
            for name, weight in heard.weights.get(pool, {}).items():
                if name in fleet:
                    fleet[name] += weight
        dispatchers = 1 + len(self._heard)
        sharing = sum(class_weights[name] for name, weight in fleet.items() if weight > 0)
        own_weights = {
            name: class_weights[name] * (own[name] / weight if own.get(name, 0.0) > 0 else 1.0 / (1.0 + weight))
            for name, weight in fleet.items()
        }
        if sharing > 0:
            share = sum(own_weights[name] for name in fleet if own.get(name, 0.0) > 0) / sharing
        else:
            share = 1.0 / dispatchers
        return FleetShare(min(1.0, share), own_weights, fleet, dispatchers, dict(class_weights))

    def _drop_silent(self, now_ms: int) -> None:
        for instance_id in [name for name, heard in self._heard.items() if heard.at_ms < now_ms - REPORT_TTL_MS]:
            del self._heard[instance_id]
