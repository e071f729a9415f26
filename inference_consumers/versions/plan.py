"""Plan of a consumer's versions: the next change towards those that it should have loaded. Pure.

- A version that fits beside the loaded ones is loaded beside them. One whose need is not known is tried.
- One that does not fit takes the place of a version that is only kept in case it is needed again.
- Otherwise it takes the place of less needed versions, a champion first that of the champion before it: only when this
  consumer has its turn, since meanwhile it serves less. The consumers of a pool change one after another.
- A champion that cannot be loaded here leaves its place to the one before.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fairlane.outcomes import VersionState
from fairlane.records import ModelVersion
from inference_consumers.batching.received_work import ModelKey
from inference_consumers.versions.memory import FreeMemory, Memory, fits
from inference_consumers.versions.wanted import Rank, WantedVersion


@dataclass(frozen=True, slots=True)
class Situation:
    """What a consumer knows when it plans.

    Attributes:
        wanted: versions to have loaded, the most needed first.
        loaded: with what each holds.
        kept: loaded versions that are not wanted and stay all the same: True for one that other consumers of the pool
            still need, False for one that only a change back would need.
        failed: versions that cannot be loaded here.
        failed_elsewhere: versions that another consumer of the pool could not load.
        needs: what each version will hold, as far as it is known.
        free: memory that is left.
        has_turn: whether this consumer may give up versions that are needed.
        is_busy: whether a version is being loaded, or makes room for one.
        is_unloading: whether any is being unloaded: then no other is, since that one's memory will be free.
        is_starting: whether it serves nothing yet: then champions are loaded whatever they need,
        without_room: but for those that found no room.
    """

    wanted: Sequence[WantedVersion]
    loaded: Mapping[ModelKey, Memory]
    kept: Mapping[ModelKey, bool] = field(default_factory=dict)
    failed: Collection[ModelKey] = ()
    failed_elsewhere: Collection[ModelKey] = ()
    needs: Mapping[ModelKey, Memory] = field(default_factory=dict)
    free: FreeMemory = field(default_factory=lambda: FreeMemory(0))
    reserve_bytes: int = 0
    has_turn: bool = False
    is_busy: bool = False
    is_unloading: bool = False
    is_starting: bool = False
    without_room: Collection[ModelKey] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Load a version. ``is_bounded``: loading ends when it leaves too little memory."""

    version: ModelVersion
    is_bounded: bool = True


@dataclass(frozen=True, slots=True)
class Unload:
    """Unload a version; ``in_favour_of`` names the one that takes its place, if that is why."""

    key: ModelKey
    in_favour_of: ModelKey | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The change to make now, if any, and why each version that is wanted and not loaded is not. ``is_exchange``: the
    change gives up a version that is still needed."""

    change: Load | Unload | None
    missing: Mapping[ModelKey, VersionState]
    is_exchange: bool = False


def next_change(now: Situation) -> Plan:
    """The plan at this moment."""
    missing: dict[ModelKey, VersionState] = {}
    ranks = {one.key: one.rank for one in now.wanted}
    goals = list(now.wanted)
    change: Load | Unload | None = None
    is_exchange = False
    for place, goal in enumerate(goals):
        if goal.key in now.loaded:
            continue
        step = _step(now, goal, ranks)
        if isinstance(step, VersionState):
            missing[goal.key] = step
            if step is VersionState.WAITING:
                # What is less needed must not take the memory meanwhile.
                break
            if goal.fallback is not None:
                fallback = WantedVersion(goal.fallback, goal.rank)
                # It is needed now as much as what it stands in for, and comes next.
                ranks[fallback.key] = goal.rank
                goals.insert(place + 1, fallback)
            continue
        change = step
        is_exchange = isinstance(step, Unload) and (step.key in ranks or now.kept.get(step.key, False))
        missing[goal.key] = VersionState.WAITING if is_exchange else VersionState.LOADING
        break
    missing = {one.key: VersionState.FAILED for one in now.wanted if one.key in now.failed} | missing
    for key in now.loaded:
        if key not in ranks and key not in now.kept:
            # Whatever else is under way: it was withdrawn or stopped.
            return Plan(Unload(key), missing)
    must_wait = now.is_busy or (now.is_unloading and isinstance(change, Unload))
    return Plan(None if must_wait else change, missing, is_exchange)


def _step(now: Situation, goal: WantedVersion, ranks: Mapping[ModelKey, Rank]) -> Load | Unload | VersionState:
    """What to do for a version that is not loaded, or why nothing can be done."""
    if goal.key in now.failed:
        return VersionState.FAILED
    if now.is_starting and goal.rank is Rank.CHAMPION and goal.key not in now.without_room:
        return Load(goal.version, is_bounded=False)
    need = now.needs.get(goal.key)
    if need is None or _fits_without(now, need, ()):
        return Load(goal.version)
    spare = [key for key, is_needed in now.kept.items() if not is_needed and key not in ranks]
    replaced = _replaced(now, goal, ranks)
    if not _fits_without(now, need, (*spare, *replaced)):
        return VersionState.NO_ROOM
    if spare:
        return Unload(spare[0], goal.key)
    if goal.key in now.failed_elsewhere:
        # It would give up a version that serves for one that most likely will not.
        return VersionState.NO_ROOM
    return Unload(replaced[0], goal.key) if now.has_turn else VersionState.WAITING


def _replaced(now: Situation, goal: WantedVersion, ranks: Mapping[ModelKey, Rank]) -> list[ModelKey]:
    """Loaded versions in whose place this one may come, the first to go first."""
    name, _ = goal.key
    before = [
        key
        for key, is_needed in now.kept.items()
        if is_needed and goal.rank is Rank.CHAMPION and key[0] == name and key not in ranks
    ]
    less_needed = [key for key in now.loaded if key in ranks and ranks[key] > goal.rank]
    # Of the same model first: the model goes on being served by the new one.
    less_needed.sort(key=lambda key: (key[0] != name, -ranks[key], key))
    return [*before, *less_needed]


def _fits_without(now: Situation, need: Memory, gone: Collection[ModelKey]) -> bool:
    stay = [memory for key, memory in now.loaded.items() if key not in gone]
    return fits(need, now.free, now.reserve_bytes, beside=stay, without=[now.loaded[key] for key in gone])
