"""Prices of a deployment, read from ``deploy/prices.yaml``. The file is accepted as a whole or not at all."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from fairlane.names import MODEL_PATTERN
from fairlane.records import ModelPrices, Price
from fairlane_server.costs.price_book import CURRENCY, LARGEST_PRICE, MOST_PRICES
from fairlane_server.models.routes import VERSION_PATTERN
from fairlane_server.yaml_config import Reader, YamlNode, load_yaml_with_lines

_PLACES = 9
"""Decimal places of a price: those of a nano."""


def load_prices(path: Path, models: Collection[str] | None = None) -> tuple[ModelPrices, ...]:
    """Read the prices, by model in file order.

    Raises ConfigError with file, line and reason: unknown or missing keys, prices out of bounds or with more than nine
    decimal places, times that are none, two prices of one version from the same time on, an entry without any price
    and, if ``models`` are given, one of another model.
    """
    fields = load_yaml_with_lines(path).read({"currency": _currency, "prices": YamlNode.sequence}, {})
    found: dict[str, dict[tuple[str | None, int], Price]] = {}
    nodes: dict[tuple[str, str | None, int], YamlNode] = {}
    for entry in fields["prices"]:
        model, price = _price(entry, models)
        place = model, price.version, price.from_ms
        if (known := nodes.get(place)) is not None:
            raise entry.fields["from"].error(f"{model} already has a price from then on, on line {known.line}")
        prices = found.setdefault(model, {})
        if len(prices) >= MOST_PRICES:
            raise entry.error(f"{model} has more than {MOST_PRICES} prices")
        nodes[place], prices[price.version, price.from_ms] = entry, price
    return tuple(
        ModelPrices(model, fields["currency"], tuple(prices[place] for place in sorted(prices, key=_order)))
        for model, prices in found.items()
    )


def _order(place: tuple[str | None, int]) -> tuple[str, int]:
    version, from_ms = place
    return version or "", from_ms


def _price(entry: YamlNode, models: Collection[str] | None) -> tuple[str, Price]:
    given = entry.read(_REQUIRED, _OPTIONAL)
    model = given.pop("model")
    if models is not None and model not in models:
        raise entry.fields["model"].error(f"unknown model {model!r}; known: {', '.join(models)}")
    if not given.keys() & _PRICES.keys():
        raise entry.error(f"holds no price; one of {', '.join(_PRICES)} is needed, and 0 is one")
    tokens = given.pop("per_million_tokens", {})
    return model, Price(**tokens, **{_FIELDS.get(key, key): value for key, value in given.items()})


def _tokens(node: YamlNode) -> dict[str, Any]:
    given = node.read({}, dict.fromkeys(("input", "cached_input", "output"), _nanos))
    if not given:
        raise node.error("holds no price")
    given.setdefault("cached_input", given.get("input", 0))
    return {f"{kind}_nanos": nanos for kind, nanos in given.items()}


_currency = partial(YamlNode.string, pattern=CURRENCY)
_nanos = partial(YamlNode.decimal, places=_PLACES, maximum=LARGEST_PRICE)
_FIELDS = {
    "from": "from_ms",
    "per_engine_second": "engine_second_nanos",
    "per_image": "image_nanos",
    "per_cached_answer": "cached_answer_nanos",
}
"""Keys, and the fields that they set, where these are called otherwise."""
_PRICES: dict[str, Reader] = {
    "per_million_tokens": _tokens,
    "per_engine_second": _nanos,
    "per_image": _nanos,
    "per_cached_answer": _nanos,
}
_REQUIRED: dict[str, Reader] = {"model": partial(YamlNode.string, pattern=MODEL_PATTERN), "from": YamlNode.utc_ms}
_OPTIONAL: dict[str, Reader] = {"version": partial(YamlNode.string, pattern=VERSION_PATTERN), **_PRICES}
