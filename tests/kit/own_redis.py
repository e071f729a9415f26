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
def own_redis_server(folder: Path, name: str = NAME) -> Iterator["OwnRedis"]:
    """One that runs; ``name`` says which of the two it is configured as."""
    ports = PortClaims()
    server = OwnRedis(Redis(folder, ports.take(name), name))
    try:
        server.start()
        yield server
    finally:
        server.kill()
        ports.close()


class OwnRedis:
    """Not started yet."""

    def __init__(self, server: Redis) -> None:
        self.url = server.url
        self._spec = server.spec()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, anew if it was killed, and wait until it answers."""
        self._process = subprocess.Popen(
            self._spec.argv, cwd=self._spec.cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
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
