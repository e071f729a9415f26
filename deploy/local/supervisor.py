"""Supervisor: starts processes by dependency, restarts those that die, stops them all.

All children are started by one thread that lives as long as they do: the kernel ties a child to the *thread* that
forked it (`PR_SET_PDEATHSIG`), so the end of that thread, or a SIGKILL of this process, ends them all.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from deploy.local.layout import PROJECT_ROOT, StackError
from deploy.local.logs import MAX_LOG_BYTES, LineSink, LogKeeper, log_path, rotate, tail
from deploy.local.run_record import RUN_ID_VARIABLE, ProcessId, ProcessRecord, RunRecord, State, identify, own_identity
from fairlane_server.processes.restarts import RestartPolicy

TICK_S = 0.02
PROBE_INTERVAL_S = 0.1
TAIL_LINES = 15

CHILD_SCRIPT = Path(__file__).with_name("child.py")

Probe = Callable[[], str | None]
"""Asks a process whether it is ready: None if it is, otherwise why not; must return within a few seconds."""


@dataclass(frozen=True, slots=True)
class RunAs:
    """User of a process (only of Postgres, and only when the supervisor runs as root)."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to supervise.

    Attributes:
        name: unique in the stack; also the name of its log.
        argv: the program, by absolute path, and its arguments.
        env: added to the supervisor's environment, from which ``without_env`` is removed.
        depends_on: processes that must be ready (or, one-shot, done) before it starts.
        one_shot: it is expected to end with status 0; any other status stops the stack.
        probe: readiness; without one it is ready as soon as it runs.
        start_timeout_s: from start to ready (or, one-shot, done).
        stop_timeout_s: from the stop signal to SIGKILL.
        death_signal: sent by the kernel when the supervisor dies.
        before_start: called right before every start, in the supervisor's thread; must be quick.
        health_url: asked by `status`, for a service with HTTP health.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    without_env: tuple[str, ...] = ()
    cwd: Path = PROJECT_ROOT
    depends_on: tuple[str, ...] = ()
    one_shot: bool = False
    probe: Probe | None = None
    start_timeout_s: float = 60.0
    stop_timeout_s: float = 15.0
    stop_signal: signal.Signals = signal.SIGTERM
    death_signal: signal.Signals = signal.SIGKILL
    run_as: RunAs | None = None
    before_start: Callable[[], None] | None = None
    health_url: str | None = None


class Instance:
    """A started process. It leads a session of its own, so a Ctrl-C on the terminal reaches the supervisor only."""

    def __init__(self, spec: ProcessSpec, log_file: Path, run_env: Mapping[str, str]) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in spec.without_env}
        user = ("-", "-") if spec.run_as is None else (str(spec.run_as.uid), str(spec.run_as.gid))
        wrapper = (sys.executable, "-I", "-S", str(CHILD_SCRIPT), str(os.getpid()), str(int(spec.death_signal)), *user)
        # Appending, so that the log can be cut short while the process writes it.
        with log_file.open("ab") as log:
            self._popen = subprocess.Popen(
                (*wrapper, "--", *spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=spec.cwd,
                env={**environment, **spec.env, **run_env},
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self.identity = identify(self.pid) or ProcessId(self.pid, 0)

    def collect(self) -> int | None:
        """Its exit status once it ended (negative: the signal that ended it), None while it runs.

        The rest of its process group is killed before its pid can be used again.
        """
        if self._popen.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            self._signal_group(signal.SIGKILL)
        return self._popen.wait()

    def send(self, signum: signal.Signals) -> None:
        """Signal the process itself; nothing happens if it has ended."""
        # Not `Popen.send_signal`, which would collect what has ended and leave its group alive.
        if self._popen.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def ask_to_stop(self, signum: signal.Signals) -> None:
        """Send the stop signal, and wake the process in case it was stopped."""
        self.send(signum)
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL the process and everything in its group."""
        if self._popen.returncode is None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signum)


def describe_exit(status: int) -> str:
    """An exit status in words: `exit status 1`, `killed by SIGKILL`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


Reporter = Callable[[str, str], None]
"""Receives events: the name of a process and a sentence."""


@dataclass(slots=True)
class _Child:
    """A supervised process; only the supervisor's thread changes it."""

    spec: ProcessSpec
    state: State = State.WAITING
    instance: Instance | None = None
    started_at: float = 0.0
    restart_at: float = 0.0
    next_probe_at: float = 0.0
    recent_deaths: list[float] = field(default_factory=list)
    death_count: int = 0
    answer: "Future[str | None] | None" = None
    why_not_ready: str = "not asked yet"
    ready_after_s: float | None = None
    last_exit: int | None = None
    was_ready: bool = False
    asked_to_restart: bool = False
    stop_deadline: float | None = None

    def settled(self) -> bool:
        """Whether what depends on it may start."""
        return self.state in {State.READY, State.DONE}

    def record(self) -> ProcessRecord:
        identity = None if self.instance is None else self.instance.identity
        return ProcessRecord(
            self.spec.name,
            self.state,
            identity,
            self.death_count,
            self.spec.health_url,
            self.ready_after_s,
            self.last_exit,
        )


class Supervisor:
    """Runs a set of processes; a library object, usable from any thread and without a terminal.

    Args:
        specs: the processes, each after those it depends on.
        log_dir: existing folder of the logs, one per process.
        processes_file: record of the run, for `status` and for the recovery after a crash.
        report: receives events.
        sink: receives every line of every log.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        log_dir: Path,
        processes_file: Path,
        policy: RestartPolicy | None = None,
        report: Reporter | None = None,
        sink: LineSink | None = None,
        max_log_bytes: int = MAX_LOG_BYTES,
    ) -> None:
        _check_order(specs)
        self.run_id = uuid.uuid4().hex
        self._children = {spec.name: _Child(spec) for spec in specs}
        self._log_dir = log_dir
        self._processes_file = processes_file
        self._policy = policy or RestartPolicy()
        self._report = report or (lambda _name, _message: None)
        self._keeper = LogKeeper(log_dir, tuple(self._children), sink, max_log_bytes)
        self._probes = ThreadPoolExecutor(max_workers=max(1, min(8, len(specs))), thread_name_prefix="probe")
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        # Guards the children: the supervisor's thread changes them, any thread asks for them or signals them.
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._ended = threading.Event()
        self.failure: str | None = None
        """Why the stack stopped by itself."""

    # ------------------------------------------------------------------ for the owner

    def start(self) -> None:
        """Start everything and wait until all of it is ready. Raises StackError: something could not be started;
        everything else has been stopped again."""
        for name in self._children:
            rotate(log_path(self._log_dir, name))
        self._keeper.start()
        self._thread.start()
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended.is_set() or all(child.settled() for child in self._children.values())
            )
        if self._ended.is_set():
            self._thread.join()
            raise StackError(self.failure or "stopped while it was starting")

    def stop(self) -> None:
        """Stop everything in reverse order and wait for it; may be called more than once and from any thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def request_stop(self, *, now: bool = False) -> None:
        """Begin to stop without waiting, as a signal handler must; with `now` what still runs is killed at once."""
        self._stopping.set()
        if now:
            self._hurry.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything has stopped, for whatever reason; False if it still runs after `timeout_s`."""
        if not self._ended.wait(timeout_s):
            return False
        self._thread.join()
        return True

    def process(self, name: str) -> ProcessRecord:
        """The present record of a process. Raises KeyError."""
        with self._changed:
            return self._children[name].record()

    def processes(self) -> list[ProcessRecord]:
        """The present records of all processes, in their order."""
        with self._changed:
            return [child.record() for child in self._children.values()]

    def kill(self, name: str, signum: signal.Signals = signal.SIGKILL) -> int:
        """Signal the process `name` and return its pid; for faults. What dies of it is restarted as after any death.
        Raises StackError: it does not run now."""
        with self._changed:
            instance = self._children[name].instance
            if instance is None:
                raise StackError(f"{name} does not run now")
            instance.send(signum)
            return instance.pid

    def restart(self, name: str) -> None:
        """Ask the process `name` to end, and start it again at once; not counted as a death."""
        with self._changed:
            child = self._children[name]
            if child.instance is None:
                raise StackError(f"{name} does not run now")
            child.asked_to_restart = True
            child.stop_deadline = time.monotonic() + child.spec.stop_timeout_s
            child.instance.ask_to_stop(child.spec.stop_signal)

    def start_now(self, name: str) -> None:
        """Start the process `name`, which died and waits for its restart, without waiting any longer. Raises
        StackError: it does not wait to be started again."""
        with self._changed:
            child = self._children[name]
            if child.state is not State.BACKING_OFF:
                raise StackError(f"{name} is {child.state} and does not wait to be started again")
            child.restart_at = time.monotonic()

    def wait_ready(self, name: str, timeout_s: float, *, other_than_pid: int | None = None) -> ProcessRecord:
        """Wait until `name` is ready, as another instance than the one with the given pid, if one is given. Raises
        StackError: it is not in time, or the stack stopped."""

        def ready() -> bool:
            child = self._children[name]
            return child.settled() and (child.instance is None or child.instance.pid != other_than_pid)

        with self._changed:
            in_time = self._changed.wait_for(lambda: self._ended.is_set() or ready(), timeout_s)
            if self._ended.is_set():
                raise StackError(self.failure or "the stack was stopped")
            if not in_time:
                raise StackError(f"{name} is not ready after {timeout_s:g} s: {self._children[name].why_not_ready}")
            return self._children[name].record()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    # ------------------------------------------------------------------ in the supervisor's thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and self.failure is None:
                with self._changed:
                    for child in self._children.values():
                        self._advance(child, time.monotonic())
                self._stopping.wait(TICK_S)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here, the children must be stopped in order
            self.failure = f"the supervisor failed: {error!r}"
        finally:
            self._stop_in_reverse()
            self._probes.shutdown(wait=False, cancel_futures=True)
            self._keeper.stop()
            self._processes_file.unlink(missing_ok=True)
            with self._changed:
                self._ended.set()
                self._changed.notify_all()

    def _advance(self, child: _Child, now: float) -> None:
        if child.instance is not None:
            status = child.instance.collect()
            if status is not None:
                self._on_exit(child, status, now)
                return
        match child.state:
            case State.WAITING if all(self._children[name].settled() for name in child.spec.depends_on):
                self._spawn(child, now)
            case State.BACKING_OFF if now >= child.restart_at:
                self._spawn(child, now)
            case State.STARTING:
                self._look(child, now)
            case _:
                pass
        if child.instance is not None and child.stop_deadline is not None and now >= child.stop_deadline:
            child.instance.kill()

    def _spawn(self, child: _Child, now: float) -> None:
        spec = child.spec
        if spec.before_start is not None:
            spec.before_start()
        child.instance = Instance(spec, log_path(self._log_dir, spec.name), {RUN_ID_VARIABLE: self.run_id})
        child.started_at = now
        child.next_probe_at = now
        child.answer = None
        child.ready_after_s = None
        child.stop_deadline = None
        child.asked_to_restart = False
        child.why_not_ready = "has not ended" if spec.one_shot else "not asked yet"
        self._set(child, State.STARTING)

    def _look(self, child: _Child, now: float) -> None:
        """See whether a starting process is ready, or has been starting for too long."""
        spec = child.spec
        if spec.probe is None and not spec.one_shot:
            self._on_ready(child, now)
            return
        if child.answer is not None and child.answer.done():
            problem = child.answer.exception()
            reason = repr(problem) if problem is not None else child.answer.result()
            child.answer = None
            child.next_probe_at = now + PROBE_INTERVAL_S
            if reason is None:
                self._on_ready(child, now)
                return
            child.why_not_ready = reason
        elif child.answer is None and spec.probe is not None and now >= child.next_probe_at:
            child.answer = self._probes.submit(spec.probe)
        if now - child.started_at > spec.start_timeout_s:
            self._on_start_timeout(child)

    def _on_ready(self, child: _Child, now: float) -> None:
        child.ready_after_s = now - child.started_at
        child.was_ready = True
        self._set(child, State.READY)
        self._report(child.spec.name, f"ready in {child.ready_after_s:.1f} s")

    def _on_start_timeout(self, child: _Child) -> None:
        reason = f"not ready after {child.spec.start_timeout_s:g} s: {child.why_not_ready}"
        if child.was_ready and child.instance is not None:
            self._report(child.spec.name, f"{reason}; killing it")
            child.instance.kill()
        else:
            self._fail(child, reason)

    def _on_exit(self, child: _Child, status: int, now: float) -> None:
        child.instance = None
        child.answer = None
        child.last_exit = status
        if child.spec.one_shot:
            if status == 0:
                self._set(child, State.DONE)
                self._report(child.spec.name, f"done in {now - child.started_at:.1f} s")
            else:
                self._fail(child, describe_exit(status))
            return
        if child.asked_to_restart:
            self._report(child.spec.name, "restarting as asked")
            self._spawn(child, now)
            return
        child.death_count += 1
        child.recent_deaths = self._policy.within_window([*child.recent_deaths, now], now)
        how = describe_exit(status)
        decision = self._policy.decide(child.recent_deaths, now, random.random(), status)  # noqa: S311 - jitter
        if isinstance(decision, str):
            self._fail(child, f"{decision}, the last time with {how}")
            return
        child.restart_at = now + decision
        self._set(child, State.BACKING_OFF)
        self._report(child.spec.name, f"died ({how}), restarting in {decision:.1f} s; {self._last_words(child)}")

    def _fail(self, child: _Child, reason: str) -> None:
        if self.failure is None:
            self.failure = f"{child.spec.name}: {reason}; {self._last_words(child)}"

    def _last_words(self, child: _Child) -> str:
        path = log_path(self._log_dir, child.spec.name)
        lines = tail(path, TAIL_LINES)
        if not lines:
            return f"its log {path} is empty"
        return "\n".join([f"the end of its log {path}:", *(f"    {line}" for line in lines)])

    def _set(self, child: _Child, state: State) -> None:
        child.state = state
        processes = tuple(one.record() for one in self._children.values())
        RunRecord(self.run_id, own_identity(), processes).save(self._processes_file)
        self._changed.notify_all()

    def _stop_in_reverse(self) -> None:
        """Stop each process once all that depend on it have ended, so that services drain while Kafka still answers.
        Returns when none runs any more."""
        while running := self._running():
            with self._changed:
                needed = {name for child in running for name in self._needs(child.spec)}
                for child in running:
                    if child.spec.name not in needed:
                        self._push_out(child, time.monotonic())
            time.sleep(TICK_S)
        with self._changed:
            for child in self._children.values():
                child.state = State.STOPPED

    def _running(self) -> list[_Child]:
        with self._changed:
            for child in self._children.values():
                if child.instance is not None and child.instance.collect() is not None:
                    child.instance = None
            return [child for child in self._children.values() if child.instance is not None]

    def _needs(self, spec: ProcessSpec) -> set[str]:
        """Everything that `spec` depends on, directly or through others (steps that are done are in between)."""
        found = set(spec.depends_on)
        return found.union(*(self._needs(self._children[name].spec) for name in found))

    def _push_out(self, child: _Child, now: float) -> None:
        if child.instance is None:
            return
        if child.state is not State.STOPPED:
            child.state = State.STOPPED
            child.stop_deadline = now + child.spec.stop_timeout_s
            child.instance.ask_to_stop(child.spec.stop_signal)
        late = child.stop_deadline is not None and now >= child.stop_deadline
        if late:
            self._report(child.spec.name, f"did not stop within {child.spec.stop_timeout_s:g} s, killing it")
            child.stop_deadline = now + child.spec.stop_timeout_s
        if late or self._hurry.is_set():
            child.instance.kill()


def _check_order(specs: Sequence[ProcessSpec]) -> None:
    known: set[str] = set()
    for spec in specs:
        if spec.name in known:
            raise ValueError(f"two processes are named {spec.name}")
        if missing := set(spec.depends_on) - known:
            raise ValueError(f"{spec.name} depends on {sorted(missing)}, which no process before it provides")
        known.add(spec.name)
