"""Whose document is next: tenants in turn, and no tenant holds every lane."""

from hypothesis import given
from hypothesis import strategies as st

from producers.ingest.turns import WaitingUpload, next_uploads

TENANTS = st.sampled_from(["a", "b", "c", "d"])


def waiting(*tenants: str) -> list[WaitingUpload]:
    return [WaitingUpload(tenant, f"upload-of-{tenant}") for tenant in tenants]


def test_the_tenant_whose_turn_is_longest_ago_is_first() -> None:
    found = next_uploads(waiting("a", "b", "c"), (), {"a": 5, "b": 2}, 3)
    assert [upload.tenant for upload in found] == ["c", "b", "a"]


def test_a_tenant_leaves_a_lane_to_the_others() -> None:
    assert next_uploads(waiting("a"), ("a",), {"a": 1}, 2) == []
    assert [upload.tenant for upload in next_uploads(waiting("a", "b"), ("a",), {"a": 1}, 2)] == ["b"]
    assert [upload.tenant for upload in next_uploads(waiting("a"), ("a",), {"a": 1}, 3)] == ["a"]


def test_a_single_lane_is_for_everybody_in_turn() -> None:
    assert [upload.tenant for upload in next_uploads(waiting("a", "b"), (), {"a": 1}, 1)] == ["b"]


@given(st.sets(TENANTS), st.lists(TENANTS, max_size=6), st.dictionaries(TENANTS, st.integers(0, 9)), st.integers(1, 6))
def test_no_more_than_there_is_room_for(
    given_tenants: set[str], running: list[str], last_turn: dict[str, int], lanes: int
) -> None:
    found = next_uploads(waiting(*sorted(given_tenants)), running, last_turn, lanes)
    assert len(found) <= max(0, lanes - len(running))
    most = max(1, lanes - 1)
    assert all([*running, upload.tenant].count(upload.tenant) <= most for upload in found)
