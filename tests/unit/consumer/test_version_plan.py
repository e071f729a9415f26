"""The next change of a consumer's versions."""

from typing import Any

from fairlane.outcomes import VersionState
from inference_consumers.versions.memory import FreeMemory, Memory
from inference_consumers.versions.plan import Load, Plan, Situation, Unload, next_change
from inference_consumers.versions.wanted import Rank, WantedVersion
from tests.kit.version_kit import MODEL, version

OLD, NEW, OTHER = ((MODEL.model, name) for name in ("1", "2", "3"))
SIZE = Memory(40)


def want(name: str, rank: Rank = Rank.CHAMPION, fallback: str | None = None) -> WantedVersion:
    return WantedVersion(version(name), rank, None if fallback is None else version(fallback))


def plan(*wanted: WantedVersion, loaded: tuple[str, ...] = (), free: int = 100, **fields: Any) -> Plan:
    held = {(MODEL.model, name): SIZE for name in loaded}
    needs = {one.key: SIZE for one in wanted} | fields.pop("needs", {})
    return next_change(Situation(wanted, held, needs=needs, free=FreeMemory(free), **fields))


def test_what_fits_is_loaded_beside_the_others() -> None:
    made = plan(want("2", fallback="1"), loaded=("1",), kept={OLD: True})
    assert made == Plan(Load(version("2")), {NEW: VersionState.LOADING})


def test_what_is_not_known_is_tried() -> None:
    made = next_change(Situation([want("2")], {OLD: SIZE}, {OLD: True}, free=FreeMemory(1)))
    assert made.change == Load(version("2"))


def test_at_the_start_a_champion_is_loaded_whatever_it_needs() -> None:
    assert plan(want("2"), free=1, is_starting=True).change == Load(version("2"), is_bounded=False)
    assert plan(want("2", Rank.ALIAS), free=1, is_starting=True) == Plan(None, {NEW: VersionState.NO_ROOM})


def test_nothing_more_is_begun_while_something_is_under_way() -> None:
    assert plan(want("2"), loaded=("1",), kept={OLD: True}, is_busy=True) == Plan(None, {NEW: VersionState.LOADING})


def test_while_one_is_unloaded_another_is_loaded_and_none_unloaded() -> None:
    assert plan(want("2"), loaded=("1",), kept={OLD: True}, is_unloading=True).change == Load(version("2"))
    made = plan(want("2"), loaded=("1",), kept={OLD: False}, free=10, is_unloading=True)
    assert made == Plan(None, {NEW: VersionState.LOADING})


def test_what_nobody_needs_is_unloaded() -> None:
    assert plan(want("2"), loaded=("1", "2")).change == Unload(OLD)
    assert plan(want("2"), loaded=("1",)).change == Unload(OLD), "first"
    assert plan(want("2"), loaded=("1", "2"), is_busy=True).change == Unload(OLD)
    assert plan(want("2"), loaded=("1", "2"), kept={OLD: False}).change is None


def test_what_is_only_kept_makes_room_at_once() -> None:
    made = plan(want("2"), loaded=("1",), kept={OLD: False}, free=10)
    assert made == Plan(Unload(OLD, NEW), {NEW: VersionState.LOADING})


def test_what_is_needed_makes_room_only_in_turn() -> None:
    known: dict[str, Any] = {"loaded": ("1",), "kept": {OLD: True}, "free": 10}
    assert plan(want("2", fallback="1"), **known) == Plan(None, {NEW: VersionState.WAITING})
    made = plan(want("2", fallback="1"), **known, has_turn=True)
    assert made == Plan(Unload(OLD, NEW), {NEW: VersionState.WAITING}, is_exchange=True)


def test_a_champion_takes_the_place_of_less_needed_versions_and_not_the_other_way() -> None:
    aliased = want("1", Rank.ALIAS)
    assert plan(want("2"), aliased, loaded=("1",), free=0, has_turn=True).change == Unload(OLD, NEW)
    made = plan(want("2"), aliased, loaded=("2",), free=0, has_turn=True)
    assert made == Plan(None, {OLD: VersionState.NO_ROOM})


def test_nothing_is_given_up_for_what_would_not_fit_all_the_same() -> None:
    made = plan(want("2"), loaded=("1",), kept={OLD: True}, free=10, has_turn=True, needs={NEW: Memory(51)})
    assert made == Plan(None, {NEW: VersionState.NO_ROOM})
    made = plan(want("2"), loaded=("1",), kept={OLD: True}, free=10, reserve_bytes=11, has_turn=True)
    assert made == Plan(None, {NEW: VersionState.NO_ROOM})


def test_nothing_is_given_up_for_what_failed_at_another_consumer() -> None:
    made = plan(want("2"), loaded=("1",), kept={OLD: True}, free=10, has_turn=True, failed_elsewhere={NEW})
    assert made == Plan(None, {NEW: VersionState.NO_ROOM})
    made = plan(want("2"), loaded=("1",), kept={OLD: True}, failed_elsewhere={NEW})
    assert made.change == Load(version("2")), "beside the others nothing is lost by a try"


def test_the_champion_before_stands_in_for_one_that_failed() -> None:
    made = plan(want("2", fallback="1"), failed={NEW}, needs={OLD: SIZE})
    assert made == Plan(Load(version("1")), {NEW: VersionState.FAILED, OLD: VersionState.LOADING})
    made = plan(want("2", fallback="1"), loaded=("1",), kept={OLD: True}, failed={NEW})
    assert made == Plan(None, {NEW: VersionState.FAILED})


def test_what_stands_in_is_as_needed_as_a_champion() -> None:
    aliased = want("3", Rank.ALIAS)
    made = plan(want("2", fallback="1"), aliased, loaded=("1",), kept={OLD: True}, failed={NEW}, free=0, has_turn=True)
    assert made == Plan(None, {NEW: VersionState.FAILED, OTHER: VersionState.NO_ROOM})
    made = plan(want("2", fallback="1"), aliased, failed={NEW}, needs={OLD: SIZE})
    assert made.change == Load(version("1")), "it comes before what is less needed"


def test_what_is_less_needed_takes_no_memory_from_one_that_waits() -> None:
    small = WantedVersion(version("3"), Rank.ALIAS)
    made = plan(want("2"), small, loaded=("1",), kept={OLD: True}, free=20, needs={OTHER: Memory(5)})
    assert made == Plan(None, {NEW: VersionState.WAITING})


def test_of_two_that_fill_a_gpu_one_makes_room() -> None:
    whole = Memory(1, 0, fills_device=True)
    now = Situation([want("2")], {OLD: whole}, {OLD: True}, needs={NEW: whole}, free=FreeMemory(100), has_turn=True)
    assert next_change(now).change == Unload(OLD, NEW)
