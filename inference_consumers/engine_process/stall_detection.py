"""Stall detection: how long an engine may be silent before it is overdue, and then hung. Pure."""

from dataclasses import dataclass

from inference_consumers.engine_process.failures import EndKind, EngineEnd

TIMES_PREDICTED = 10
"""A run that is predicted to take long may be silent for so many times that before it is overdue, and twice that before
it is hung, until the engine says that it came further: a slow engine is not a hung one, and not every one tells of its
steps."""

MOST_TIMES_LONGER = 10
"""However long it is predicted to take, it is overdue, and hung, at so many times the least time: a prediction is of
the whole run, of which an engine that tells of its steps is silent until the first alone."""

REPORTED_AFTER_MS = 1_000
"""Within that time the dispatchers have heard that the process fails. Work that is handed back before could be sent
straight back."""

BUSY_SHARE = 0.5
"""For so much of its silence the engine must have used a processor, or else the silence is not held against what it
ran: a process that waits for a volume, a driver or a processor that others have uses hardly any. A run that loops may
not get more than that on a shared machine, and what runs beside one that waits takes far less."""

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

    What was seen of its silence is the time between looks, and of long gaps a part only: a process that was paused, or
    a clock that was set, must not make a hung engine of a running one.
    """

    patience: StallTimeouts
    silent_since_ms: int
    predicted_s: float | None
    told: bool = False
    """Whether what waits behind it was handed back."""
    has_stepped: bool = False
    _seen_ms: int = 0
    _own_ms: int = 0
    """Of what was seen, the part in which nothing but the run can have kept it silent."""
    _busy_ms: int = 0
    """Of that part, the time of a processor that the engine used, but one processor's at most."""
    _cpu_ms: int | None = None
    """CPU time of the engine at the last look."""
    _looked_at_ms: int | None = None

    def progressed(self, now_ms: int) -> None:
        """The engine said that it came further. It says so at every step: from now on none is expected to take as long
        as the run."""
        self.has_stepped = True
        self.silent_since_ms = now_ms
        self._seen_ms = self._own_ms = self._busy_ms = 0
        self._cpu_ms = None
        self._looked_at_ms = now_ms

    def look(self, now_ms: int, *, stopped: bool = False, cpu_ms: int | None = None) -> None:
        """It still runs. ``stopped`` when its process was found to be stopped by somebody; ``cpu_ms`` is what that has
        used of processors since it began, None when that is not known."""
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
        return now_ms - self.silent_since_ms > self._bound_ms(self.patience.overdue_ms, TIMES_PREDICTED)

    @property
    def is_reported(self) -> bool:
        """Whether it was overdue for so long that the dispatchers know."""
        return self._seen_ms > self._bound_ms(self.patience.overdue_ms, TIMES_PREDICTED) + REPORTED_AFTER_MS

    @property
    def is_hung(self) -> bool:
        return self._seen_ms > self._bound_ms(self.patience.hung_ms, 2 * TIMES_PREDICTED)

    @property
    def end(self) -> EngineEnd:
        """As what the process of a hung engine is ended. The silence is the run's own when it was long enough without
        any time in which the process was stopped, or nobody looked, and the process computed meanwhile."""
        why = f"it made no progress for {self.seen_s:.0f} s"
        if self._own_ms <= self._bound_ms(self.patience.hung_ms, 2 * TIMES_PREDICTED):
            return EngineEnd(EndKind.STOPPED, f"{why}, and was stopped for a part of that")
        if self._busy_ms < BUSY_SHARE * self._own_ms:
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
