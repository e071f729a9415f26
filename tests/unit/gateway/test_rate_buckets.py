"""Buckets of callers: never more than rate x time + burst, all or none, honest waits, bounded memory."""

from hypothesis import given
from hypothesis import strategies as st

from producers.gateway.limits.rate_buckets import RatePolicy, TokenBuckets

START_MS = 1_700_000_000_000

policies = st.builds(RatePolicy, rate_per_s=st.sampled_from([0.1, 1.0, 7.3, 100.0, 2_500.0]), burst=st.integers(1, 50))
steps = st.lists(
    st.tuples(
        st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=2, unique=True),
        st.sampled_from([0, 0, 1, 10, 333, 5_000, -50]),
    ),
    max_size=60,
)


@given(policies, steps)
def test_nobody_gets_more_than_the_rate_and_the_burst(policy: RatePolicy, asked: list[tuple[list[str], int]]) -> None:
    # The latest time that the buckets were asked at: the clock may go back, and theirs does not.
    book, now_ms, latest_ms = TokenBuckets(), START_MS, 0
    granted: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for owners, pause_ms in asked:
        now_ms += pause_ms
        latest_ms = max(latest_ms, now_ms)
        found = book.take(owners, policy, now_ms)
        assert 0 <= found.remaining < policy.burst or not found.is_granted
        assert found.limit == policy.burst
        assert found.reset_ms >= 0
        for owner in owners if found.is_granted else ():
            granted[owner].append(latest_ms)
    for times in granted.values():
        for first, since_ms in enumerate(times):
            for last in range(first, len(times)):
                most = policy.burst + (times[last] - since_ms) * policy.per_ms
                assert last - first + 1 <= most + 1e-6


@given(policies, steps)
def test_who_waits_as_told_is_let_in_and_a_moment_earlier_is_not(
    policy: RatePolicy, asked: list[tuple[list[str], int]]
) -> None:
    book, now_ms = TokenBuckets(), START_MS
    for owners, pause_ms in asked:
        now_ms += max(0, pause_ms)
        found = book.take(owners, policy, now_ms)
        if found.is_granted:
            continue
        if found.retry_after_ms > 2:
            assert not book.take(owners, policy, now_ms + found.retry_after_ms - 2).is_granted
        now_ms += found.retry_after_ms
        assert book.take(owners, policy, now_ms).is_granted


@given(policies, steps)
def test_what_is_said_to_remain_can_be_taken_and_no_more(
    policy: RatePolicy, asked: list[tuple[list[str], int]]
) -> None:
    book, now_ms = TokenBuckets(), START_MS
    for owners, pause_ms in asked:
        now_ms += max(0, pause_ms)
        found = book.take(owners, policy, now_ms)
    if asked:
        assert all(book.take(owners, policy, now_ms).is_granted for _ in range(found.remaining))
        assert not book.take(owners, policy, now_ms).is_granted


@given(policies, steps)
def test_after_the_reset_the_bucket_is_full(policy: RatePolicy, asked: list[tuple[list[str], int]]) -> None:
    book, now_ms = TokenBuckets(), START_MS
    for owners, pause_ms in asked:
        now_ms += max(0, pause_ms)
        now_ms += book.take(owners, policy, now_ms).reset_ms
        found = book.take(owners, policy, now_ms)
        assert (found.is_granted, found.remaining) == (True, policy.burst - 1)


def test_a_refused_call_takes_from_none() -> None:
    book, policy = TokenBuckets(), RatePolicy(rate_per_s=1.0, burst=3)
    for _ in range(3):
        assert book.take(["user"], policy, START_MS).is_granted
    for _ in range(10):
        found = book.take(["key", "user"], policy, START_MS)
        assert (found.is_granted, found.remaining, found.retry_after_ms) == (False, 0, 1_001)
    assert book.take(["key"], policy, START_MS).remaining == 2


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    book, policy = TokenBuckets(), RatePolicy(rate_per_s=1.0, burst=1)
    assert book.take(["a"], policy, START_MS).is_granted
    assert book.take(["a"], policy, START_MS - 10_000).retry_after_ms == 11_001
    assert book.take(["a"], policy, START_MS + 1_001).is_granted


def test_memory_is_bounded_and_what_is_full_is_forgotten() -> None:
    book, policy = TokenBuckets(most_owners=100), RatePolicy(rate_per_s=1.0, burst=2)
    for number in range(1_000):
        assert book.take([f"caller-{number}"], policy, START_MS).is_granted
    assert len(book) == 100
    # Who called of late is remembered.
    assert book.take(["caller-999"], policy, START_MS).remaining == 0
    for _ in range(100):
        book.take(["caller-0"], policy, START_MS + 10_000)
    assert len(book) == 1
