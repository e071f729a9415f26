"""A Redis server of one test's own, that it may stop."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.local import probes
from deploy.local.ports import PortClaims
from deploy.local.redis import NAME, Redis
from tests.kit.waiting import eventually


@contextmanager
def own_redis_server(folder: Path, name: str = NAME, credentials: Path | None = None) -> Iterator["OwnRedis"]:
    """One that runs; ``name`` says which of the two it is configured as. With a folder of ``credentials`` it lets its
    users in, and nobody else."""
    ports = PortClaims()
    server = OwnRedis(Redis(folder, ports.take(name), name, credentials))
    try:
        server.start()
        yield server
    finally:
        server.kill()
        ports.close()


class OwnRedis:
    """Not started yet.

    Attributes:
        port: at 127.0.0.1.
        url: of somebody who may do everything, or of the operator where it has credentials.
        acl_file: its users, who survive its end.
    """

    def __init__(self, server: Redis) -> None:
        self._spec = server.spec()
        self.url = server.url
        self.port = server.port
        self.acl_file = server.folder / "users.acl"
        self._argv = self._spec.argv
        if server.credentials is None:
            self.acl_file.write_text("user default on nopass ~* &* +@all\n", encoding="utf-8")
            self._argv += ("--aclfile", str(self.acl_file))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, anew if it was killed, and wait until it answers."""
        self._process = subprocess.Popen(
            self._argv, cwd=self._spec.cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        eventually(lambda: probes.redis(self.url) is None, what="Redis")

    def hang(self) -> None:
        """From here on it is there and answers nobody."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """It answers again."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """From here on nobody listens."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
