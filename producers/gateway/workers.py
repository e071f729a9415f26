"""Worker processes of one gateway behind one port.

The parent opens the port, and every worker inherits the listening socket: an idle worker accepts the next connection,
and connections that wait for one outlive a worker's death. A worker is a gateway of its own, with its own bounds, its
own reply partitions and its own metrics port.
"""

import os
import socket
import sys

from fairlane.settings import Settings
from fairlane_server.processes.launcher import Launcher, worker_environment

_LISTENER_VARIABLE = "FAIRLANE_GATEWAY_LISTENER"
"""Environment variable with the descriptor of the listening socket."""

_BACKLOG = 2_048


def inherited_listener() -> socket.socket | None:
    """In a worker: the listening socket. None in any other process."""
    descriptor = os.environ.pop(_LISTENER_VARIABLE, None)
    return None if descriptor is None else socket.socket(fileno=int(descriptor))


def run_workers(settings: Settings) -> int:
    """Open the port and run the workers until a stop signal. Returns the exit status. Raises OSError when the port
    cannot be opened."""
    family = socket.AF_INET6 if ":" in settings.gateway_host else socket.AF_INET
    address = (settings.gateway_host, settings.gateway_port)
    with socket.create_server(address, family=family, backlog=_BACKLOG) as listener:
        base = os.environ | {_LISTENER_VARIABLE: str(listener.fileno())}
        environments = [
            worker_environment(base, settings.instance_id, settings.metrics_port, number)
            for number in range(settings.gateway_workers)
        ]
        command = (sys.executable, "-m", "producers.gateway")
        # A draining worker closes the port, which is closed when nobody has it open.
        launcher = Launcher(
            command, environments, settings.drain_timeout_s, (listener.fileno(),), on_end=listener.close
        )
        return launcher.run()
