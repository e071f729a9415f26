"""Estimated cost of a request in money. Pure."""

from collections.abc import Callable

from fairlane_server.admission_rule import OUTPUT_WEIGHT
from fairlane_server.costs.price_book import PriceBook, Used, nanos_of
from stream_processors.dispatcher.queued_request import QueuedRequest

_MOST_SERVICE_MS = 600_000


def estimated_nanos(
    prices: PriceBook, queued: QueuedRequest, currency: str | None, service_ms: Callable[[], float], now_ms: int
) -> int:
    """The price of the tokens that are expected of a request, of its image, and of the engine for its predicted time of
    service alone. 0 where its cost will not count: without a price in force in this currency."""
    price = prices.price(queued.model.model, queued.model.version, now_ms)
    nothing = prices.nothing(queued.model.model)
    if price is None or nothing is None or nothing.currency != currency:
        return 0
    used = Used(
        prompt_tokens=queued.prompt_tokens,
        completion_tokens=max(0, queued.cost_tokens - queued.prompt_tokens) // OUTPUT_WEIGHT,
        images=int(queued.request.input.image is not None),
        engine_ms=round(min(service_ms(), _MOST_SERVICE_MS)) if price.engine_second_nanos else 0,
    )
    return nanos_of(price, used)
