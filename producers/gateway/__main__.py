"""``python -m producers.gateway``"""

import socket
import sys

from fairlane import logs
from fairlane.settings import Settings
from fairlane_server.processes.launcher import end_with_launcher
from fairlane_server.processes.start import begin_service
from producers.gateway.app import Gateway
from producers.gateway.edge.body_limit import map_large_blocks
from producers.gateway.server import serve
from producers.gateway.workers import inherited_listener, run_workers

log = logs.get_logger(__name__)


def main() -> int:
    """Run a gateway: in this process, or in GATEWAY_WORKERS processes behind one port. Returns the exit status: 0 after
    a stop signal, 1 after a failure."""
    settings = Settings()
    begin_service(settings, "gateway")
    if end_with_launcher() or settings.gateway_workers == 1:
        return _serve(settings, inherited_listener())
    try:
        return run_workers(settings)
    except OSError as error:
        log.error("gateway_failed", reason=str(error))
        return 1


def _serve(settings: Settings, listener: socket.socket | None) -> int:
    map_large_blocks()
    try:
        gateway = Gateway(settings)
    except ValueError as error:
        log.error("gateway_failed", reason=str(error))
        return 1
    return serve(gateway, gateway.readiness, settings, (settings.gateway_host, settings.gateway_port), listener)


if __name__ == "__main__":
    sys.exit(main())
