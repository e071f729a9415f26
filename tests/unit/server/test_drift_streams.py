"""Streams: blocks are samples of equal size in whatever order requests are read, and monitors go from a reference to
findings and back."""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import poisson

from fairlane.records import SourceCoordinate
from fairlane_server.drift.figures import (
    CONFIDENCE,
    LANGUAGE,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    REFUSALS,
    STATISTICS,
    Figure,
    FigureKind,
)
from fairlane_server.drift.monitor import (
    CALIBRATION_BLOCKS,
    REFERENCE_BLOCKS,
    FigureBlock,
    MonitorPhase,
    StatisticMonitor,
    after_block,
    chance_of,
    finding_of,
    part_of_day,
)
from fairlane_server.drift.stored import block_of, monitors_of, plain_block, plain_monitors
from fairlane_server.drift.streams import (
    DriftRules,
    DriftStream,
    OpenBlock,
    SampledRequest,
    StreamKey,
    strangest,
)

REQUESTS = StreamKey("acme", "words", "generate", "")
ANSWERS = StreamKey("acme", "words", "generate", "2")
SIZE = 32
RULES = DriftRules(SIZE, 10, 0, 1.0)
LOG_NEEDED = math.log(1e6)
LEARNING = REFERENCE_BLOCKS + CALIBRATION_BLOCKS

Draw = Callable[[random.Random], Figure]


def request(place: int, at_ms: int = 0, **figures: Figure) -> SampledRequest:
    return SampledRequest(place, at_ms, figures)


requests = st.builds(request, st.integers(-(2**63), 2**63 - 1), st.integers(0, 1_000))


@given(st.lists(st.lists(requests, max_size=20), max_size=6), st.integers(1, 20), st.randoms())
def test_a_block_is_the_same_in_whatever_order_and_however_often_requests_are_read(
    looks: list[list[SampledRequest]], size: int, drawn: random.Random
) -> None:
    every = list({one.place: one for look in looks for one in look}.values())
    block, once = OpenBlock(), OpenBlock().with_requests(every, size)
    again = [*every, *drawn.sample(every, len(every) // 2)]
    drawn.shuffle(again)
    while again:
        count = drawn.randint(1, len(again))
        taken, again = again[:count], again[count:]
        block = block.with_requests(taken, size)

    assert block == once
    assert len(block.sample) == min(size, len(every))
    assert [one.place for one in block.sample] == sorted(one.place for one in every)[:size]


def test_what_was_answered_before_a_block_belongs_to_the_one_before() -> None:
    block = OpenBlock(not_before_ms=100).with_requests([request(1, 99), request(2, 100)], 8)

    assert [one.place for one in block.sample] == [2]
    assert OpenBlock(not_before_ms=100).with_requests([request(1, 99)], 8).began_ms is None


def test_a_block_needs_requests_and_time() -> None:
    two = OpenBlock().with_requests([request(1, 5), request(2, 14)], 2)

    assert not two.is_complete(2, 10)
    assert two.with_requests([request(3, 15)], 2).is_complete(2, 10)
    assert not two.with_requests([request(3, 15)], 4).is_complete(4, 10)


def test_a_statistic_without_enough_figures_has_no_block() -> None:
    with_figures = [request(number, 1, prompt_tokens=1.0) for number in range(3)]
    block = OpenBlock().with_requests([*with_figures, request(9, 1)], 4)

    assert block.figures(PROMPT_TOKENS, 4) is None
    assert block.figures(PROMPT_TOKENS, 3) == FigureBlock(1, 1, (1.0, 1.0, 1.0))


def test_requests_and_answers_have_their_own_statistics() -> None:
    assert PROMPT_TOKENS in REQUESTS.statistics
    assert LANGUAGE in REQUESTS.statistics
    assert ANSWERS.statistics == [OUTPUT_TOKENS, REFUSALS]
    assert StreamKey("acme", "digits", "classify", "").statistics == []
    assert CONFIDENCE in StreamKey("acme", "digits", "classify", "1").statistics


def blocks_of(draw: Draw, drawn: random.Random, first: int = 0, size: int = SIZE) -> Iterator[FigureBlock]:
    number = first
    while True:
        yield FigureBlock(10 * number, 10 * number + 9, tuple(draw(drawn) for _ in range(size)))
        number += 1


def watching(
    draw: Draw, drawn: random.Random, kind: FigureKind = FigureKind.NUMBER, blocks: int = 0
) -> StatisticMonitor:
    """A monitor that has judged so many blocks."""
    monitor = StatisticMonitor()
    source = blocks_of(draw, drawn)
    for _ in range(LEARNING + blocks):
        monitor = after_block(monitor, next(source), kind, 0, 1.0 - drawn.random())
    assert monitor.is_watching
    return monitor


def usual(drawn: random.Random) -> float:
    return float(round(drawn.lognormvariate(5, 1)))


def test_a_monitor_learns_before_it_judges_and_has_no_finding_until_then() -> None:
    drawn = random.Random(1)
    monitor, phases = StatisticMonitor(), []
    source = blocks_of(usual, drawn)
    for _ in range(LEARNING + 3):
        phases.append(monitor.phase)
        assert finding_of(monitor, OUTPUT_TOKENS, -1e9) is None or monitor.judged
        monitor = after_block(monitor, next(source), FigureKind.NUMBER, 0, 0.5)

    assert phases == [
        *[MonitorPhase.REFERENCE] * REFERENCE_BLOCKS,
        *[MonitorPhase.CALIBRATION] * CALIBRATION_BLOCKS,
        *[MonitorPhase.WATCHING] * 3,
    ]
    assert monitor.judged == 3
    assert not monitor.collected, "figures of the reference are not kept"


def test_learning_takes_its_time_as_well() -> None:
    drawn = random.Random(2)
    monitor = StatisticMonitor()
    source = blocks_of(usual, drawn)
    for _ in range(2 * LEARNING):
        monitor = after_block(monitor, next(source), FigureKind.NUMBER, 20 * LEARNING, 0.5)

    assert monitor.phase is MonitorPhase.REFERENCE


def refused(rate: float) -> Draw:
    return lambda drawn: "refused" if drawn.random() < rate else "answered"


def around(middle: float) -> Draw:
    return lambda drawn: tuple(drawn.gauss(middle, 1) for _ in range(4))


@pytest.mark.parametrize(
    ("before", "after", "kind", "most_blocks"),
    [
        (usual, lambda drawn: 3 * usual(drawn), FigureKind.NUMBER, 12),
        (usual, lambda drawn: 1.6 * usual(drawn), FigureKind.NUMBER, 20),
        (refused(0.05), refused(0.4), FigureKind.CATEGORY, 12),
        (around(0.0), around(0.5), FigureKind.VECTOR, 12),
    ],
    ids=["three times as long", "longer by 60 %", "more refusals", "another centroid"],
)
def test_a_change_is_found_soon_and_dated(before: Draw, after: Draw, kind: FigureKind, most_blocks: int) -> None:
    drawn = random.Random(4)
    statistic = next(one for one in STATISTICS.values() if one.kind is kind)
    monitor = watching(before, drawn, kind, blocks=20)
    assert finding_of(monitor, statistic, LOG_NEEDED) is None
    changed_at = LEARNING + 20
    source = blocks_of(after, drawn, changed_at)
    for _ in range(most_blocks):
        monitor = after_block(monitor, next(source), kind, 0, 1.0 - drawn.random())
        if (finding := finding_of(monitor, statistic, LOG_NEEDED)) is not None:
            break

    assert finding is not None
    assert monitor.judged - 20 >= 5, "a few strange blocks are no drift"
    assert abs(finding.since_ms - 10 * changed_at) <= 30
    assert finding.effect > 0.15
    assert finding.before.keys() == finding.now.keys()


def correlated(seed: int) -> Iterator[FigureBlock]:
    """Blocks whose requests resemble one another: each block has a middle of its own."""
    drawn = random.Random(seed)
    number = 0
    while True:
        middle = drawn.gauss(5, 0.5)
        yield FigureBlock(number, number, tuple(round(drawn.lognormvariate(middle, 1), 3) for _ in range(SIZE)))
        number += 1


def test_alarms_without_drift_are_as_rare_as_stated_also_if_requests_of_a_block_resemble_one_another() -> None:
    """The whole monitor, with an alarm wanted in 50 blocks at most: 1,200 judged blocks in four streams."""
    most, alarms, judged = 50, 0, 0
    for seed in range(4):
        source, monitor = correlated(seed), StatisticMonitor()
        drawn = random.Random(seed)
        for _ in range(300 + LEARNING):
            monitor = after_block(monitor, next(source), FigureKind.NUMBER, 0, 1.0 - drawn.random())
            judged += monitor.judged > 0
            if finding_of(monitor, OUTPUT_TOKENS, math.log(most)) is not None:
                alarms += 1
                monitor = replace(monitor, evidence=StatisticMonitor().evidence)

    assert judged == 1_200
    assert alarms <= poisson.isf(1e-6, judged / most)


def by_the_hour(seed: int) -> Iterator[FigureBlock]:
    """Blocks of five minutes; at noon requests are three times as long as at midnight."""
    drawn = random.Random(seed)
    number = 0
    while True:
        factor = 1 + 0.5 * math.sin(2 * math.pi * number / 288)
        figures = tuple(factor * usual(drawn) for _ in range(SIZE))
        yield FigureBlock(300_000 * number, 300_000 * (number + 1) - 1, figures)
        number += 1


def test_hours_of_the_day_are_no_drift() -> None:
    source, monitor = by_the_hour(11), StatisticMonitor()
    drawn = random.Random(11)
    for _ in range(5 * 288):
        monitor = after_block(monitor, next(source), FigureKind.NUMBER, 86_400_000, 1.0 - drawn.random())
        assert finding_of(monitor, PROMPT_TOKENS, math.log(1e5)) is None

    assert monitor.judged > 2 * 288
    assert len(monitor.scores) == 8


def test_a_block_that_lasts_longer_than_a_part_of_the_day_has_none() -> None:
    hour = 3_600_000

    assert part_of_day(FigureBlock(86_400_000 + 4 * hour, 86_400_000 + 5 * hour, ())) == 1
    assert part_of_day(FigureBlock(4 * hour, 8 * hour, ())) == part_of_day(FigureBlock(14 * hour, 40 * hour, ()))


def sampled(draw: Draw, drawn: random.Random, at_ms: int, name: str) -> list[SampledRequest]:
    return [request(drawn.getrandbits(63), at_ms + number, **{name: draw(drawn)}) for number in range(SIZE)]


def test_a_stream_finds_a_change_begins_anew_and_does_not_find_it_again() -> None:
    drawn = random.Random(7)
    stream, findings = DriftStream(ANSWERS), []
    for block in range(2 * LEARNING + 60):
        draw: Draw = usual if block < LEARNING + 10 else lambda drawn: 4 * usual(drawn)
        stream = stream.with_requests(sampled(draw, drawn, 100 * block, "output_tokens"), RULES)
        assert stream.is_due(RULES)
        stream, found = stream.judged(RULES, LOG_NEEDED)
        findings += [(block, one) for one in found]

    ((block, finding),) = findings
    assert LEARNING + 10 < block < LEARNING + 30
    assert finding.statistic == "output_tokens"
    assert stream.watched == 1


def test_alarms_of_the_whole_deployment_are_shared_by_what_is_watched() -> None:
    rules = DriftRules(64, 300_000, 0, 2.0)

    assert rules.log_needed(100) == pytest.approx(math.log(100 * 8_640 / 2))
    assert rules.log_needed(0) == pytest.approx(math.log(1_000))


@given(st.text(), st.integers())
def test_a_chance_is_drawn_alike_by_all(name: str, number: int) -> None:
    assert chance_of(name, number) == chance_of(name, number)
    assert 0 < chance_of(name, number) <= 1


@given(st.lists(st.floats(0, 9), max_size=20), st.integers(0, 10))
def test_the_strangest_come_first(strangeness: Sequence[float], most: int) -> None:
    chosen = strangest(strangeness, most)

    assert len(chosen) == min(most, len(strangeness))
    values = [strangeness[place] for place in chosen]
    assert values == sorted(strangeness, reverse=True)[:most]


@pytest.mark.parametrize(
    ("draw", "kind"),
    [(usual, FigureKind.NUMBER), (refused(0.3), FigureKind.CATEGORY), (around(0.0), FigureKind.VECTOR)],
    ids=["numbers", "categories", "vectors"],
)
@pytest.mark.parametrize("blocks", [0, 3, LEARNING - 1, LEARNING + 20])
def test_a_state_survives_its_column(draw: Draw, kind: FigureKind, blocks: int) -> None:
    drawn = random.Random(9)
    monitor = StatisticMonitor()
    source = blocks_of(draw, drawn)
    for _ in range(blocks):
        monitor = after_block(monitor, next(source), kind, 0, 0.5)

    assert monitors_of(json.loads(json.dumps(plain_monitors({"labels": monitor})))) == {"labels": monitor}


def test_a_block_survives_its_column() -> None:
    work = SourceCoordinate("priority.p.normal", 0, 1)
    sample = (SampledRequest(-5, 3, {"embedding": (0.5, 1.0), "language": "zh"}, work), SampledRequest(7, 4, {}))
    block = OpenBlock(1, 3, 4, sample)

    assert block_of(json.loads(json.dumps(plain_block(block)))) == block


@pytest.mark.parametrize(
    "plain", [{}, {"phase": "later"}, {"phase": "watching", "reference": None, "evidence": {}}, []]
)
def test_a_state_that_cannot_be_read_begins_anew(plain: object) -> None:
    assert monitors_of({"labels": plain}) == {}
    assert block_of({"sample": [{"place": 1}]}) == OpenBlock()
