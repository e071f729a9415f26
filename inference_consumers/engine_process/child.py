"""The process of one engine: it loads one model and runs what its consumer sends, until the consumer is gone.

It has no credentials and reads no settings. Its main thread runs batches; another one reads, so that a cancellation or
the end of the consumer is noticed while a batch runs.
"""

import contextlib
import faulthandler
import gc
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from time import monotonic
from typing import TypeGuard

import msgspec

from fairlane.outcomes import Code
from fairlane_server.processes.core_files import no_core_file
from fairlane_server.processes.parent import die_with_parent
from inference_consumers.engine_process.failures import is_end_of_engine, lacks_memory, name_of_end, problem_of
from inference_consumers.engine_process.messages import (
    Cancel,
    Channel,
    Close,
    Died,
    Finished,
    Loaded,
    Metrics,
    Run,
    RunEnded,
    RunStep,
    Text,
    to_engine,
)
from inference_consumers.engine_process.process_facts import held_bytes
from inference_consumers.engine_process.smoke_set import check_smoke_set
from inference_consumers.engines.protocol import (
    ContinuousEngine,
    Engine,
    EngineItem,
    EngineLoadError,
    EngineMemory,
    EngineSpec,
    Failure,
    ItemOutcome,
    LoadFailed,
    Problem,
    RunCost,
    computed_tokens,
)

_ALIVE_EVERY_S = 0.1


@dataclass(eq=False)
class RunReport:
    """The observer of one run, on the engine's side. Methods of an observer are called by one thread at a time;
    ``cancel`` by any.

    A second outcome of an item, or text after its outcome, is a mistake of the engine: RuntimeError.
    """

    channel: Channel
    run_id: int
    items: int
    on_end: Callable[[int], None]
    """Gets the run's id when it ends."""
    timer: Callable[[], float] = monotonic
    ends_by_itself: bool = False
    """A run of a continuous engine ends with the step after its last outcome, without a call of ``end``."""
    _texts: list[Text] = field(default_factory=list)
    _finished: list[Finished] = field(default_factory=list)
    _cancelled: frozenset[int] = frozenset()
    _is_over: bool = False
    _computed_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._open = set(range(self.items))
        self._started = self._told_at = self.timer()

    def text(self, index: int, delta: str) -> None:
        if index not in self._open:
            raise RuntimeError(f"text of item {index}, which is done")
        self._texts.append(Text(index, delta))

    def finished(self, index: int, outcome: ItemOutcome) -> None:
        if index not in self._open:
            raise RuntimeError(f"a second outcome of item {index}")
        self._open.remove(index)
        try:
            msgspec.msgpack.encode(outcome)
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            outcome = Failure(Code.ENGINE_ERROR, f"the answer cannot be sent: {type(error).__name__}")
        self._computed_tokens += computed_tokens(outcome)
        self._finished.append(Finished(index, outcome))

    def step(self) -> None:
        """Send the collected reports; without any, a sign of life now and then."""
        if self._is_over:
            return
        if self.ends_by_itself and not self._open:
            # An engine without batches pads nothing.
            self.end(RunCost(self._computed_tokens, self._computed_tokens))
        else:
            self._pass_on()

    def _pass_on(self) -> None:
        now = self.timer()
        if self._texts or self._finished or now - self._told_at >= _ALIVE_EVERY_S:
            self._told_at = now
            step = RunStep(self.run_id, tuple(self._texts), tuple(self._finished))
            self._texts, self._finished = [], []
            self.channel.write(step)

    def is_cancelled(self, index: int) -> bool:
        return index in self._cancelled

    def cancel(self, indexes: tuple[int, ...]) -> None:
        with self._lock:
            self._cancelled |= set(indexes)

    def end(self, cost: RunCost, problem: Problem | None = None) -> None:
        if problem is None and self._open:
            problem = Problem("MissingOutcome")
        if self._texts or self._finished:
            self._told_at = 0.0
            self._pass_on()
        self._is_over = True
        self.channel.write(
            RunEnded(
                self.run_id,
                self.timer() - self._started,
                useful_tokens=cost.useful_tokens,
                computed_tokens=cost.computed_tokens,
                problem=problem,
            )
        )
        self.on_end(self.run_id)


_Create = Callable[[EngineSpec], Engine]

_DIED_STATUS = 3
_LOADING_NICE = 10
"""Added to the nice value of the process: under contention its loading gets about a tenth of what others get."""
_MOST_NICE = 19
_METRICS_EVERY_S = 5.0


def main(create: _Create) -> int:
    """Serve the consumer at the other end of the file descriptor that the command line names. Returns the exit
    status."""
    # A run inside a library in C would otherwise hold the device until it came back.
    die_with_parent(signal.SIGKILL)
    no_core_file()
    faulthandler.enable()
    # They are meant for the consumer, which lets this process finish what it runs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    return _EngineProcess(Channel(Connection(descriptor)), create).serve()


class _EngineProcess:
    """One engine, one consumer."""

    def __init__(self, channel: Channel, create: _Create) -> None:
        self._channel = channel
        self._create = create
        self._continuous: ContinuousEngine | None = None
        self._runs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._reports: dict[int, RunReport] = {}
        self._lock = threading.Lock()
        self._run_ended = threading.Condition(self._lock)
        self._closing = threading.Event()

    def serve(self) -> int:
        """Load, then run until the consumer says that it is enough."""
        engine = self._load()
        if engine is None:
            return 1
        if _is_continuous(engine):
            self._continuous = engine
            engine.watch(self._died)
            threading.Thread(target=self._report_metrics, args=(engine,), name="metrics", daemon=True).start()
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        while (run := self._runs.get()) is not None:
            self._run(engine, run)
        # What joined runs on: it has as long as its consumer waits.
        with self._run_ended:
            self._run_ended.wait_for(lambda: not self._reports)
        self._closing.set()
        engine.close()
        return 0

    def _load(self) -> Engine | None:
        spec = to_engine.decode(self._channel.read())
        if not isinstance(spec, EngineSpec):
            raise TypeError(f"{type(spec).__name__} came before EngineSpec")
        started = monotonic()
        try:
            load = partial(_load, self._create, spec)
            engine = _at_low_priority(load) if spec.is_beside and _starts_no_threads(spec) else load()
        except EngineLoadError as error:
            # One line, for a log: libraries explain at length.
            self._channel.write(LoadFailed(" ".join(str(error).split()), no_room=lacks_memory(error)))
            return None
        seconds = monotonic() - started
        self._channel.write(Loaded(engine.name, _is_continuous(engine), seconds, _memory_of(engine)))
        return engine

    def _read(self) -> None:
        """Ends the process when its consumer is gone."""
        try:
            while True:
                message = to_engine.decode(self._channel.read())
                match message:
                    case Run():
                        report = RunReport(self._channel, message.run_id, len(message.items), self._forget)
                        report.ends_by_itself = self._continuous is not None
                        with self._lock:
                            self._reports[message.run_id] = report
                        self._runs.put(Run(message.run_id, named_items(message)))
                    case Cancel():
                        self._cancel(message)
                    case Close():
                        self._runs.put(None)
                    case EngineSpec():
                        os._exit(_DIED_STATUS)
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # noqa: BLE001 - without this thread the process is deaf
            os._exit(_DIED_STATUS)

    def _cancel(self, message: Cancel) -> None:
        with self._lock:
            report = self._reports.get(message.run_id)
        if report is not None:
            report.cancel(message.indexes)
            if self._continuous is not None:
                self._continuous.cancel([item_name(message.run_id, index) for index in message.indexes])

    def _report_metrics(self, engine: ContinuousEngine) -> None:
        while not self._closing.wait(_METRICS_EVERY_S):
            try:
                text = engine.metrics()
            except Exception:
                if self._closing.is_set():
                    return
                raise
            self._channel.write(Metrics(text))

    def _died(self, error: BaseException) -> None:
        with contextlib.suppress(OSError):
            self._channel.write(Died(name_of_end(error)))
        os._exit(_DIED_STATUS)

    def _forget(self, run_id: int) -> None:
        with self._run_ended:
            self._reports.pop(run_id, None)
            self._run_ended.notify_all()

    def _run(self, engine: Engine, run: Run) -> None:
        report = self._reports[run.run_id]
        problem = None
        cost = RunCost()
        try:
            if self._continuous is not None:
                self._continuous.join(run.items, report)
                return
            cost = engine.run(run.items, report)
        except Exception as error:  # noqa: BLE001 - any failure of the engine is the consumer's to narrow down
            if is_end_of_engine(error):
                self._died(error)
            problem = problem_of(error)
        if problem is not None and problem.out_of_memory:
            # Out here, where the error is gone: its traceback kept alive what the failed run had allocated.
            _free_memory()
        report.end(cost, problem)


def _load(create: _Create, spec: EngineSpec) -> Engine:
    """Load an engine and try it. Raises EngineLoadError."""
    engine = create(spec)
    engine.load()
    check_smoke_set(engine, spec)
    return engine


def _starts_no_threads(spec: EngineSpec) -> bool:
    """Whether nothing that an engine starts while it is loaded goes on afterwards."""
    return spec.engine_name.startswith("torch")


def _at_low_priority(load: Callable[[], Engine]) -> Engine:
    """The result of a call in a thread that leaves the processors to others.

    On Linux a nice value is of one thread and of those that it starts; the thread that runs batches keeps its own.
    """
    with ThreadPoolExecutor(1, "load", initializer=_be_nice) as pool:
        return pool.submit(load).result()


def _be_nice() -> None:
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(_MOST_NICE, os.getpriority(os.PRIO_PROCESS, thread) + _LOADING_NICE))


def named_items(run: Run) -> tuple[EngineItem, ...]:
    """Its items under names that no other has here: ids of requests are their tenants' own, two may be alike."""
    return tuple(replace(item, item_id=item_name(run.run_id, index)) for index, item in enumerate(run.items))


def item_name(run_id: int, index: int) -> str:
    return f"{run_id}/{index}"


def _is_continuous(engine: Engine) -> TypeGuard[ContinuousEngine]:
    """Whether an engine takes items while others run."""
    return hasattr(engine, "join")


def _free_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def _memory_of(engine: Engine) -> EngineMemory:
    main_bytes, fills_device = held_bytes(os.getpid()), bool(getattr(engine, "fills_device", False))
    torch = sys.modules.get("torch")
    # An engine that uses no GPU here must not begin to: a context alone takes hundreds of megabytes.
    if torch is None or not torch.cuda.is_initialized():
        return EngineMemory(main_bytes, fills_device=fills_device)
    free_bytes, _ = torch.cuda.mem_get_info()
    return EngineMemory(main_bytes, torch.cuda.memory_reserved(), free_bytes, fills_device)
