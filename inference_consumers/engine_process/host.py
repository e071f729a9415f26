"""Host of one engine's process: starts it, sends it work, restarts it when it dies."""

import contextlib
import math
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from time import monotonic
from typing import Protocol

import msgspec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.logs import get_logger
from fairlane.records import ModelVersion
from fairlane.settings import Settings
from fairlane_server.artifacts.cache import CachedArtifact
from fairlane_server.artifacts.digest import ArtifactError
from fairlane_server.artifacts.source import ArtifactUnavailableError, StoppedError, StopWait
from fairlane_server.artifacts.store import ArtifactStore
from inference_consumers.child_process import kill_child, start_child
from inference_consumers.engine_process.failures import EndKind, EngineEnd, end_by_error, end_of
from inference_consumers.engine_process.messages import (
    Cancel,
    Channel,
    Close,
    Died,
    FromEngine,
    Loaded,
    Metrics,
    Run,
    RunEnded,
    RunStep,
    from_engine,
)
from inference_consumers.engine_process.process_facts import OomKills, cpu_ms, held_bytes, is_stopped
from inference_consumers.engines.protocol import EngineItem, EngineSpec, LoadFailed, SimulatedCost
from inference_consumers.engines.remote.endpoints import endpoints_of
from inference_consumers.engines.remote.endpoints_file import load_endpoints

log = get_logger(__name__)

MAX_DEATHS_WHILE_LOADING = 3
"""In a row: then it is not chance, and the consumer gives up."""

MODULE = "inference_consumers.engine_process"
_OF_CLIENTS = ("AWS_", "PG")
"""Beginnings of what clients of S3 and Postgres read by themselves."""
_SECRET = re.compile(r"PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|API_?KEY|PRIVATE_?KEY|(?:^|_)TOKEN(?:_FILE)?$")
_LOOK_EVERY_S = 0.2
_LOAD_TIMEOUT_S = 900.0
_FETCH_PATIENCE_S = 120.0
_END_TIMEOUT_S = 5.0
_STANDARD_ERROR = 2


def _never() -> bool:
    return False


class EngineListener(Protocol):
    """Callbacks for an engine's events, on the host's thread. Must not raise."""

    def engine_loaded(self, host: "EngineHost", loaded: Loaded) -> None:
        """It can run something now."""

    def engine_stepped(self, host: "EngineHost", step: RunStep) -> None:
        """A run came further."""

    def engine_ended(self, host: "EngineHost", ended: RunEnded) -> None:
        """A run is over."""

    def engine_died(self, host: "EngineHost", end: EngineEnd) -> None:
        """Its process is gone with all its runs; unless the host is closing, it is started again."""

    def engine_failed(self, host: "EngineHost", failure: LoadFailed) -> None:
        """It cannot be loaded, and is not tried again here."""


class EngineHost:
    """Host of one engine. ``run``, ``cancel`` and ``kill`` may be called from any thread; on a process that has ended
    they are lost, and ``engine_died`` reports its end."""

    def __init__(
        self,
        spec: EngineSpec,
        python: str,
        environment: Mapping[str, str],
        module: str = MODULE,
        backoff: Backoff = Backoff(first_s=0.2, longest_s=10.0),  # noqa: B008 - frozen
        chance: Callable[[], float] = random.random,
        fetch: Callable[[StopWait], CachedArtifact] | None = None,
        fetch_patience_s: float = _FETCH_PATIENCE_S,
    ) -> None:
        """The engine's process is this module in this Python interpreter. ``fetch`` gets the files of its model, with
        credentials that it does not have itself; without it they are in the folder of models. While their source is
        away it is asked again, and ``engine_failed`` is called after ``fetch_patience_s``."""
        self.spec = spec
        self.key = (spec.model.model, spec.model.version)
        self._python = python
        self._module = module
        self._environment = environment
        self._backoff = backoff
        self._chance = chance
        self._fetch = fetch
        self._fetch_patience_s = fetch_patience_s
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        # Of the present process.
        self._is_loaded = self._has_run = False
        self._load_failure: LoadFailed | None = None
        self._lacks_room: Callable[[], bool] = _never
        self._died_of = ""
        self._ended_here: EngineEnd | None = None
        self._oom_kills = OomKills()
        self._oom_kills_before: int | None = None
        self._life = 0
        self.metrics_text = ""
        """The engine's latest metrics, in the text format of Prometheus."""
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    @property
    def life(self) -> int:
        """The number of the process, from 1: each start is another."""
        return self._life

    @property
    def is_stopped(self) -> bool:
        pid = self.pid
        return pid is not None and is_stopped(pid)

    @property
    def cpu_ms(self) -> int | None:
        pid = self.pid
        return None if pid is None else cpu_ms(pid)

    @property
    def held_bytes(self) -> int:
        """Main memory of its process and that one's children; 0 without one."""
        pid = self.pid
        return 0 if pid is None else held_bytes(pid)

    def start(self, listener: EngineListener, lacks_room: Callable[[], bool] | None = None) -> None:
        """``lacks_room`` is given when others serve meanwhile. The model is then loaded at low priority the first time.
        ``lacks_room`` is asked every moment; once it is true, loading ends as failed for want of room."""
        self._lacks_room = lacks_room or _never
        self._thread = threading.Thread(target=self._serve, args=(listener,), name=f"engine-{self.key[0]}", daemon=True)
        self._thread.start()

    def run(self, run_id: int, items: Sequence[EngineItem], life: int) -> None:
        """Send a run, unless the process is another than that of ``life``. Blocks while the process does not read."""
        # In this order: a channel of a later life comes with its number.
        channel = self._channel
        if life == self._life:
            # What the kernel killed before was not for this run.
            self._oom_kills_before = self._oom_kills.count()
            self._send(Run(run_id, tuple(items)), channel)

    def cancel(self, run_id: int, indexes: Sequence[int]) -> None:
        self._send(Cancel(run_id, tuple(indexes)), self._channel)

    def kill(self, end: EngineEnd) -> None:
        """End the process now; it is started again. ``engine_died`` gets ``end``."""
        process = self._process
        if process is not None:
            self._ended_here = end
            kill_child(process)

    def close(self, timeout_s: float) -> None:
        """End the process for good, by force when it does not end in time."""
        self._closing.set()
        self._send(Close(), self._channel)
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self.kill(EngineEnd(EndKind.KILLED, "it did not end in time"))
                self._thread.join(_END_TIMEOUT_S)

    @staticmethod
    def _send(message: Run | Cancel | Close, channel: Channel | None) -> None:
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.write(message)

    def _serve(self, listener: EngineListener) -> None:
        try:
            with self._files():
                self._live(listener)
        except StoppedError:
            pass
        except ArtifactError as error:
            metrics.ARTIFACT_FAILURES.labels(model=self.key[0], reason=type(error).__name__).inc()
            may_pass = isinstance(error, ArtifactUnavailableError)
            listener.engine_failed(self, self._failed(str(error), may_pass=may_pass))
        except Exception as error:  # noqa: BLE001 - a thread that ends must end the consumer, not leave it without engine
            why = f"its listener failed: {type(error).__name__}"
            self._ended_here = EngineEnd(EndKind.KILLED, why)
            log.error("engine_listener_failed", model=self.key[0], error=type(error).__name__)
            if self._process is not None and self._channel is not None:
                self._bury(self._process, self._channel)
            listener.engine_failed(self, self._failed(why))

    @contextlib.contextmanager
    def _files(self) -> Iterator[None]:
        """Have the files of the model on this machine meanwhile. Raises ArtifactError, StoppedError."""
        if self._fetch is None:
            yield
            return
        artifact = self._fetched(self._fetch)
        try:
            self.spec = msgspec.structs.replace(self.spec, models_dir=str(artifact.path))
            yield
        finally:
            artifact.release()

    def _fetched(self, fetch: Callable[[StopWait], CachedArtifact]) -> CachedArtifact:
        began_s, tries = monotonic(), 0
        while True:
            try:
                return fetch(self._closing.wait)
            except ArtifactUnavailableError as error:
                tries += 1
                log.warning("artifact_unavailable", model=self.key[0], version=self.key[1], reason=str(error))
                if monotonic() - began_s >= self._fetch_patience_s:
                    # Others can be loaded meanwhile.
                    raise
            if self._closing.wait(self._backoff.delay_s(tries, self._chance())):
                raise StoppedError

    def _live(self, listener: EngineListener) -> None:
        # The process is started here and nowhere else: the kernel ends it with the thread that started it.
        deaths = deaths_while_loading = 0
        while not self._closing.is_set():
            try:
                self._start()
            except OSError as error:
                listener.engine_failed(self, self._failed(f"{self._python} cannot be started: {error.strerror}"))
                return
            end = self._listen(listener)
            if self._load_failure is not None:
                listener.engine_failed(self, self._load_failure)
                return
            if self._closing.is_set():
                return
            deaths = 1 if self._has_run else deaths + 1
            deaths_while_loading = 0 if self._is_loaded else deaths_while_loading + 1
            log.error(
                "engine_died", model=self.key[0], version=self.key[1], reason=end.reason, kind=end.kind, in_a_row=deaths
            )
            if deaths_while_loading >= MAX_DEATHS_WHILE_LOADING:
                why = f"its process died {deaths_while_loading} times while it loaded: {end.reason}"
                listener.engine_failed(self, self._failed(why))
                return
            listener.engine_died(self, end)
            self._closing.wait(self._backoff.delay_s(deaths, self._chance()))

    def _failed(self, why: str, *, no_room: bool = False, may_pass: bool = False) -> LoadFailed:
        return LoadFailed(f"{self.key[0]}: {why}", no_room, may_pass)

    def _start(self) -> None:
        self._ended_here = self._load_failure = None
        self._is_loaded = self._has_run = False
        self._died_of = ""
        self._process, channel = start_child(
            self._python, self._module, self.key[0], self._environment, _STANDARD_ERROR
        )
        self._life += 1
        self._channel = channel
        with contextlib.suppress(OSError):
            channel.write(msgspec.structs.replace(self.spec, is_beside=self._lacks_room is not _never))

    def _listen(self, listener: EngineListener) -> EngineEnd:
        process, channel = self._process, self._channel
        assert process is not None and channel is not None  # noqa: S101, PT018 - set by _start
        started = monotonic()
        try:
            while True:
                if channel.has_message(_LOOK_EVERY_S):
                    self._take(from_engine.decode(channel.read()), listener)
                elif process.poll() is not None:
                    break
                elif not self._is_loaded and monotonic() - started > _LOAD_TIMEOUT_S:
                    why = f"it was not loaded within {_LOAD_TIMEOUT_S:.0f} s"
                    self._load_failure = self._load_failure or self._failed(why)
                    self.kill(EngineEnd(EndKind.HUNG, why))
                elif not self._is_loaded and self._load_failure is None and self._lacks_room():
                    self._load_failure = self._failed("it would leave too little memory", no_room=True)
                    self.kill(EngineEnd(EndKind.KILLED, "for want of memory"))
        except (EOFError, OSError):
            pass
        except msgspec.DecodeError as error:
            why = f"it sent what is no message: {type(error).__name__}"
            self._ended_here = EngineEnd(EndKind.EXITED, why)
        status = self._bury(process, channel)
        if self._ended_here is not None:
            return self._ended_here
        if self._died_of:
            return end_by_error(self._died_of)
        before, now = self._oom_kills_before, self._oom_kills.count()
        return end_of(status, kernel_killed=before is not None and now is not None and now > before)

    def _take(self, message: FromEngine, listener: EngineListener) -> None:
        match message:
            case Loaded():
                self._is_loaded, self._lacks_room = True, _never
                listener.engine_loaded(self, message)
            case RunStep():
                listener.engine_stepped(self, message)
            case RunEnded():
                self._has_run = True
                listener.engine_ended(self, message)
            case LoadFailed():
                self._load_failure = self._load_failure or message
            case Died():
                self._died_of = message.error
            case Metrics():
                self.metrics_text = message.text

    def _bury(self, process: "subprocess.Popen[bytes]", channel: Channel) -> int:
        """End the process, unless it does so by itself, and what belongs to it. Returns its exit status."""
        if self._ended_here is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT_S if self._closing.is_set() else _LOOK_EVERY_S)
        kill_child(process)
        status = process.wait()
        self._channel = self._process = None
        self.metrics_text = ""
        channel.close()
        return status


class EngineMetrics(Collector):
    """Collector of the metrics that engines keep themselves (vLLM's, named ``vllm:…``). Unreadable ones are logged and
    left out: they must not take the others along."""

    def __init__(self, hosts: Callable[[], Sequence[EngineHost]]) -> None:
        self._hosts = hosts

    def collect(self) -> Iterable[Metric]:
        """A family that several engines have is shown once, with the samples of all."""
        families: dict[str, Metric] = {}
        for host in self._hosts():
            try:
                found = list(text_string_to_metric_families(host.metrics_text))
            except ValueError as error:
                log.warning("engine_metrics_unreadable", model=host.key[0], error=type(error).__name__)
                continue
            for family in found:
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return families.values()

    def describe(self) -> Iterable[Metric]:
        return ()


def engine_host(settings: Settings, artifacts: ArtifactStore, model: ModelVersion) -> EngineHost:
    """The host of a version's engine, not started. The endpoints file is read each time, so that a new version may have
    new endpoints. Raises ConfigError for a bad one."""
    entries = () if settings.endpoints_file is None else load_endpoints(settings.endpoints_file)
    endpoints = endpoints_of(entries, model.model, model.version)
    is_simulated = settings.engine == "simulated"
    if endpoints is not None and (names := settings_below(settings, model)):
        log.warning("remote_version_cut", model=model.model, version=model.version, raise_settings=names)
    spec = EngineSpec(
        model,
        str(settings.models_dir.absolute()),
        settings.engine_threads,
        settings.device,
        "simulated" if is_simulated else None,
        SimulatedCost(
            settings.simulated_prefill_tokens_per_s or math.inf,
            settings.simulated_decode_tokens_per_s or math.inf,
            settings.simulated_batch_ms,
            settings.simulated_memory_tokens,
        ),
        settings.allow_unsafe_weights,
        endpoints,
    )
    is_fetched = model.artifact_digest is not None and not is_simulated
    fetch = partial(artifacts.of_version, model) if is_fetched else None
    environment = without_settings(os.environ)
    if model.engine != "vllm" or is_simulated:
        return EngineHost(spec, sys.executable, environment, MODULE, fetch=fetch)
    # vLLM has a log of its own, which is quiet by default.
    debugging = {"VLLM_LOGGING_LEVEL": "DEBUG"} if settings.log_level == "DEBUG" else {}
    return EngineHost(spec, str(settings.vllm_python.absolute()), {**debugging, **environment}, MODULE, fetch=fetch)


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the settings and the files that hold some, without what clients of storage and Postgres
    read, without proxies that need a user, and without other secrets by their names: a process that runs a stranger's
    model gets no address, user or password of ours."""
    ours = {name.upper() for name in Settings.model_fields}
    return {name: value for name, value in environment.items() if not _is_ours(name.upper(), value, ours)}


def _is_ours(name: str, value: str, settings: Set[str]) -> bool:
    is_setting = name in settings or name.removesuffix("_FILE") in settings
    has_user = name.endswith("_PROXY") and "@" in value
    return is_setting or has_user or name.startswith(_OF_CLIENTS) or _SECRET.search(name) is not None


def settings_below(settings: Settings, model: ModelVersion) -> list[str]:
    """The settings that are below what models.yaml says of the version: of both the smaller one counts. For a version
    on other servers they leave servers idle."""
    limits = {
        "MAX_BATCH_SIZE": (settings.max_batch_size, model.max_batch_size),
        "MAX_BATCH_TOKENS": (settings.max_batch_tokens, model.max_batch_tokens),
    }
    return [name for name, (ours, of_version) in limits.items() if ours < of_version]
