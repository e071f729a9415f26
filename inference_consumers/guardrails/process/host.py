"""Host of the process of one check, or of post-processing: starts it, asks it, restarts it when it dies or hangs."""

import contextlib
import os
import random
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic

import msgspec

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.frozen import frozen_dataclass
from fairlane.logs import get_logger
from inference_consumers.child_process import kill_child, start_child
from inference_consumers.engine_process.failures import EndKind, EngineEnd, end_of
from inference_consumers.guardrails.decision import Answers, CheckFailure
from inference_consumers.guardrails.examination import CheckCall
from inference_consumers.guardrails.process.call_queue import CallQueue, Done, Piece, QueuedCall, Speed
from inference_consumers.guardrails.process.line import Line
from inference_consumers.guardrails.process.messages import (
    OUT_OF_MEMORY_STATUS,
    Ask,
    Found,
    FromCheck,
    Load,
    Ready,
    Unavailable,
    from_check,
)
from inference_consumers.guardrails.registry import QUESTION_SIZES, WHOLE_TEXTS

log = get_logger(__name__)

MODULE = "inference_consumers.guardrails.process"

UNAVAILABLE = CheckFailure("unavailable")
"""The check cannot be loaded here."""
BUSY = CheckFailure("busy")
LATE = CheckFailure("timeout")
DIED = CheckFailure("died")
FAILED = CheckFailure("failed")
"""The check raised an exception."""
ENDING = CheckFailure("ending")

_QUESTION_PART = 0.1
"""Of its time limit that a question is expected to take: some texts take several times as long as others of their
length, and other processes may need the processor."""
_LOOK_EVERY_S = 0.05
_END_TIMEOUT_S = 5.0


@frozen_dataclass(frozen=True, slots=True)
class CheckLimits:
    """Time limits: of a question to a process, of a call's wait for a process that is not there, and of loading a
    check; a call waits for its turn until its own end. And the memory that a process may need for questions, beyond
    what it has when it is loaded."""

    question_ms: int = 5_000
    wait_ms: int = 5_000
    load_ms: int = 60_000
    memory_bytes: int = 1 << 30


class CheckHost:
    """Host of one check. ``submit`` may be called from any thread; answers come on the host's thread."""

    def __init__(
        self,
        check: str,
        python: str,
        environment: Mapping[str, str],
        models_dir: Path,
        on_fatal: Callable[[Exception], None],
        limits: CheckLimits = CheckLimits(),  # noqa: B008 - frozen
        module: str = MODULE,
        backoff: Backoff = Backoff(first_s=0.2, longest_s=30.0),  # noqa: B008 - frozen
        chance: Callable[[], float] = random.random,
    ) -> None:
        """The process is this module in this Python interpreter; it starts with ``start`` or the first call.
        ``on_fatal`` is called if the host's own thread fails: its calls would never be answered."""
        self.check = check
        self._python = python
        self._module = module
        self._environment = environment
        self._models_dir = str(models_dir.absolute())
        self._on_fatal = on_fatal
        self._limits = limits
        self._backoff = backoff
        self._chance = chance
        self._lock = threading.Lock()
        self._queue = CallQueue(QUESTION_SIZES.get(check, WHOLE_TEXTS))
        self._speed = Speed()
        self._closing = threading.Event()
        self._woken = -1
        """An event of the kernel; made with the thread."""
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # Of the present process.
        self._is_ready = False
        self._unavailable: str | None = None
        self._asked: list[Piece] = []
        self._asked_at_ms = 0
        self._questions = 0
        self._absent_since_ms: int | None = 0
        """When the process ended, until the next one is ready; None while it is."""
        self._failures = 0
        """Processes that ended since one was last ready and answered."""

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    def start(self) -> None:
        """Start the process; does nothing if that was done."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                metrics.GUARDRAIL_READY.labels(check=self.check).set(0)
                self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._thread = threading.Thread(target=self._serve, name=f"check-{self.check}", daemon=True)
                self._thread.start()

    def submit(self, tenant: str, call: CheckCall, within_ms: int, done: Done) -> CheckFailure | None:
        """Have this asked in the tenant's turns; ``done`` gets the answer, once. Returns a failure at once if it cannot
        be."""
        self.start()
        now_ms = _now_ms()
        with self._lock:
            refusal = self._refusal(tenant)
            if refusal is None:
                self._queue.add(QueuedCall(tenant, call, done, now_ms, now_ms + within_ms))
                os.eventfd_write(self._woken, 1)
        if refusal is not None:
            self._count_failure(refusal, 1)
        return refusal

    def close(self, timeout_s: float) -> None:
        """End the process for good; what was asked fails."""
        with self._lock:
            if self._thread is not None and not self._closing.is_set():
                os.eventfd_write(self._woken, 1)
            self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _refusal(self, tenant: str) -> CheckFailure | None:
        if self._closing.is_set():
            return ENDING
        if self._unavailable is not None:
            return UNAVAILABLE
        return BUSY if self._queue.is_full(tenant) else None

    def _serve(self) -> None:
        try:
            self._live_again_and_again()
        except Exception as error:  # noqa: BLE001 - a thread that ends must end the consumer
            log.error("check_host_failed", check=self.check, error=type(error).__name__)
            self._on_fatal(error)
        finally:
            with self._lock:
                self._closing.set()
                os.close(self._woken)

    def _live_again_and_again(self) -> None:
        while not self._closing.is_set():
            end = self._live()
            self._is_ready = False
            self._absent_since_ms = _now_ms()
            metrics.GUARDRAIL_READY.labels(check=self.check).set(0)
            if self._closing.is_set():
                break
            self._failures += 1
            metrics.GUARDRAIL_RESTARTS.labels(check=self.check, end=end.kind).inc()
            reason = self._unavailable or end.reason
            log.error("check_died", check=self.check, reason=reason, kind=end.kind, in_a_row=self._failures)
            self._after_death()
            self._rest(self._backoff.delay_s(self._failures, self._chance()))
        with self._lock:
            left = [*(piece.of for piece in self._asked), *self._queue.take_all()]
            self._asked = []
        self._fail(left, ENDING)

    def _live(self) -> EngineEnd:
        """Run one process to its end."""
        try:
            # Its output leads nowhere: a library's warning or traceback may quote a text.
            process, channel = start_child(
                self._python, self._module, self.check, self._environment, subprocess.DEVNULL
            )
        except OSError as error:
            return EngineEnd(EndKind.EXITED, f"{self._python} cannot be started: {error.strerror}")
        self._process, line = process, Line(channel)
        try:
            line.send(Load(self.check, self._models_dir, self._limits.memory_bytes))
            killed = self._talk(line)
        except (EOFError, OSError):
            killed = None
        except msgspec.DecodeError as error:
            killed = EngineEnd(EndKind.EXITED, f"it sent what is no message: {type(error).__name__}")
        if killed is None and not self._closing.is_set():
            # It may just be ending by itself: its own status tells more.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_EVERY_S)
        kill_child(process)
        status = process.wait(_END_TIMEOUT_S)
        self._process = None
        line.close()
        if killed is None and status == OUT_OF_MEMORY_STATUS:
            allowed = f"{self._limits.memory_bytes >> 20} MiB beyond what it has when it is loaded"
            return EngineEnd(EndKind.OUT_OF_MEMORY, f"it needed more memory than {allowed}")
        return killed or end_of(status, kernel_killed=False)

    def _talk(self, line: Line) -> EngineEnd | None:
        """Ask and listen. Returns why the process must end, None at the end of the host. Raises EOFError or OSError
        when the process is gone."""
        started_at_ms = _now_ms()
        while not self._closing.is_set():
            now_ms = _now_ms()
            self._expire(now_ms)
            if not self._is_ready:
                if now_ms - started_at_ms > self._limits.load_ms:
                    return EngineEnd(EndKind.HUNG, f"it was not loaded within {self._limits.load_ms / 1_000:.0f} s")
            elif self._asked:
                if now_ms - self._asked_at_ms > self._limits.question_ms:
                    self._speed.given_up(*self._spent(now_ms))
                    return EngineEnd(EndKind.HUNG, f"it did not answer within {self._limits.question_ms / 1_000:.1f} s")
            elif self._ask(line, now_ms):
                continue
            messages = line.exchange(_LOOK_EVERY_S, self._woken)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._woken)
            for message in messages:
                self._take(from_check.decode(message))
        return None

    def _ask(self, line: Line, now_ms: int) -> bool:
        room = self._speed.room(self._limits.question_ms * _QUESTION_PART)
        with self._lock:
            self._asked = self._queue.next(room)
        if not self._asked:
            return False
        self._questions += 1
        self._asked_at_ms = now_ms
        texts = tuple(piece.text for piece in self._asked)
        try:
            line.send(Ask(self._questions, texts, self._asked[0].of.call.context))
        except UnicodeEncodeError:
            # Half a character: no check can look at it, and the process is not to blame.
            asked, self._asked = self._asked, []
            self._apart(asked, FAILED)
        return True

    def _take(self, message: FromCheck) -> None:
        match message:
            case Ready():
                self._is_ready = True
                self._absent_since_ms = None
                self._unavailable = None
                metrics.GUARDRAIL_READY.labels(check=self.check).set(1)
                log.info("check_ready", check=self.check, seconds=message.seconds)
            case Unavailable():
                self._unavailable = message.reason
            case Found() if message.call_id == self._questions and self._asked:
                cost, took_ms = self._spent(_now_ms())
                self._speed.answered(cost, took_ms)
                metrics.GUARDRAIL_SECONDS.labels(check=self.check).observe(took_ms / 1_000)
                asked, self._asked = self._asked, []
                if message.error is not None:
                    log.warning("check_failed", check=self.check, error=message.error, texts=len(asked))
                    self._apart(asked, FAILED)
                    return
                self._failures = 0
                self._share_out(asked, message.answers)

    def _spent(self, now_ms: int) -> tuple[int, int]:
        """Cost of the question, and the time since it was asked."""
        return sum(piece.cost for piece in self._asked), now_ms - self._asked_at_ms

    def _share_out(self, asked: Sequence[Piece], answers: Answers) -> None:
        if len(asked) != len(answers):
            self._fail([piece.of for piece in asked], FAILED)
            return
        for piece, answer in zip(asked, answers, strict=True):
            whole = piece.of.answered(piece, answer)
            if whole is not None and not piece.of.is_over:
                piece.of.is_over = True
                piece.of.done(whole)

    def _after_death(self) -> None:
        asked, self._asked = self._asked, []
        self._apart(asked, DIED)
        if self._unavailable is not None:
            with self._lock:
                waiting = self._queue.take_all()
            self._fail(waiting, UNAVAILABLE)

    def _apart(self, asked: Sequence[Piece], failure: CheckFailure) -> None:
        """Ask about the pieces of a question that failed once more, each alone, so that the one at fault is found; the
        call of one that was alone already fails."""
        failed = [piece.of for piece in asked if piece.alone]
        with self._lock:
            self._queue.again([piece for piece in asked if not piece.alone])
        self._fail(failed, failure)

    def _rest(self, seconds: float) -> None:
        """Wait before the next start. What waits for too long meanwhile fails."""
        ends_at_ms = _now_ms() + round(1_000 * seconds)
        while not self._closing.is_set() and (now_ms := _now_ms()) < ends_at_ms:
            self._expire(now_ms)
            wait([self._woken], min(_LOOK_EVERY_S, (ends_at_ms - now_ms) / 1_000))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._woken)

    def _expire(self, now_ms: int) -> None:
        # The first load may take long; one after a death must not hold up everything behind it.
        is_loading = not self._is_ready and not self._failures
        with self._lock:
            longest_wait_ms = self._limits.load_ms if is_loading else self._limits.wait_ms
            late = self._queue.late(now_ms, self._absent_since_ms, longest_wait_ms)
        self._fail(late, LATE)

    def _fail(self, calls: Sequence[QueuedCall], failure: CheckFailure) -> None:
        failed = [call for call in dict.fromkeys(calls) if not call.is_over]
        self._count_failure(failure, len(failed))
        with self._lock:
            for call in failed:
                call.is_over = True
                self._queue.remove(call)
        for call in failed:
            call.done(failure)

    def _count_failure(self, failure: CheckFailure, calls: int) -> None:
        if calls:
            metrics.GUARDRAIL_FAILURES.labels(check=self.check, reason=failure.reason).inc(calls)


def _now_ms() -> int:
    return round(monotonic() * 1_000)
