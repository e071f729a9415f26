"""Status of a running stack: the supervisor's record, and a health check of each part."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

from deploy.local import kafka, postgres, probes, redis
from deploy.local.kafka import part_of
from deploy.local.layout import DataDir, Endpoints, mask
from deploy.local.run_record import ProcessRecord, RunRecord, State
from deploy.local.services import GATEWAY
from fairlane.kafka_config import connection
from fairlane_server.postgres.rights import PostgresRole


@dataclass(frozen=True, slots=True)
class PartStatus:
    """One part. ``address``: with passwords masked, empty for none; ``checked``:
    whether its health was checked."""

    name: str
    state: State
    pid: int | None
    deaths: int
    address: str
    checked: bool
    problem: str | None


@dataclass(frozen=True, slots=True)
class StackStatus:
    """The whole stack. ``running``: whether its supervisor lives."""

    data_dir: str
    running: bool
    supervisor_pid: int | None = None
    parts: tuple[PartStatus, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether it runs and nothing is wrong."""
        return self.running and all(part.problem is None for part in self.parts)

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return {**asdict(self), "healthy": self.healthy}


def read_status(data_dir: DataDir) -> StackStatus:
    """Look at the stack of a data directory; asks each part for its health, at most a few seconds in all."""
    record = RunRecord.load(data_dir.processes_file)
    endpoints = Endpoints.load(data_dir.endpoints_file)
    if record is None or endpoints is None or not record.supervisor.is_alive():
        return StackStatus(str(data_dir.root), running=False)
    admin = connection(endpoints.kafka_settings(kafka.ADMIN_USER)) if endpoints.kafka_ca_file else None
    operator_dsn = endpoints.postgres_dsn(PostgresRole.OPERATOR)
    servers: dict[str, tuple[str, Callable[[], str | None]]] = {
        kafka.NAME: (
            endpoints.kafka_bootstrap_servers,
            lambda: probes.kafka(endpoints.kafka_bootstrap_servers, config=admin),
        ),
        postgres.NAME: (mask(operator_dsn), lambda: probes.postgres(operator_dsn)),
        redis.NAME: (mask(endpoints.redis_url), lambda: probes.redis(endpoints.redis_url)),
        redis.CACHE_NAME: (mask(endpoints.redis_cache_url), lambda: probes.redis(endpoints.redis_cache_url)),
    }
    if endpoints.gateway_url:
        servers[GATEWAY] = endpoints.gateway_url, lambda: probes.http_ok(f"{endpoints.gateway_url}/health/ready")
    ours = {part_of(process.name) for process in record.processes}
    nodes = [process.name for process in record.processes if part_of(process.name) == kafka.NAME]
    external = [
        ProcessRecord(name, State.EXTERNAL)
        for name, (address, _) in servers.items()
        if address and name not in ours and name != GATEWAY
    ]
    for name, address in zip(nodes, endpoints.kafka_bootstrap_servers.split(","), strict=False):
        servers[name] = address, partial(probes.kafka_node, address, config=admin)
    with ThreadPoolExecutor(max_workers=8) as pool:
        parts = tuple(pool.map(lambda process: _look(process, servers), (*external, *record.processes)))
    return StackStatus(str(data_dir.root), running=True, supervisor_pid=record.supervisor.pid, parts=parts)


def _look(process: ProcessRecord, servers: dict[str, tuple[str, Callable[[], str | None]]]) -> PartStatus:
    address, check = servers.get(process.name, (process.health_url or "", None))
    problem: str | None = None
    if process.state in {State.READY, State.EXTERNAL}:
        if process.identity is not None and not process.identity.is_alive():
            problem = "its process is gone"
        elif check is not None:
            problem = check()
        elif process.health_url is not None:
            problem = probes.http_ok(process.health_url)
    elif process.state != State.DONE:
        problem = process.state
    checked = check is not None or process.health_url is not None
    return PartStatus(
        name=process.name,
        state=process.state,
        pid=process.pid,
        deaths=process.deaths,
        address=address.removesuffix("/health/ready"),
        checked=checked,
        problem=problem,
    )
