"""The price in force and the cost of what a request used. Pure; whole numbers only.

What is charged: an answer, and a run that was cancelled, for what it used until then; an answer from the cache its own
price. Whatever else became of a request, it costs nothing.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import fields

from fairlane.frozen import frozen_dataclass
from fairlane.money import LARGEST_NANOS, NANOS_PER_UNIT
from fairlane.names import is_model_name
from fairlane.outcomes import Outcome
from fairlane.records import Cost, ModelPrices, Price, UsageEvent

CURRENCY = re.compile(r"[A-Z]{3}")
"""An ISO 4217 code. XTS is the one for tests and examples."""

LARGEST_PRICE = 1_000_000_000
"""Units of the currency, of any price."""

MOST_PRICES = 1_000
"""Of one model: its record must fit its topic."""

_CHARGED = frozenset({Outcome.OK, Outcome.CANCELLED})
_TOKENS_PER_PRICE = 1_000_000
_MS_PER_S = 1_000
_NANOS = [field.name for field in fields(Price) if field.name.endswith("_nanos")]


@frozen_dataclass(frozen=True, slots=True)
class Used:
    """What one request used. ``cached_tokens`` are among the ``prompt_tokens``; ``batch_size`` items shared
    ``engine_ms``."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    images: int = 0
    engine_ms: int = 0
    batch_size: int = 1


def nanos_of(price: Price, used: Used) -> int:
    """The price of what was used, rounded once, half up, to whole nanos.

    It is exact, and so the sum of the prices of its parts, if the prices are multiples of 0.001 per million tokens and
    0.000001 per second, and the engine's time of a multiple of ``batch_size`` milliseconds.
    """
    prompt, cached = max(0, used.prompt_tokens), max(0, used.cached_tokens)
    cached = min(cached, prompt)
    shares = max(1, used.batch_size)
    tokens = (
        (prompt - cached) * price.input_nanos
        + cached * price.cached_input_nanos
        + max(0, used.completion_tokens) * price.output_nanos
    )
    engine = max(0, used.engine_ms) * price.engine_second_nanos * (_TOKENS_PER_PRICE // _MS_PER_S)
    divisor = _TOKENS_PER_PRICE * shares
    return max(0, used.images) * price.image_nanos + (2 * (tokens * shares + engine) + divisor) // (2 * divisor)


@frozen_dataclass(frozen=True, slots=True)
class _Periods:
    """Prices by the time from which they are in force, ascending."""

    starts_ms: tuple[int, ...]
    prices: tuple[Price, ...]

    def at(self, at_ms: int) -> Price | None:
        index = bisect_right(self.starts_ms, at_ms)
        return self.prices[index - 1] if index else None


class PriceBook:
    """The prices of all models. A model that has none, or none yet at a time, has no known cost then."""

    def __init__(self, models: Iterable[ModelPrices] = ()) -> None:
        """Every record must pass ``check_prices``."""
        self._currencies: dict[str, str] = {}
        self._periods: dict[tuple[str, str | None], _Periods] = {}
        for model in models:
            self._currencies[model.model] = model.currency
            for version in {price.version for price in model.prices}:
                ordered = sorted(
                    (price for price in model.prices if price.version == version), key=lambda price: price.from_ms
                )
                starts = tuple(price.from_ms for price in ordered)
                self._periods[model.model, version] = _Periods(starts, tuple(ordered))

    def price(self, model: str, version: str, at_ms: int) -> Price | None:
        """The price in force at a time: the latest of the version itself or, without one, of the model."""
        for key in ((model, version), (model, None)):
            periods = self._periods.get(key)
            price = None if periods is None else periods.at(at_ms)
            if price is not None:
                return price
        return None

    def nothing(self, model: str) -> Cost | None:
        """The cost of a request that used nothing of this model; None if the model has no prices."""
        currency = self._currencies.get(model)
        return None if currency is None else Cost(0, currency)

    def cost(
        self, model: str, version: str, at_ms: int, outcome: str, used: Used, *, cached: bool = False
    ) -> Cost | None:
        """The cost of a request that ended so at ``at_ms``; None if no price was in force then, or if it is larger than
        a record can carry. ``cached``: an answer from the cache, for which nothing ran."""
        if outcome not in _CHARGED:
            return self.nothing(model)
        price = self.price(model, version, at_ms)
        if price is None:
            return None
        nanos = price.cached_answer_nanos if cached else nanos_of(price, used)
        return Cost(nanos, self._currencies[model]) if nanos <= LARGEST_NANOS else None

    def cost_of(self, event: UsageEvent) -> Cost | None:
        """The cost of a usage event by these prices, whatever cost it carries."""
        used = Used(
            event.prompt_tokens,
            event.completion_tokens,
            event.cached_tokens,
            event.images,
            event.engine_ms,
            event.batch_size,
        )
        return self.cost(
            event.model, event.model_version, event.occurred_at_ms, event.outcome, used, cached=event.cached
        )


NO_PRICES = PriceBook()


def check_prices(key: str, prices: ModelPrices) -> None:
    """Check a published record, which need not come from a file. Raises ValueError."""
    if prices.model != key or not is_model_name(key):
        raise ValueError(f"model: {prices.model!r} under the key {key!r}")
    if CURRENCY.fullmatch(prices.currency) is None:
        raise ValueError(f"currency: {prices.currency!r} does not match {CURRENCY.pattern}")
    places = [(price.version, price.from_ms) for price in prices.prices]
    if len(set(places)) < len(places):
        raise ValueError("prices: two from the same time on")
    for price in prices.prices:
        for name in _NANOS:
            nanos = getattr(price, name)
            if not 0 <= nanos <= LARGEST_PRICE * NANOS_PER_UNIT:
                raise ValueError(f"{name}: must be from 0 to {LARGEST_PRICE * NANOS_PER_UNIT}, not {nanos}")


def usable_prices(published: Mapping[str, ModelPrices]) -> tuple[list[ModelPrices], dict[str, str]]:
    """The records that pass ``check_prices``, and why each other one does not, by its key."""
    usable, refused = [], {}
    for key, prices in published.items():
        try:
            check_prices(key, prices)
        except ValueError as error:
            refused[key] = str(error)
        else:
            usable.append(prices)
    return usable, refused
