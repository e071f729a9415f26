"""Free TCP ports, chosen so that two stacks that start at the same moment never choose the same one.

Being free when asked is not enough: until the server binds it, another stack may find the same port free. A claim is
therefore a socket in the kernel's abstract namespace, named after the port: it exists once per network namespace,
exactly like the port itself, needs no file, and goes away with the process that holds it. The range lies below the
kernel's ephemeral ports, so no outgoing connection takes a port between the choice and the bind.
"""

import json
import random
import socket
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from deploy.local.layout import StackError
from fairlane_server.private_files import write_private

FIRST_PORT = 20_000
LAST_PORT = 31_999
ATTEMPTS = 500


class PortClaims:
    """The ports of one stack by name, kept over restarts where possible. ``file``: the ports of the last run."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._claims: dict[int, socket.socket] = {}
        self._by_name = _read(file)
        self._taken: dict[str, int] = {}

    def take(self, name: str) -> int:
        """Claim a free port for `name`, that of the last run if it is free. Raises StackError: there is none."""
        if name in self._taken:
            return self._taken[name]
        remembered = self._by_name.get(name)
        candidates = [] if remembered is None else [remembered]
        candidates += random.sample(range(FIRST_PORT, LAST_PORT + 1), ATTEMPTS)
        for port in candidates:
            if self._claim(port):
                self._taken[name] = port
                if self._file is not None:
                    self._by_name |= self._taken
                    write_private(self._file, json.dumps(self._by_name, indent=2))
                return port
        raise StackError(f"no free TCP port for {name} in {FIRST_PORT}-{LAST_PORT} after {ATTEMPTS} attempts")

    def close(self) -> None:
        """Give every claim back."""
        for claim in self._claims.values():
            claim.close()
        self._claims.clear()
        self._taken.clear()

    def _claim(self, port: int) -> bool:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0fairlane-port-{port}")
        except OSError:
            claim.close()
            return False
        if not is_free(port):
            claim.close()
            return False
        self._claims[port] = claim
        return True


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` on every address of this machine now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Connections of a server that just went linger in TIME_WAIT; they stop no server from listening again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def _read(file: Path | None) -> dict[str, int]:
    try:
        return {} if file is None else TypeAdapter(dict[str, int]).validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return {}
