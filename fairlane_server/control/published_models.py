"""The control topic of models: their versions and routes, each under the reference by which a request can name it."""

import threading
from collections.abc import Callable, Mapping

from fairlane.codec import Codec
from fairlane.names import CONTROL_MODELS, is_model_name, is_name
from fairlane.records import ModelRoute, ModelVersion
from fairlane.settings import KafkaSettings
from fairlane_server.control.last_good import LastGood
from fairlane_server.control.publisher import ControlTopic
from fairlane_server.kafka.feeds import Feed
from fairlane_server.models.catalog import ModelCatalog, ModelRecord
from fairlane_server.models.route_checks import check_route
from fairlane_server.models.routes import version_key


def key_of(record: ModelRecord) -> str:
    """``model/version`` of a version, the model's name of a route."""
    return version_key(record.model, record.version) if isinstance(record, ModelVersion) else record.model


def model_topic(settings: KafkaSettings, codec: Codec) -> ControlTopic[ModelRecord]:
    """The control topic of models."""
    return ControlTopic(settings, codec, CONTROL_MODELS, ModelVersion, ModelRoute, kind="model", key_of=key_of)


class PublishedModels:
    """Follows the control topic. Before ``start`` the catalog is empty. Any thread may read it."""

    def __init__(self, settings: KafkaSettings, codec: Codec, on_failure: Callable[[Exception], None]) -> None:
        """``on_failure`` is called, on the feed's thread, when following ends by itself."""
        self.catalog = ModelCatalog()
        """The same object until a record changes."""
        self._usable = LastGood(check_model, "model_unusable")
        self._feed: Feed[ModelRecord] = Feed(settings, codec, CONTROL_MODELS, ModelVersion, ModelRoute)
        self._feed.on_change(self._changed)
        self._feed.on_failure(on_failure)

    def start(self) -> None:
        """Read all published models, then go on following them. Raises FeedUnavailableError."""
        self._feed.start()

    def stop(self) -> None:
        self._feed.stop()

    def _changed(self, published: Mapping[str, ModelRecord]) -> None:
        self.catalog = ModelCatalog.of(self._usable.usable(published))


class FollowedModels:
    """The published models for a thread that looks now and then: followed from the first look on, and anew after
    following has ended by itself. For one thread."""

    def __init__(self, settings: KafkaSettings, codec: Codec) -> None:
        self._settings = settings
        self._codec = codec
        self._models: PublishedModels | None = None
        self._is_lost = threading.Event()

    def catalog(self) -> ModelCatalog:
        """As it is now. Raises FeedUnavailableError."""
        if self._is_lost.is_set():
            self.stop()
            self._is_lost.clear()
        if self._models is None:
            models = PublishedModels(self._settings, self._codec, lambda _error: self._is_lost.set())
            models.start()
            self._models = models
        return self._models.catalog

    def stop(self) -> None:
        if self._models is not None:
            self._models.stop()
            self._models = None


def check_model(key: str, record: ModelRecord) -> None:
    """Raises ValueError for an invalid model or pool name, and for an invalid route. That a route names versions which
    are not published is no error here: they may come later, and until then others get its requests."""
    if isinstance(record, ModelRoute):
        check_route(key, record)
        return
    if key not in (record.model, version_key(record.model, record.version)) or not is_model_name(record.model):
        raise ValueError(f"model: {record.model!r} under the key {key!r}")
    for pool in (record.pool, *record.dedicated_pools):
        if not is_name(pool):
            raise ValueError(f"pool: {pool!r} cannot name one")
