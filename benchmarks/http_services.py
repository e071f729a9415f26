"""The gateway, and other servers of HTTP beside it, as processes of a benchmark's cluster."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.cluster import Cluster
from benchmarks.waiting import wait_while
from deploy.local import probes
from deploy.local.ports import PortClaims
from deploy.local.services import HOST, Service

READY = "/health/ready"
_READY_TIMEOUT_S = 60.0
_COMMAND_TIMEOUT_S = 60.0
NO_LIMITS = {
    "GATEWAY_KEY_RATE_PER_S": "1000000",
    "GATEWAY_KEY_BURST": "1000000",
    "GATEWAY_TENANT_RATE_PER_S": "1000000",
    "GATEWAY_TENANT_BURST": "1000000",
}
"""One key makes all the calls of a benchmark."""


@dataclass(frozen=True, slots=True)
class HttpService:
    """A server that answers; ``headers`` go with every call."""

    url: str
    pid: int
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@contextmanager
def http_service(
    running: Cluster, name: str, *arguments: str, env: Mapping[str, str] | None = None
) -> Iterator[HttpService]:
    """Run ``python`` with these arguments until the context ends; ``{port}`` in one of them, or in a value of ``env``,
    is the port it is to listen on. It answers when the context begins.

    Raises:
        TimeoutError: it was not ready within a minute, with why.
    """
    ports = PortClaims()
    try:
        port = str(ports.take(name))
        settings = {key: value.format(port=port) for key, value in (env or {}).items()}
        service = Service(name, tuple(one.format(port=port) for one in arguments), settings)
        url = f"http://{HOST}:{port}"
        with running.service(service) as pid:
            wait_while(lambda: probes.http_ok(url + READY), _READY_TIMEOUT_S, name)
            yield HttpService(url, pid, {"Content-Type": "application/json"})
    finally:
        ports.close()


@contextmanager
def gateway(running: Cluster, tenant: str) -> Iterator[HttpService]:
    """The gateway without limits on keys, and the headers of a key of this tenant. The cluster needs Postgres."""
    env = {"GATEWAY_PORT": "{port}", **NO_LIMITS}
    with http_service(running, "gateway-1", "-m", "producers.gateway", env=env) as service:
        headers = {**service.headers, "Authorization": f"Bearer {api_key(running, tenant)}"}
        yield HttpService(service.url, service.pid, headers)


def api_key(running: Cluster, tenant: str) -> str:
    """Create a key of the tenant. Raises RuntimeError with the command's standard error."""
    command = ("-m", "fairlane_server.cli", "keys", "create", "--tenant", tenant, "--name", "benchmark", "--json")
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **running.env, **running.stack.endpoints.migration_env},
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"no key was made: {done.stderr[-500:]}")
    return str(json.loads(done.stdout)["api_key"])
