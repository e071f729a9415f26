"""A pipeline with a gateway in front, its keys, and how tests call it.

@pytest.fixture(scope="module")
def served(broker, postgres, redis_url, tmp_path_factory) -> Iterator[Served]:
    with serving(broker, postgres, tmp_path_factory.mktemp("gateway"), redis_url=redis_url) as served:
        yield served

with served.client("a") as client:
    client.post("/v1/chat/completions", json=...)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deploy.local.services import HOST, Service
from fairlane.records import TenantSpec
from fairlane_server.api_keys.key_store import ApiKeys
from tests.kit.deployment import model_per_task
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer, migrated_database
from tests.kit.waiting import eventually

CALL_TIMEOUT_S = 60.0
LONG_MS = 600_000
"""Longer than any test: such a request never comes too late on a busy machine."""
_PATIENT = {
    "GATEWAY_WAIT_S": "600",
    "GATEWAY_REDIS_TIMEOUT_S": "60",
    "GATEWAY_KEY_BURST": "100000",
    "GATEWAY_TENANT_BURST": "100000",
    "DRAIN_TIMEOUT_S": "120",
}
"""Nothing in a test is to fail because its machine is slow, or because another test called before it."""


@dataclass(slots=True)
class Served:
    """A running pipeline with dispatcher, consumer, recorder and one gateway; more can be started.

    Attributes:
        pipeline: with the tenants ``a`` and ``b``, or others.
        database: migrated, and this pipeline's alone.
        keys: an API key of each tenant, by its short name.
    """

    pipeline: Pipeline
    database: PostgresServer
    keys: Mapping[str, str]
    ports: dict[str, int] = field(default_factory=dict)

    def gateway(self, number: int = 1, env: Mapping[str, str] | None = None) -> ServiceProcess:
        """Start a gateway. A number that was used before is the same slot: what ran in it must have ended."""
        name = f"gateway-{number}"
        port = self.ports.setdefault(name, self.pipeline.free_port(f"{name}-http"))
        env = {**_PATIENT, "GATEWAY_PORT": str(port), "POSTGRES_DSN": self.database.gateway_dsn, **(env or {})}
        return self.pipeline.launch(Service(name, ("-m", "producers.gateway"), env))

    def url(self, path: str = "", number: int = 1) -> str:
        """Of a gateway."""
        return f"http://{HOST}:{self.ports[f'gateway-{number}']}{path}"

    def client(self, tenant: str = "a", number: int = 1) -> httpx.Client:
        """Of a tenant, to be closed."""
        return httpx.Client(base_url=self.url(number=number), headers=self.headers(tenant), timeout=CALL_TIMEOUT_S)

    def headers(self, tenant: str = "a") -> dict[str, str]:
        """What says who calls."""
        return {"authorization": f"Bearer {self.keys[tenant]}"}

    @contextmanager
    def engines_paused(self) -> Iterator[None]:
        """Accepted work waits meanwhile, or until ``resume``."""
        self.run_all()
        self.consumer.pause()
        try:
            yield
        finally:
            self.resume()

    def resume(self) -> None:
        """Before ``engines_paused`` is over."""
        self.consumer.resume()

    def run_all(self) -> None:
        """Start again what has ended by itself, but for gateways; nobody supervises it here. A service does when its
        transaction hung with the broker, or when it was paused for longer than its group waits."""
        for name, process in self.pipeline.processes.items():
            if not name.startswith("gateway-") and not process.alive:
                process.start()

    @property
    def consumer(self) -> ServiceProcess:
        """The one that has the engines."""
        return self.pipeline.processes[f"consumer-{self.pipeline.pool}-1"]

    def call_line(self, request_id: str, number: int = 1) -> dict[str, Any]:
        """What a gateway's log has of the first call with this `x-request-id`; it comes when the call is over."""
        gateway = self.pipeline.processes[f"gateway-{number}"]
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            calls = gateway.events("call")
            found.extend(one for one in calls if request_id in (one["request_id"], one.get("answer_id")))
            return bool(found)

        eventually(is_there, what=f"the line of the call with {request_id}")
        return found[0]

    def question(self, prompt: str = "what is a watermark?") -> dict[str, Any]:
        """The body of a request of Fairlane's own."""
        model = self.pipeline.model_for("generate")
        return {"model": model, "input": {"prompt": prompt}, "parameters": {"max_tokens": 4}}

    def chat(self, text: str = "what is a watermark?", **fields: Any) -> dict[str, Any]:
        """The body of a chat completion."""
        messages = [{"role": "user", "content": text}]
        patient = {"timeout_ms": LONG_MS}
        return {
            "model": self.pipeline.model_for("generate"),
            "messages": messages,
            "max_tokens": 4,
            "fairlane": patient,
            **fields,
        }


@contextmanager
def serving(
    broker: str,
    postgres: PostgresServer,
    folder: Path,
    *,
    redis_url: str | None = None,
    env: Mapping[str, str] | None = None,
    gateway_env: Mapping[str, str] | None = None,
    tenants: Sequence[str | TenantSpec] = ("a", "b"),
    recorder: bool = True,
    each_task: bool = False,
    env_of: Callable[[Pipeline, Service], Mapping[str, str]] | None = None,
) -> Iterator[Served]:
    """Everything, ready. ``env`` is for every process, ``env_of`` as for a pipeline, ``gateway_env`` for the first
    gateway. With ``each_task`` there is a model per task, and not one for all."""
    unique = unique_name()
    models = model_per_task(unique, f"{unique}-pool") if each_task else None
    with (
        migrated_database(postgres, unique) as database,
        Pipeline(
            broker, folder, unique, tenants=tenants, models=models, redis_url=redis_url, env=env, env_of=env_of
        ) as pipeline,
    ):
        names = [tenant if isinstance(tenant, str) else tenant.tenant for tenant in tenants]
        with ApiKeys(database.owner_dsn) as keys:
            issued = {name: keys.create(pipeline.tenant(name), "tests").text for name in names}
        served = Served(pipeline, database, issued)
        gateway = served.gateway(env=gateway_env)
        if recorder:
            pipeline.recorder(postgres_dsn=database.recorder_dsn)
        pipeline.start()
        gateway.wait_ready()
        yield served
