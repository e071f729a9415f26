"""The prices that ``fairlane prices apply`` published, followed by every process that writes usage."""

from collections.abc import Callable, Mapping

from fairlane.codec import Codec
from fairlane.logs import get_logger
from fairlane.names import CONTROL_PRICES
from fairlane.records import ModelPrices
from fairlane.settings import KafkaSettings
from fairlane_server.costs.price_book import NO_PRICES, PriceBook, usable_prices
from fairlane_server.kafka.feeds import Feed

log = get_logger(__name__)


class PublishedPrices:
    """``book`` holds the present prices; before ``start``, none. Any thread may read it."""

    def __init__(self, settings: KafkaSettings, codec: Codec, on_failure: Callable[[Exception], None]) -> None:
        """``on_failure`` is called, on the feed's thread, when following ends by itself."""
        self.book: PriceBook = NO_PRICES
        self._feed = Feed(settings, codec, CONTROL_PRICES, ModelPrices)
        self._feed.on_change(self._changed)
        self._feed.on_failure(on_failure)

    def start(self) -> None:
        """Read all published prices, then go on following them. Raises FeedUnavailableError."""
        self._feed.start()

    def stop(self) -> None:
        self._feed.stop()

    def _changed(self, published: Mapping[str, ModelPrices]) -> None:
        # A record that was not made of a checked file may hold anything: no price is better than a wrong one.
        usable, refused = usable_prices(published)
        for model, reason in refused.items():
            log.error("prices_unusable", model=model, reason=reason)
        self.book = PriceBook(usable)
        log.info("prices_read", models=len(usable))
