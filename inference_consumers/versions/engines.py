"""Engines of the versions that a consumer has loaded: each comes and goes while the others serve."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fairlane.records import ModelVersion
from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.batching.received_work import ModelKey
from inference_consumers.driver import EngineDriver
from inference_consumers.engine_process.host import EngineHost
from inference_consumers.engine_process.states import EngineState
from inference_consumers.engines.protocol import EngineMemory, LoadFailed

END_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """How far the engine of a version is. ``failure`` None and ``is_loaded`` False: it is being loaded."""

    is_loaded: bool
    failure: LoadFailed | None
    memory: EngineMemory


@dataclass(slots=True)
class VersionEngines:
    """The engines of a driver. One thread changes them; any may read ``hosts``.

    ``make_host`` makes the host of a version's engine. It may raise ConfigError.
    """

    driver: EngineDriver
    make_host: Callable[[ModelVersion], EngineHost]
    limits_of: Callable[[ModelVersion], BatchLimits]
    _hosts: dict[ModelKey, EngineHost] = field(default_factory=dict)

    @property
    def hosts(self) -> Sequence[EngineHost]:
        return tuple(self._hosts.values())

    def load(self, version: ModelVersion, lacks_room: Callable[[], bool] | None) -> None:
        """Start the engine of a version. ``lacks_room`` is asked while it is loaded."""
        host, limits = self.make_host(version), self.limits_of(version)
        self._hosts = {**self._hosts, host.key: host}
        with self.driver.changed:
            self.driver.waiting.set_limits(host.key, limits)
            self.driver.engines.by_key[host.key] = EngineState(host, limits.max_items, limits.max_tokens)
        host.start(self.driver, lacks_room)

    def progress(self, key: ModelKey) -> EngineProgress:
        with self.driver.changed:
            state = self.driver.engines.by_key[key]
            return EngineProgress(state.has_been_loaded, state.failure, state.memory)

    def host(self, key: ModelKey) -> EngineHost:
        return self._hosts[key]

    def hide(self, key: ModelKey) -> None:
        """Report the version as not loaded, and serve what comes all the same."""
        self._mark(key, hidden=True)

    def refuse(self, key: ModelKey) -> None:
        """Hand back what waits for the version, and what comes."""
        self._mark(key, hidden=True, leaving=True)

    def keep(self, key: ModelKey) -> None:
        """Serve a version after all that was hidden or refused."""
        self._mark(key)

    def is_at_rest(self, key: ModelKey) -> bool:
        """Whether nothing runs on the engine or waits for it."""
        with self.driver.changed:
            return not self.driver.engines.runs.of(key) and key not in self.driver.waiting.waiting_models

    def remove(self, key: ModelKey) -> None:
        """End the engine's process, which frees its memory. Blocks until it has ended."""
        # What is still in its checks may come while the process ends.
        self.refuse(key)
        host = self._hosts[key]
        host.close(END_TIMEOUT_S)
        with self.driver.changed:
            self.driver.engines.by_key.pop(key, None)
            self.driver.waiting.forget(key)
        self._hosts = {one: kept for one, kept in self._hosts.items() if one != key}

    def close(self, timeout_s: float) -> None:
        for host in self.hosts:
            host.close(timeout_s)

    def _mark(self, key: ModelKey, *, hidden: bool = False, leaving: bool = False) -> None:
        with self.driver.changed:
            state = self.driver.engines.by_key[key]
            state.is_hidden, state.is_leaving = hidden, leaving
            self.driver.changed.notify_all()
