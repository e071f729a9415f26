"""The versions of one consumer, from the records that are published to the engines that serve."""

from collections.abc import Callable

from prometheus_client import REGISTRY

from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.records import ModelVersion, VersionChange
from fairlane.settings import Settings
from fairlane_server.artifacts.store import artifact_store
from fairlane_server.control.published_models import PublishedModels
from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.driver import EngineDriver
from inference_consumers.engine_process.host import EngineHost, EngineMetrics, engine_host
from inference_consumers.engines.protocol import EngineLoadError
from inference_consumers.versions.engines import END_TIMEOUT_S, VersionEngines
from inference_consumers.versions.heartbeats import PoolHeartbeats
from inference_consumers.versions.keeper import VersionKeeper
from inference_consumers.versions.measurement import MemoryBook


class PoolVersions:
    """Follows ``control.models`` and the heartbeats of the pool's consumers, and keeps the driver's engines as they
    should be. ``owns_work`` says whether this consumer has partitions."""

    def __init__(
        self,
        settings: Settings,
        pool: str,
        codec: Codec,
        driver: EngineDriver,
        owns_work: Callable[[], bool],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._settings = settings
        self._artifacts = artifact_store(settings)
        self._models = PublishedModels(settings, codec, on_failure)
        self._heartbeats = PoolHeartbeats(settings, codec, pool, settings.instance_id, on_failure)
        self._engines = VersionEngines(driver, self._host, self._limits)
        self._metrics = EngineMetrics(lambda: self._engines.hosts)
        self._keeper = VersionKeeper(
            pool,
            lambda: self._models.catalog,
            self._engines,
            MemoryBook(settings.models_dir, settings.engine_memory_max_bytes, settings.load_memory_reserve_bytes),
            self._heartbeats,
            owns_work,
            keep_ms=round(settings.previous_version_keep_s * 1_000),
            clock=now_ms,
            on_failure=on_failure,
        )

    def start(self) -> None:
        """Begin to load. Raises FeedUnavailableError when a control topic cannot be read."""
        REGISTRY.register(self._metrics)
        self._models.start()
        self._keeper.start()
        self._heartbeats.start()

    @property
    def is_loaded(self) -> bool:
        """Whether something is loaded, and everything else that can be. Raises EngineLoadError when nothing can be."""
        if self._keeper.start_failure is not None:
            raise EngineLoadError(self._keeper.start_failure)
        return self._keeper.is_complete

    @property
    def waiting_for(self) -> str | None:
        """Why nothing is served; None while something is."""
        return self._keeper.waiting_for

    @property
    def changes(self) -> tuple[VersionChange, ...]:
        return self._keeper.changes

    def begin_serving(self) -> None:
        """From now on versions are needed by others, and are given up only in turn."""
        self._keeper.begin_serving()

    def stop(self) -> None:
        """Begin no more changes."""
        self._keeper.stop()

    def close(self, *, gently: bool) -> None:
        """End the engines and all threads; after ``stop``."""
        self._engines.close(END_TIMEOUT_S if gently else 0)
        REGISTRY.unregister(self._metrics)
        self._models.stop()
        self._heartbeats.stop()

    def _host(self, version: ModelVersion) -> EngineHost:
        return engine_host(self._settings, self._artifacts, version)

    def _limits(self, version: ModelVersion) -> BatchLimits:
        settings = self._settings
        return BatchLimits(
            min(settings.max_batch_size, version.max_batch_size),
            min(settings.max_batch_tokens, version.max_batch_tokens),
            settings.batch_timeout_ms,
        )
