"""Engines of versions that come and go beside one that serves."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fairlane.records import ModelVersion
from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.batching.received_work import ModelKey
from inference_consumers.engine_process.messages import Finished, Loaded, RunEnded, RunStep
from inference_consumers.engines.protocol import EngineMemory, LoadFailed
from inference_consumers.versions.engines import END_TIMEOUT_S, VersionEngines
from tests.kit.driver_bench import OK, DriverBench, FakeHost, named
from tests.kit.micro_batch_kit import MODEL
from tests.kit.version_kit import version

NEW = (MODEL[0], "next")
LIMITS = BatchLimits(7, 700, 0)


@dataclass
class StartedHost(FakeHost):
    """Started, and not loaded until the test says so."""

    listener: Any = None
    lacks_room: Callable[[], bool] | None = None
    closed_after_s: float | None = None

    def start(self, listener: Any, lacks_room: Callable[[], bool] | None) -> None:
        self.listener, self.lacks_room = listener, lacks_room

    def loaded(self) -> None:
        self.listener.engine_loaded(self, Loaded("fake", False, 0.1, EngineMemory(5)))

    def close(self, timeout_s: float) -> None:
        self.closed_after_s = timeout_s


def engines_of(bench: DriverBench) -> tuple[VersionEngines, list[StartedHost]]:
    made: list[StartedHost] = []

    def make(model: ModelVersion) -> Any:
        made.append(StartedHost((model.model, model.version)))
        return made[-1]

    return VersionEngines(bench.driver, make, lambda _model: LIMITS), made


def served(bench: DriverBench) -> list[ModelKey]:
    return list(bench.driver.served[0])


def test_a_version_serves_from_the_moment_it_is_loaded() -> None:
    bench = DriverBench()
    engines, made = engines_of(bench)
    engines.load(version("next", MODEL[0]), lambda: False)
    (host,) = made
    assert host.lacks_room is not None
    assert engines.progress(NEW).is_loaded is False
    assert served(bench) == [MODEL]
    host.loaded()
    assert engines.progress(NEW).memory.main_bytes == 5
    assert served(bench) == [MODEL, NEW]
    assert bench.driver.served[1] == BatchLimits(7, 1_000, 0), "the largest of both"
    assert [one.key for one in engines.hosts] == [NEW]


def test_a_version_that_cannot_be_loaded_is_reported_and_removed() -> None:
    bench = DriverBench()
    engines, (host, *_) = _loading(bench)
    failure = LoadFailed("no room", no_room=True)
    host.listener.engine_failed(host, failure)
    assert engines.progress(NEW).failure == failure
    engines.remove(NEW)
    assert host.closed_after_s == END_TIMEOUT_S
    assert NEW not in bench.driver.engines.by_key
    assert not engines.hosts
    assert not bench.fatal


def test_what_was_in_its_checks_until_its_version_is_removed_does_not_run_and_hurts_nobody() -> None:
    bench = DriverBench()
    engines, (host, *_) = _loading(bench)
    host.loaded()
    late = named("late")
    late = replace(late, item=replace(late.item, model_version=NEW[1]))

    def closes(_timeout_s: float) -> None:
        with bench.driver.changed:
            bench.driver.input_passed(late)
        assert not bench.driver.start_one()

    host.close = closes  # type: ignore[method-assign,assignment]
    engines.remove(NEW)
    assert [work.request_id for work in bench.driver.take_unserved()] == ["late"]
    bench.add(named("mine"))
    assert bench.start() == ["mine"]


def test_a_version_is_removed_when_its_work_is_done_and_given_back() -> None:
    bench = DriverBench()
    engines, (host, *_) = _loading(bench)
    host.loaded()
    engines.refuse(MODEL)
    mine, other = named("mine"), named("other")
    other = replace(other, item=replace(other.item, model_version=NEW[1]))
    bench.add(mine, other)
    assert [work.request_id for work in bench.driver.take_unserved()] == ["mine"]
    assert bench.driver.start_one()
    assert [item.item_id for item in host.given[-1][1]] == ["other"]
    assert engines.is_at_rest(MODEL)
    assert not engines.is_at_rest(NEW)
    run_id = host.given[-1][0]
    host.listener.engine_stepped(host, RunStep(run_id, (), (Finished(0, OK),)))
    host.listener.engine_ended(host, RunEnded(run_id, 0.1))
    assert engines.is_at_rest(NEW)


def test_a_hidden_version_serves_and_may_be_kept_after_all() -> None:
    bench = DriverBench()
    engines, (host, *_) = _loading(bench)
    host.loaded()
    engines.hide(NEW)
    assert served(bench) == [MODEL]
    assert bench.driver.engines.serves(NEW)
    engines.refuse(NEW)
    assert not bench.driver.engines.serves(NEW)
    engines.keep(NEW)
    assert served(bench) == [MODEL, NEW]
    assert bench.driver.engines.serves(NEW)
    engines.close(0)
    assert host.closed_after_s == 0


def _loading(bench: DriverBench) -> tuple[VersionEngines, list[StartedHost]]:
    engines, made = engines_of(bench)
    engines.load(version("next", MODEL[0]), None)
    return engines, made
