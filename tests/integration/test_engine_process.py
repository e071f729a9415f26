"""Engines in processes of their own: what they tell, and what becomes of them."""

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fairlane.backoff import Backoff
from fairlane.records import ModelVersion, Parameters, RequestInput
from fairlane.settings import Settings
from fairlane_server.artifacts.cache import CachedArtifact
from fairlane_server.artifacts.digest import ArtifactError
from fairlane_server.artifacts.source import ArtifactUnavailableError, StoppedError, StopWait
from inference_consumers.engine_process.failures import EndKind, EngineEnd
from inference_consumers.engine_process.host import (
    MAX_DEATHS_WHILE_LOADING,
    EngineHost,
    without_settings,
)
from inference_consumers.engine_process.messages import Loaded, RunEnded, RunStep
from inference_consumers.engine_process.process_facts import OomKills
from inference_consumers.engines.protocol import (
    CancelledItem,
    EngineItem,
    EngineSpec,
    Failure,
    ItemOutcome,
    LoadFailed,
    SimulatedCost,
    Success,
)
from tests.kit.artifact_kit import FILES, cache_of, cached, contents, write_files
from tests.kit.continuous_engine import UNJOINABLE
from tests.kit.troubled_engine import ALWAYS, DEADLY, ENDLESS, KILLED, NEVER_LOADED_MS, POISON, TOO_LARGE
from tests.kit.waiting import eventually

MODEL = ModelVersion("m", "1", "p", "simulated", ("generate",), "m", 2048, 512)
SLOW = EngineSpec(MODEL, "models", simulated=SimulatedCost(decode_tokens_per_s=20))
FAST = EngineSpec(MODEL, "models")
WAIT_S = 20
CONTINUOUS = "tests.kit.continuous_engine"
QUICK = Backoff(first_s=0.01, longest_s=0.02)


class Heard:
    """What a host told, in order."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[object] = queue.SimpleQueue()

    def engine_loaded(self, host: EngineHost, loaded: Loaded) -> None:
        self.told.put((loaded, host.life))

    def engine_stepped(self, host: EngineHost, step: RunStep) -> None:
        self.told.put(step)

    def engine_ended(self, host: EngineHost, ended: RunEnded) -> None:
        self.told.put(ended)

    def engine_died(self, host: EngineHost, end: EngineEnd) -> None:
        self.told.put(end)

    def engine_failed(self, host: EngineHost, failure: LoadFailed) -> None:
        why = " for want of room" if failure.no_room else " for now" if failure.may_pass else ""
        self.told.put(f"failed{why}: {failure.message}")

    def next(self) -> object:
        return self.told.get(timeout=WAIT_S)

    def loaded(self) -> tuple[Loaded, int]:
        """Expects that an engine is loaded: what it said, and which of its lives that is."""
        match self.next():
            case (Loaded() as loaded, int() as life):
                return loaded, life
            case told:
                raise AssertionError(told)

    def run_until_end(self) -> tuple[dict[int, ItemOutcome], dict[int, str], RunEnded]:
        """Outcomes and texts by place, and the end."""
        outcomes: dict[int, ItemOutcome] = {}
        texts: dict[int, str] = {}
        while not isinstance(told := self.next(), RunEnded):
            assert isinstance(told, RunStep)
            for text in told.texts:
                texts[text.index] = texts.get(text.index, "") + text.delta
            outcomes.update({finished.index: finished.outcome for finished in told.finished})
        return outcomes, texts, told


def item(prompt: str = "hello", *, tokens: int = 4, stream: bool = False) -> EngineItem:
    return EngineItem(prompt, "generate", RequestInput(prompt=prompt), Parameters(max_tokens=tokens, stream=stream))


def host_of(spec: EngineSpec, module: str = "tests.kit.troubled_engine") -> EngineHost:
    return EngineHost(spec, sys.executable, without_settings(os.environ), module, QUICK)


@contextmanager
def engine(spec: EngineSpec, module: str = "tests.kit.troubled_engine") -> Iterator[tuple[EngineHost, Heard]]:
    """A host whose engine is loaded; its process is gone afterwards."""
    heard = Heard()
    host = host_of(spec, module)
    host.start(heard)
    try:
        loaded, life = heard.loaded()
        assert (loaded.name, loaded.continuous, life) == ("simulated", module == CONTINUOUS, 1)
        yield host, heard
    finally:
        process = psutil.Process(pid) if (pid := host.pid) is not None else None
        host.close(WAIT_S)
        assert process is None or not process.is_running()


@pytest.fixture(scope="module")
def fast() -> Iterator[tuple[EngineHost, Heard]]:
    with engine(FAST) as started:
        yield started


def test_a_run_tells_texts_outcomes_and_its_end(fast: tuple[EngineHost, Heard]) -> None:
    host, heard = fast
    host.run(7, [item(), item(stream=True), replace(item(), task="nonsense")], host.life)
    outcomes, texts, ended = heard.run_until_end()
    assert isinstance(outcomes[0], Success)
    assert isinstance(outcomes[1], Success)
    assert isinstance(outcomes[2], Failure)
    assert texts == {1: outcomes[1].output.text}
    assert (ended.run_id, ended.problem) == (7, None)
    assert ended.computed_tokens >= ended.useful_tokens > 0


def test_a_failing_run_names_the_kind_of_its_error_and_quotes_nothing(fast: tuple[EngineHost, Heard]) -> None:
    host, heard = fast
    for number, (prompt, error) in enumerate(
        ((POISON, "RuntimeError"), (TOO_LARGE, "MemoryError"), (ALWAYS, "TransientEngineError"))
    ):
        host.run(number, [item(), item(prompt)], host.life)
        outcomes, _, ended = heard.run_until_end()
        assert ended.problem is not None
        assert ended.problem.error == error
        assert (ended.problem.out_of_memory, ended.problem.transient) == (prompt == TOO_LARGE, prompt == ALWAYS)
        assert outcomes == {}
        assert prompt not in repr(ended)
    host.run(9, [item()], host.life)
    assert isinstance(heard.run_until_end()[0][0], Success)


def test_a_dead_process_is_told_and_another_takes_its_place() -> None:
    with engine(FAST) as (host, heard):
        first = host.pid
        host.run(1, [item(DEADLY)], host.life)
        assert heard.next() == EngineEnd(EndKind.CRASHED, "killed by SIGSEGV")
        loaded, life = heard.loaded()
        assert (loaded.name, life) == ("simulated", 2)
        assert host.pid != first
        host.run(2, [item()], 1)  # meant for the one before
        host.run(3, [item()], 2)
        assert heard.run_until_end()[2].run_id == 3
        host.run(4, [item(KILLED)], 2)
        assert heard.next() == EngineEnd(EndKind.KILLED, "killed by SIGKILL")


@pytest.mark.parametrize(
    ("by", "kind"),
    [(signal.SIGKILL, EndKind.KILLED), (signal.SIGUSR1, EndKind.KILLED), (signal.SIGABRT, EndKind.CRASHED)],
)
def test_an_end_by_a_signal_says_who_can_have_sent_it(by: signal.Signals, kind: EndKind) -> None:
    with engine(FAST) as (host, heard):
        host.run(1, [item(ENDLESS)], host.life)
        assert host.pid is not None
        assert not host.is_stopped
        os.kill(host.pid, by)
        assert heard.next() == EngineEnd(kind, f"killed by {by.name}")
        heard.loaded()


def test_a_kill_that_the_kernel_counted_for_want_of_memory_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/")
    counters = tmp_path / "memory.events"
    counters.write_text("oom_kill 4\n")
    with engine(FAST) as (host, heard):
        host._oom_kills = OomKills(tmp_path, tmp_path)
        host.run(1, [item(ENDLESS)], host.life)
        counters.write_text("oom_kill 5\n")
        assert host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        assert heard.next() == EngineEnd(EndKind.OUT_OF_MEMORY, "killed by SIGKILL: out of memory")
        assert heard.loaded()[1] == 2
        host.run(2, [item(KILLED)], 2)
        assert heard.next() == EngineEnd(EndKind.KILLED, "killed by SIGKILL")
        heard.loaded()


def test_a_process_that_hangs_can_be_ended() -> None:
    with engine(FAST) as (host, heard):
        host.run(1, [item(ENDLESS)], host.life)
        hung = EngineEnd(EndKind.HUNG, "it hangs")
        host.kill(hung)
        assert heard.next() == hung
        assert heard.loaded()[1] == 2


def test_an_item_is_cancelled_while_it_runs() -> None:
    with engine(SLOW) as (host, heard):
        host.run(1, [item(tokens=400, stream=True), item(tokens=3)], host.life)
        while not isinstance(step := heard.next(), RunStep) or not step.texts:
            pass
        host.cancel(1, [0])
        outcomes, _, ended = heard.run_until_end()
        assert isinstance(outcomes[0], CancelledItem)
        assert 0 < outcomes[0].usage.completion_tokens < 400
        assert ended.problem is None


def test_a_continuous_engine_runs_several_at_a_time_and_ends_each_by_itself() -> None:
    with engine(SLOW, CONTINUOUS) as (host, heard):
        host.run(1, [item(tokens=400, stream=True)], host.life)
        while not isinstance(step := heard.next(), RunStep) or not step.texts:
            pass
        host.run(2, [item("short", tokens=1), item(UNJOINABLE)], host.life)
        host.run(3, [item("short", tokens=1)], host.life)
        host.run(4, [], host.life)
        ends: dict[int, RunEnded] = {}
        while len(ends) < 3:
            if isinstance(told := heard.next(), RunEnded):
                ends[told.run_id] = told
        assert ends.keys() == {2, 3, 4}
        assert ends[2].problem is not None
        assert ends[2].problem.error == "RuntimeError"
        assert (ends[3].problem, ends[4].problem) == (None, None)
        assert ends[3].computed_tokens == ends[3].useful_tokens > ends[4].useful_tokens == 0
        host.cancel(1, [0])
        outcomes, _, ended = heard.run_until_end()
        assert isinstance(outcomes[0], CancelledItem)
        assert ended.run_id == 1


@pytest.mark.parametrize("module", ["tests.kit.troubled_engine", CONTINUOUS])
def test_an_engine_that_is_closed_finishes_what_runs_if_there_is_time(module: str) -> None:
    with engine(SLOW, module) as (host, heard):
        host.run(1, [item(tokens=4)], host.life)
        host.run(2, [item(tokens=5)], host.life)
        host.close(WAIT_S)
        outcomes = [heard.run_until_end()[0][0] for _ in range(2)]
        assert all(isinstance(outcome, Success) for outcome in outcomes)
        assert heard.told.empty()


@pytest.mark.parametrize("module", ["tests.kit.troubled_engine", CONTINUOUS])
def test_what_runs_when_the_time_is_up_gets_no_outcome_at_all(module: str) -> None:
    """So that it stays undone in the log, and whoever owns it next runs it."""
    with engine(SLOW, module) as (host, heard):
        host.run(1, [item(tokens=400, stream=True)], host.life)
        while not isinstance(step := heard.next(), RunStep) or not step.texts:
            pass
        host.close(0.3)
        told = [heard.told.get() for _ in range(heard.told.qsize())]
        assert all(isinstance(one, RunStep) and not one.finished for one in told)


def test_a_listener_that_fails_is_told_and_the_engine_is_not_left_without_one() -> None:
    heard = Heard()

    def fails(host: EngineHost, step: RunStep) -> None:
        raise RuntimeError(f"{host.key} {step.run_id}")

    heard.engine_stepped = fails  # type: ignore[method-assign] # a defect
    host = host_of(FAST)
    host.start(heard)
    heard.loaded()
    pid = host.pid
    host.run(1, [item()], host.life)
    assert heard.next() == "failed: m: its listener failed: RuntimeError"
    assert pid is not None
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", WAIT_S, "its end")
    host.close(WAIT_S)


def test_the_process_ends_with_its_consumer() -> None:
    """However the consumer ends: the pipe is all that holds them together."""
    code = (
        "import os, sys, threading\n"
        "from tests.integration import test_engine_process as t\n"
        "heard = t.Heard()\n"
        "host = t.host_of(t.FAST)\n"
        "host.start(heard)\n"
        "heard.next()\n"
        f"host.run(1, [t.item({ENDLESS!r})], host.life)\n"
        "print(host.pid, flush=True)\n"
        "threading.Event().wait()\n"
    )
    with psutil.Popen([sys.executable, "-c", code], stdout=-1, text=True) as consumer:
        assert consumer.stdout is not None
        child = psutil.Process(int(consumer.stdout.readline()))
        os.kill(consumer.pid, signal.SIGKILL)
        consumer.wait(WAIT_S)
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, WAIT_S, "the engine's end")


def test_an_engine_that_cannot_be_loaded_is_not_tried_again() -> None:
    heard = Heard()
    unknown = EngineSpec(MODEL, "models", engine="no-such-engine")
    host = EngineHost(unknown, sys.executable, os.environ, backoff=QUICK)
    host.start(heard)
    told = heard.next()
    assert isinstance(told, str)
    assert told.startswith("failed: m: models/m: no engine is called 'no-such-engine'")
    host.close(WAIT_S)


def test_a_process_that_dies_whenever_it_loads_is_given_up() -> None:
    heard = Heard()
    host = host_of(FAST, "tests.no_such_module")
    host.start(heard)
    told = [heard.next() for _ in range(MAX_DEATHS_WHILE_LOADING)]
    assert told[:-1] == [EngineEnd(EndKind.EXITED, "exit status 1")] * (MAX_DEATHS_WHILE_LOADING - 1)
    assert told[-1] == "failed: m: its process died 3 times while it loaded: exit status 1"
    host.close(WAIT_S)


def test_a_load_that_leaves_too_little_memory_is_ended_and_its_memory_is_back() -> None:
    heard, asked = Heard(), 0
    host = host_of(EngineSpec(MODEL, "models", simulated=SimulatedCost(batch_ms=NEVER_LOADED_MS)))

    def lacks_room() -> bool:
        nonlocal asked
        asked += host.held_bytes > 0
        return asked > 0

    host.start(heard, lacks_room)
    assert heard.next() == "failed for want of room: m: it would leave too little memory"
    host.close(WAIT_S)
    assert host.held_bytes == 0


def test_a_loaded_engine_says_what_it_holds_and_is_bounded_no_more() -> None:
    heard = Heard()
    bounds = iter([False] * 1_000)
    host = host_of(FAST)
    host.start(heard, lambda: next(bounds))
    loaded, _ = heard.loaded()
    assert loaded.memory.main_bytes > 1 << 20
    assert host.held_bytes > 1 << 20
    assert loaded.memory.device_free_bytes is None
    host.close(WAIT_S)


def test_a_python_that_is_not_there_is_named() -> None:
    heard = Heard()
    host = EngineHost(FAST, "/no/such/python", os.environ, backoff=QUICK)
    host.start(heard)
    assert heard.next() == "failed: m: /no/such/python cannot be started: No such file or directory"
    host.close(WAIT_S)


def test_the_files_of_an_engine_are_fetched_before_it_starts_and_kept_while_it_lives(tmp_path: Path) -> None:
    origin, cache = write_files(tmp_path / "origin", FILES), cache_of(tmp_path / "cache", sum(map(len, FILES.values())))
    heard = Heard()

    def fetch(stop: StopWait) -> CachedArtifact:
        return cached(cache, origin, stop=stop)

    host = EngineHost(FAST, sys.executable, without_settings(os.environ), backoff=QUICK, fetch=fetch)
    host.start(heard)
    heard.loaded()
    ours = cached(cache, origin)
    assert host.spec.path == ours.path / MODEL.path
    ours.release()
    with pytest.raises(ArtifactError, match="there is no room"):
        cached(cache, write_files(tmp_path / "other", {"a": b"1"}))
    host.close(WAIT_S)
    assert contents(cached(cache, tmp_path / "other").path) == {"a": b"1"}


def test_an_engine_whose_files_cannot_be_used_is_not_started() -> None:
    heard = Heard()

    def fetch(_stop: StopWait) -> CachedArtifact:
        raise ArtifactError("it has other files")

    host = EngineHost(FAST, "/no/such/python", os.environ, backoff=QUICK, fetch=fetch)
    host.start(heard)
    assert heard.next() == "failed: m: it has other files"
    host.close(WAIT_S)


def test_a_source_that_is_away_for_too_long_fails_the_version_for_now() -> None:
    def fetch(_stop: StopWait) -> CachedArtifact:
        raise ArtifactUnavailableError("the source is away")

    heard = Heard()
    host = EngineHost(FAST, sys.executable, os.environ, backoff=QUICK, fetch=fetch, fetch_patience_s=0.0)
    host.start(heard)
    assert heard.next() == "failed for now: m: the source is away"
    host.close(WAIT_S)
    assert heard.told.empty()


def test_a_source_that_is_away_for_a_moment_costs_no_version(tmp_path: Path) -> None:
    origin, cache, heard = write_files(tmp_path / "origin", FILES), cache_of(tmp_path / "cache"), Heard()
    left = [ArtifactUnavailableError("the source is away")] * 2

    def fetch(stop: StopWait) -> CachedArtifact:
        if left:
            raise left.pop()
        return cached(cache, origin, stop=stop)

    environment = without_settings(os.environ)
    host = EngineHost(FAST, sys.executable, environment, backoff=QUICK, fetch=fetch, fetch_patience_s=60.0)
    host.start(heard)
    try:
        assert heard.loaded()[1] == 1
    finally:
        host.close(WAIT_S)
    assert heard.told.empty()


def test_a_wait_for_a_source_ends_with_the_host() -> None:
    asked = threading.Event()

    def fetch(_stop: StopWait) -> CachedArtifact:
        asked.set()
        raise ArtifactUnavailableError("the source is away")

    heard = Heard()
    host = EngineHost(FAST, "/no/such/python", os.environ, backoff=Backoff(600.0, 600.0), fetch=fetch)
    host.start(heard)
    assert asked.wait(WAIT_S)
    host.close(WAIT_S)
    assert heard.told.empty()


def test_a_host_that_is_closed_ends_the_download() -> None:
    begun = threading.Event()

    def fetch(stop: StopWait) -> CachedArtifact:
        begun.set()
        assert stop(WAIT_S)
        raise StoppedError

    heard = Heard()
    host = EngineHost(FAST, "/no/such/python", os.environ, backoff=QUICK, fetch=fetch)
    host.start(heard)
    assert begun.wait(WAIT_S)
    host.close(WAIT_S)
    assert heard.told.empty()


OF_OTHERS = (
    *("KAFKA_SASL_PASSWORD_FILE", "POSTGRES_DSN_FILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"),
    *("PGPASSWORD", "PGPASSFILE", "HF_TOKEN", "EMBEDDER_API_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE"),
)


def test_no_setting_reaches_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_SASL_PASSWORD", "secret")
    monkeypatch.setenv("postgres_dsn", "secret")
    for name in OF_OTHERS:
        monkeypatch.setenv(name, "secret")
    for name in ("HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://user:secret@proxy.example:8080")
    monkeypatch.setenv("FTP_PROXY", "http://proxy.example:8080")
    for name in Settings.model_fields:
        if name.endswith("_file"):
            monkeypatch.setenv(name.upper(), "/secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    left = without_settings(os.environ)
    assert not any("secret" in value for value in left.values())
    assert left["FTP_PROXY"] == "http://proxy.example:8080"
    assert left["CUDA_VISIBLE_DEVICES"] == "3"
    assert left["TOKENIZERS_PARALLELISM"] == "false"
    assert left["PATH"] == os.environ["PATH"]
