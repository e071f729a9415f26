"""The benchmark of offline jobs, in a short version: that it runs on real parts and says what it promises."""

import pytest

from benchmarks import backfill

pytestmark = [pytest.mark.full, pytest.mark.broker]


def test_a_job_is_measured_beside_a_bare_loop_in_one_run() -> None:
    result = backfill.run(rows=400, fewer_rows=200)

    assert result.benchmark == backfill.NAME
    assert all(figure.value > 0 for figure in result.figures)
    ratios = [figure for figure in result.figures if figure.aim is not None]
    assert [figure.unit for figure in ratios] == ["ratio", "ratio", "ratio"]
    # Whatever the machine does meanwhile: twice the rows do not take twice the memory.
    assert ratios[2].value < 1.5
