"""Slots and bytes of tenants: bounds, and room that nobody takes from others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.gateway.tenant_bounds import TenantSlots
from producers.openai_api.errors import GatewayError

FULL, TENANT_FULL = GatewayError(503, "full", "full"), GatewayError(429, "tenant_full", "tenant full")


def slots(most: int, most_of_tenant: int, *, has_reserve: bool = False) -> TenantSlots:
    return TenantSlots(most, most_of_tenant, lambda: FULL, lambda: TENANT_FULL, has_reserve=has_reserve)


def taken(kept: TenantSlots, tenant: str, count: int = 1) -> bool:
    try:
        kept.take(tenant, count)
    except GatewayError:
        return False
    return True


def test_a_tenant_and_all_have_a_bound_in_any_unit() -> None:
    kept = slots(100, 60)
    kept.take("a", 60)
    with pytest.raises(GatewayError) as refused:
        kept.take("a", 1)
    assert refused.value is TENANT_FULL
    with pytest.raises(GatewayError) as refused:
        kept.take("b", 41)
    assert refused.value is FULL
    kept.take("b", 40)
    kept.give_back("a", 60)
    kept.give_back("b", 40)
    assert kept.total == 0
    assert not kept._taken


def test_four_tenants_that_take_all_they_can_leave_room_for_a_fifth() -> None:
    without, kept = slots(16, 4), slots(16, 4, has_reserve=True)
    for tenant in "abcd":
        while taken(without, tenant):
            pass
        while taken(kept, tenant):
            pass
    assert not taken(without, "e")
    assert taken(kept, "e")
    assert kept._taken["a"] == 4, "who is early has all that one may have"


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 20), st.booleans()), max_size=200),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_no_bound_is_exceeded_and_what_is_given_back_is_free(
    steps: list[tuple[str, int, bool]], most: int, most_of_tenant: int
) -> None:
    kept = slots(most, most_of_tenant, has_reserve=True)
    held: list[tuple[str, int]] = []
    for tenant, count, is_taken in steps:
        mine = sum(number for who, number in held if who == tenant)
        free = most - kept.total
        if not is_taken and held:
            kept.give_back(*held.pop())
        elif taken(kept, tenant, count):
            held.append((tenant, count))
            assert not mine or mine + count <= free, "no more than are free"
        elif not mine:
            assert count > min(free, most_of_tenant), "who has none gets what is free"
        assert kept.total == sum(number for _, number in held) <= most
        assert all(kept._taken[who] <= most_of_tenant for who in kept._taken)
