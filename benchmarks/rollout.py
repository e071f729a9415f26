"""rollout: candidates in simulated rollouts, judged by three rules over the same requests.

Each rollout goes through the steps of 1, 5, 25 and 50 percent of the traffic, until it is rolled back, promoted, or a
step has lasted a day or 120,000 requests. Latencies are those of the simulated engine behind a queue that both arms
share (``rollout_traffic.py``), with sizes of the trace. The rules are ours (``sequential``), the thresholds of common
rollout tools for failures and latency (``fixed_threshold``), and tests of all four guards, made for one look, that are
looked at every second (``repeated_test``).

A verdict is right if a candidate that is better, equal, or worse within the tolerance is promoted, and any other is
rolled back. Requests until the verdict are the candidate's, over all its steps. Harm is what these requests suffered
because of the candidate: answers that failed or were wrong, and seconds beyond those of the champion. ``--json`` gives
every candidate on every shape of traffic.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.result import Bound, Figure, Result
from benchmarks.rollout_rules import ROLLOUT, Rule, fixed_threshold, repeated_test, sequential
from benchmarks.rollout_traffic import CANDIDATES, SHAPES, ArmTraffic, Candidate, RolloutTraffic, SimulatedStep
from fairlane_server.rollouts.verdict import RolloutVerdict

NAME = "rollout"
RUNS = 10
"""Of each candidate on each shape."""
SEED = 20
HOW = (
    f"{RUNS} simulated rollouts of each candidate on each of {len(SHAPES)} shapes of traffic; the same on every machine"
)

OURS, THRESHOLD, REPEATED = "", "fixed threshold: ", "repeated test: "
RULES: Mapping[str, Rule] = {OURS: sequential, THRESHOLD: fixed_threshold, REPEATED: repeated_test}
LOW = "low traffic"
NO_WORSE = ("equal", "better")
LEAST_RIGHT = 0.95
MOST_WRONG = 0.02
_WORDS = {"bad_answers": "bad answers", "excess_s": "excess seconds"}


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """End of one rollout under one rule."""

    shape: str
    candidate: Candidate
    rule: str
    verdict: RolloutVerdict
    requests: int
    bad_answers: int
    excess_s: float

    @property
    def is_right(self) -> bool:
        return self.verdict is (RolloutVerdict.PASSED if self.candidate.is_good else RolloutVerdict.WORSE)

    @property
    def is_wrong(self) -> bool:
        """The opposite of right; undecided is neither."""
        return not self.is_right and self.verdict is not RolloutVerdict.UNDECIDED


def run(*, runs: int = RUNS, shapes: Sequence[ArmTraffic] = SHAPES) -> Result:
    """Judge all rollouts by all rules."""
    ends = [end for shape in shapes for end in rollouts(shape, runs)]
    return Result(NAME, tuple(figures(ends)), tuple(cells(ends)))


def rollouts(shape: ArmTraffic, runs: int, candidates: Sequence[Candidate] = CANDIDATES) -> Iterator[RolloutEnd]:
    """Each candidate's rollouts on this shape, under each rule."""
    for place, candidate in enumerate(candidates):
        for number in range(runs):
            traffic = RolloutTraffic(shape, SEED + 1_000 * place + number)
            steps: list[SimulatedStep] = []
            for name, rule in RULES.items():
                yield _rollout(name, rule, shape, candidate, traffic, steps)


def _rollout(
    name: str,
    rule: Rule,
    shape: ArmTraffic,
    candidate: Candidate,
    traffic: RolloutTraffic,
    steps: list[SimulatedStep],
) -> RolloutEnd:
    """``steps``: those drawn so far, so that all rules see the same requests."""
    verdict, requests, bad, excess_s = RolloutVerdict.UNDECIDED, 0, 0, 0.0
    for place, percent in enumerate(ROLLOUT.steps[:-1]):
        if place == len(steps):
            steps.append(traffic.step(candidate, percent))
        end = rule(steps[place], place)
        arm = steps[place].candidate
        verdict = end.verdict
        requests += int(np.searchsorted(arm.arrived_s, end.at_s, side="right"))
        bad_here, excess_here = arm.harm(end.at_s)
        bad, excess_s = bad + bad_here, excess_s + excess_here
        if verdict is not RolloutVerdict.PASSED:
            break
    return RolloutEnd(shape.name, candidate, name, verdict, requests, bad, excess_s)


def figures(ends: Sequence[RolloutEnd]) -> Iterator[Figure]:
    """By rule, by candidate, and by shape. Only the last have low traffic, of which a day may be too little."""
    usual = [end for end in ends if end.shape != LOW]
    for rule in RULES:
        chosen = _of(usual, rule)
        good = [end for end in chosen if end.candidate.name in NO_WORSE]
        yield _aimed(rule, "right verdicts", _part(chosen, "is_right"), "at least", LEAST_RIGHT)
        yield _aimed(rule, "rollbacks of equal and better", _part(good, "is_wrong"), "at most", MOST_WRONG)
    worse = [end for end in usual if not end.candidate.is_good]
    for what, word in _WORDS.items():
        ours, others = (sum(getattr(end, what) for end in _of(worse, rule)) for rule in (OURS, THRESHOLD))
        name = f"{word} of worse candidates, divided by those of fixed thresholds"
        yield Figure(name, ours / max(1, others), "ratio", "at most", 1.0)
    for name in dict.fromkeys(end.candidate.name for end in usual):
        for rule in RULES:
            yield from _of_candidate(f"{rule}{name}", [end for end in _of(usual, rule) if end.candidate.name == name])
    for shape in dict.fromkeys(end.shape for end in ends):
        for rule in RULES:
            chosen = [end for end in _of(ends, rule) if end.shape == shape]
            yield Figure(f"{rule}{shape}: right", _part(chosen, "is_right"), "ratio")
            yield Figure(f"{rule}{shape}: wrong", _part(chosen, "is_wrong"), "ratio")


def _aimed(rule: str, name: str, value: float, bound: Bound, aim: float) -> Figure:
    """The aims are ours; other rules are only compared."""
    return Figure(name, value, "ratio", bound, aim) if rule == OURS else Figure(f"{rule}{name}", value, "ratio")


def _of_candidate(name: str, ends: Sequence[RolloutEnd]) -> Iterator[Figure]:
    yield Figure(f"{name}: right", _part(ends, "is_right"), "ratio")
    decided = [end.requests for end in ends if end.verdict is not RolloutVerdict.UNDECIDED]
    if decided:
        yield Figure(f"{name}: requests until the verdict, median", float(np.median(decided)), "requests")
        yield Figure(f"{name}: requests until the verdict, p95", float(np.quantile(decided, 0.95)), "requests")
    for what, unit in (("bad_answers", "answers"), ("excess_s", "s")):
        mean = float(np.mean([getattr(end, what) for end in ends]))
        if mean:
            yield Figure(f"{name}: {_WORDS[what]}", mean, unit)


def _of(ends: Sequence[RolloutEnd], rule: str) -> list[RolloutEnd]:
    return [end for end in ends if end.rule == rule]


def cells(ends: Sequence[RolloutEnd]) -> Iterator[dict[str, float]]:
    """One dict for each shape: every candidate and rule on it."""
    by_shape: dict[str, dict[tuple[str, str], list[RolloutEnd]]] = defaultdict(lambda: defaultdict(list))
    for end in ends:
        by_shape[end.shape][end.rule, end.candidate.name].append(end)
    for shape, found in by_shape.items():
        yield {
            f"{shape}: {rule}{name}: {what}": value
            for (rule, name), chosen in found.items()
            for what, value in (
                ("right", _part(chosen, "is_right")),
                ("wrong", _part(chosen, "is_wrong")),
                ("median requests", float(np.median([end.requests for end in chosen]))),
                ("p95 requests", float(np.quantile([end.requests for end in chosen], 0.95))),
                ("bad answers", float(np.mean([end.bad_answers for end in chosen]))),
                ("excess s", float(np.mean([end.excess_s for end in chosen]))),
            )
        }


def _part(ends: Sequence[RolloutEnd], name: str) -> float:
    return float(np.mean([getattr(end, name) for end in ends])) if ends else 0.0
