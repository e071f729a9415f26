"""What the dispatcher's own replies cost: answers from the cache their price, refusals nothing."""

from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from fairlane import names
from fairlane.outcomes import Code, Outcome
from fairlane.records import Cost, InferenceReply, ModelPrices, Price, UsageEvent
from fairlane_server.costs.price_book import NO_PRICES, PriceBook
from tests.kit.cached_replies import after, crowd
from tests.kit.dispatcher_bench import MODEL, NOW_MS, Bench, encoded
from tests.kit.response_cache_kit import ANSWER, asking, bytes_of, keep, replies, work

PRICE = Price(0, None, input_nanos=10**9, output_nanos=10**9, cached_answer_nanos=700)
PRICES = PriceBook([ModelPrices(MODEL.model, "XTS", (PRICE,))])
CALLER = "key:0123456789abcdef"


def cached(prices: PriceBook) -> tuple[InferenceReply, UsageEvent]:
    bench = Bench()
    bench.prices = prices
    bench.report()
    keep(bench)
    bench.run(bytes_of(asking(1, requested_by=CALLER)))
    (reply,), (usage,) = replies(bench), bench.decoded(names.LEDGER_USAGE)
    return reply, usage


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_an_answer_from_the_cache_costs_its_own_price_whatever_its_tokens() -> None:
    of_acme = {"tenant": "acme", "model": MODEL.model, "currency": "XTS"}
    before = counted("fairlane_cost_total", **of_acme)
    reply, usage = cached(PRICES)
    assert ANSWER.usage.prompt_tokens > 0
    assert reply.cost == usage.cost == Cost(700, "XTS") == PRICES.cost_of(usage)
    assert (usage.requested_by, usage.batch_size, usage.images) == (CALLER, 0, 0)
    assert counted("fairlane_cost_total", **of_acme) == pytest.approx(before + 700e-9)


def test_without_prices_or_before_the_first_the_cost_of_a_cached_answer_is_not_known() -> None:
    later = PriceBook([ModelPrices(MODEL.model, "XTS", (replace(PRICE, from_ms=NOW_MS + 1),))])
    before = counted("fairlane_unpriced_total", model=MODEL.model)
    for prices in (NO_PRICES, later):
        reply, usage = cached(prices)
        assert (reply.cost, usage.cost) == (None, None)
    assert counted("fairlane_unpriced_total", model=MODEL.model) == before + 2


def test_a_refusal_costs_nothing_and_of_an_unknown_model_nothing_is_known() -> None:
    bench = Bench()
    bench.prices = PRICES
    bench.report()
    bench.run(bytes_of(asking(1, group="nobodys")), bytes_of(asking(2, model="unheard-of")))
    assert [(reply.outcome, reply.code, reply.cost) for reply in replies(bench)] == [
        (Outcome.REJECTED, Code.INVALID, Cost(0, "XTS")),
        (Outcome.REJECTED, Code.UNKNOWN_MODEL, None),
    ]


def test_what_waited_in_vain_costs_nothing() -> None:
    bench = Bench()
    bench.prices = PRICES
    crowd(bench)
    after(bench, encoded(1, timeout_ms=1_000))
    bench.now_ms += 1_001
    bench.dispatcher.sweep()
    after(bench, offset=20)
    (reply,) = replies(bench)
    assert (reply.outcome, reply.cost) == (Outcome.EXPIRED, Cost(0, "XTS"))


def test_who_asked_goes_with_the_work_and_is_bounded() -> None:
    bench = Bench()
    bench.report()
    longest = asking(1, requested_by=f"user:{'x' * 255}", cache="none")
    bench.run(bytes_of(longest), bytes_of(asking(2, requested_by="x" * 261)))
    assert [item.request.requested_by for item in work(bench)] == [longest.requested_by]
    (reply,) = replies(bench)
    assert (reply.code, reply.field) == (Code.INVALID, "requested_by")
