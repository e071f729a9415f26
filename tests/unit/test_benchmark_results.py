"""Figures, aims, and the document made from them."""

from pathlib import Path

import pytest

from benchmarks.report import write_markdown
from benchmarks.result import Bound, Figure, Result, median_of, repeated


@pytest.mark.parametrize(
    ("value", "bound", "met"),
    [(1.5, "at most", True), (1.51, "at most", False), (0.9, "at least", True), (0.8, "at least", False)],
)
def test_an_aim_is_met_or_missed(value: float, bound: Bound, met: bool) -> None:
    aim = 1.5 if bound == "at most" else 0.9
    assert Figure("ratio", value, "ratio", bound, aim).met is met


def test_a_figure_without_an_aim_is_only_reported() -> None:
    figure = Figure("rate", 10.0, "requests/s")

    assert figure.met is None
    assert Result("b", (figure,), ()).met


def test_one_missed_aim_is_a_missed_benchmark() -> None:
    figures = (Figure("a", 1, "ratio", "at most", 2), Figure("b", 3, "ratio", "at most", 2))

    assert not Result("b", figures, ()).met


def test_the_median_of_three_runs_is_reported() -> None:
    values = iter((3.0, 1.0, 2.0))
    runs = repeated(lambda _number: {"ratio": next(values)})

    assert len(runs) == 3
    assert median_of(runs, "ratio") == 2.0


def test_the_object_has_the_documented_keys() -> None:
    result = Result("b", (Figure("a", 1, "ratio", "at most", 2),), ({"a": 1.0},)).as_json()

    assert set(result) == {"benchmark", "figures", "runs", "machine"}
    assert result["figures"] == [{"name": "a", "value": 1, "unit": "ratio", "aim": "at most 2", "met": True}]


def test_the_document_names_missed_aims(tmp_path: Path) -> None:
    path = tmp_path / "docs" / "benchmarks.md"
    write_markdown(path, [Result("b", (Figure("a", 3, "ratio", "at most", 2),), ())])

    assert "| b | a | 3 ratio | at most 2 | no |" in path.read_text()
