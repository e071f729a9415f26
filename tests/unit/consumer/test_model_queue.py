"""The orders that batches are made by: kept in logarithmic time, and swept of what has left them."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.batching.micro_batch import MicroBatcher
from inference_consumers.batching.model_queue import EntryHeap, ModelQueue, QueuedItem, Standing
from tests.kit.micro_batch_kit import FAR_AWAY_MS, MODEL, work

_numbers = count()


def entry(at_ms: int = 0, priority: str = "normal", prompt_tokens: int = 0) -> QueuedItem:
    return QueuedItem(
        work(priority, at_ms=at_ms, tokens=10 + prompt_tokens, prompt_tokens=prompt_tokens), next(_numbers)
    )


@given(
    keys=st.lists(st.integers(0, 50), max_size=300),
    left=st.sets(st.integers(0, 299)),
    back=st.sets(st.integers(0, 299)),
)
def test_the_first_is_the_least_of_those_that_count(keys: list[int], left: set[int], back: set[int]) -> None:
    """Whoever left meanwhile, and whoever came back and was pushed again."""
    heap = EntryHeap(Standing.HOPEFUL)
    entries = [entry() for _ in keys]
    for key, one in zip(keys, entries, strict=True):
        heap.push((key, one.number), one)
    for index in left & set(range(len(keys))):
        entries[index].standing = Standing.HOPELESS
    for index in back & left & set(range(len(keys))):
        entries[index].standing = Standing.HOPEFUL
        heap.push((keys[index], entries[index].number), entries[index])
    expected = sorted(
        (keys[index], one.number) for index, one in enumerate(entries) if one.standing is Standing.HOPEFUL
    )
    for _, number in expected:
        first = heap.first()
        assert first is not None
        assert first.number == number
        first.standing = Standing.GONE
    assert heap.first() is None


def test_who_has_left_is_swept_although_never_first() -> None:
    """The first stays for ever, with the least key."""
    heap = EntryHeap(Standing.HOPEFUL)
    heap.push((0, 0), entry())
    for number in range(1, 10_000):
        one = entry()
        heap.push((number, number), one)
        one.standing = Standing.GONE
    assert len(heap) < 200


def test_a_heap_of_many_that_count_keeps_them_all() -> None:
    heap = EntryHeap(Standing.HOPEFUL)
    for number in range(1_000):
        heap.push((number, number), entry())
    assert len(heap) == 1_000


def test_cells_that_are_empty_are_forgotten() -> None:
    lines = ModelQueue(MODEL)
    entries = [entry(prompt_tokens=length) for length in (10, 1_000, 1_000)]
    for one in entries:
        lines.add(one)
    assert Counter(cell.items for cell in lines.cells) == {1: 1, 2: 1}
    for one in entries:
        lines.remove(one, Standing.GONE)
    assert list(lines.cells) == []
    assert (lines.items, lines.cost_tokens) == (0, 0)
    assert list(lines.firsts()) == []


def test_asking_for_what_expired_does_not_look_through_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def deadline_at_ms(one: QueuedItem) -> int:
        nonlocal looked
        looked += 1
        return one.work.item.deadline_at_ms

    made = MicroBatcher(BatchLimits(max_items=8, max_tokens=10_000, timeout_ms=20))
    for index in range(5_000):
        made.add(work(prompt_tokens=index % 7, deadline_at_ms=1_000 + index))
    monkeypatch.setattr(QueuedItem, "deadline_at_ms", property(deadline_at_ms))
    for now_ms in range(1_000):
        assert made.take_expired(now_ms) == []
    assert looked <= 1_000
    assert len(made.take_expired(1_100)) == 100
    assert looked <= 1_200


def test_a_long_life_leaves_nothing_behind() -> None:
    """Of items that went through, whose deadlines are far away."""
    made = MicroBatcher(BatchLimits(max_items=8, max_tokens=10_000, timeout_ms=20))
    for index in range(3_000):
        made.add(work(prompt_tokens=index % 500, deadline_at_ms=FAR_AWAY_MS + index))
        if index % 8 == 7:
            while made.next_batch(index, idle=True) is not None:
                pass
    assert len(made) == 0
    assert len(made._by_deadline) < 200
