"""Versions that consumers have loaded: only they get traffic, and work goes to consumers that have its version."""

import asyncio
from dataclasses import replace
from typing import Any

from fairlane.outcomes import Code, Degradation
from fairlane.records import ModelRoute, Passage, TenantSpec, WorkItem
from fairlane.schema_files import default_codec
from fairlane_server.models.catalog import ModelCatalog
from stream_processors.dispatcher.scheduling.loaded_versions import LOST_AFTER_MS, LoadedVersions
from tests.kit.dispatcher_bench import MODEL, Bench, encoded, handed_back

OLD, NEW = f"{MODEL.model}/1", f"{MODEL.model}/2"
TWO = replace(MODEL, version="2")
ACME = TenantSpec("acme")
ROOM, ONE, FULL = 100_000, 20, 5
"""Tokens of a batch: of all requests, of one, or of less than one."""


def bench_of(champion: str = "2", **route: Any) -> Bench:
    bench = Bench()
    bench.assign("requests.acme", "backfill.acme", "returned.pool")
    publish(bench, champion, **route)
    return bench


def publish(bench: Bench, champion: str, **route: Any) -> None:
    made = ModelRoute(MODEL.model, 2, {"champion": champion}, {"champion": "1"}, **route)
    bench.dispatcher.set_registry({"acme": ACME}, ModelCatalog([MODEL, TWO], [made]), {})


def consumers(bench: Bench, *loaded: tuple[str, ...], tokens: int = ROOM) -> None:
    """As many consumers with these versions, which own one partition each."""
    rate = 1e6 if tokens == ROOM else 100.0
    for number, versions in enumerate(loaded):
        bench.report(rate, tokens=tokens, number=number, partitions=(number,), versions=versions)
    bench.dispatcher.scheduler.in_flight.set_partitions("priority.pool.normal", len(loaded))
    bench.dispatcher.follow_loaded()


def following(bench: Bench, *loaded: str, loading: tuple[str, ...] = (), tokens: int = ROOM) -> None:
    """One consumer that loads and unloads versions while it runs."""
    given: dict[str, Any] = {"versions": loaded, "loading": loading, "follows_models": True}
    bench.report(1e6 if tokens == ROOM else 100.0, tokens=tokens, number=0, partitions=(0,), **given)
    bench.dispatcher.scheduler.in_flight.set_partitions("priority.pool.normal", 1)
    bench.dispatcher.follow_loaded()


def sent(bench: Bench) -> list[str]:
    """The versions of what was dispatched."""
    bench.dispatcher.dispatch()
    return [item.model_version for item in bench.decoded("priority.pool.normal")]


def test_a_champion_gets_requests_when_a_consumer_has_loaded_it() -> None:
    bench = bench_of()
    consumers(bench, (OLD,))
    bench.run(encoded(1))
    consumers(bench, (OLD, NEW))
    bench.run(encoded(2), topic="backfill.acme")
    assert sent(bench) == ["1", "2"]


def test_of_a_pool_that_never_reported_nothing_is_known() -> None:
    bench = bench_of()
    bench.run(encoded(1))
    bench.report(1e6, tokens=ROOM)
    assert sent(bench) == ["2"], "an older consumer names no versions"


def test_what_waits_keeps_its_version_while_a_consumer_has_it() -> None:
    bench = bench_of(champion="1")
    consumers(bench, (OLD, NEW), tokens=FULL)
    bench.run(*map(encoded, range(1, 4)))
    assert len(bench.dispatcher.scheduler) > 0
    publish(bench, "2")
    consumers(bench, (OLD, NEW))
    assert sent(bench) == ["1", "1", "1"]


def test_what_waits_moves_when_its_version_is_stopped_or_loaded_nowhere() -> None:
    for gone in ("stopped", "unloaded"):
        bench = bench_of(champion="1")
        consumers(bench, (OLD, NEW), tokens=FULL)
        bench.run(*map(encoded, range(1, 4)))
        waiting = len(bench.dispatcher.scheduler)
        assert waiting > 0
        publish(bench, "2", stopped=("1",) if gone == "stopped" else ())
        if gone == "unloaded":
            bench.now_ms += LOST_AFTER_MS
        consumers(bench, (NEW,) if gone == "unloaded" else (OLD, NEW))
        assert sent(bench) == ["1"] * (3 - waiting) + ["2"] * waiting, gone


def test_a_pool_without_consumers_is_expected_back_with_what_it_had() -> None:
    bench = bench_of(champion="1")
    consumers(bench, (OLD,), tokens=FULL)
    bench.run(*map(encoded, range(1, 4)))
    assert len(bench.dispatcher.scheduler) > 0
    publish(bench, "2")
    bench.report(number=0, draining=True)
    bench.dispatcher.follow_loaded()
    consumers(bench, (OLD,))
    assert sent(bench) == ["1", "1", "1"]


def test_what_names_a_version_that_no_consumer_has_is_refused() -> None:
    bench = bench_of(champion="1")
    consumers(bench, (OLD,))
    bench.run(encoded(1, model=NEW))
    asyncio.run(bench.decide())
    (reply,) = bench.decoded("replies.acme")
    assert (reply.code, reply.field, reply.model) == (Code.OVERLOADED, "model", MODEL.model)
    assert reply.message == f"no consumer has loaded version 2 of {MODEL.model}"


def test_a_request_by_reference_becomes_work_of_its_model_and_version() -> None:
    bench = bench_of(champion="1")
    consumers(bench, (OLD, NEW))
    bench.run(encoded(1, model=NEW), encoded(2, model=f"{MODEL.model}@champion"))
    bench.dispatcher.dispatch()
    work: list[WorkItem] = bench.decoded("priority.pool.normal")
    assert [(item.request.model, item.model_version, item.arm) for item in work] == [
        (MODEL.model, "2", "version"),
        (MODEL.model, "1", "champion"),
    ]


def test_work_goes_to_a_consumer_that_has_its_version() -> None:
    bench = bench_of(champion="1")
    consumers(bench, (OLD,), (NEW,), (OLD,))
    bench.run(*(encoded(number, model=NEW if number % 2 else MODEL.model) for number in range(1, 21)))
    bench.dispatcher.dispatch()
    outputs = [one for one in bench.transactions.outputs if one.topic == "priority.pool.normal"]
    assert len(outputs) == 20
    placed = {(bench.decoded_all([one])[0].model_version, one.partition) for one in outputs}
    assert placed == {("1", 0), ("1", 2), ("2", 1)}


def test_what_waits_for_a_busy_consumer_goes_to_no_other_and_holds_up_no_other_tenant() -> None:
    """A flood for a version that one consumer has leaves the other consumers to the others, and is no longer in Kafka
    than the window of its consumer."""
    bench = bench_of(champion="1")
    bench.assign("requests.other")
    bench.dispatcher.set_registry({"acme": ACME, "other": TenantSpec("other")}, bench.dispatcher.registry.models, {})
    consumers(bench, (OLD,), (NEW,), tokens=ONE)
    bench.run(*(encoded(number, model=NEW) for number in range(1, 41)))
    flood = len(bench.decoded("priority.pool.normal"))
    assert 0 < flood < 10
    bench.run(*(encoded(number) for number in range(41, 44)), topic="requests.other")
    work = bench.decoded("priority.pool.normal")[flood:]
    assert {(item.tenant, item.model_version) for item in work} == {("other", "1")}
    assert len(bench.dispatcher.scheduler) == 40 - flood + 3 - len(work)


def test_what_no_consumer_has_loaded_waits_until_one_has() -> None:
    bench = bench_of(champion="2", stopped=("1",))
    consumers(bench, (OLD,))
    bench.run(encoded(1), encoded(2))
    assert sent(bench) == []
    assert not bench.decoded("replies.acme")
    consumers(bench, (OLD,), (NEW,))
    assert sent(bench) == ["2", "2"]


def test_what_waits_for_a_new_champion_goes_to_the_one_before_when_only_that_is_loaded() -> None:
    bench = bench_of(champion="2")
    consumers(bench, ("another/1",))
    bench.run(encoded(1), encoded(2))
    assert len(bench.dispatcher.scheduler) == 2
    consumers(bench, (OLD,))
    assert sent(bench) == ["1", "1"]


def test_a_version_counts_as_loaded_for_a_while_after_its_last_report() -> None:
    loaded = LoadedVersions()
    assert loaded.follow({"pool": {"m/1": 1.0, "m/2": 0.5}}, 0)
    assert not loaded.follow({"pool": {"m/1": 1.0}}, LOST_AFTER_MS - 1)
    assert loaded.by_pool == {"pool": {"m/1": 1.0, "m/2": 0.5}}
    assert not loaded.follow({}, 10 * LOST_AFTER_MS), "a pool without consumers is expected back as it was"
    assert loaded.follow({"pool": {"m/1": 1.0}}, 10 * LOST_AFTER_MS)
    assert loaded.by_pool == {"pool": {"m/1": 1.0}}
    assert not loaded.follow({"pool": {"m/1": 1.0}}, 10 * LOST_AFTER_MS), "it was lost once"
    assert not loaded.follow({"pool": None}, 11 * LOST_AFTER_MS)
    assert loaded.follow({"other": {"m/3": 1.0}}, 11 * LOST_AFTER_MS)
    assert loaded.by_pool == {"pool": None, "other": {"m/3": 1.0}}


def test_work_that_a_consumer_had_no_engine_for_keeps_its_context() -> None:
    bench = bench_of(champion="1")
    consumers(bench, (OLD,))
    item = replace(handed_back(), unserved=1, passages=tuple(Passage(str(n), "text", 0.5) for n in range(4)))
    bench.run(default_codec().encode(item), topic="returned.pool")
    (again,) = bench.decoded("priority.pool.normal")
    assert (len(again.passages), again.unserved, again.handed_back) == (4, 1, 1)
    assert Degradation.FEWER_PASSAGES not in again.degradations


def test_a_consumer_between_two_versions_gets_nothing_and_nothing_is_refused() -> None:
    """It unloads one, and loads the other in its place: what comes meanwhile waits."""
    bench = bench_of(champion="1")
    following(bench, OLD)
    publish(bench, "2")
    following(bench, loading=(NEW,))
    bench.run(encoded(1), encoded(2, model=NEW), encoded(3, model=f"{MODEL.model}@champion"))
    assert sent(bench) == []
    assert not bench.decoded("replies.acme")
    following(bench, NEW)
    assert sent(bench) == ["2", "2", "2"]


def test_what_waits_for_a_version_that_was_unloaded_moves_as_soon_as_the_next_is_loaded() -> None:
    """Nothing is waited for: the consumer said that it is gone."""
    bench = bench_of(champion="1")
    following(bench, OLD, tokens=FULL)
    bench.run(*map(encoded, range(1, 4)))
    waiting = len(bench.dispatcher.scheduler)
    assert waiting > 0
    publish(bench, "2")
    following(bench, loading=(NEW,))
    assert len(bench.dispatcher.scheduler) == waiting
    following(bench, NEW)
    assert sent(bench) == ["1"] * (3 - waiting) + ["2"] * waiting


def test_a_version_that_was_given_up_and_loaded_again_counts() -> None:
    bench = bench_of(champion="1")
    following(bench, OLD)
    following(bench)
    assert bench.dispatcher.registry.served(MODEL, "acme") == 0
    following(bench, OLD)
    assert bench.dispatcher.registry.served(MODEL, "acme") == 1
    following(bench, OLD, loading=(NEW,))
    assert bench.dispatcher.registry.served(TWO, "acme") is None


def test_a_version_that_becomes_loaded_or_is_given_up_is_a_change() -> None:
    loaded = LoadedVersions()
    assert loaded.follow({"pool": {"m/1": 1.0, "m/2": None}}, 0)
    assert loaded.follow({"pool": {"m/1": 1.0, "m/2": 0.5}}, 1)
    assert loaded.follow({"pool": {"m/1": 0.0, "m/2": 1.0}}, 2)
    assert loaded.by_pool == {"pool": {"m/2": 1.0}}
    assert not loaded.follow({"pool": {"m/1": 0.0, "m/2": 1.0}}, 3)
