"""Memory as measured: what loaded versions hold, what is left, and from these what another version will need."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fairlane import metrics
from fairlane.records import ModelVersion
from inference_consumers.batching.received_work import ModelKey
from inference_consumers.engine_process.process_facts import main_memory_bytes
from inference_consumers.engines.protocol import EngineMemory
from inference_consumers.versions.engines import VersionEngines
from inference_consumers.versions.memory import FreeMemory, Memory, larger, predicted


@dataclass(frozen=True, slots=True)
class _Measured:
    """What a version held when it was loaded, and the size of its files."""

    memory: Memory
    files_bytes: int


@dataclass(slots=True)
class MemoryBook:
    """For one thread, but for ``lacks_room``.

    ``max_bytes`` bounds the main memory of all engines together, None: only the machine or the container does.
    """

    models_dir: Path
    max_bytes: int | None
    reserve_bytes: int
    free_main_bytes: Callable[[], int] = main_memory_bytes
    _held: dict[ModelKey, _Measured] = field(default_factory=dict)
    _of_model: dict[str, _Measured] = field(default_factory=dict)
    """Of the version of each model that was loaded last, also if it is gone."""
    _at_least: dict[ModelKey, Memory] = field(default_factory=dict)
    """Of versions that there was no room for."""
    _device_free_bytes: int | None = None
    _free_before: FreeMemory = field(default_factory=lambda: FreeMemory(0))
    """When the latest version began to be loaded."""

    def held(self, key: ModelKey, engines: VersionEngines) -> Memory:
        """What a loaded version holds: as much as when it was loaded, or as now if that is more."""
        known = self._held.get(key)
        memory = Memory() if known is None else known.memory
        return larger(memory, Memory(engines.host(key).held_bytes)) if self.max_bytes is not None else memory

    def free(self, engines: VersionEngines) -> FreeMemory:
        main_bytes = self.free_main_bytes()
        if self.max_bytes is not None:
            main_bytes = min(main_bytes, self.max_bytes - sum(host.held_bytes for host in engines.hosts))
        return FreeMemory(main_bytes, self._device_free_bytes)

    def needed(self, version: ModelVersion) -> Memory | None:
        """What a version will hold; None while nothing is known of its model."""
        key = version.model, version.version
        known, least = self._of_model.get(version.model), self._at_least.get(key)
        if known is None:
            return least
        path = self.models_dir / version.path if version.artifact_digest is None else None
        need = predicted(known.memory, known.files_bytes, None if path is None else folder_bytes(path))
        return need if least is None else larger(need, least)

    def begin(self, version: ModelVersion, engines: VersionEngines) -> tuple[int | None, int]:
        """A version is to be loaded. Shows what it will need and what is left, and returns both, of main memory."""
        need, free = self.needed(version), self.free(engines)
        self._free_before = free
        for kind, needed_bytes, free_bytes in (
            ("main", 0 if need is None else need.main_bytes, free.main_bytes),
            ("device", 0 if need is None else need.device_bytes, free.device_bytes or 0),
        ):
            metrics.MEMORY_NEEDED_BYTES.labels(model=version.model, kind=kind).set(needed_bytes)
            metrics.MEMORY_FREE_BYTES.labels(kind=kind).set(free_bytes)
        return None if need is None else need.main_bytes, free.main_bytes

    def lacks_room(self, engines: VersionEngines) -> bool:
        """Whether less than the reserve is left. Any thread."""
        return self.free(engines).main_bytes < self.reserve_bytes

    def found_no_room(self, key: ModelKey) -> None:
        """The version that was to be loaded could not be, for want of memory: it needs more than was free."""
        free = self._free_before
        self._at_least[key] = Memory(free.main_bytes + 1, 0 if free.device_bytes is None else free.device_bytes + 1)

    def measured(self, key: ModelKey, memory: EngineMemory, engines: VersionEngines) -> None:
        """A version was loaded, and holds this."""
        self._at_least.pop(key, None)
        held = Memory(memory.main_bytes, memory.device_bytes, memory.fills_device)
        found = _Measured(held, folder_bytes(engines.host(key).spec.path))
        self._held[key] = self._of_model[key[0]] = found
        if memory.device_free_bytes is not None:
            self._device_free_bytes = memory.device_free_bytes
        self._show(key[0])

    def released(self, key: ModelKey) -> None:
        """A version was unloaded."""
        known = self._held.pop(key, None)
        if known is not None and self._device_free_bytes is not None:
            self._device_free_bytes += known.memory.device_bytes
        self._show(key[0])

    def _show(self, model: str) -> None:
        held = [one.memory for key, one in self._held.items() if key[0] == model]
        metrics.ENGINE_MEMORY_BYTES.labels(model=model, kind="main").set(sum(one.main_bytes for one in held))
        metrics.ENGINE_MEMORY_BYTES.labels(model=model, kind="device").set(sum(one.device_bytes for one in held))


def folder_bytes(folder: Path) -> int:
    """The size of the files in a folder; 0 if there is none."""
    size_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size_bytes += Path(parent, name).stat().st_size
            except OSError:
                continue
    return size_bytes
