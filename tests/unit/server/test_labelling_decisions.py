"""The labelling queue's decisions: two agree, a third decides, a lease is one reviewer's, gold measures."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane_server.labelling.decisions import (
    AGREEING_LABELS,
    GOLD_EVERY,
    LEASE_MS,
    MOST_LABELS,
    MOST_SKIPS,
    GivenLabel,
    ItemOutcome,
    ItemState,
    LabelItem,
    ReviewedLabel,
    ReviewerStatistics,
    choose,
    label_fault,
    may_take,
    outcome_of,
    refusal,
    statistics,
)


def labels(*given: str | None) -> list[GivenLabel]:
    return [GivenLabel(f"reviewer-{number}", label) for number, label in enumerate(given)]


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        ((), ItemOutcome(ItemState.OPEN)),
        (("good",), ItemOutcome(ItemState.OPEN)),
        (("good", "good"), ItemOutcome(ItemState.AGREED, "good")),
        (("good", "bad"), ItemOutcome(ItemState.OPEN)),
        (("good", "bad", "bad"), ItemOutcome(ItemState.AGREED, "bad")),
        (("1", "7", "9"), ItemOutcome(ItemState.DISPUTED)),
        ((None, None), ItemOutcome(ItemState.OPEN)),
        ((None, None, None), ItemOutcome(ItemState.DISMISSED)),
        ((None, "good", None, "good"), ItemOutcome(ItemState.AGREED, "good")),
    ],
)
def test_two_agree_and_a_third_decides(given: Sequence[str | None], outcome: ItemOutcome) -> None:
    assert outcome_of(labels(*given)) == outcome


@given(st.permutations(["good", "bad", "good", None]), st.lists(st.none() | st.sampled_from("ab"), max_size=6))
def test_the_outcome_does_not_depend_on_the_order(order: list[str | None], more: list[str | None]) -> None:
    assert outcome_of(labels(*order)) == ItemOutcome(ItemState.AGREED, "good")
    assert outcome_of(labels(*more)).state == outcome_of(labels(*reversed(more))).state


def test_of_more_labels_than_are_asked_for_most_decide_and_a_tie_is_disputed() -> None:
    """An item that was gold may have many."""
    assert outcome_of(labels("bad", "bad", "good", "good", "good")) == ItemOutcome(ItemState.AGREED, "good")
    assert outcome_of(labels("bad", "bad", "good", "good")) == ItemOutcome(ItemState.DISPUTED)
    assert outcome_of(labels("bad", None, None, None, "bad")) == ItemOutcome(ItemState.AGREED, "bad")


@pytest.mark.parametrize(
    ("task", "label", "fault"),
    [
        ("generate", "good", None),
        ("generate", "bad", None),
        ("generate", "Good", "must be good or bad"),
        ("generate", "7", "must be good or bad"),
        ("embed", "7", "must be good or bad"),
        ("rank", "good", None),
        ("classify", "7", None),
        ("classify", "", "must have from 1 to 256 characters"),
        ("classify", "x" * 257, "must have from 1 to 256 characters"),
    ],
)
def test_a_label_is_one_that_the_output_can_have(task: str, label: str, fault: str | None) -> None:
    assert label_fault(task, label) == fault


def test_who_judged_an_item_does_not_get_it_again_and_a_lease_ends() -> None:
    leased = LabelItem("r", ItemState.OPEN, lease_holder="anna", lease_until_ms=100)
    assert may_take(leased, "anna", 99)
    assert not may_take(leased, "ben", 99)
    assert may_take(leased, "ben", 100)
    assert not may_take(LabelItem("r", ItemState.OPEN, judged_by=frozenset({"ben"})), "ben", 0)
    assert not may_take(LabelItem("r", ItemState.AGREED), "ben", 0)
    assert may_take(LabelItem("r", ItemState.AGREED, is_gold=True), "ben", 0)
    assert refusal(leased, "anna", 99) is None
    assert refusal(leased, "anna", 100) == refusal(leased, "ben", 99) is not None


def test_gold_comes_now_and_then_and_never_alone() -> None:
    gold, item = LabelItem("gold", ItemState.AGREED, is_gold=True), LabelItem("item", ItemState.OPEN)
    given = [choose([item, gold], "anna", labelled, 0) for labelled in range(2 * GOLD_EVERY)]
    assert [number for number, one in enumerate(given) if one is gold] == [GOLD_EVERY - 1, 2 * GOLD_EVERY - 1]
    assert choose([gold], "anna", 0, 0) is None
    own = LabelItem("own", ItemState.OPEN, lease_holder="anna", lease_until_ms=9)
    assert choose([item, gold, own], "anna", GOLD_EVERY - 1, 8) is own, "what was asked for comes again"


@dataclass
class Desk:
    """The queue in memory, by the decisions alone."""

    items: dict[str, LabelItem]
    given: dict[str, list[GivenLabel]] = field(default_factory=dict)
    leases: dict[str, tuple[str, int]] = field(default_factory=dict)

    def take(self, reviewer: str, now_ms: int) -> str | None:
        labelled = sum(one.reviewer == reviewer for given in self.given.values() for one in given)
        chosen = choose(list(self.items.values()), reviewer, labelled, now_ms)
        if chosen is None:
            return None
        holder, until_ms = self.leases.get(chosen.request_id, ("", 0))
        assert holder in ("", reviewer) or until_ms <= now_ms, "nobody else works on it"
        self.leases[chosen.request_id] = reviewer, now_ms + LEASE_MS
        self._put(chosen, lease_holder=reviewer, lease_until_ms=now_ms + LEASE_MS)
        return chosen.request_id

    def judge(self, reviewer: str, request_id: str, label: str | None, now_ms: int) -> bool:
        item = self.items[request_id]
        if refusal(item, reviewer, now_ms) is not None:
            return False
        given = self.given.setdefault(request_id, [])
        given.append(GivenLabel(reviewer, label))
        state = item.state if item.is_gold else outcome_of(given).state
        self._put(item, state=state, judged_by=item.judged_by | {reviewer}, lease_holder=None, lease_until_ms=0)
        del self.leases[request_id]
        return True

    def _put(self, item: LabelItem, **fields: object) -> None:
        names = ("request_id", "state", "is_gold", "judged_by", "lease_holder", "lease_until_ms")
        values = {name: getattr(item, name) for name in names} | fields
        self.items[item.request_id] = LabelItem(**values)


steps = st.lists(
    st.tuples(
        st.sampled_from(["anna", "ben", "cleo", "dan"]),
        st.sampled_from(["take", "judge", "skip", "wait"]),
        st.sampled_from(["good", "bad", "other"]),
    ),
    max_size=60,
)


@given(steps)
@settings(max_examples=60)
def test_no_item_is_leased_twice_nor_judged_twice_by_one_or_more_often_than_needed(
    script: list[tuple[str, str, str]],
) -> None:
    items = [LabelItem(f"r-{number}", ItemState.OPEN, is_gold=number == 0) for number in range(4)]
    desk, held, now_ms = Desk({one.request_id: one for one in items}), dict[str, str](), 0
    for reviewer, action, label in script:
        now_ms += 1
        if action == "wait":
            now_ms += LEASE_MS
        elif action == "take":
            taken = desk.take(reviewer, now_ms)
            if taken is not None:
                held[reviewer] = taken
        elif reviewer in held:
            desk.judge(reviewer, held.pop(reviewer), label if action == "judge" else None, now_ms)
    for request_id, judged in desk.given.items():
        assert len({one.reviewer for one in judged}) == len(judged)
        if desk.items[request_id].is_gold:
            assert desk.items[request_id].state is ItemState.OPEN
            continue
        said = [one for one in judged if one.label is not None]
        assert len(said) <= MOST_LABELS
        assert len(judged) - len(said) <= MOST_SKIPS
        # What is settled was open without its last label.
        outcome = outcome_of(judged)
        assert outcome.state is ItemState.OPEN or outcome_of(judged[:-1]).state is ItemState.OPEN
        assert outcome.label is None or sum(one.label == outcome.label for one in judged) == AGREEING_LABELS


def test_reviewers_are_measured_by_gold_and_by_what_others_agreed_on() -> None:
    reviewed = [
        ReviewedLabel("anna", "good", gold_label="good"),
        ReviewedLabel("anna", "bad", gold_label="good"),
        ReviewedLabel("anna", "good", settled_label="good"),
        ReviewedLabel("anna", "bad", settled_label="good"),
        ReviewedLabel("anna", "bad"),
        ReviewedLabel("anna", None, settled_label="good"),
        ReviewedLabel("ben", None),
    ]
    assert statistics(reviewed) == [
        ReviewerStatistics("anna", 5, 1, gold=2, gold_right=1, settled=2, agreed=1),
        ReviewerStatistics("ben", 0, 1, 0, 0, 0, 0),
    ]
    assert statistics([]) == []
