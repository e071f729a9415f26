"""The launcher: environment, process group and end of its workers."""

import signal
import subprocess
import sys

import pytest

from fairlane_server.processes.launcher import worker_environment


def test_each_worker_has_its_own_name_and_port() -> None:
    made = worker_environment({"PATH": "/bin", "INSTANCE_ID": "host"}, "host", 9_100, 1)
    assert made == {"PATH": "/bin", "INSTANCE_ID": "host-1", "METRICS_PORT": "9101"}
    assert worker_environment({}, "host", 0, 1)["METRICS_PORT"] == "0"


_LAUNCH = """
import os, sys
from fairlane_server.processes.launcher import Launcher
sys.exit(Launcher([sys.executable, "-c", sys.argv[1]], [dict(os.environ)], 5.0).run())
"""
_SAY_AND_WAIT = "print('here', flush=True); import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("worker", "status"),
    [
        (_SAY_AND_WAIT, 0),
        (f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); {_SAY_AND_WAIT}", 0),
        (f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); {_SAY_AND_WAIT}", 1),
    ],
    ids=["just started", "drained", "failed to drain"],
)
def test_a_worker_that_had_nothing_to_drain_yet_ended_well(worker: str, status: int) -> None:
    with subprocess.Popen([sys.executable, "-c", _LAUNCH, worker], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        # The launcher's own log stands there as well.
        assert b"here\n" in launcher.stdout
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == status


def test_a_signal_of_the_terminal_reaches_the_workers_once() -> None:
    """The launcher passes it on; as a member of its process group a worker would get two, which end it at once."""
    say_group = "import os; print('group', os.getpgid(0) == os.getpid(), flush=True); import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", _LAUNCH, say_group], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        assert b"group True\n" in launcher.stdout
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 0
