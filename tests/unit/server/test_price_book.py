"""What a request costs: the price in force counts, whole numbers only, and the same record always costs the same."""

import re
from dataclasses import fields, replace
from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.money import LARGEST_NANOS, NANOS_PER_UNIT, nanos_text
from fairlane.outcomes import Outcome
from fairlane.records import Cost, ModelPrices, Price, SourceCoordinate, UsageEvent
from fairlane_server.costs.price_book import (
    LARGEST_PRICE,
    NO_PRICES,
    PriceBook,
    Used,
    check_prices,
    nanos_of,
    usable_prices,
)

KINDS = [field.name for field in fields(Price) if field.name.endswith("_nanos")]
EVENT = UsageEvent(
    *("id", "acme", "pool", "words", "3", "high", Outcome.OK, None),
    *(1_000, 100, 0, 1_200, 0, 5_000),
    SourceCoordinate("priority.pool.high", 0, 1),
)
PRICE = Price(0, None, input_nanos=2_000_000, cached_input_nanos=1_000_000, output_nanos=8_000_000)
BOOK = PriceBook([ModelPrices("words", "XTS", (PRICE,))])

_nanos = st.integers(0, 10**12)
prices = st.builds(Price, st.just(0), st.none(), *(_nanos for _ in KINDS))
counts = st.integers(0, 10**7)
# Cached tokens are among the tokens of the prompt.
used = st.builds(
    lambda plain, cached, *others: Used(plain + cached, others[0], cached, *others[1:]),
    *(counts, counts, counts, st.integers(0, 100), counts),
    st.integers(1, 64),
)


def exactly(price: Price, one: Used) -> Fraction:
    """The price without rounding, from the definition."""
    tokens = (
        (one.prompt_tokens - one.cached_tokens) * price.input_nanos
        + one.cached_tokens * price.cached_input_nanos
        + one.completion_tokens * price.output_nanos
    )
    engine_s = Fraction(one.engine_ms, 1_000 * one.batch_size)
    return Fraction(tokens, 1_000_000) + one.images * price.image_nanos + engine_s * price.engine_second_nanos


@given(prices, used)
def test_a_price_is_the_exact_one_rounded_once(price: Price, one: Used) -> None:
    nanos = nanos_of(price, one)
    assert isinstance(nanos, int)
    assert nanos == floor(exactly(price, one) + Fraction(1, 2))


@given(prices, used, st.sampled_from([field.name for field in fields(Used)]), counts)
def test_who_uses_more_never_pays_less(price: Price, one: Used, name: str, more: int) -> None:
    grown = replace(one, **{name: getattr(one, name) + more})
    if name == "cached_tokens":
        # More of the prompt was in the cache: another kind of token, not more of them.
        grown = replace(grown, prompt_tokens=grown.prompt_tokens + more)
    if name == "batch_size":
        assert nanos_of(price, grown) <= nanos_of(price, one), "an engine shared by more"
    else:
        assert nanos_of(price, grown) >= nanos_of(price, one)


@given(prices, prices, used)
def test_a_higher_price_never_costs_less(price: Price, more: Price, one: Used) -> None:
    higher = replace(price, **{kind: getattr(price, kind) + getattr(more, kind) for kind in KINDS})
    assert nanos_of(higher, one) >= nanos_of(price, one)


def together(one: Used, other: Used) -> Used:
    """Both in one request; the size of the batch is the first one's."""
    sums = {field.name: getattr(one, field.name) + getattr(other, field.name) for field in fields(Used)}
    return Used(**{**sums, "batch_size": one.batch_size})


_whole = st.builds(
    Price, st.just(0), st.none(), *(st.integers(0, 10**6).map(lambda nanos: nanos * 10**6) for _ in KINDS)
)


@given(_whole, used, used)
def test_prices_of_whole_nanos_add_up_exactly(price: Price, one: Used, other: Used) -> None:
    one, other = replace(one, batch_size=1), replace(other, batch_size=1)
    assert nanos_of(price, together(one, other)) == nanos_of(price, one) + nanos_of(price, other)


@given(prices, used, used)
def test_any_prices_add_up_to_within_a_nano(price: Price, one: Used, other: Used) -> None:
    other = replace(other, batch_size=one.batch_size)
    apart = nanos_of(price, one) + nanos_of(price, other)
    assert abs(nanos_of(price, together(one, other)) - apart) <= 1


@given(prices, st.integers(1, 64), st.integers(0, 10**6))
def test_the_items_of_a_batch_pay_its_engine_together(price: Price, items: int, engine_ms: int) -> None:
    each = nanos_of(price, Used(engine_ms=engine_ms, batch_size=items))
    whole = nanos_of(price, Used(engine_ms=engine_ms))
    assert abs(items * each - whole) <= items


def test_what_engines_report_wrong_is_no_credit() -> None:
    assert nanos_of(PRICE, Used(-5, -5, -5, -5, -5, -5)) == 0
    assert nanos_of(PRICE, Used(prompt_tokens=10, cached_tokens=99)) == nanos_of(PRICE, Used(10, cached_tokens=10))


def test_a_request_by_hand() -> None:
    # 600 at 2 nanos, 400 at 1 nano, 100 at 8 nanos.
    assert BOOK.cost_of(replace(EVENT, cached_tokens=400)) == Cost(2_400, "XTS")


starts = st.lists(st.integers(0, 1_000), min_size=1, max_size=6, unique=True)


@given(starts, starts, st.integers(-10, 1_010))
def test_the_price_in_force_at_the_time_counts(of_model: list[int], of_version: list[int], at_ms: int) -> None:
    # A price names its own time, so that the right one is known by it.
    general = [Price(at, None, input_nanos=at + 1) for at in of_model]
    special = [Price(at, "3", input_nanos=10**6 * (at + 1)) for at in of_version]
    book = PriceBook([ModelPrices("words", "XTS", (*special, *general))])
    in_force = [price for price in special if price.from_ms <= at_ms] or [
        price for price in general if price.from_ms <= at_ms
    ]
    expected = max(in_force, key=lambda price: price.from_ms, default=None)
    assert book.price("words", "3", at_ms) == expected
    assert book.price("words", "4", at_ms) == max(
        (price for price in general if price.from_ms <= at_ms), key=lambda price: price.from_ms, default=None
    )
    assert (book.cost_of(replace(EVENT, occurred_at_ms=at_ms)) is None) == (expected is None)


@given(st.lists(prices, min_size=1, max_size=4), used, st.integers(0, 10_000), st.booleans(), st.sampled_from(Outcome))
def test_a_replay_costs_the_same(found: list[Price], one: Used, at_ms: int, cached: bool, outcome: Outcome) -> None:
    """Whoever computes it, whenever, of the same record and prices, in whatever order these come."""
    dated = [replace(price, from_ms=1_000 * number) for number, price in enumerate(found)]
    event = replace(
        EVENT,
        outcome=outcome,
        occurred_at_ms=at_ms,
        cached=cached,
        cost=Cost(99, "EUR"),
        **{field.name: getattr(one, field.name) for field in fields(Used)},
    )
    book, again = (PriceBook([ModelPrices("words", "XTS", tuple(order))]) for order in (dated, dated[::-1]))
    assert book.cost_of(event) == book.cost_of(replace(event, cost=None)) == again.cost_of(event)


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.EXPIRED, Outcome.FAILED])
def test_what_got_no_answer_costs_nothing(outcome: Outcome) -> None:
    assert BOOK.cost_of(replace(EVENT, outcome=outcome, engine_ms=5_000)) == Cost(0, "XTS")


def test_a_cancelled_run_costs_what_it_used_until_then_and_nothing_before_it_ran() -> None:
    assert BOOK.cost_of(replace(EVENT, outcome=Outcome.CANCELLED)) == BOOK.cost_of(EVENT)
    waited = replace(EVENT, outcome=Outcome.CANCELLED, prompt_tokens=0, completion_tokens=0, batch_size=0)
    assert BOOK.cost_of(waited) == Cost(0, "XTS")


@given(_nanos, used)
def test_an_answer_from_the_cache_has_a_price_of_its_own(nanos: int, one: Used) -> None:
    book = PriceBook([ModelPrices("words", "XTS", (replace(PRICE, cached_answer_nanos=nanos),))])
    event = replace(EVENT, cached=True, **{field.name: getattr(one, field.name) for field in fields(Used)})
    assert book.cost_of(event) == Cost(nanos, "XTS")
    assert BOOK.cost_of(event) == Cost(0, "XTS"), "nothing, unless somebody says otherwise"


def test_without_prices_no_cost_is_known() -> None:
    assert NO_PRICES.cost_of(EVENT) is None
    assert BOOK.cost_of(replace(EVENT, model="others")) is None
    assert (BOOK.nothing("words"), BOOK.nothing("others")) == (Cost(0, "XTS"), None)


def test_a_cost_that_no_record_can_carry_is_not_known() -> None:
    dear = PriceBook([ModelPrices("words", "XTS", (Price(0, None, image_nanos=LARGEST_PRICE * NANOS_PER_UNIT),))])
    assert dear.cost_of(replace(EVENT, images=9)) == Cost(9 * LARGEST_PRICE * NANOS_PER_UNIT, "XTS")
    assert dear.cost_of(replace(EVENT, images=10)) is None
    assert 9 * LARGEST_PRICE * NANOS_PER_UNIT <= LARGEST_NANOS < 10 * LARGEST_PRICE * NANOS_PER_UNIT


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (ModelPrices("other", "XTS", (PRICE,)), "model: 'other' under the key 'words'"),
        (ModelPrices("words", "usd", (PRICE,)), "currency: 'usd' does not match"),
        (ModelPrices("words", "XTS", (PRICE, replace(PRICE, input_nanos=1))), "prices: two from the same time on"),
        (ModelPrices("words", "XTS", (replace(PRICE, output_nanos=-1),)), "output_nanos: must be from 0 to"),
        (ModelPrices("words", "XTS", (replace(PRICE, image_nanos=2**62),)), "image_nanos: must be from 0 to"),
    ],
)
def test_records_that_no_file_can_make_are_no_prices(wrong: ModelPrices, why: str) -> None:
    good = ModelPrices("good", "XTS", (PRICE,))
    with pytest.raises(ValueError, match=re.escape(why)):
        check_prices("words", wrong)
    usable, refused = usable_prices({"words": wrong, "good": good})
    assert usable == [good]
    assert refused.keys() == {"words"}


@pytest.mark.parametrize(
    ("nanos", "text"),
    [
        (0, "0"),
        (1, "0.000000001"),
        (153_600, "0.0001536"),
        (NANOS_PER_UNIT, "1"),
        (-1_500_000_000, "-1.5"),
        (120 * NANOS_PER_UNIT, "120"),
    ],
)
def test_amounts_are_written_exactly(nanos: int, text: str) -> None:
    assert nanos_text(nanos) == Cost(nanos, "XTS").amount == text


@given(st.integers(-(2**63), 2**63))
def test_an_amount_is_read_back_as_it_was(nanos: int) -> None:
    assert Fraction(nanos_text(nanos)) * NANOS_PER_UNIT == nanos
