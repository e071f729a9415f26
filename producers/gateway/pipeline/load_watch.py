"""Current load, tenants and models, followed on threads."""

import random
import threading
from collections.abc import Callable

from fairlane.backoff import Backoff
from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.logs import get_logger
from fairlane.names import CONTROL_TENANTS
from fairlane.records import ModelVersion, TenantSpec
from fairlane.schema_registry import RegistryError
from fairlane.settings import KafkaSettings
from fairlane_server.control.published_models import PublishedModels
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.kafka.feeds import Feed
from fairlane_server.kafka.load_board import LoadBoard, LoadView
from fairlane_server.kafka.load_feed import LoadFeed
from fairlane_server.models.routes import model_of
from producers.gateway.pipeline.early_rejection import RegistrySnapshot

log = get_logger(__name__)

_EVERY_S = 0.25
_THREAD_TIMEOUT_S = 5.0


class RegistryFeeds:
    """Registered tenants and models. ``start`` blocks; the rest is thread-safe."""

    def __init__(self, settings: KafkaSettings, codec: Codec, on_failure: Callable[[BaseException], None]) -> None:
        self._tenants = Feed(settings, codec, CONTROL_TENANTS, TenantSpec)
        self._models = PublishedModels(settings, codec, on_failure)
        self._tenants.on_failure(on_failure)

    def start(self) -> None:
        """Read both topics to their ends. Raises FeedUnavailableError."""
        self._tenants.start()
        self._models.start()

    def stop(self) -> None:
        self._tenants.stop()
        self._models.stop()

    @property
    def registry(self) -> RegistrySnapshot:
        """Current tenants and models."""
        return RegistrySnapshot(self._tenants.snapshot, self._models.catalog)

    def models_of(self, tenant: str) -> tuple[ModelVersion, ...]:
        """The champions of the models that a tenant may use, sorted by name; empty for an unregistered tenant."""
        spec, models = self._tenants.snapshot.get(tenant), self._models.catalog.champions
        if spec is None:
            return ()
        return tuple(model for name, model in sorted(models.items()) if not spec.models or name in spec.models)

    def may_name(self, tenant: str, reference: str) -> bool:
        """Whether a request of a tenant may name this model, version or alias; False for one that there is not."""
        spec = self._tenants.snapshot.get(tenant)
        if spec is None or (spec.models and model_of(reference) not in spec.models):
            return False
        return self._models.catalog.named(reference) is not None


class LoadWatch:
    """Reports the load to ``listener`` a few times a second, on its own thread. While Kafka, or a schema registry that
    it needs, is unavailable, it reports nothing and retries. ``on_failure``: the thread has died, the process must
    end."""

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        listener: Callable[[LoadView], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._settings = settings
        self._codec = codec
        self._listener = listener
        self._on_failure = on_failure
        self._backoff = Backoff(first_s=0.5, longest_s=5.0)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_THREAD_TIMEOUT_S)

    def _run(self) -> None:
        failures = 0
        try:
            while not self._stopping.is_set():
                try:
                    self._follow()
                except (ClusterError, RegistryError) as error:
                    failures += 1
                    log.warning("load_not_known", reason=str(error))
                    self._stopping.wait(self._backoff.delay_s(failures, random.random()))  # noqa: S311 - jitter
        except Exception as error:  # noqa: BLE001 - the process ends with it
            log.error("load_watch_died", error=type(error).__name__)
            self._on_failure(error)

    def _follow(self) -> None:
        board = LoadBoard()
        feed = LoadFeed(self._settings, self._codec, board)
        try:
            feed.catch_up()
            while not self._stopping.is_set():
                feed.follow(_EVERY_S)
                if feed.trouble is None:
                    self._listener(board.view(now_ms()))
        finally:
            feed.close()
