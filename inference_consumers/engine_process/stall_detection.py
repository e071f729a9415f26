"""Stall detection: how long an engine may be silent before it is overdue, and then hung. Pure."""

from dataclasses import dataclass

from inference_consumers.engine_process.failures import EndKind, EngineEnd

TIMES_PREDICTED = 10
"""Until its first reported step, a run is overdue after so many times its predicted time, and hung after twice that: a
slow engine is not a hung one, and not every engine reports steps."""

MOST_TIMES_LONGER = 10
"""Bound on both, in times of the least time: a prediction covers the whole run, not the silence before the first
step."""

REPORTED_AFTER_MS = 1_000
"""The dispatchers know within this time that the process fails. Work handed back earlier could be sent straight
back."""

_BUSY_SHARE = 0.5
"""The silence counts against the run only if the engine used a processor for this part of it: a process that waits for
a volume, a driver or a busy processor uses hardly any. A run that loops may get no more on a shared machine."""

_LONGEST_LOOK_MS = 1_000


@dataclass(frozen=True, slots=True)
class StallTimeouts:
    """Time that an engine may run without a sign of progress: after ``hung_ms`` its process is restarted."""

    hung_ms: int

    @property
    def overdue_ms(self) -> int:
        """From then on the consumer says that it fails: it gets no new work beside healthy ones."""
        return self.hung_ms // 2


@dataclass(slots=True)
class RunWatch:
    """Watch of one run. ``predicted_s`` is None before any measured run.

    Silence is summed over the time between looks, and a long gap counts only in part: a paused process, or a clock that
    was set, must not make a running engine look hung.
    """

    timeouts: StallTimeouts
    silent_since_ms: int
    predicted_s: float | None
    told: bool = False
    """Whether the work waiting behind it was requeued."""
    has_stepped: bool = False
    _seen_ms: int = 0
    _own_ms: int = 0
    """The part of it in which only the run can be the cause."""
    _busy_ms: int = 0
    """CPU time in that part, at most one processor's."""
    _cpu_ms: int | None = None
    """CPU time of the engine at the last look."""
    _looked_at_ms: int | None = None

    def progressed(self, now_ms: int) -> None:
        """The engine reported a step. From now on no step is expected to take as long as the run."""
        self.has_stepped = True
        self.silent_since_ms = now_ms
        self._seen_ms = self._own_ms = self._busy_ms = 0
        self._cpu_ms = None
        self._looked_at_ms = now_ms

    def look(self, now_ms: int, *, stopped: bool = False, cpu_ms: int | None = None) -> None:
        """It still runs. ``stopped``: its process is stopped by a signal; ``cpu_ms`` is the CPU time of the process so
        far, None when unknown."""
        before_ms = self.silent_since_ms if self._looked_at_ms is None else self._looked_at_ms
        passed_ms = max(0, now_ms - before_ms)
        self._seen_ms += min(passed_ms, _LONGEST_LOOK_MS)
        # After a longer gap this process or the whole machine may have been stopped, and the engine with it.
        if not stopped and passed_ms <= _LONGEST_LOOK_MS:
            self._own_ms += passed_ms
            if cpu_ms is not None and self._cpu_ms is not None:
                # Many threads for a short time are no reason for a long silence. It falls when a process below ends.
                self._busy_ms += min(max(0, cpu_ms - self._cpu_ms), passed_ms)
        self._cpu_ms = cpu_ms
        self._looked_at_ms = now_ms

    def is_overdue(self, now_ms: int) -> bool:
        return now_ms - self.silent_since_ms > self._bound_ms(self.timeouts.overdue_ms, TIMES_PREDICTED)

    @property
    def is_reported(self) -> bool:
        """Whether it has been overdue for so long that the dispatchers know."""
        return self._seen_ms > self._bound_ms(self.timeouts.overdue_ms, TIMES_PREDICTED) + REPORTED_AFTER_MS

    @property
    def is_hung(self) -> bool:
        return self._seen_ms > self._bound_ms(self.timeouts.hung_ms, 2 * TIMES_PREDICTED)

    @property
    def end(self) -> EngineEnd:
        """Why the process of a hung engine is ended. The run is the cause if the silence is long enough without the
        time in which the process was stopped or not looked at, and the process computed meanwhile."""
        why = f"it made no progress for {self.seen_s:.0f} s"
        if self._own_ms <= self._bound_ms(self.timeouts.hung_ms, 2 * TIMES_PREDICTED):
            return EngineEnd(EndKind.STOPPED, f"{why}, and was stopped for a part of that")
        if self._busy_ms < _BUSY_SHARE * self._own_ms:
            return EngineEnd(EndKind.STOPPED, f"{why}, and used a processor for {self._busy_ms / 1_000:.0f} s of that")
        return EngineEnd(EndKind.HUNG, why)

    @property
    def seen_s(self) -> float:
        return self._seen_ms / 1_000

    def _bound_ms(self, least_ms: int, times: int) -> float:
        if self.has_stepped:
            return least_ms
        expected_ms = times * 1_000 * (self.predicted_s or 0.0)
        return min(max(least_ms, expected_ms), MOST_TIMES_LONGER * least_ms)
