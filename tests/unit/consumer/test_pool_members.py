"""Whose turn it is to give up a version, by the heartbeats of a pool."""

from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import VersionState
from fairlane.records import VersionChange
from fairlane_server.admission_rule import CAPACITY_TTL_MS
from inference_consumers.versions.members import PoolMembers
from tests.kit.version_kit import POOL, heartbeat

WAITING = (VersionChange("digits/2", VersionState.WAITING),)
CHANGING = (VersionChange("digits/2", VersionState.CHANGING),)
FAILED = (VersionChange("digits/2", VersionState.FAILED, "broken"),)
LOADING = (VersionChange("digits/2", VersionState.LOADING),)
NAMES = ("a", "b", "c")


def test_the_first_to_wait_is_the_first_to_change() -> None:
    members = PoolMembers(POOL)
    for at_ms, (name, changes) in enumerate([("b", WAITING), ("a", WAITING), ("b", CHANGING), ("a", WAITING)]):
        members.report(heartbeat(name, changes=changes), at_ms)
    assert [members.has_turn(name) for name in NAMES] == [False, True, False]
    members.report(heartbeat("b", "digits/2"), 4)
    assert members.has_turn("a")


def test_one_that_loads_beside_others_takes_no_turn() -> None:
    members = PoolMembers(POOL)
    members.report(heartbeat("a", changes=LOADING), 0)
    members.report(heartbeat("b", changes=WAITING), 1)
    members.report(heartbeat("c", changes=WAITING, pool="other"), 1)
    assert members.has_turn("b")


def test_one_that_falls_silent_or_says_goodbye_loses_its_turn() -> None:
    for gone in ("silent", "draining"):
        members = PoolMembers(POOL)
        members.report(heartbeat("a", changes=WAITING), 0)
        members.report(heartbeat("b", changes=WAITING), 1)
        if gone == "draining":
            members.report(heartbeat("a", changes=WAITING, draining=True), 2)
        else:
            members.report(heartbeat("b", changes=WAITING), CAPACITY_TTL_MS + 1)
        assert members.has_turn("b"), gone


def test_the_others_are_asked_and_not_this_one() -> None:
    members = PoolMembers(POOL)
    assert members.all_have("digits/2", but="a")
    members.report(heartbeat("a"), 0)
    members.report(heartbeat("b", "digits/2"), 0)
    assert members.all_have("digits/2", but="a")
    members.report(heartbeat("c", "digits/1", changes=FAILED), 1)
    assert not members.all_have("digits/2", but="a")
    assert members.failed(but="a") == {"digits/2"}
    assert members.failed(but="c") == set()


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), st.integers(0, CAPACITY_TTL_MS)), max_size=40))
def test_all_see_the_same_order_so_that_one_at_most_has_its_turn(reports: list[tuple[str, bool, int]]) -> None:
    """A reader of a part of the log may be behind, but whoever has the turn by a longer part has seen the others leave
    the queue or fall silent."""
    members, at_ms, holder = PoolMembers(POOL), 0, ""
    for name, waits, passed_ms in reports:
        at_ms += passed_ms
        silent = passed_ms > 0
        members.report(heartbeat(name, changes=WAITING if waits else ()), at_ms)
        now = next((one for one in NAMES if members.has_turn(one)), "")
        assert sum(members.has_turn(one) for one in NAMES) <= 1
        if holder and now != holder:
            assert silent or name == holder, "nobody but itself takes a turn away from one that is heard"
        holder = now
