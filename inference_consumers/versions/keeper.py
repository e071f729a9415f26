"""Keeper of a consumer's versions: follows ``control.models`` and carries out the plan, one change after another."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from fairlane.outcomes import VersionState
from fairlane.records import ModelVersion, VersionChange
from fairlane_server.models.catalog import ModelCatalog
from fairlane_server.models.routes import version_key
from fairlane_server.yaml_config import ConfigError
from inference_consumers.batching.received_work import ModelKey
from inference_consumers.engines.protocol import EngineLoadError, LoadFailed
from inference_consumers.versions.engines import VersionEngines
from inference_consumers.versions.measurement import MemoryBook
from inference_consumers.versions.memory import FreeMemory, Memory
from inference_consumers.versions.plan import Load, Plan, Situation, Unload, next_change
from inference_consumers.versions.wanted import Rank, WantedVersion, champion_after, usable, wanted_versions

log = get_logger(__name__)

_LOOK_EVERY_S, _START_LOOK_EVERY_S = 0.1, 0.02
_HIDDEN_MS = 1_000
"""A few heartbeats: dispatchers send nothing more to a version that is to be unloaded."""
_SAY_EVERY_MS = 30_000
_AGAIN_AFTER_MS = 60_000
"""Until a version is tried again whose files could not be had."""
_STOP_TIMEOUT_S = 2.0
_MOST_REASON_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class FailedVersion:
    """A version that could not be loaded. Another record of it is tried anew, and this one at ``again_at_ms``, if it
    failed for a reason that may pass."""

    record: ModelVersion
    reason: str
    again_at_ms: int | None = None


class Others(Protocol):
    """The other consumers of the pool; see :class:`inference_consumers.versions.heartbeats.PoolHeartbeats`."""

    def has_turn(self) -> bool: ...

    def all_others_have(self, version: str) -> bool: ...

    def failed_elsewhere(self) -> set[str]: ...


@dataclass(slots=True)
class VersionKeeper:
    """Loads and unloads versions on a thread of its own, from ``start`` to ``stop``. Any thread may ask.

    Until ``begin_serving`` it loads what there is memory for, and waits for no turn. ``owns_work`` says whether this
    consumer has partitions: one without may give up versions at any time.
    """

    pool: str
    catalog: Callable[[], ModelCatalog]
    engines: VersionEngines
    memory: MemoryBook
    others: Others
    owns_work: Callable[[], bool]
    keep_ms: int
    clock: ClockMs
    on_failure: Callable[[Exception], None]
    changes: tuple[VersionChange, ...] = ()
    """Versions that should be served here and are not, for the heartbeats."""
    start_failure: str | None = None
    """Why nothing can be served."""
    _is_serving: bool = False
    _is_complete: threading.Event = field(default_factory=threading.Event)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _loading: ModelKey | None = None
    _leaving: dict[ModelKey, int] = field(default_factory=dict)
    """Versions on their way out, and since when they are hidden."""
    _making_room: set[ModelKey] = field(default_factory=set)
    """Those of them that leave for another one."""
    _failed: dict[ModelKey, FailedVersion] = field(default_factory=dict)
    _away: dict[ModelKey, ModelVersion | None] = field(default_factory=dict)
    """Records of versions whose files could not be had: nothing that serves is given up for them again."""
    _without_room: set[ModelKey] = field(default_factory=set)
    """Versions that found no room when they were loaded."""
    _unneeded_since_ms: dict[ModelKey, int] = field(default_factory=dict)
    _exchange: ModelKey | None = None
    """The version for which needed ones are given up."""
    _gave_up: bool = False
    """Whether a needed version was given up, and none is loaded in its place yet."""
    _said_at_ms: int = -_SAY_EVERY_MS

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="versions", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begin no change any more. What is being loaded is left to its owner to end."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)

    @property
    def is_complete(self) -> bool:
        """Whether something is loaded, and everything else that can be."""
        return self._is_complete.is_set()

    def begin_serving(self) -> None:
        self._is_serving = True

    @property
    def waiting_for(self) -> str | None:
        """What a consumer that has nothing loaded waits for; None for one that serves."""
        if self._loaded():
            return None
        missing = ", ".join(f"{change.version} ({change.state})" for change in self.changes)
        return missing or f"no version of a model of the pool {self.pool} is published, with an alias or a rule"

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.turn()
                self._stopping.wait(_LOOK_EVERY_S if self._is_serving else _START_LOOK_EVERY_S)
        except Exception as error:  # noqa: BLE001 - without this thread the consumer follows nothing: it must end
            self.on_failure(error)

    def turn(self) -> None:
        """Carry out what is due now."""
        now_ms, catalog = self.clock(), self.catalog()
        wanted = wanted_versions(catalog, self.pool, now_ms)
        self._retry(catalog, now_ms)
        self._see_loading(catalog, now_ms)
        self._see_failed(catalog, now_ms)
        self._see_leaving(wanted, now_ms)
        plan = next_change(self._situation(catalog, wanted, now_ms))
        self._see_plan(plan, now_ms)
        self._see_complete(plan, wanted)
        match plan.change:
            case Load(version, is_bounded):
                self._load(version, is_bounded=is_bounded)
            case Unload(key, in_favour_of):
                self._unload(key, in_favour_of, now_ms, is_exchange=plan.is_exchange)
            case None:
                if self._loading is None and not self._leaving:
                    self._making_room.clear()
                    self._rest(plan, wanted)

    # What there is

    def _loaded(self) -> list[ModelKey]:
        return [host.key for host in self.engines.hosts if host.key != self._loading and host.key not in self._leaving]

    def _situation(self, catalog: ModelCatalog, wanted: tuple[WantedVersion, ...], now_ms: int) -> Situation:
        keys = self._loaded()
        is_busy = self._loading is not None or not self._making_room.isdisjoint(self._leaving)
        absent = [version for one in wanted for version in (one.version, one.fallback) if version is not None]
        absent = [one for one in absent if (one.model, one.version) not in keys]
        # Nothing is measured as long as nothing can be loaded.
        is_measured = bool(absent) and not is_busy
        others_failed = self.others.failed_elsewhere()
        away = {key for key, record in self._away.items() if catalog.versions.get(key) == record}
        loaded = {key: self.memory.held(key, self.engines) if is_measured else Memory() for key in keys}
        needs = {(one.model, one.version): self.memory.needed(one) for one in absent} if is_measured else {}
        return Situation(
            wanted,
            loaded,
            self._kept(catalog, wanted, loaded, now_ms),
            self._failed.keys(),
            away.union(one.key for one in wanted if version_key(*one.key) in others_failed),
            {key: need for key, need in needs.items() if need is not None},
            self.memory.free(self.engines) if is_measured else FreeMemory(0),
            self.memory.reserve_bytes,
            has_turn=self.others.has_turn() or not self.owns_work(),
            is_busy=is_busy,
            is_unloading=bool(self._leaving),
            is_starting=not self._is_serving,
            without_room=self._without_room,
        )

    def _kept(
        self, catalog: ModelCatalog, wanted: tuple[WantedVersion, ...], loaded: Mapping[ModelKey, object], now_ms: int
    ) -> dict[ModelKey, bool]:
        """Loaded versions that are not wanted any more and stay for now, as in ``Situation``."""
        kept: dict[ModelKey, bool] = {}
        since_ms: dict[ModelKey, int] = {}
        for key in loaded.keys() - {one.key for one in wanted}:
            if usable(catalog, self.pool, key) is None:
                continue
            champion = champion_after(catalog, key)
            is_needed = champion is not None and not (
                champion in loaded and self.others.all_others_have(version_key(*champion))
            )
            # The time begins when no consumer needs it any more.
            since_ms[key] = now_ms if is_needed else self._unneeded_since_ms.get(key, now_ms)
            if is_needed or now_ms - since_ms[key] < self.keep_ms:
                kept[key] = is_needed
        self._unneeded_since_ms = since_ms
        return kept

    # What has happened

    def _retry(self, catalog: ModelCatalog, now_ms: int) -> None:
        self._failed = {
            key: known
            for key, known in self._failed.items()
            if catalog.versions.get(key) == known.record and (known.again_at_ms is None or now_ms < known.again_at_ms)
        }

    def _see_loading(self, catalog: ModelCatalog, now_ms: int) -> None:
        key = self._loading
        if key is None:
            return
        progress = self.engines.progress(key)
        if progress.failure is not None:
            self.engines.remove(key)
            self._loading = None
            self._not_loaded(catalog, key, progress.failure, now_ms)
        elif progress.is_loaded:
            self._loading = None
            self._gave_up = False
            self._away.pop(key, None)
            if self._exchange == key:
                self._exchange = None
            self.memory.measured(key, progress.memory, self.engines)
            metrics.MODEL_LOADS.labels(model=key[0], result="loaded").inc()
        elif usable(catalog, self.pool, key) is None:
            log.info("version_not_wanted", model=key[0], version=key[1])
            self.engines.remove(key)
            self._loading = None

    def _see_failed(self, catalog: ModelCatalog, now_ms: int) -> None:
        """Versions that were loaded, and whose engines could not be started again."""
        for key in self._loaded():
            failure = self.engines.progress(key).failure
            if failure is not None:
                self.engines.remove(key)
                self.memory.released(key)
                metrics.MODEL_LOADS.labels(model=key[0], result="failed").inc()
                may_pass = failure.may_pass or failure.no_room
                self._fail(catalog, key, failure.message, now_ms + _AGAIN_AFTER_MS if may_pass else None)

    def _not_loaded(self, catalog: ModelCatalog, key: ModelKey, failure: LoadFailed, now_ms: int) -> None:
        for_good = not failure.no_room or self._exchange == key or not self._loaded()
        metrics.MODEL_LOADS.labels(model=key[0], result="failed" if for_good else "no_room").inc()
        if failure.may_pass:
            self._away[key] = catalog.versions.get(key)
        if for_good:
            self._fail(catalog, key, failure.message, now_ms + _AGAIN_AFTER_MS if failure.may_pass else None)
        else:
            self.memory.found_no_room(key)
            self._without_room.add(key)
            log.warning("version_without_room", model=key[0], version=key[1], reason=failure.message)

    def _fail(self, catalog: ModelCatalog, key: ModelKey, reason: str, again_at_ms: int | None) -> None:
        if self._exchange == key:
            self._exchange = None
        record = catalog.versions.get(key)
        if record is not None:
            self._failed[key] = FailedVersion(record, reason, again_at_ms)

    def _see_leaving(self, wanted: tuple[WantedVersion, ...], now_ms: int) -> None:
        if self._exchange is not None and all(one.key != self._exchange for one in wanted):
            self._exchange = None
        for key, since_ms in list(self._leaving.items()):
            if self._exchange is None and any(one.key == key for one in wanted):
                # It was taken back before it was gone.
                self.engines.keep(key)
                del self._leaving[key]
            elif now_ms - since_ms >= _HIDDEN_MS or not self._is_serving:
                self.engines.refuse(key)
                if self.engines.is_at_rest(key):
                    self.engines.remove(key)
                    del self._leaving[key]
                    self.memory.released(key)
                    self._without_room.clear()
                    log.info("version_unloaded", model=key[0], version=key[1])

    def _see_plan(self, plan: Plan, now_ms: int) -> None:
        """Show why versions are missing, and log it now and then."""
        missing = dict(plan.missing)
        if self._loading is not None:
            missing[self._loading] = VersionState.LOADING
        if self._gave_up:
            for key, state in missing.items():
                if state in (VersionState.LOADING, VersionState.WAITING):
                    missing[key] = VersionState.CHANGING
        self.changes = tuple(
            VersionChange(version_key(*key), state, self._reason(key, state)) for key, state in missing.items()
        )
        for state in VersionState:
            metrics.VERSIONS_MISSING.labels(state=state).set(sum(one == state for one in missing.values()))
        if now_ms - self._said_at_ms >= _SAY_EVERY_MS:
            self._said_at_ms = now_ms
            if not self._loaded() and self._loading is None and plan.change is None:
                log.warning("nothing_to_serve", pool=self.pool, reason=self.waiting_for)
            for change in self.changes:
                if change.state in (VersionState.WAITING, VersionState.NO_ROOM):
                    log.info("version_missing", version=change.version, state=change.state)

    def _see_complete(self, plan: Plan, wanted: tuple[WantedVersion, ...]) -> None:
        """A consumer serves as soon as its champions are loaded, or cannot be: a candidate that hangs while it is
        loaded keeps nobody from that."""
        champions = [one for one in wanted if one.rank is Rank.CHAMPION]
        needed = {one.key for one in champions}
        needed.update((one.fallback.model, one.fallback.version) for one in champions if one.fallback is not None)
        ended = (VersionState.FAILED, VersionState.NO_ROOM)
        open_keys = {key for key, state in plan.missing.items() if state not in ended} | {self._loading}
        if self._loaded() and needed.isdisjoint(open_keys):
            self._is_complete.set()

    def _reason(self, key: ModelKey, state: VersionState) -> str:
        reason = self._failed[key].reason if state is VersionState.FAILED and key in self._failed else ""
        return reason[:_MOST_REASON_CHARACTERS]

    # What is done

    def _load(self, version: ModelVersion, *, is_bounded: bool) -> None:
        key = version.model, version.version
        if key in self._leaving:
            # It is wanted again, before it was gone.
            self.engines.keep(key)
            del self._leaving[key]
            self._making_room.discard(key)
            return
        needed, free = self.memory.begin(version, self.engines)
        log.info("version_loading", model=key[0], version=key[1], needed_bytes=needed, free_bytes=free)
        lacks_room = partial(self.memory.lacks_room, self.engines) if is_bounded else None
        # First, so that nobody takes it for a loaded one meanwhile.
        self._loading = key
        try:
            self.engines.load(version, lacks_room)
        except ConfigError as error:
            self._loading = None
            log.error("engine_unusable", model=key[0], version=key[1], reason=str(error))
            metrics.MODEL_LOADS.labels(model=key[0], result="failed").inc()
            self._failed[key] = FailedVersion(version, str(error))

    def _unload(self, key: ModelKey, in_favour_of: ModelKey | None, now_ms: int, *, is_exchange: bool) -> None:
        if is_exchange:
            self._exchange, self._gave_up = in_favour_of, True
        log.info(
            "version_unloading",
            model=key[0],
            version=key[1],
            in_favour_of=None if in_favour_of is None else version_key(*in_favour_of),
        )
        self.engines.hide(key)
        self._leaving[key] = now_ms
        if in_favour_of is not None:
            self._making_room.add(key)

    def _rest(self, plan: Plan, wanted: tuple[WantedVersion, ...]) -> None:
        """Nothing can be done now."""
        if self._exchange is not None and plan.missing.get(self._exchange) is VersionState.NO_ROOM:
            # Others were given up for it, and still it does not fit: another try would only repeat that.
            record = next(one.version for one in wanted if one.key == self._exchange)
            log.error("engine_unusable", model=record.model, version=record.version, reason="no room for it alone")
            self._failed[self._exchange] = FailedVersion(record, "there is no room for it, even without others")
            self._exchange = None
            return
        self._gave_up = self._gave_up and any(state is VersionState.WAITING for state in plan.missing.values())
        if self._loaded():
            self._is_complete.set()
        elif wanted and all(one.key in self._failed for one in wanted):
            # Once more from the beginning, where the champion before may be loaded whatever it needs.
            reason = self._failed[wanted[0].key].reason
            if self._is_serving:
                self.on_failure(EngineLoadError(reason))
            self.start_failure = reason
