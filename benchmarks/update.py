"""update: requests, latency and memory while a version takes the place of another.

Digits are classified at a steady rate by the real engine, on one consumer and on two, with memory for both versions and
with memory for one. Version 2, with the same weights, is published as the champion, as `fairlane models alias` does.
The update lasts until every consumer has the new version and has unloaded the old one; latency is that of the requests
submitted meanwhile, against those of the calm before. Memory is that of the consumers' engines (PSS).

With memory for one version a lone consumer serves neither of them while it loads: what comes then waits, and its
latency is that of loading.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from time import monotonic

import psutil
import yaml

from benchmarks.cluster import MODELS_DIR, BenchStack, cluster, wait_until
from benchmarks.load import WARM_UP_S, LoadGenerator, Planned, latency_percentile_ms, make_request, submitted_within
from benchmarks.result import Figure, Result
from benchmarks.simulated_pool import UNBOUNDED, UNBOUNDED_TENANT, consumer, dispatcher
from deploy.local.services import MODELS_FILE
from fairlane.clock import now_ms
from fairlane.outcomes import Task
from fairlane.records import ModelRoute, ModelVersion, Parameters, RequestInput
from fairlane.schema_files import default_codec
from fairlane_server.control.published_models import model_topic
from fairlane_server.models.models_file import load_models
from inference_consumers.engine_process.host import MODULE
from inference_consumers.engine_process.process_facts import held_bytes

NAME = "update"
CALM_S = 10.0
HOW = f"one update each, after {CALM_S:g} s of calm"
AIM_P99 = 1.5
RATE_PER_S = 40.0
_MODEL, _POOL, _TENANT = "digits", "encode", "acme"
_PIXELS = bytes(range(64))
_LONGEST_S = 90.0
_KEPT_S = 2.0
_SAMPLE_S = 0.25
_TIMEOUT_MS = 120_000
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """How many consumers, and whether each has memory for both versions."""

    consumers: int
    has_room: bool

    @property
    def name(self) -> str:
        room = "with room for both" if self.has_room else "with room for one"
        return f"{self.consumers} consumer{'s' if self.consumers > 1 else ''} {room}"


SETTINGS = tuple(Setting(consumers, has_room) for has_room in (True, False) for consumers in (1, 2))


def run(calm_s: float = CALM_S, settings: Sequence[Setting] = SETTINGS) -> Result:
    """An update in each setting. The first must have room: it shows what a version holds."""
    runs: dict[Setting, dict[str, float]] = {}
    for setting in settings:
        one_bytes = next((found["engine_bytes"] for found in runs.values()), None)
        runs[setting] = _update(setting, calm_s, None if setting.has_room else one_bytes)
    figures = [
        Figure("requests refused or lost", sum(found["unserved"] for found in runs.values()), "", "at most", 0),
        Figure("requests during the updates", sum(found["requests"] for found in runs.values()), ""),
    ]
    for setting, found in runs.items():
        ratio = Figure(f"{setting.name}: p99 divided by that before", found["p99_ratio"], "ratio")
        figures += [
            replace(ratio, bound="at most", aim=AIM_P99) if setting.has_room else ratio,
            Figure(f"{setting.name}: p99 before", found["calm_p99_ms"], "ms"),
            Figure(f"{setting.name}: p99 during", found["p99_ms"], "ms"),
            Figure(f"{setting.name}: until all have the new version", found["loaded_s"], "s"),
            Figure(f"{setting.name}: memory before", found["before_bytes"] / _MIB, "MiB"),
            Figure(f"{setting.name}: most memory during", found["most_bytes"] / _MIB, "MiB"),
            Figure(f"{setting.name}: memory after", found["after_bytes"] / _MIB, "MiB"),
        ]
    return Result(NAME, tuple(figures), tuple(runs.values()))


class _Memory:
    """Memory of the engines of all consumers, sampled on a thread."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self.most_bytes = 0
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def now_bytes(self) -> int:
        return sum(held_bytes(engine.pid) for engine in self.engines)

    @property
    def engines(self) -> list[psutil.Process]:
        found = [child for pid in self._pids for child in psutil.Process(pid).children()]
        return [child for child in found if _is_engine(child)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.most_bytes = max(self.most_bytes, self.now_bytes)


def _is_engine(process: psutil.Process) -> bool:
    try:
        return MODULE in process.cmdline()
    except psutil.Error:
        return False


def _update(setting: Setting, calm_s: float, one_bytes: float | None) -> dict[str, float]:
    env = {"ENGINE_THREADS": "1", "PREVIOUS_VERSION_KEEP_S": f"{_KEPT_S:g}", "MODELS_DIR": str(MODELS_DIR.absolute())}
    if one_bytes is not None:
        env |= {"ENGINE_MEMORY_MAX_BYTES": str(round(1.5 * one_bytes)), "LOAD_MEMORY_RESERVE_BYTES": "0"}
    names = [f"consumer-{number}" for number in range(1, setting.consumers + 1)]
    services = [dispatcher(env=UNBOUNDED), *(consumer(number + 1, env, _POOL) for number in range(setting.consumers))]
    (old,) = (model for model in load_models(MODELS_FILE) if model.model == _MODEL)
    entries = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))["models"]
    models = [entry for entry in entries if entry["model"] == _MODEL]
    tenants = [{"tenant": _TENANT, **UNBOUNDED_TENANT}]
    with (
        cluster(services, tenants=tenants, models=models) as running,
        LoadGenerator(running.settings, [_TENANT]) as load,
    ):
        supervisor = running.stack.supervisor
        memory = _Memory([pid for name in names if (pid := supervisor.process(name).pid) is not None])
        load.start(_requests())
        calm = load.interval(calm_s)
        wait_until(lambda: now_ms() >= calm[1], WARM_UP_S + calm_s + 10, "the end of the calm")
        before_bytes, began = memory.now_bytes, monotonic()
        engine_bytes = before_bytes / setting.consumers
        with memory.watched():
            _publish(running, old)
            wait_until(lambda: all(_loads(running, name) > 1 for name in names), _LONGEST_S, "the new version")
            loaded_s = monotonic() - began
            wait_until(lambda: len(memory.engines) == len(names), _LONGEST_S, "the end of the old version")
        during = calm[1], now_ms()
        after_bytes = memory.now_bytes
        load.cut()
        load.wait_published(_LONGEST_S)
        load.wait_answered(_LONGEST_S)
        observed, lag_ms = load.observed(), load.checked_lag_ms()
    before_ms, during_ms = (latency_percentile_ms(submitted_within(observed, one), 0.99) for one in (calm, during))
    return {
        "consumers": setting.consumers,
        "has_room": float(setting.has_room),
        "unserved": sum(not one.served for one in observed),
        "requests": len(submitted_within(observed, during)),
        "calm_p99_ms": before_ms,
        "p99_ms": during_ms,
        "p99_ratio": during_ms / before_ms,
        "loaded_s": loaded_s,
        "engine_bytes": engine_bytes,
        "before_bytes": before_bytes,
        "most_bytes": max(memory.most_bytes, before_bytes),
        "after_bytes": after_bytes,
        "generator_lag_ms": lag_ms,
    }


def _requests() -> Iterator[Planned]:
    codec = default_codec()
    for number in count():
        request = make_request(
            model=_MODEL,
            task=str(Task.CLASSIFY),
            input=RequestInput(image=_PIXELS),
            parameters=Parameters(),
            timeout_ms=_TIMEOUT_MS,
        )
        yield Planned.of(request, _TENANT, codec, number / RATE_PER_S)


def _publish(running: BenchStack, old: ModelVersion) -> None:
    """Make version 2 the champion."""
    published = model_topic(running.settings, default_codec())
    versions = published.read().values()
    (known,) = (one for one in versions if isinstance(one, ModelVersion) and one.version == old.version)
    published.publish(
        [replace(known, version="2"), ModelRoute(_MODEL, 2, {"champion": "2"}, {"champion": old.version})]
    )


def _loads(running: BenchStack, name: str) -> float:
    """How many versions a consumer has loaded since its start."""
    found = running.samples(name)
    wanted = "fairlane_model_loads_total"
    return sum(one.value for one in found if one.name == wanted and one.labels["result"] == "loaded")
