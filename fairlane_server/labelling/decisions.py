"""Decisions of the labelling queue: who gets which item, when it is settled, how good reviewers are. Pure.

Two independent labels that agree settle an item; when they differ a third decides. Items with a known answer (gold) are
mixed in, so that a reviewer's agreement with them can be told from agreement with others by chance.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fairlane.outcomes import Task

AGREEING_LABELS = 2
MOST_LABELS = 3
MOST_SKIPS = 3
GOLD_EVERY = 10
"""One of so many labels of a reviewer is asked for on a gold item, while there is one that it has not seen."""
LEASE_MS = 900_000

MOST_LABEL_CHARS = 256
MOST_REVIEWER_CHARS = 128

GOOD, BAD = "good", "bad"
"""The labels of a text, of vectors and of ranks: as it is, or not. Those of classifications are their classes."""


class ItemState(StrEnum):
    """State of an item."""

    OPEN = "open"
    AGREED = "agreed"
    DISPUTED = "disputed"
    """As many labels as are asked for, and no two the same."""
    DISMISSED = "dismissed"
    """Skipped by as many reviewers as are asked."""


@dataclass(frozen=True, slots=True)
class GivenLabel:
    """What one reviewer said of one item; ``label`` None: skipped. ``correction`` is what the output should have
    been."""

    reviewer: str
    label: str | None
    correction: str | None = None
    given_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """What follows from the labels of an item; ``label`` is set once two agree."""

    state: ItemState
    label: str | None = None


def outcome_of(labels: Iterable[GivenLabel]) -> ItemOutcome:
    """The outcome of an item with these labels, one of each reviewer. Independent of their order. Of one that was gold
    there may be more than are asked for: most of those who agree decide."""
    given = list(labels)
    counts = Counter(one.label for one in given if one.label is not None)
    (first, most), (_, next_most) = (*counts.most_common(2), ("", 0), ("", 0))[:2]
    if most >= AGREEING_LABELS and most > next_most:
        return ItemOutcome(ItemState.AGREED, first)
    if counts.total() >= MOST_LABELS:
        return ItemOutcome(ItemState.DISPUTED)
    if len(given) - counts.total() >= MOST_SKIPS:
        return ItemOutcome(ItemState.DISMISSED)
    return ItemOutcome(ItemState.OPEN)


def label_fault(task: str, label: str) -> str | None:
    """Why an output of this task cannot have the label; None if it can."""
    if not 1 <= len(label) <= MOST_LABEL_CHARS:
        return f"must have from 1 to {MOST_LABEL_CHARS} characters"
    if task != Task.CLASSIFY and label not in (GOOD, BAD):
        return f"must be {GOOD} or {BAD}"
    return None


@dataclass(frozen=True, slots=True)
class LabelItem:
    """An item that a reviewer may get.

    Attributes:
        is_gold: its answer is known; it is never settled.
        task: what its request asked for.
        judged_by: its reviewers so far.
        lease_holder, lease_until_ms: who works on it, and until when nobody else gets it.
    """

    request_id: str
    state: ItemState
    is_gold: bool = False
    task: str = Task.GENERATE
    judged_by: frozenset[str] = frozenset()
    lease_holder: str | None = None
    lease_until_ms: int = 0

    def is_leased(self, now_ms: int) -> bool:
        return self.lease_holder is not None and now_ms < self.lease_until_ms


def may_take(item: LabelItem, reviewer: str, now_ms: int) -> bool:
    """Whether the reviewer may get the item: nobody else works on it, and it was not judged by the reviewer."""
    if reviewer in item.judged_by or not (item.is_gold or item.state is ItemState.OPEN):
        return False
    return not item.is_leased(now_ms) or item.lease_holder == reviewer


def choose(items: Sequence[LabelItem], reviewer: str, labelled: int, now_ms: int) -> LabelItem | None:
    """The item that the reviewer gets; None if there is none.

    Args:
        items: in the order in which they are to be settled.
        reviewer: an opaque name.
        labelled: how many labels the reviewer has given.
        now_ms: since the epoch.
    """
    takeable = [item for item in items if may_take(item, reviewer, now_ms)]
    own = [item for item in takeable if item.is_leased(now_ms)]
    wants_gold = labelled % GOLD_EVERY == GOLD_EVERY - 1
    # What was asked for and not judged comes again. Gold items settle nothing: they never come alone.
    ranked = own or [item for item in takeable if wants_gold and item.is_gold]
    return next(iter(ranked or [item for item in takeable if not item.is_gold]), None)


def refusal(item: LabelItem, reviewer: str, now_ms: int) -> str | None:
    """Why the reviewer may not judge the item now; None if it may."""
    if reviewer in item.judged_by:
        return "this reviewer has judged it"
    if item.lease_holder != reviewer or not item.is_leased(now_ms):
        return "the lease has ended, or is another reviewer's: take the next item"
    return None


@dataclass(frozen=True, slots=True)
class ReviewedLabel:
    """A label with what is known of its item."""

    reviewer: str
    label: str | None
    settled_label: str | None = None
    gold_label: str | None = None


@dataclass(frozen=True, slots=True)
class ReviewerStatistics:
    """How one reviewer works.

    Attributes:
        labelled, skipped: items.
        gold, gold_right: labels of gold items, and those of them that are right.
        settled, agreed: labels of items on which two agreed, and those of them that became the item's.
    """

    reviewer: str
    labelled: int
    skipped: int
    gold: int
    gold_right: int
    settled: int
    agreed: int


def statistics(judged: Iterable[ReviewedLabel]) -> list[ReviewerStatistics]:
    """Of every reviewer, by name."""
    by_reviewer: dict[str, list[ReviewedLabel]] = {}
    for one in judged:
        by_reviewer.setdefault(one.reviewer, []).append(one)
    return [_statistics(reviewer, by_reviewer[reviewer]) for reviewer in sorted(by_reviewer)]


def _statistics(reviewer: str, judged: Sequence[ReviewedLabel]) -> ReviewerStatistics:
    labelled = [one for one in judged if one.label is not None]
    gold = [one for one in labelled if one.gold_label is not None]
    settled = [one for one in labelled if one.gold_label is None and one.settled_label is not None]
    return ReviewerStatistics(
        reviewer,
        labelled=len(labelled),
        skipped=len(judged) - len(labelled),
        gold=len(gold),
        gold_right=sum(one.label == one.gold_label for one in gold),
        settled=len(settled),
        agreed=sum(one.label == one.settled_label for one in settled),
    )
