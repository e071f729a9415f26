"""Consumers of a pool that follow the published versions: one by itself, and several that change one after another."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.evaluation_records import Shadow
from fairlane.records import ModelRoute
from fairlane_server.models.catalog import ModelCatalog
from inference_consumers.engines.protocol import LoadFailed
from tests.kit.version_kit import KEEP_MS, MODEL, TURN_MS, FakeConsumer, FakePool, route, version

ONE, TWO, THREE = map(version, "123")
NEW = (MODEL.model, "2")
SETTLED = 100
"""Turns: more than any change takes."""
KEPT = KEEP_MS // TURN_MS


def running(consumers: int = 1, memory_bytes: int = 100, reserve_bytes: int = 0) -> FakePool:
    """A pool that serves version 1. A version takes 40 bytes: there is room for two of them, or for one."""
    pool = FakePool(consumers, memory_bytes=memory_bytes, reserve_bytes=reserve_bytes)
    pool.publish(ONE, route("1"))
    pool.turn(SETTLED)
    assert all(pool.served(name) == ["1"] for name in pool.consumers)
    return pool


def start_failure(consumer: FakeConsumer) -> str | None:
    return consumer.keeper.start_failure


def test_with_room_the_new_version_is_loaded_beside_the_old_one_which_goes_later() -> None:
    pool = running()
    (consumer,) = pool.consumers.values()
    pool.publish(TWO, route("2", "1"))
    seen = []
    for _ in range(SETTLED):
        pool.turn()
        seen.append(pool.served())
    assert all("1" in served for served in seen)
    assert seen[-1] == ["1", "2"]
    pool.turn(KEPT)
    assert pool.served() == ["2"]
    assert consumer.engines.log == [("load", "1"), ("load", "2"), ("unload", "1")]
    assert not consumer.keeper.changes


def test_a_champion_that_comes_back_is_still_there() -> None:
    pool = running()
    pool.publish(TWO, route("2", "1"))
    pool.turn(SETTLED)
    pool.publish(route("1", "2"))
    pool.turn(SETTLED)
    (consumer,) = pool.consumers.values()
    assert consumer.engines.log == [("load", "1"), ("load", "2")]
    assert pool.served() == ["1", "2"]


def test_one_that_is_taken_back_on_its_way_out_stays() -> None:
    pool = running()
    pool.publish(TWO, route("2", "1"))
    pool.turn(SETTLED)
    (consumer,) = pool.consumers.values()
    consumer.engines.busy = {(MODEL.model, "1")}
    pool.publish(route("2", "1", stopped=("1",)))
    pool.turn(20)
    assert pool.served() == ["2"]
    assert consumer.engines.engines[MODEL.model, "1"].refused
    pool.publish(route("1", "2"))
    pool.turn(2)
    assert pool.served() == ["1", "2"]
    assert not consumer.engines.engines[MODEL.model, "1"].refused


def test_a_stopped_or_withdrawn_version_goes_when_its_last_run_has_ended() -> None:
    for withdrawn in (False, True):
        pool = running()
        pool.publish(TWO, route("1", aliases={"candidate": "2"}))
        pool.turn(SETTLED)
        (consumer,) = pool.consumers.values()
        consumer.engines.busy = {NEW}
        if withdrawn:
            pool.catalog = ModelCatalog([ONE], [route("1")])
        else:
            pool.publish(route("1", stopped=("2",)))
        pool.turn()
        assert pool.served() == ["1"], "it is reported no more, at once"
        assert not consumer.engines.engines[NEW].refused, "and serves until the dispatchers know"
        pool.turn(20)
        assert consumer.engines.engines[NEW].refused
        consumer.engines.busy = set()
        pool.turn()
        assert NEW not in consumer.engines.engines


def test_without_room_the_old_one_makes_room() -> None:
    pool = running(memory_bytes=50)
    pool.publish(TWO, route("2", "1"))
    pool.turn(SETTLED)
    (consumer,) = pool.consumers.values()
    assert consumer.engines.log == [("load", "1"), ("unload", "1"), ("load", "2")]
    assert not consumer.keeper.changes


def test_what_is_not_known_is_tried_and_ends_when_too_little_is_left() -> None:
    pool = running(memory_bytes=50, reserve_bytes=5)
    other = version("1", "other")
    pool.publish(other, route("1", model="other"))
    pool.turn(SETTLED)
    (consumer,) = pool.consumers.values()
    assert consumer.engines.log == [("load", "1"), ("load", "1"), ("unload", "1")], "once, and not again"
    assert consumer.state_of == {"other/1": "no_room"}
    assert pool.served() == ["1"]


def test_a_version_that_fails_never_serves_and_is_tried_again_as_another_record() -> None:
    pool = running()
    (consumer,) = pool.consumers.values()
    consumer.engines.broken = {NEW}
    pool.publish(TWO, route("2", "1"))
    pool.turn(SETTLED)
    assert consumer.state_of == {"digits/2": "failed"}
    assert consumer.keeper.changes[0].reason == "broken"
    assert consumer.engines.log == [("load", "1"), ("load", "2"), ("unload", "2")]
    pool.turn(KEPT)
    assert pool.served() == ["1"], "nothing else can serve"

    consumer.engines.broken = set()
    pool.publish(replace(TWO, max_batch_size=4))
    pool.turn(SETTLED)
    assert pool.served() == ["1", "2"]
    assert not consumer.keeper.changes


def test_a_version_whose_files_cannot_be_had_is_tried_again_after_a_minute() -> None:
    pool = running()
    (consumer,) = pool.consumers.values()
    consumer.engines.away = {NEW}
    pool.publish(TWO, route("2", "1"))
    pool.turn(SETTLED)
    assert consumer.state_of == {"digits/2": "failed"}
    consumer.engines.away = set()
    pool.turn(60_000 // TURN_MS)
    assert pool.served() == ["1", "2"]
    assert consumer.engines.log == [("load", "1"), ("load", "2"), ("unload", "2"), ("load", "2")]
    assert not consumer.keeper.changes


def test_the_candidate_of_a_shadow_is_loaded_until_the_shadow_ends() -> None:
    pool = running()
    shadow = Shadow("s", "2", 5.0, 1, 0.1, 60_000, 0)
    pool.publish(TWO, replace(route("1"), shadow=shadow))
    pool.turn(SETTLED)
    assert pool.served() == ["1", "2"]
    pool.publish(replace(route("1"), shadow=replace(shadow, stopped_at_ms=1)))
    pool.turn(SETTLED + KEPT)
    assert pool.served() == ["1"]


def test_a_version_that_fails_after_it_was_loaded_is_loaded_no_more() -> None:
    pool = running()
    shadow = Shadow("s", "2", 5.0, 1, 0.1, 60_000, 0)
    pool.publish(TWO, replace(route("1"), shadow=shadow))
    pool.turn(SETTLED)
    (consumer,) = pool.consumers.values()
    consumer.engines.engines[NEW].failure = LoadFailed("it died too often")
    pool.turn()
    assert consumer.state_of == {"digits/2": "failed"}
    pool.publish(route("2", "1"))
    pool.turn(SETTLED + KEPT)
    assert pool.served() == ["1"], "the champion before goes on"
    assert not consumer.failures


def test_without_room_a_version_whose_files_are_away_makes_others_go_once() -> None:
    pool = running(memory_bytes=50)
    (consumer,) = pool.consumers.values()
    consumer.engines.away = {NEW}
    pool.publish(TWO, route("2", "1"))
    pool.turn(300_000 // TURN_MS)
    assert consumer.engines.log.count(("unload", "1")) == 1
    assert pool.served() == ["1"]


def test_a_starting_consumer_serves_one_champion_if_there_is_no_room_for_another() -> None:
    pool = FakePool()
    (consumer,) = pool.consumers.values()
    other = version("1", "other")
    consumer.engines.unroomy = {("other", "1")}
    pool.publish(ONE, other, route("1"), route("1", model="other"))
    pool.turn(SETTLED)
    assert consumer.is_serving
    assert pool.served() == ["1"]
    assert consumer.state_of == {"other/1": "no_room"}
    assert consumer.engines.log.count(("load", "1")) == 2, "each once"


def test_a_candidate_that_hangs_while_it_is_loaded_keeps_no_consumer_from_serving() -> None:
    pool = FakePool()
    (consumer,) = pool.consumers.values()
    consumer.engines.hanging = {NEW}
    pool.publish(ONE, TWO, replace(route("1"), shadow=Shadow("s", "2", 5.0, 1, 0.1, 60_000, 0)))
    pool.turn(SETTLED)
    assert consumer.is_serving
    assert consumer.state_of == {"digits/2": "loading"}


def test_a_champion_before_that_is_wanted_again_on_its_way_out_stays() -> None:
    pool = running()
    (consumer,) = pool.consumers.values()
    consumer.engines.broken = {NEW}
    pool.publish(TWO, route("2", "1"))
    pool.turn(SETTLED)
    consumer.engines.busy = {(MODEL.model, "1")}
    pool.publish(route("2", "1", stopped=("1",)))
    pool.turn(20)
    assert consumer.engines.engines[MODEL.model, "1"].refused
    pool.publish(route("2", "1"))
    pool.turn(SETTLED)
    assert pool.served() == ["1"]
    assert consumer.engines.log.count(("load", "1")) == 1


def test_a_consumer_that_starts_with_a_broken_champion_serves_the_one_before() -> None:
    pool = FakePool()
    (consumer,) = pool.consumers.values()
    consumer.engines.broken = {NEW}
    pool.publish(ONE, TWO, route("2", "1"))
    pool.turn(SETTLED)
    assert pool.served() == ["1"]
    assert consumer.state_of == {"digits/2": "failed"}


def test_a_consumer_that_can_load_nothing_says_why() -> None:
    pool = FakePool()
    (consumer,) = pool.consumers.values()
    pool.turn()
    assert consumer.keeper.waiting_for == "no version of a model of the pool pool is published, with an alias or a rule"
    assert start_failure(consumer) is None
    consumer.engines.broken = {(MODEL.model, "1")}
    pool.publish(ONE, route("1"))
    pool.turn(2)
    assert consumer.keeper.waiting_for == "digits/1 (loading)"
    pool.turn(SETTLED)
    assert start_failure(consumer) == "broken"
    assert not consumer.keeper.is_complete


def test_a_version_for_which_others_made_room_in_vain_is_not_tried_for_ever() -> None:
    pool = running(memory_bytes=50)
    pool.publish(TWO, route("2", "1"), size=60)
    pool.turn(SETTLED)
    (consumer,) = pool.consumers.values()
    assert consumer.engines.log.count(("unload", "1")) <= 1
    assert pool.served() == ["1"], "the one before is back"
    assert consumer.state_of == {"digits/2": "failed"}


def test_a_new_champion_waits_for_no_version_that_was_stopped() -> None:
    """Which may take minutes to finish its runs."""
    pool = running()
    pool.publish(TWO, THREE, route("2", "1"), size=30)
    pool.turn(SETTLED)
    (consumer,) = pool.consumers.values()
    consumer.engines.busy = {NEW}
    pool.publish(route("3", "2", stopped=("2",)))
    pool.turn(SETTLED)
    assert pool.served() == ["1", "3"]
    assert NEW in consumer.engines.engines


def test_a_previous_champion_that_is_not_kept_stays_as_long_as_it_is_needed() -> None:
    pool = running()
    (consumer,) = pool.consumers.values()
    consumer.keeper.keep_ms = 0
    pool.publish(TWO, route("2", "1"))
    seen = []
    for _ in range(SETTLED):
        pool.turn()
        seen.append(pool.served())
    assert all(seen)
    assert seen[-1] == ["2"]


def test_a_consumer_that_is_left_with_nothing_ends() -> None:
    """It gave up version 1 for a version that cannot be loaded, and cannot load version 1 again either."""
    pool = running(memory_bytes=50)
    (consumer,) = pool.consumers.values()
    consumer.engines.broken = {NEW, (MODEL.model, "1")}
    pool.publish(TWO, route("2", "1"))
    pool.turn(SETTLED)
    assert [str(error) for error in consumer.failures] != []
    assert {str(error) for error in consumer.failures} == {"broken"}


def test_consumers_without_room_change_one_after_another() -> None:
    pool = running(consumers=3, memory_bytes=50)
    pool.publish(TWO, route("2", "1"))
    least = 3
    for _ in range(4 * SETTLED):
        pool.turn()
        least = min(least, sum(bool(pool.served(name)) for name in pool.consumers))
    assert least == 2, "only one at a time served nothing"
    assert all(pool.served(name) == ["2"] for name in pool.consumers)
    assert not any(consumer.keeper.changes for consumer in pool.consumers.values())


def test_what_fails_at_the_first_consumer_is_given_room_by_no_other() -> None:
    pool = running(consumers=3, memory_bytes=50)
    for consumer in pool.consumers.values():
        consumer.engines.broken = {NEW}
    pool.publish(TWO, route("2", "1"))
    pool.turn(4 * SETTLED)
    assert all(pool.served(name) == ["1"] for name in pool.consumers)
    assert sum(("unload", "1") in consumer.engines.log for consumer in pool.consumers.values()) == 1


def test_the_old_version_stays_until_all_have_the_new_one() -> None:
    pool = running(consumers=2)
    slow = pool.consumers["consumer-1"]
    slow.engines.broken = {NEW}
    pool.publish(TWO, route("2", "1"))
    pool.turn(KEPT + SETTLED)
    assert pool.served("consumer-0") == ["1", "2"]
    pool.kill("consumer-1")
    pool.turn(KEPT + SETTLED)
    assert pool.served("consumer-0") == ["2"]


_EVENTS = st.lists(
    st.tuples(st.sampled_from(["champion", "candidate", "stop", "kill", "start", "wait"]), st.integers(0, 2**32)),
    max_size=12,
)


@settings(deadline=None)
@given(consumers=st.integers(1, 3), memory=st.sampled_from([50, 90, 200]), events=_EVENTS)
def test_whatever_happens_at_most_one_consumer_gives_up_what_serves(
    consumers: int, memory: int, events: list[tuple[str, int]]
) -> None:
    """With memory for one, two or all versions, aliases that move, stopped versions and killed consumers: memory is
    never exceeded, and at the end every consumer serves the champion. An update begins when the one before is done: of
    two at once nothing serves, which is no fault of the consumers."""
    pool = running(consumers, memory)
    pool.publish(TWO, THREE)
    aliases, previous, stopped = {"champion": "1"}, "1", set[str]()
    for event, seed in events:
        chance = random.Random(seed)
        name = chance.choice("123")
        is_settled = all(_serves(consumer, aliases["champion"]) for consumer in pool.consumers.values())
        if event == "champion" and name != aliases["champion"] and is_settled:
            previous, aliases["champion"] = aliases["champion"], name
            stopped.discard(name)
        elif event == "candidate":
            aliases["candidate"] = name
        elif event == "stop" and name != aliases["champion"] and is_settled:
            stopped.add(name)
        elif event == "kill" and len(pool.consumers) > 1:
            pool.kill(chance.choice(sorted(pool.consumers)))
        elif event == "start" and len(pool.consumers) < 3:
            pool.begin(f"consumer-{chance.randrange(100, 1_000)}")
        pool.publish(ModelRoute(MODEL.model, 1, dict(aliases), {"champion": previous}, stopped=tuple(stopped)))
        for _ in range(chance.randrange(1, 60)):
            pool.turn()
            _check(pool)
    pool.turn(10 * SETTLED)
    for consumer in pool.consumers.values():
        _check(pool)
        assert _serves(consumer, aliases["champion"])
        assert set(consumer.state_of.values()) <= {"no_room"}
        assert not consumer.failures


def _serves(consumer: FakeConsumer, name: str) -> bool:
    return f"{MODEL.model}/{name}" in consumer.engines.served


def _check(pool: FakePool) -> None:
    assert all(consumer.engines.free_bytes >= 0 for consumer in pool.consumers.values())
    assert sum(_has_nothing(pool, name) for name in pool.consumers) <= 1


def _has_nothing(pool: FakePool, name: str) -> bool:
    """Whether a consumer that served has nothing to serve now."""
    return pool.consumers[name].is_serving and not pool.served(name)
