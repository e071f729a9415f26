"""The benchmark of drift in short: streams without drift and with changes, by three rules."""

import numpy as np
import pytest

from benchmarks import drift
from benchmarks.drift_rules import fixed_threshold, repeated_test
from benchmarks.drift_traffic import BLOCK, CHANGES, DIRECTIONS, QUIET, QuietStream, trace_blocks
from fairlane_server.drift.figures import FigureKind


@pytest.mark.parametrize("stream", QUIET, ids=lambda stream: stream.name)
def test_the_same_seed_draws_the_same_stream(stream: QuietStream) -> None:
    one, other = stream.draw(3, 20), stream.draw(3, 20)

    assert one.shape == (20, BLOCK)
    assert np.array_equal(one, other)


def test_every_change_changes_something_and_nothing_before() -> None:
    for change in CHANGES:
        values = change.draw(1, 300, 300)
        assert values.shape[:2] == (600, BLOCK)
        assert (values.ndim == 3 and values.shape[2] == DIRECTIONS) is (change.kind is FigureKind.VECTOR)
        before, after = values[:300], values[300:]
        assert abs(before.mean() - after.mean()) > 0.01 * before.std(), change.name


def test_a_stream_without_drift_has_an_alarm_now_and_then_and_the_repeated_test_many() -> None:
    (independent, alike, *_) = QUIET
    figures = {one.name: one for stream in (independent, alike) for one in drift.quiet_figures(stream, 1, 3)}

    assert figures["independent requests: alarms per 1,000 blocks, one stated"].aim == 1.0
    assert figures["requests of a block alike: alarms per 1,000 blocks"].value == 0
    assert figures["repeated test: requests of a block alike: alarms per 1,000 blocks"].value > 5


def test_large_changes_are_found_by_all_rules() -> None:
    change = next(one for one in CHANGES if one.name == "100 % longer")
    for rule in drift.rules_for(change.kind).values():
        (requests,) = drift.requests_until_found(change, rule, 1)
        assert requests <= 20 * BLOCK


def test_the_trace_is_judged_as_it_came() -> None:
    assert trace_blocks(32).shape == (275, 32)
    assert {figure.unit for figure in drift.trace_figures()} == {"alarms"}


def test_the_other_rules_know_categories() -> None:
    change = next(one for one in CHANGES if one.name == "refusals from 2 to 30 %")
    values = change.draw(1, 100, 16)

    assert list(repeated_test(values, change.kind, 100)) == [7, 15]
    assert list(fixed_threshold(values, change.kind, 100)) == [7, 15]
