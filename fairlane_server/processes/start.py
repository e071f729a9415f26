"""Start of a service's process."""

from fairlane import logs
from fairlane.settings import Settings
from fairlane_server.processes.core_files import no_core_file


def begin_service(settings: Settings, service: str) -> None:
    """Set up logging, and leave no core file. Called once, from the composition root."""
    logs.configure(settings, service)
    no_core_file()
