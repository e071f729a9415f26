"""The search for the end of a batch that cannot be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.skipping_consumer import BatchEnd


def looks(search: BatchEnd, end: int) -> int:
    """Look until it is found. Returns how often."""
    count = 0
    while (offset := search.next_look) is not None:
        count += 1
        if offset >= end:
            search.saw_beyond(offset)
        else:
            search.saw_inside(offset)
    return count


@given(base=st.integers(0, 10**12), size=st.integers(1, 10**6), behind=st.integers(0, 10**9))
def test_it_is_found_in_few_looks_and_exactly(base: int, size: int, behind: int) -> None:
    search = BatchEnd(base, base + size + behind)
    count = looks(search, base + size)
    assert search.end == base + size
    assert count <= 2 * size.bit_length() + 2


def test_another_damaged_batch_behind_it_bounds_it() -> None:
    search = BatchEnd(10, 1_000)
    search.saw_inside(11)
    search.saw_beyond(12)
    assert (search.next_look, search.end) == (None, 12)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="the log ends at 10"):
        BatchEnd(10, 10)
    search = BatchEnd(10, 20)
    search.saw_inside(12)
    with pytest.raises(ValueError, match="12 is inside"):
        search.saw_beyond(12)
