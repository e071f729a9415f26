"""Consumers of a pool that change versions, without engines, broker or time: all of them in one thread."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fairlane.records import CapacityReport, ModelRoute, ModelVersion, VersionChange
from fairlane_server.models.catalog import ModelCatalog
from fairlane_server.models.routes import version_key
from inference_consumers.batching.received_work import ModelKey
from inference_consumers.engines.protocol import EngineMemory, LoadFailed
from inference_consumers.versions.engines import EngineProgress
from inference_consumers.versions.keeper import VersionKeeper
from inference_consumers.versions.members import PoolMembers
from inference_consumers.versions.memory import FreeMemory, Memory

POOL = "pool"
MODEL = ModelVersion("digits", "1", POOL, "simulated", ("classify",), "digits", 8, 8)
KEEP_MS = 60_000
TURN_MS = 100
_LOAD_TURNS = 5


def version(name: str, model: str = MODEL.model) -> ModelVersion:
    return replace(MODEL, model=model, version=name)


def route(champion: str, previous: str | None = None, **fields: Any) -> ModelRoute:
    aliases = {"champion": champion, **fields.pop("aliases", {})}
    return ModelRoute(
        fields.pop("model", MODEL.model), 1, aliases, {} if previous is None else {"champion": previous}, **fields
    )


def heartbeat(
    instance: str, *loaded: str, changes: tuple[VersionChange, ...] = (), draining: bool = False, pool: str = POOL
) -> CapacityReport:
    return CapacityReport(
        *(instance, pool, (MODEL.model,), "healthy", draining, 0.0, 0.0, 8, 8, 0.0, 0, 0, 0),
        versions=loaded,
        follows_models=True,
        changes=changes,
    )


@dataclass(frozen=True, slots=True)
class _Host:
    key: ModelKey


@dataclass
class _Engine:
    host: _Host
    turns_left: int
    lacks_room: Callable[[], bool] | None
    hidden: bool = False
    refused: bool = False
    failure: LoadFailed | None = None

    @property
    def is_loaded(self) -> bool:
        return self.turns_left <= 0 and self.failure is None


@dataclass
class FakeEngines:
    """Engines that take some turns to load, in so much memory. Versions that are ``broken``, or whose files are
    ``away`` for now, fail at the end of loading."""

    memory_bytes: int
    sizes: dict[ModelKey, int]
    broken: set[ModelKey] = field(default_factory=set)
    away: set[ModelKey] = field(default_factory=set)
    hanging: set[ModelKey] = field(default_factory=set)
    """Those that never end loading."""
    unroomy: set[ModelKey] = field(default_factory=set)
    """Those whose engine finds no room at the end of loading."""
    busy: set[ModelKey] = field(default_factory=set)
    """Those that run something."""
    engines: dict[ModelKey, _Engine] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)

    @property
    def hosts(self) -> list[_Host]:
        return [engine.host for engine in self.engines.values()]

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - sum(self.sizes[key] for key in self.engines)

    @property
    def served(self) -> list[str]:
        """What a heartbeat names."""
        return [version_key(*key) for key, one in self.engines.items() if one.is_loaded and not one.hidden]

    def load(self, model: ModelVersion, lacks_room: Callable[[], bool] | None) -> None:
        key = model.model, model.version
        assert key not in self.engines
        self.log.append(("load", model.version))
        self.engines[key] = _Engine(_Host(key), _LOAD_TURNS, lacks_room)

    def advance(self) -> None:
        for key, engine in self.engines.items():
            if engine.turns_left <= 0 or engine.failure is not None or key in self.hanging:
                continue
            engine.turns_left -= 1
            if engine.lacks_room is not None and engine.lacks_room():
                engine.failure = LoadFailed("no room", no_room=True)
            elif engine.turns_left <= 0 and key in self.broken:
                engine.failure = LoadFailed("broken")
            elif engine.turns_left <= 0 and key in self.unroomy:
                engine.failure = LoadFailed("no room", no_room=True)
            elif engine.turns_left <= 0 and key in self.away:
                engine.failure = LoadFailed("away", may_pass=True)

    def progress(self, key: ModelKey) -> EngineProgress:
        engine = self.engines[key]
        return EngineProgress(engine.is_loaded, engine.failure, EngineMemory(self.sizes[key]))

    def hide(self, key: ModelKey) -> None:
        self.engines[key].hidden = True

    def refuse(self, key: ModelKey) -> None:
        self.engines[key].refused = True

    def keep(self, key: ModelKey) -> None:
        self.engines[key].hidden = self.engines[key].refused = False

    def is_at_rest(self, key: ModelKey) -> bool:
        return key not in self.busy

    def remove(self, key: ModelKey) -> None:
        self.log.append(("unload", key[1]))
        del self.engines[key]


@dataclass
class FakeMemory:
    """Knows what is free, and what a version needs once another one of its model was loaded."""

    engines: FakeEngines
    reserve_bytes: int = 0
    known: dict[str, int] = field(default_factory=dict)
    least: dict[ModelKey, int] = field(default_factory=dict)
    _free_before: int = 0

    def held(self, key: ModelKey, _engines: object) -> Memory:
        return Memory(self.engines.sizes[key])

    def free(self, _engines: object) -> FreeMemory:
        return FreeMemory(self.engines.free_bytes)

    def needed(self, model: ModelVersion) -> Memory | None:
        known, least = self.known.get(model.model), self.least.get((model.model, model.version))
        found = [size for size in (known, least) if size is not None]
        return Memory(max(found)) if found else None

    def begin(self, model: ModelVersion, _engines: object) -> tuple[int | None, int]:
        self._free_before = self.engines.free_bytes
        need = self.needed(model)
        return None if need is None else need.main_bytes, self._free_before

    def lacks_room(self, _engines: object) -> bool:
        return self.engines.free_bytes < self.reserve_bytes

    def found_no_room(self, key: ModelKey) -> None:
        self.least[key] = self._free_before + 1

    def measured(self, key: ModelKey, memory: EngineMemory, _engines: object) -> None:
        self.known[key[0]] = memory.main_bytes

    def released(self, key: ModelKey) -> None: ...


class FakeConsumer:
    """One consumer: a keeper, and the heartbeats that it has read."""

    def __init__(self, name: str, pool: "FakePool", engines: FakeEngines, reserve_bytes: int) -> None:
        self.name = name
        self.engines = engines
        self.members = PoolMembers(POOL)
        self.failures: list[Exception] = []
        given: Any = engines
        memory: Any = FakeMemory(engines, reserve_bytes)
        self.keeper = VersionKeeper(
            POOL,
            lambda: pool.catalog,
            given,
            memory,
            self,
            lambda: True,
            KEEP_MS,
            lambda: pool.now_ms,
            self.failures.append,
        )

    def has_turn(self) -> bool:
        return self.members.has_turn(self.name)

    def all_others_have(self, version: str) -> bool:
        return self.members.all_have(version, but=self.name)

    def failed_elsewhere(self) -> set[str]:
        return self.members.failed(but=self.name)

    @property
    def state_of(self) -> dict[str, str]:
        return {change.version: change.state for change in self.keeper.changes}

    @property
    def is_serving(self) -> bool:
        return self.keeper.is_complete


class FakePool:
    """Some consumers, the published records, and the clock."""

    def __init__(
        self,
        consumers: int = 1,
        *,
        memory_bytes: int = 100,
        reserve_bytes: int = 0,
        sizes: dict[ModelKey, int] | None = None,
    ) -> None:
        self.now_ms = 1_000_000
        self.catalog = ModelCatalog()
        self.sizes = {} if sizes is None else sizes
        self._memory_bytes, self._reserve_bytes = memory_bytes, reserve_bytes
        self.consumers: dict[str, FakeConsumer] = {}
        for number in range(consumers):
            self.begin(f"consumer-{number}")

    def begin(self, name: str) -> FakeConsumer:
        """Start a consumer, in the place of one of this name that was killed."""
        made = FakeConsumer(name, self, FakeEngines(self._memory_bytes, self.sizes), self._reserve_bytes)
        self.consumers[name] = made
        return made

    def kill(self, name: str) -> None:
        del self.consumers[name]

    def publish(self, *records: ModelVersion | ModelRoute, size: int = 40) -> None:
        """Records beside, or in the place of, those that there are."""
        versions = {**self.catalog.versions}
        routes = {**self.catalog.routes}
        for record in records:
            if isinstance(record, ModelVersion):
                versions[record.model, record.version] = record
                self.sizes.setdefault((record.model, record.version), size)
            else:
                routes[record.model] = record
        self.catalog = ModelCatalog(versions.values(), routes.values())

    def turn(self, turns: int = 1) -> None:
        for _ in range(turns):
            self.now_ms += TURN_MS
            for consumer in list(self.consumers.values()):
                consumer.engines.advance()
                consumer.keeper.turn()
                if consumer.keeper.is_complete:
                    consumer.keeper.begin_serving()
            self._send_heartbeats()

    def _send_heartbeats(self) -> None:
        for consumer in self.consumers.values():
            if consumer.is_serving:
                report = heartbeat(consumer.name, *consumer.engines.served, changes=consumer.keeper.changes)
                for reader in self.consumers.values():
                    reader.members.report(report, self.now_ms)

    def served(self, name: str = "consumer-0") -> list[str]:
        """The versions of the model that a consumer serves."""
        return sorted(one.partition("/")[2] for one in self.consumers[name].engines.served)
