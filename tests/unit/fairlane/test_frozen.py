"""Types that are frozen for the type checker alone."""

import copy
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from pathlib import Path

import pytest
from mypy import api

from fairlane.frozen import frozen_dataclass
from fairlane.records import SourceCoordinate


@frozen_dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 0


@frozen_dataclass(frozen=True, slots=True, eq=False)
class Unique:
    x: int


def test_they_are_values() -> None:
    assert Point(1) == Point(1, 0) != Point(2)
    assert {Point(1), Point(1, 0)} == {Point(1)}
    assert replace(Point(1), y=3) == Point(1, 3)
    assert [field.name for field in fields(Point)] == ["x", "y"]
    assert copy.copy(Point(1, 2)) == Point(1, 2)
    assert Unique(1) != Unique(1)
    assert hash(SourceCoordinate("a", 1, 2)) == hash(SourceCoordinate("a", 1, 2))
    with pytest.raises(AttributeError):
        Point(1).z = 3  # type: ignore[attr-defined]


def test_a_type_that_is_not_frozen_is_refused() -> None:
    with pytest.raises(TypeError, match="use dataclass"):
        frozen_dataclass(frozen=False, slots=True)


@dataclass(frozen=True)
class Held:
    x: int


def test_assignments_are_what_the_type_checker_finds(tmp_path: Path) -> None:
    """At run time only ``dataclass`` refuses them."""
    with pytest.raises(FrozenInstanceError):
        Held(1).x = 2  # type: ignore[misc]
    program = tmp_path / "program.py"
    program.write_text("from fairlane.records import SourceCoordinate\n\nSourceCoordinate('a', 1, 2).offset = 3\n")
    report, _, status = api.run([str(program), "--follow-imports=silent", f"--cache-dir={tmp_path}"])
    assert (status, "read-only" in report) == (1, True), report
