"""What is kept for tenants: bounded, and nobody's is pushed out by who keeps more."""

from hypothesis import given
from hypothesis import strategies as st

from producers.gateway.tenant_bounds import TenantMap

MOST = 4
STEPS = st.lists(st.tuples(st.sampled_from(["put", "pop"]), st.sampled_from("abc"), st.integers(0, 5)), max_size=80)


def test_the_tenant_with_most_loses_its_oldest() -> None:
    kept: TenantMap[int] = TenantMap(3)
    kept.put("globex", "theirs", 0)
    for number in range(10):
        kept.put("acme", f"{number}", number)
    assert kept.get("theirs") == 0
    assert [kept.get(f"{number}") for number in (7, 8, 9)] == [None, 8, 9]
    kept.put("acme", "8", 88)
    kept.put("acme", "10", 10)
    assert [kept.get(name) for name in ("8", "9", "10")] == [88, None, 10], "what is put again is new"


@given(STEPS)
def test_it_is_what_the_plain_way_makes(steps: list[tuple[str, str, int]]) -> None:
    kept: TenantMap[int] = TenantMap(MOST)
    model: dict[str, dict[str, int]] = {tenant: {} for tenant in "abc"}
    for at, (verb, tenant, number) in enumerate(steps):
        mine, name = model[tenant], f"{tenant}-{number}"
        if verb == "pop":
            assert kept.pop(name) == mine.pop(name, None)
            continue
        mine.pop(name, None)
        mine[name] = at
        kept.put(tenant, name, at)
        if sum(map(len, model.values())) > MOST:
            largest = max(map(len, model.values()))
            # Whoever of those with most it was.
            losers = [one for one, values in model.items() if len(values) == largest]
            lost = [one for one in losers if kept.get(next(iter(model[one]))) is None]
            assert len(lost) == 1
            del model[lost[0]][next(iter(model[lost[0]]))]
        assert len(kept) == sum(map(len, model.values())) <= MOST
        assert all(kept.get(key) == value for one, values in model.items() for key, value in values.items())
