"""How much may end among the dead letters, and that no tenant alone decides it."""

from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.results.dead_letter_share import LEAST_ITEMS, MAX_AGE_MS, MAX_TENANTS, DeadLetterShare


def settle(share: DeadLetterShare, tenant: str | None, *, dead: int = 0, good: int = 0, now_ms: int = 0) -> None:
    for is_dead in [True] * dead + [False] * good:
        share.settled(tenant, dead=is_dead, now_ms=now_ms)


def test_one_tenant_alone_exceeds_nothing() -> None:
    share = DeadLetterShare(0.5)
    settle(share, "acme", dead=1_000)
    assert share.exceeded() is None


def test_a_tenant_whose_items_all_fail_does_not_stop_the_service_of_others() -> None:
    share = DeadLetterShare(0.01)
    settle(share, "globex", good=12)
    settle(share, "acme", dead=1_000)
    assert share.exceeded() is None, "a flood pushes nobody out"


def test_a_few_bad_items_of_others_beside_one_who_fails_end_nothing() -> None:
    share = DeadLetterShare(0.5)
    settle(share, "acme", dead=200)
    settle(share, "globex", dead=3, good=8)
    settle(share, "initech", dead=1)
    assert share.exceeded() is not None, "two of three fail for the most part"
    settle(share, "initech", good=1)
    assert share.exceeded() is None


def test_what_fails_for_everybody_is_no_tenants_fault() -> None:
    share = DeadLetterShare(0.5)
    settle(share, "acme", dead=20)
    settle(share, "globex", dead=LEAST_ITEMS - 1)
    assert share.exceeded() is None
    settle(share, "globex", dead=1)
    assert share.exceeded() == ("10 of the latest 10 items of all tenants but the worst went to the dead letters")


def test_many_tenants_with_an_item_each_are_enough() -> None:
    share = DeadLetterShare(0.5)
    for number in range(LEAST_ITEMS + 1):
        assert share.exceeded() is None
        settle(share, f"tenant-{number}", dead=1)
    assert share.exceeded() is not None


def test_every_tenant_counts_the_same_however_much_it_sends() -> None:
    share = DeadLetterShare(0.5)
    for number in range(3):
        settle(share, f"good-{number}", good=20)
    for number in range(6):
        settle(share, f"bad-{number}", dead=2)
    assert share.exceeded() is not None, "five of eight, beside the one that does not count"


def test_what_happened_long_ago_ends_nothing() -> None:
    share = DeadLetterShare(0.5)
    settle(share, "globex", dead=LEAST_ITEMS)
    settle(share, "acme", dead=20, now_ms=MAX_AGE_MS + 1)
    assert share.exceeded() is None


def test_what_cannot_be_read_counts_by_itself() -> None:
    share = DeadLetterShare(0.5)
    settle(share, "acme", good=12)
    settle(share, None, dead=12)
    assert share.exceeded() is None
    settle(share, None, dead=1)
    assert share.exceeded() == "13 of the latest 25 items could not be read"


def test_so_many_tenants_are_known_and_no_more() -> None:
    share = DeadLetterShare(0.5)
    for number in range(MAX_TENANTS + 100):
        settle(share, f"tenant-{number}", good=1)
    assert len(share._tenants) == MAX_TENANTS


@given(
    st.lists(st.tuples(st.sampled_from(["globex", "initech"]), st.just(False)) | st.just(("acme", True)), max_size=400),
    st.floats(0.01, 1.0),
)
def test_no_sequence_of_one_tenants_dead_letters_ends_a_consumer(items: list[tuple[str, bool]], most: float) -> None:
    share = DeadLetterShare(most)
    for now_ms, (tenant, dead) in enumerate(items):
        share.settled(tenant, dead=dead, now_ms=now_ms)
        assert share.exceeded() is None
