"""Streams of requests of one tenant, model and task: an open block, and the monitors of their statistics. Pure.

Requests and answers have a stream each. That of the requests is of all versions of the model; each version has one of
its answers, so that a new champion begins anew with a reference of its own. A block takes a sample of equal size,
whatever the traffic: the requests with the smallest digests, so that it does not matter in which order, and how often,
they are read.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fairlane.records import SourceCoordinate
from fairlane_server.drift.figures import DriftStatistic, Figure, statistics_of
from fairlane_server.drift.monitor import (
    DriftFinding,
    FigureBlock,
    StatisticMonitor,
    after_block,
    chance_of,
    finding_of,
)

MONTH_MS = 30 * 86_400_000
LEAST_BLOCKS_PER_ALARM = 1_000
"""However few statistics are watched."""


@dataclass(frozen=True, slots=True, order=True)
class StreamKey:
    """Whose requests, to what; ``version`` is empty for the requests, and that of the answers otherwise."""

    tenant: str
    model: str
    task: str
    version: str

    @property
    def of_answers(self) -> bool:
        return self.version != ""

    @property
    def statistics(self) -> list[DriftStatistic]:
        return statistics_of(self.task, of_answer=self.of_answers)


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """One request of a block.

    Attributes:
        place: digest of its id, which orders the requests of a block.
        work: where its text is in the log; None if it may not be read.
    """

    place: int
    answered_at_ms: int
    figures: Mapping[str, Figure]
    work: SourceCoordinate | None = None


@dataclass(frozen=True, slots=True)
class OpenBlock:
    """A block that takes requests, in the order of their places.

    Attributes:
        began_ms: when its first request was answered; None: it has none. Requests that were answered before
            ``not_before_ms`` belong to the block before.
        ended_ms: when its last one was.
    """

    not_before_ms: int = 0
    began_ms: int | None = None
    ended_ms: int = 0
    sample: tuple[SampledRequest, ...] = ()

    def with_requests(self, requests: Iterable[SampledRequest], size: int) -> "OpenBlock":
        """With these, of which it may have some."""
        fresh = [one for one in requests if one.answered_at_ms >= self.not_before_ms]
        if not fresh:
            return self
        by_place = {one.place: one for one in (*fresh, *self.sample)}
        times = [one.answered_at_ms for one in fresh]
        return replace(
            self,
            began_ms=min(times if self.began_ms is None else (*times, self.began_ms)),
            ended_ms=max(*times, self.ended_ms),
            sample=tuple(by_place[place] for place in sorted(by_place)[:size]),
        )

    def is_complete(self, size: int, least_ms: int) -> bool:
        """Whether it is large and long enough."""
        return len(self.sample) == size and self.ended_ms - (self.began_ms or 0) >= least_ms

    def figures(self, statistic: DriftStatistic, size: int) -> FigureBlock | None:
        """Those of one statistic; None unless there are as many as every block has."""
        wanted = size if statistic.most_of_block is None else min(size, statistic.most_of_block)
        found = [one.figures[statistic.name] for one in self.sample if statistic.name in one.figures]
        if len(found) < wanted or self.began_ms is None:
            return None
        return FigureBlock(self.began_ms, self.ended_ms, tuple(found[:wanted]))


@dataclass(frozen=True, slots=True)
class DriftRules:
    """How drift is looked for.

    Attributes:
        block_requests: size of a block.
        block_ms: least duration of a block.
        phase_ms: least duration of a reference, and of its calibration.
        false_alarms_per_month: of the whole deployment, on average, at most.
    """

    block_requests: int
    block_ms: int
    phase_ms: int
    false_alarms_per_month: float

    def log_needed(self, watched: int) -> float:
        """Logarithm of the evidence of an alarm, while so many statistics are watched: the most blocks that they judge
        in a month, by the false alarms that these may cause."""
        blocks = watched * MONTH_MS / self.block_ms
        return math.log(max(LEAST_BLOCKS_PER_ALARM, blocks / self.false_alarms_per_month))


@dataclass(frozen=True, slots=True)
class DriftStream:
    """State of one stream."""

    key: StreamKey
    block: OpenBlock = OpenBlock()
    monitors: Mapping[str, StatisticMonitor] = field(default_factory=dict)

    @property
    def watched(self) -> int:
        """Statistics that are judged."""
        return sum(one.is_watching for one in self.monitors.values())

    def with_requests(self, requests: Iterable[SampledRequest], rules: DriftRules) -> "DriftStream":
        return replace(self, block=self.block.with_requests(requests, rules.block_requests))

    def is_due(self, rules: DriftRules) -> bool:
        """Whether its block is complete, and ``judged`` is to be called."""
        return self.block.is_complete(rules.block_requests, rules.block_ms)

    def judged(self, rules: DriftRules, log_needed: float) -> "tuple[DriftStream, list[DriftFinding]]":
        """The stream with its complete block judged and a new one open, and what was found. A statistic with a finding
        begins with a new reference: what is found once is the new normal."""
        findings: list[DriftFinding] = []
        monitors = dict(self.monitors)
        for statistic in self.key.statistics:
            block = self.block.figures(statistic, rules.block_requests)
            if block is None:
                continue
            monitor = monitors.get(statistic.name, StatisticMonitor())
            chance = chance_of(*_names(self.key), statistic.name, block.began_ms)
            monitor = after_block(monitor, block, statistic.kind, rules.phase_ms, chance)
            finding = finding_of(monitor, statistic, log_needed)
            if finding is not None:
                findings.append(finding)
                monitor = StatisticMonitor()
            monitors[statistic.name] = monitor
        return DriftStream(self.key, OpenBlock(self.block.ended_ms + 1), monitors), findings


def strangest(strangeness: Sequence[float], most: int) -> list[int]:
    """Indices of those that make most of a difference, the first of equal ones first."""
    return sorted(range(len(strangeness)), key=lambda place: (-strangeness[place], place))[:most]


def _names(key: StreamKey) -> tuple[str, str, str, str]:
    return key.tenant, key.model, key.task, key.version
