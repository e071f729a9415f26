"""Tiers of the tests: which command runs a test, decided by its marks alone."""

import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path


class Tier(StrEnum):
    """A set of tests with a command of its own."""

    CORE = "core"
    """`make test`: unit and contract tests, the live core, one short kill run; two workers."""
    FULL = "full"
    """`make test-full`, first part: everything else that may share the machine, and each property test with more
    examples; two workers."""
    ALONE = "alone"
    """`make test-full`, second part: tests that hold a rate or a time against a bound, one after another."""
    FAULTS = "faults"
    """`make faults`: the long fault runs."""


_TIER_OF_MARK = {"long": Tier.FAULTS, "alone": Tier.ALONE, "full": Tier.FULL}
"""The first of these marks that a test has decides; a test that has none is in the core."""
PROPERTY_MARK = "hypothesis"
"""The mark that hypothesis gives to every property test."""
_MARKS_OF_ALL = re.compile(r"^pytestmark = (?:\[[^\]]*\]|.*)", re.MULTILINE)
"""The marks that every test of a file has: a list, perhaps of several lines, or one mark."""


def tiers_of(marks: Iterable[str]) -> frozenset[Tier]:
    """The tiers of a test with these marks: one, or two for a property test of the core."""
    names = set(marks)
    tier = next((tier for mark, tier in _TIER_OF_MARK.items() if mark in names), Tier.CORE)
    if tier is Tier.CORE and PROPERTY_MARK in names:
        return frozenset({Tier.CORE, Tier.FULL})
    return frozenset({tier})


def may_hold(file: Path, tier: Tier) -> bool:
    """Whether this test file may have a test of this tier, by its text: importing every file to ask takes minutes."""
    text = file.read_text(encoding="utf-8")
    if tier is Tier.CORE:
        of_all = _MARKS_OF_ALL.search(text)
        return of_all is None or not any(f"mark.{mark}" in of_all[0] for mark in _TIER_OF_MARK)
    words = [f"mark.{mark}" for mark, its_tier in _TIER_OF_MARK.items() if its_tier is tier]
    if tier is Tier.FULL:
        words.append(PROPERTY_MARK)
    return any(word in text for word in words)
