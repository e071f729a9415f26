"""The limiter: never too many inside, nobody forgotten, and no line longer because of somebody else's."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from stream_processors.dispatcher.enrichment.concurrency_limiter import FairConcurrencyLimiter, Permit, Urgency

STEPS = st.lists(
    st.tuples(st.sampled_from(["stand", "leave", "hurry", "hurry a lot"]), st.integers(0, 3), st.integers(0, 30)),
    max_size=120,
)


@given(STEPS, st.integers(1, 5), st.integers(1, 5))
def test_room_is_never_exceeded_and_never_left_empty_while_somebody_may_enter(
    steps: list[tuple[str, int, int]], limit: int, per_tenant: int
) -> None:
    async def run() -> None:
        limiter = FairConcurrencyLimiter(limit, per_tenant)
        permits: list[Permit] = []
        for what, tenant, number in steps:
            if what == "stand":
                permits.append(limiter.permit(f"t{tenant}", Urgency(number % len(Urgency))))
            elif permits:
                permit = permits[number % len(permits)]
                if what != "leave":
                    limiter.hurry(permit, Urgency.TURN_LOW if what == "hurry" else Urgency.TURN_HIGH)
                else:
                    permits.remove(permit)
                    limiter.leave(permit)
            inside = [permit for permit in permits if permit.granted.done()]
            assert len(inside) == len(limiter) <= limit
            by_tenant = {f"t{one}": [held for held in inside if held.tenant == f"t{one}"] for one in range(4)}
            assert all(len(held) <= per_tenant for held in by_tenant.values())
            if len(inside) < limit:
                waiting = {permit.tenant for permit in permits if not permit.granted.done()}
                assert all(len(by_tenant[tenant]) == per_tenant for tenant in waiting)
        for permit in permits:
            limiter.leave(permit)
        assert len(limiter) == 0

    asyncio.run(run())


def test_urgent_ones_go_first_and_tenants_take_turns() -> None:
    async def run() -> list[str]:
        limiter = FairConcurrencyLimiter(1, 1)
        inside = limiter.permit("first", Urgency.WAITS)
        waiting = {f"flood{number}": limiter.permit("flood", Urgency.WAITS) for number in range(3)}
        waiting["victim"] = limiter.permit("victim", Urgency.WAITS)
        waiting["pressed"] = limiter.permit("flood", Urgency.WAITS)
        limiter.hurry(waiting["pressed"], Urgency.TURN_NORMAL)
        limiter.hurry(waiting["pressed"], Urgency.WAITS)
        order = []
        while waiting:
            limiter.leave(inside)
            (name,) = [name for name, permit in waiting.items() if permit.granted.done()]
            order.append(name)
            inside = waiting.pop(name)
        return order

    assert asyncio.run(run()) == ["pressed", "flood0", "victim", "flood1", "flood2"]


def test_what_is_more_urgent_passes_what_is_less() -> None:
    async def run() -> list[str]:
        limiter = FairConcurrencyLimiter(1, 1)
        inside = limiter.permit("acme", Urgency.WAITS)
        waiting = {urgency.name: limiter.permit("acme", urgency) for urgency in reversed(Urgency)}
        order = []
        while waiting:
            limiter.leave(inside)
            (name,) = [name for name, permit in waiting.items() if permit.granted.done()]
            order.append(name)
            inside = waiting.pop(name)
        return order

    assert asyncio.run(run()) == ["TURN_HIGH", "TURN_NORMAL", "TURN_LOW", "WAITS"]


def test_who_gives_up_in_line_frees_no_room_twice() -> None:
    async def run() -> None:
        limiter = FairConcurrencyLimiter(1, 1)
        inside, gives_up, next_one = (limiter.permit("acme", Urgency.WAITS) for _ in range(3))
        gives_up.granted.cancel()
        limiter.leave(gives_up)
        assert not next_one.granted.done()
        limiter.leave(inside)
        assert next_one.granted.done()
        assert len(limiter) == 1

    asyncio.run(run())
