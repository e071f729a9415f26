"""Figures, aims, and the document made from them."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import DOCUMENT, HOW
from benchmarks.result import (
    Bound,
    Figure,
    ReportError,
    Result,
    median_of,
    read_results,
    repeated,
    updated,
    write,
)

MACHINE = "2 cores, 24 GiB, Python 3.11.7"


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


def result(benchmark: str, value: float) -> Result:
    return Result(benchmark, (Figure("a", value, "ratio", "at most", 2),), ({"a": value},), MACHINE)


def test_a_result_can_be_read_back(tmp_path: Path) -> None:
    made = Result("b", (Figure("a", 1, "ratio", "at least", 0.5), Figure("c", 2, "ms")), ({"a": 1.0},), MACHINE)
    file = tmp_path / "results.json"
    file.write_text("".join(f"{json.dumps(one.as_json())}\n" for one in (made, result("d", 3))))

    assert read_results(file) == [made, result("d", 3)]


@pytest.mark.parametrize("text", ["no json", "[1]", '{"benchmark": "b"}'])
def test_what_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)

    with pytest.raises(ReportError, match=r"results\.json"):
        read_results(file)


def test_the_document_says_how_and_where_and_names_missed_aims(tmp_path: Path) -> None:
    path = tmp_path / "docs" / "benchmarks.md"
    write(path, [result("b", 3)], {"b": "one run of 60 s"})

    text = path.read_text()
    assert "## b\n\nOne run of 60 s. 2 cores, 24 GiB, Python 3.11.7.\n" in text
    assert "| a | 3 ratio | at most 2 | **no** |\n" in text


def test_only_what_was_measured_again_changes_and_remarks_stay() -> None:
    how = {"first": "one run", "second": "3 runs", "third": "one run"}
    before = updated("", [result("second", 3), result("first", 1)], how)
    before = before.replace("**no** |\n", "**no** |\n\nMissed, because.\n\nAnd so on.\n")
    before += "\n## gone\n\n| a | 9 ratio |  |  |\n"
    after = updated(before, [result("second", 1.5), result("third", 1)], how)

    assert [line[3:] for line in after.splitlines() if line.startswith("## ")] == ["first", "second", "third"]
    assert "| a | 1.5 ratio | at most 2 | yes |\n\nMissed, because.\n\nAnd so on.\n\n## third" in after
    assert "gone" not in after
    assert updated(after, [], how) == after


def test_a_result_of_no_benchmark_is_refused() -> None:
    with pytest.raises(ReportError, match="'b'"):
        updated("", [result("b", 1)], {"a": "one run"})


def test_the_document_that_ships_is_as_the_writer_leaves_it() -> None:
    document = DOCUMENT.read_text()

    assert updated(document, [], HOW) == document
