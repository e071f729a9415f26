"""A part of the stack that some tests have for themselves, and may stop.

with OwnPart("kafka", folder) as kafka:
    kafka.begin("gone")
    ...
    kafka.end()
"""

import signal
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from deploy.local.layout import Endpoints, StackError
from deploy.local.run_record import State
from deploy.local.stack import LocalStack
from fairlane_server.processes.restarts import RestartPolicy
from tests.kit.waiting import PATIENCE_S, eventually

# Once killed it comes back when it is told to, and not by itself.
_POLICY = RestartPolicy(max_deaths=20, first_delay_s=3_600.0, max_delay_s=3_600.0, jitter=0.0)
START_S = 5 * PATIENCE_S
"""A broker that was killed takes up to 16 s where nobody disturbs it, and its clients some time to find it."""


class OwnPart:
    """It alone runs in its stack, with nothing in it.

    Args:
        name: of the part.
        folder: where its data go.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._stack = LocalStack(data_dir=folder, parts=(name,), environ={}, policy=_POLICY)
        self._stopped: list[psutil.Process] = []

    def __enter__(self) -> Self:
        """Start it, and wait until it is ready."""
        self._stack.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, whatever was done to it."""
        self._go_on()
        self._stack.stop()

    @property
    def endpoints(self) -> Endpoints:
        """Where it is, also after it was away."""
        return self._stack.endpoints

    def begin(self, fault: str) -> None:
        """From here on nobody listens (gone), or somebody does who never answers (hung)."""
        supervisor = self._stack.supervisor
        if fault == "gone":
            supervisor.kill(self._name)
            eventually(lambda: self._state is State.BACKING_OFF, what=f"the end of {self._name}")
            return
        # The sessions of Postgres are processes of their own, which would go on without their parent.
        parent = psutil.Process(supervisor.kill(self._name, signal.SIGSTOP))
        self._stopped = [parent, *parent.children(recursive=True)]
        self._signal_all(signal.SIGSTOP)

    def end(self) -> None:
        """It works again, with what it had on its disk."""
        self._go_on()
        eventually(self._is_back, START_S, self._name)

    def _is_back(self) -> bool:
        if self._state is State.BACKING_OFF:
            # Its supervisor may be starting it by now.
            with suppress(StackError):
                self._stack.supervisor.start_now(self._name)
        return self._state is State.READY

    @property
    def _state(self) -> State:
        return self._stack.supervisor.process(self._name).state

    def _go_on(self) -> None:
        """What is stopped would not hear that it is to end."""
        self._signal_all(signal.SIGCONT)
        self._stopped = []

    def _signal_all(self, number: signal.Signals) -> None:
        # The parent last: once it runs it reaps those of its children that have ended.
        for process in reversed(self._stopped):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
