"""Precision and recall, of texts and of places in them."""

from pathlib import Path

import pytest

from benchmarks.guardrail_data import MarkedText, leaked_prompts, personal_data, repetitions, secrets
from benchmarks.guardrails import Counts, count_spans, count_texts, request_times
from fairlane.settings import Settings
from inference_consumers.guardrails.check import Finding


def same(place: str, found: str) -> bool:
    return place == found


def test_texts_are_counted_by_what_was_expected_of_them() -> None:
    counts = count_texts([True, True, True, False, False], [True, True, False, True, False])
    assert counts == Counts(right=2, wrong=1, missed=1)
    assert counts.precision == counts.recall == counts.f1 == 2 / 3
    assert Counts(0, 0, 0).f1 == 0


def test_a_place_is_found_when_a_finding_of_its_type_overlaps_it() -> None:
    marked = [MarkedText("…", (Finding("A", 0, 5, 1.0), Finding("A", 10, 15, 1.0), Finding("B", 20, 25, 1.0)))]
    found = [[Finding("A", 4, 6, 1.0), Finding("A", 6, 9, 1.0), Finding("A", 20, 25, 1.0)]]
    assert count_spans(marked, found, same) == Counts(right=1, wrong=2, missed=2)


def test_times_of_requests_are_those_through_the_processes_of_checks(tmp_path: Path) -> None:
    figures = request_times(["secrets"], Settings(models_dir=tmp_path))
    assert len({one.name for one in figures}) == len(figures) == 8
    assert {one.unit for one in figures} == {"ms"}
    values = {one.name: one.value for one in figures}
    assert all(value > 0 for value in values.values())
    for title in ("a sentence", "8,000 characters"):
        assert values[f"secrets, a request of {title}, 50 %"] <= values[f"secrets, a request of {title}, 99 %"]


def test_a_check_that_cannot_be_made_has_no_time(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="toxicity was not made: unavailable"):
        request_times(["toxicity"], Settings(models_dir=tmp_path))


def test_the_data_is_what_it_says() -> None:
    for marked in (personal_data(), secrets()):
        assert all(0 <= one.start < one.end <= len(text.text) for text in marked for one in text.findings)
        assert sum(not text.findings for text in marked) > 20
    assert len({one.is_attack for one in repetitions()}) == len({one.leaks for one in leaked_prompts()}) == 2
    assert secrets() == secrets()
