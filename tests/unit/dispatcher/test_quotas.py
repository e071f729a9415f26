"""Token buckets: never more than rate x time + burst, a refused ask takes nothing, and its waiting time is honest."""

import asyncio
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import TenantSpec
from fairlane_server.token_bucket import LONGEST_WAIT_MS
from stream_processors.dispatcher.admission.quotas import (
    Bucket,
    Charge,
    Exceeded,
    LocalQuotas,
    Quota,
    QuotaBook,
    buckets_of,
)

START_MS = 1_700_000_000_000
DAY_MS = 86_400_000


def ask(spec: TenantSpec, tokens: int = 1) -> Charge:
    return Charge(spec.tenant, spec, tokens)


def take(book: QuotaBook, spec: TenantSpec, tokens: int, now_ms: int, share: float = 1.0) -> Exceeded | None:
    return book.take(ask(spec, tokens), buckets_of(spec, share), now_ms)


def test_a_tenant_without_quotas_has_no_buckets() -> None:
    assert buckets_of(TenantSpec("acme")) == ()
    book = QuotaBook()
    assert take(book, TenantSpec("acme"), 10**12, START_MS) is None
    assert len(book) == 0


def test_the_buckets_of_a_tenant() -> None:
    spec = TenantSpec("acme", requests_per_s=5.0, burst_requests=20, tokens_per_minute=600, tokens_per_day=86_400)
    assert buckets_of(spec) == (
        Bucket(Quota.REQUESTS_PER_S, 20, 0.005, 20),
        Bucket(Quota.TOKENS_PER_MINUTE, 600, 0.01, 600),
        Bucket(Quota.TOKENS_PER_DAY, 86_400, 0.001, 86_400),
    )
    assert buckets_of(spec, 0.5)[0] == Bucket(Quota.REQUESTS_PER_S, 10, 0.0025, 20)
    assert buckets_of(TenantSpec("acme", requests_per_s=0.1))[0].capacity == 1
    assert buckets_of(TenantSpec("acme", requests_per_s=7.5))[0].capacity == 7.5


def test_the_quota_with_the_longest_wait_is_named() -> None:
    spec = TenantSpec("acme", requests_per_s=1.0, tokens_per_minute=60, tokens_per_day=100)
    book = QuotaBook()
    assert take(book, spec, 60, START_MS) is None
    assert take(book, spec, 0, START_MS) == Exceeded(Quota.REQUESTS_PER_S, 1_001)
    assert take(book, spec, 30, START_MS) == Exceeded(Quota.TOKENS_PER_MINUTE, 30_001)
    # 41 against the 40 that are left of the day.
    assert take(book, spec, 41, START_MS) == Exceeded(Quota.TOKENS_PER_DAY, DAY_MS // 100 + 1)
    assert take(book, spec, 61, START_MS) == Exceeded(Quota.TOKENS_PER_MINUTE, None)
    assert take(book, spec, 30, START_MS + 30_001) is None


def test_what_is_given_back_can_be_taken_again() -> None:
    spec = TenantSpec("acme", requests_per_s=1.0, tokens_per_minute=60)
    book = QuotaBook()
    assert take(book, spec, 60, START_MS) is None
    book.give_back(ask(spec, 60), buckets_of(spec), START_MS)
    assert take(book, spec, 60, START_MS) is None
    for _ in range(5):
        book.give_back(ask(spec, 60), buckets_of(spec), START_MS)
    assert take(book, spec, 60, START_MS) is None
    assert take(book, spec, 1, START_MS) is not None, "no bucket gets more than full"


def test_quotas_that_change_count_from_then_on() -> None:
    book = QuotaBook()
    assert take(book, TenantSpec("acme", tokens_per_minute=600), 500, START_MS) is None
    assert take(book, TenantSpec("acme", tokens_per_minute=60), 61, START_MS) == Exceeded(Quota.TOKENS_PER_MINUTE, None)
    assert take(book, TenantSpec("acme", tokens_per_minute=60), 60, START_MS) is None
    wider = TenantSpec("acme", tokens_per_minute=600, requests_per_s=1.0)
    assert take(book, wider, 1, START_MS) == Exceeded(Quota.TOKENS_PER_MINUTE, 101)
    assert take(book, wider, 1, START_MS + 101) is None


@pytest.mark.parametrize(
    "spec",
    [
        TenantSpec("acme", requests_per_s=0.0),
        TenantSpec("acme", requests_per_s=-1.0),
        TenantSpec("acme", requests_per_s=0.0, burst_requests=5),
        TenantSpec("acme", tokens_per_day=0),
    ],
)
def test_a_quota_of_nothing_lets_nothing_through(spec: TenantSpec) -> None:
    book = QuotaBook()
    refused = take(book, spec, 1, START_MS)
    assert refused is not None
    assert refused.retry_after_ms is None


def test_a_share_still_lets_a_large_request_through() -> None:
    """A third of one request, or of a minute's tokens, must not mean never."""
    spec = TenantSpec("acme", requests_per_s=0.5, tokens_per_minute=600)
    book = QuotaBook()
    assert take(book, spec, 600, START_MS, share=1 / 3) is None
    refused = take(book, spec, 600, START_MS, share=1 / 3)
    assert refused == Exceeded(Quota.TOKENS_PER_MINUTE, 180_001), "it pays back first"
    assert take(book, spec, 601, START_MS, share=1 / 3) == Exceeded(Quota.TOKENS_PER_MINUTE, None)
    assert take(book, spec, 600, START_MS + 180_001, share=1 / 3) is None


def test_a_wait_fits_where_it_is_told() -> None:
    """A reply has 64 bits for it; a bucket may take longer than that."""
    spec = TenantSpec("acme", requests_per_s=1e-20)
    book = QuotaBook()
    assert take(book, spec, 1, START_MS) is None
    assert take(book, spec, 1, START_MS) == Exceeded(Quota.REQUESTS_PER_S, LONGEST_WAIT_MS)


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    spec = TenantSpec("acme", tokens_per_minute=60)
    book = QuotaBook()
    assert take(book, spec, 60, START_MS) is None
    refused = take(book, spec, 1, START_MS - 10_000)
    assert refused == Exceeded(Quota.TOKENS_PER_MINUTE, 11_001)
    assert take(book, spec, 1, START_MS + 1_001) is None
    assert take(book, spec, 1, START_MS + 1_001) is not None


def test_tenants_with_full_buckets_are_forgotten() -> None:
    book = QuotaBook()
    specs = [TenantSpec(f"tenant-{index}", tokens_per_minute=60) for index in range(500)]
    for spec in specs:
        assert take(book, spec, 30, START_MS) is None
    assert len(book) == 500
    busy = TenantSpec("busy", tokens_per_minute=60)
    for _ in range(600):
        take(book, busy, 30, START_MS + 60_000)
    assert len(book) == 1


def test_the_local_share_is_looked_up_by_tenant() -> None:
    now_ms = START_MS
    spec, other = TenantSpec("acme", tokens_per_minute=60), TenantSpec("zenith", tokens_per_minute=60)
    quotas = LocalQuotas(lambda: now_ms, lambda tenant: 0.5 if tenant == "acme" else 1.0)

    async def run() -> list[Exceeded | None]:
        return await quotas.take([ask(spec, 30), ask(spec, 10), ask(other, 30), ask(other, 10)])

    assert asyncio.run(run()) == [None, Exceeded(Quota.TOKENS_PER_MINUTE, 20_001), None, None]


SPECS = st.builds(
    TenantSpec,
    tenant=st.just("acme"),
    requests_per_s=st.none() | st.floats(0.01, 100),
    burst_requests=st.none() | st.integers(1, 50),
    tokens_per_minute=st.none() | st.integers(1, 100_000),
    tokens_per_day=st.none() | st.integers(1, 10_000_000),
)
STEPS_MS = st.one_of(st.integers(0, 20), st.integers(0, 5_000), st.integers(0, 10**7))
SIZES = st.one_of(st.integers(0, 50), st.integers(0, 200_000))
ASKS = st.lists(st.tuples(STEPS_MS, SIZES), min_size=1, max_size=60)
SHARES = st.sampled_from((1.0, 0.5, 1 / 3, 0.01))


@given(spec=SPECS, asks=ASKS, share=SHARES)
def test_no_interval_gets_more_than_rate_and_burst(spec: TenantSpec, asks: list[tuple[int, int]], share: float) -> None:
    """Granted in any interval <= rate x its length + burst; a share lets the largest ask stand for its burst."""
    book, now_ms = QuotaBook(), START_MS
    buckets = buckets_of(spec, share)
    granted: list[tuple[int, Charge]] = []
    for passed_ms, tokens in asks:
        now_ms += passed_ms
        if book.take(ask(spec, tokens), buckets, now_ms) is None:
            granted.append((now_ms, ask(spec, tokens)))
    for bucket in buckets:
        for first in range(len(granted)):
            total, largest = 0, 0
            for until_ms, one in granted[first:]:
                amount = bucket.amount(one)
                total, largest = total + amount, max(largest, amount)
                allowed = bucket.per_ms * (until_ms - granted[first][0]) + max(bucket.capacity, largest)
                assert total <= allowed * (1 + 1e-6)
                assert share < 1 or amount <= bucket.capacity


@given(spec=SPECS, asks=ASKS, share=SHARES)
def test_the_time_to_retry_is_honest(spec: TenantSpec, asks: list[tuple[int, int]], share: float) -> None:
    book, now_ms = QuotaBook(), START_MS
    buckets = buckets_of(spec, share)
    for passed_ms, tokens in asks:
        now_ms += passed_ms
        refused = book.take(ask(spec, tokens), buckets, now_ms)
        if refused is None:
            continue
        if refused.retry_after_ms is None:
            assert any(bucket.amount(ask(spec, tokens)) > bucket.largest for bucket in buckets)
            assert deepcopy(book).take(ask(spec, tokens), buckets, now_ms + 10 * DAY_MS) == refused
            continue
        assert refused.retry_after_ms > 0
        then_ms = now_ms + refused.retry_after_ms
        assert deepcopy(book).take(ask(spec, tokens), buckets, then_ms) is None
        if refused.retry_after_ms > 2:
            assert deepcopy(book).take(ask(spec, tokens), buckets, then_ms - 2) is not None


@given(spec=SPECS, asks=ASKS, share=SHARES)
def test_a_refused_ask_takes_nothing(spec: TenantSpec, asks: list[tuple[int, int]], share: float) -> None:
    """Asking for too much in between changes no other answer."""
    calm, pestered, now_ms = QuotaBook(), QuotaBook(), START_MS
    buckets = buckets_of(spec, share)
    for passed_ms, tokens in asks:
        now_ms += passed_ms
        while tokens and (spec.tokens_per_minute or spec.tokens_per_day):
            if pestered.take(ask(spec, 10**9), buckets, now_ms) is not None:
                break
        assert calm.take(ask(spec, tokens), buckets, now_ms) == pestered.take(ask(spec, tokens), buckets, now_ms)


@given(spec=SPECS, asks=ASKS, share=SHARES)
def test_giving_back_at_once_undoes_a_take(spec: TenantSpec, asks: list[tuple[int, int]], share: float) -> None:
    plain, book, now_ms = QuotaBook(), QuotaBook(), START_MS
    buckets = buckets_of(spec, share)
    for passed_ms, tokens in asks:
        now_ms += passed_ms
        for _ in range(3):
            if book.take(ask(spec, 1), buckets, now_ms) is None:
                book.give_back(ask(spec, 1), buckets, now_ms)
        one, other = plain.take(ask(spec, tokens), buckets, now_ms), book.take(ask(spec, tokens), buckets, now_ms)
        assert (one is None) == (other is None)
