"""``python -m producers.admin``"""

import sys

from fairlane import logs
from fairlane.settings import Settings
from fairlane_server.processes.start import begin_service
from producers.admin.app import AdminApi
from producers.gateway.server import serve

log = logs.get_logger(__name__)


def main() -> int:
    """Run the admin API. Returns the exit status: 0 after a stop signal, 1 after a failure."""
    settings = Settings()
    begin_service(settings, "admin")
    try:
        api = AdminApi(settings)
    except ValueError as error:
        log.error("admin_failed", reason=str(error))
        return 1
    return serve(api, api.readiness, settings, (settings.admin_host, settings.admin_port), None)


if __name__ == "__main__":
    sys.exit(main())
