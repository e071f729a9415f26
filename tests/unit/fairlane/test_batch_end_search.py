"""The search for the end of a batch that cannot be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.skipping_consumer import end_of_batch


@given(base=st.integers(0, 10**12), size=st.integers(1, 10**6), behind=st.integers(0, 10**9))
def test_it_is_found_in_few_looks_and_exactly(base: int, size: int, behind: int) -> None:
    looks = []

    def look(offset: int) -> int | None:
        looks.append(offset)
        return offset if offset >= base + size else None

    assert end_of_batch(base, base + size + behind, look) == base + size
    assert len(looks) <= 2 * size.bit_length() + 2


def test_another_damaged_batch_behind_it_bounds_it() -> None:
    assert end_of_batch(10, 1_000, lambda offset: None if offset == 11 else 12) == 12


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="12 is inside"):
        end_of_batch(10, 20, lambda offset: None if offset <= 13 else 12)
