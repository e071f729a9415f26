"""Users on a Redis that tests share: what acts as one of them has the rights of the code, and nothing is refused."""

import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from fairlane_server.redis.rights import RIGHTS, RedisRole, RedisServer, acl_line, hashed

_TIMEOUT_S = 5.0
_MOST_ENTRIES = 128
"""Of the server's log of what was refused."""


def check_no_refusal(log_files: Iterable[Path]) -> None:
    """No process says in its log that Redis refused it something: then it would go on as without Redis."""
    for file in log_files:
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            assert re.search("(?i)noperm|nopermission", line) is None, f"{file.name}: {line}"


class RedisUsers:
    """A user for each role and each kind of server, all on one server. Leaving the context removes them, and fails if
    one of them was refused anything.

    Args:
        url: of the server, as somebody who may do everything.
        unique: what the names begin with.
        may_be_refused: nothing is said about what was refused.
    """

    def __init__(self, url: str, unique: str, *, may_be_refused: bool = False) -> None:
        self._may_be_refused = may_be_refused
        self._address = urlsplit(url)
        self._unique = unique
        self._passwords = {
            (server, role): secrets.token_urlsafe() for server, roles in RIGHTS.items() for role in roles
        }
        self._admin: Any = Redis.from_url(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )

    def __enter__(self) -> Self:
        version = int(str(self._admin.info("server")["redis_version"]).partition(".")[0])
        for (server, role), password in self._passwords.items():
            line = acl_line(server, role, [hashed(password)], reads_apart=version >= 7)
            self._admin.execute_command("ACL SETUSER", self.name(server, role), *line.split()[2:])
        self._save()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        refused: list[tuple[str, str, str]] = []
        # The test may have ended the server.
        with suppress(RedisConnectionError, RedisTimeoutError):
            refused = self.refused()
            self._admin.acl_deluser(*(self.name(*user) for user in self._passwords))
            self._save()
        self._admin.close()
        if kind is None and not self._may_be_refused:
            assert not refused, f"Redis refused {refused}"

    def name(self, server: RedisServer, role: RedisRole) -> str:
        return f"{self._unique}-{server}-{role}"

    def url(self, server: RedisServer, role: RedisRole) -> str:
        """The URL of this user."""
        host = self._address.netloc.rpartition("@")[2]
        netloc = f"{self.name(server, role)}:{self._passwords[server, role]}@{host}"
        return self._address._replace(netloc=netloc).geturl()

    def env(self, role: RedisRole) -> dict[str, str]:
        """The settings of a process of this role."""
        return {server.setting: self.url(server, role) for server, roles in RIGHTS.items() if role in roles}

    def env_of(self, service: str) -> dict[str, str]:
        """The settings of a service by its name, such as ``dispatcher-1``; empty if it does not use Redis."""
        kind = service.partition("-")[0]
        return self.env(RedisRole(kind)) if kind in {*RedisRole} else {}

    def refused(self) -> list[tuple[str, str, str]]:
        """User, reason and object of everything that was refused to one of these users."""
        log = self._admin.acl_log(_MOST_ENTRIES)
        return [
            (entry["username"], entry["reason"], entry["object"])
            for entry in log
            if entry["username"].startswith(f"{self._unique}-")
        ]

    def _save(self) -> None:
        # Without an ACL file, as where the server is not restarted.
        with suppress(ResponseError):
            self._admin.acl_save()
