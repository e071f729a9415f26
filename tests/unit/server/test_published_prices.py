"""Published prices: the present ones count, and a record that is none is no price and no end."""

from structlog.testing import capture_logs

from fairlane.outcomes import Outcome
from fairlane.records import Cost, ModelPrices, Price
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from fairlane_server.costs.price_book import Used
from fairlane_server.costs.published_prices import PublishedPrices

GOOD = ModelPrices("words", "XTS", (Price(0, None, image_nanos=5),))
BAD = ModelPrices("letters", "XTS", (Price(0, None, image_nanos=-5),))


def cost(prices: PublishedPrices, model: str) -> Cost | None:
    return prices.book.cost(model, "1", 1, Outcome.OK, Used(images=2))


def test_what_was_published_last_counts_and_what_is_no_price_is_none() -> None:
    prices = PublishedPrices(KafkaSettings(), default_codec(), lambda _error: None)
    assert cost(prices, "words") is None
    with capture_logs() as logged:
        prices._changed({"words": GOOD, "letters": BAD})
    assert (cost(prices, "words"), cost(prices, "letters")) == (Cost(10, "XTS"), None)
    (told,) = [entry for entry in logged if entry["event"] == "prices_unusable"]
    assert (told["model"], told["reason"].split(":")[0]) == ("letters", "image_nanos")
    prices._changed({})
    assert cost(prices, "words") is None
