"""A Postgres of some tests' own, that they may stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from deploy.local.lifecycle import State
from deploy.local.stack import LocalStack
from fairlane.restarts import RestartPolicy
from tests.stack import PostgresServer
from tests.waiting import eventually

_NAME = "postgres"
# Once killed it comes back when it is told to, and not by itself.
_POLICY = RestartPolicy(max_deaths=20, first_delay_s=3_600.0, max_delay_s=3_600.0, jitter=0.0)


@contextmanager
def own_postgres_server(folder: Path) -> Iterator["OwnPostgres"]:
    """One that runs, without tables."""
    with LocalStack(data_dir=folder, parts=(_NAME,), environ={}, policy=_POLICY) as stack:
        server = OwnPostgres(stack)
        try:
            yield server
        finally:
            # What is stopped would not hear that it is to end.
            server.end()


class OwnPostgres:
    """The server of a stack."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._stopped: list[psutil.Process] = []
        self.server = PostgresServer(stack.endpoints.postgres_dsn, stack.endpoints.postgres_owner_dsn)

    def begin(self, fault: str) -> None:
        """From here on nobody listens (gone), or somebody does who never answers (hung)."""
        supervisor = self._stack.supervisor
        if fault == "gone":
            supervisor.kill(_NAME)
            eventually(lambda: supervisor.process(_NAME).state is State.BACKING_OFF, what="the end of Postgres")
            return
        # Its sessions are processes of their own, which would go on without their parent.
        parent = psutil.Process(supervisor.kill(_NAME, signal.SIGSTOP))
        self._stopped = [parent, *parent.children(recursive=True)]
        for process in self._stopped:
            process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        """It works again."""
        for process in self._stopped:
            process.send_signal(signal.SIGCONT)
        self._stopped = []
        eventually(self._is_back, what="Postgres")

    def _is_back(self) -> bool:
        supervisor = self._stack.supervisor
        if supervisor.process(_NAME).state is State.BACKING_OFF:
            supervisor.start_now(_NAME)
        return supervisor.process(_NAME).state is State.READY
