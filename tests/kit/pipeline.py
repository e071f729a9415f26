"""A pipeline of real processes in a namespace of its own, on a broker that it shares with others.

    with Pipeline(broker, folder, unique) as pipeline:
        pipeline.start(dispatchers=2, consumers=2)
        replies = pipeline.replies("a")
        request = pipeline.request(prompt="hello")
        pipeline.publish("a", request)
        replies.wait([request.request_id])

Tenants, models, pools and groups are named after ``unique``. Shared by name are control.*, ledger.* and dead-letter.*:
filter by tenant what is read there (``decoded``, ``dead_letters``). Every dispatcher serves every tenant on
control.tenants, whatever its group: one pipeline at a time, and leaving it takes its tenants and models back.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar
from uuid import uuid4

from confluent_kafka import ConsumerGroupState, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from benchmarks.faults.rig import Deployment
from deploy.local.ports import PortClaims
from deploy.local.services import Service
from fairlane import headers, names
from fairlane.kafka_config import connection, idempotent_producer
from fairlane.outcomes import Task
from fairlane.records import (
    AuditEvent,
    InferenceRequest,
    ModelPrices,
    ModelRoute,
    ModelVersion,
    Parameters,
    Price,
    ReplyChunk,
    RequestInput,
    SourceCoordinate,
    TenantSpec,
    UsageEvent,
)
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from fairlane_server.control.published_models import model_topic
from fairlane_server.control.published_tenants import tenant_topic
from fairlane_server.control.publisher import ControlTopic
from fairlane_server.kafka.cluster_admin import ClusterAdmin
from fairlane_server.models.catalog import route_of_one
from fairlane_server.topics.admin import apply_plan, read_state
from fairlane_server.topics.families import expand, load_families
from fairlane_server.topics.plan import plan
from tests.kit.deployment import default_model, write_models, write_tenants
from tests.kit.log_reader import LogReader, Replies
from tests.kit.processes import ServiceProcess
from tests.kit.redis_users import RedisUsers, check_no_refusal
from tests.kit.secured_kafka import users_on
from tests.kit.waiting import eventually

_FLUSH_TIMEOUT_S = 30.0
_ADMIN_TIMEOUT_S = 10.0
_NO_ENGINE_TIME = {"SIMULATED_PREFILL_TOKENS_PER_S": "1e9", "SIMULATED_DECODE_TOKENS_PER_S": "1e9"}
_OURS = re.compile(r"t[0-9a-f]{12}")
"""What the tenants of a pipeline begin with: a name made by the fixture ``unique`` or by ``unique_name``."""

_IMAGE = bytes(64)
_INPUTS: Mapping[str, RequestInput] = {
    Task.GENERATE: RequestInput(prompt="what is a watermark?"),
    Task.EMBED: RequestInput(texts=("one text", "another")),
    Task.RANK: RequestInput(query="which one?", documents=("this one", "that one")),
    Task.CLASSIFY: RequestInput(image=_IMAGE),
}

RecordT = TypeVar("RecordT", AuditEvent, UsageEvent, ReplyChunk)


class Pipeline:
    """Nothing runs until ``start``, ``dispatcher`` or ``consumer`` is called; leaving the context ends everything.

    Args:
        bootstrap_servers: the broker.
        folder: where its files and logs go.
        unique: fit for a topic name, and nobody else's.
        tenants: short names; ``tenant("a")`` is the whole one. Or whole specifications, under short names as well.
        models: what its one or more pools serve; by default one pool with one model for every task.
        redis_url: where duplicates are remembered and caches are kept, if anywhere, as somebody who may do everything.
            Each process acts as a user with the rights of its role, and none may be refused anything.
        env: settings of every process, for instance ``{"MAX_BATCH_SIZE": "8"}``. The simulated engine takes no time
            unless they say otherwise.
        env_of: more settings of a process; asked when it is launched. By default those of the user of its role, on a
            broker that checks rights.
    """

    _open: ClassVar[str | None] = None

    def __init__(
        self,
        bootstrap_servers: str,
        folder: Path,
        unique: str,
        *,
        tenants: Sequence[str | TenantSpec] = ("a", "b"),
        models: Sequence[ModelVersion] | None = None,
        redis_url: str | None = None,
        env: Mapping[str, str] | None = None,
        env_of: "Callable[[Pipeline, Service], Mapping[str, str]] | None" = None,
    ) -> None:
        self.unique = unique
        self._env_of = env_of or users_on(bootstrap_servers)
        self.group_prefix = unique
        self.pool = f"{unique}-pool"
        self.settings = KafkaSettings(kafka_bootstrap_servers=bootstrap_servers)
        self.codec = default_codec()
        self.folder = folder
        self.models = (default_model(unique, self.pool),) if models is None else tuple(models)
        self.tenants = {spec.tenant: spec for spec in map(self._spec, tenants)}
        self.env: dict[str, str] = {
            "KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers,
            # Of processes that come without a password, because the broker checks nothing or a test starts them.
            "ALLOW_OPEN_KAFKA": "true",
            "GROUP_PREFIX": self.group_prefix,
            "MODELS_FILE": str(folder / "models.yaml"),
            "TENANTS_FILE": str(folder / "tenants.yaml"),
            **_NO_ENGINE_TIME,
            **(env or {}),
        }
        self.redis_url = redis_url
        self._redis_users = None if redis_url is None else RedisUsers(redis_url, unique)
        self.processes: dict[str, ServiceProcess] = {}
        self.admin = AdminClient(connection(self.settings))
        self._control_tenants = tenant_topic(self.settings, self.codec)
        self.control_models = model_topic(self.settings, self.codec)
        self._control_prices = ControlTopic(self.settings, self.codec, names.CONTROL_PRICES, ModelPrices, kind="model")
        self._producer: Producer | None = None
        self._cleanup = ExitStack()
        self._ports = PortClaims()
        self._cleanup.callback(self._ports.close)

    def __enter__(self) -> Self:
        """Create the topics and say on the control topics which tenants and models there are."""
        assert Pipeline._open is None, f"one pipeline at a time: {Pipeline._open} is open"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.apply()
        if self._redis_users is not None:
            self._cleanup.enter_context(self._redis_users)
        Pipeline._open = self.unique
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """SIGKILL what still runs, take tenants and models back, close the readers."""
        Pipeline._open = None
        for process in self.processes.values():
            process.kill()
        self._control_tenants.publish((), withdrawn=self.tenants)
        ours = [key for key in self.control_models.read() if key.startswith(self.unique)]
        self.control_models.publish((), withdrawn=ours)
        self.price()
        self._cleanup.__exit__(kind, error, trace)
        if kind is None:
            check_no_refusal(process.log_file for process in self.processes.values())

    @property
    def deployment(self) -> Deployment:
        """Its values, for fault runs."""
        return Deployment(self.settings, tuple(self.tenants), self.models, self.group_prefix, self.codec)

    # Setting up

    def apply(self) -> None:
        """Make topics and control records as ``tenants`` and ``models`` are now; may be repeated."""
        self.write_files()
        families = load_families()
        wanted = expand(families, self.tenants.values(), self.models)
        cluster = ClusterAdmin(self.settings)
        state = read_state(cluster, [topic.name for topic in wanted])
        made = plan(
            wanted,
            state.topics,
            families=families,
            broker_config=state.broker_config,
            replication_factor=state.default_replication_factor,
        )
        failed = [item for item in apply_plan(cluster, made) if item.result == "failed"]
        assert not failed, failed
        champions = {model.model: model for model in reversed(self.models)}
        self.control_models.publish([*self.models, *map(route_of_one, champions.values())])
        # Those of a run that was killed before it could take them back: dispatchers would serve them too.
        stale = [tenant for tenant in self._control_tenants.read() if _OURS.match(tenant)]
        withdrawn = [tenant for tenant in stale if tenant not in self.tenants]
        self._control_tenants.publish(self.tenants.values(), withdrawn)

    def write_files(self) -> None:
        """Write models.yaml and tenants.yaml, for the services and for the command line."""
        write_models(self.folder / "models.yaml", self.models)
        write_tenants(self.folder / "tenants.yaml", self.tenants.values())

    def price(self, *prices: Price) -> None:
        """Publish these prices, in XTS, of every model; without any, take them back."""
        models = [model.model for model in self.models]
        records = [ModelPrices(model, "XTS", prices) for model in models] if prices else []
        self._control_prices.publish(records, () if prices else models)

    # Processes

    def start(
        self, *, dispatchers: int = 1, consumers: int = 1, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> None:
        """Start dispatchers and consumers (with the simulated engine) and wait until each of them owns partitions.

        There must be at least as many tenants as dispatchers.
        """
        started = [self.dispatcher(number, env) for number in range(1, dispatchers + 1)]
        started += [self.consumer(number, env) for number in range(1, consumers + 1)]
        for process in started:
            process.wait_ready(timeout_s)
        self.wait_all_own(timeout_s)

    def dispatcher(self, number: int = 1, env: Mapping[str, str] | None = None) -> ServiceProcess:
        """Start a dispatcher. A number that was used before is the same slot: what ran in it must have ended."""
        return self.launch(Service(f"dispatcher-{number}", ("-m", "stream_processors.dispatcher"), env or {}))

    def name_versions(self) -> None:
        """Give every version that is no champion an alias, so that consumers load it."""
        routes: dict[str, ModelRoute] = {}
        for model in self.models:
            route = routes.setdefault(model.model, route_of_one(model))
            if model.version not in route.aliases.values():
                route.aliases[f"other-{model.version}"] = model.version
        self.control_models.publish(list(routes.values()))

    def consumer(
        self, number: int = 1, env: Mapping[str, str] | None = None, *, pool: str | None = None
    ) -> ServiceProcess:
        """Start an inference consumer with the simulated engine; by default one of the first model's pool."""
        pool = pool or self.models[0].pool
        arguments = ("-m", "inference_consumers", "--pool", pool, "--engine", "simulated")
        return self.launch(Service(f"consumer-{pool}-{number}", arguments, env or {}))

    def recorder(self, number: int = 1, *, postgres_dsn: str, env: Mapping[str, str] | None = None) -> ServiceProcess:
        """Start a recorder. It records every tenant of the broker: give it a database of its own, already migrated."""
        env = {"POSTGRES_DSN": postgres_dsn, **(env or {})}
        return self.launch(Service(f"recorder-{number}", ("-m", "stream_processors.recorder"), env))

    def launch(self, service: Service) -> ServiceProcess:
        """Start a process of any kind with the environment of this pipeline. It is killed at the end."""
        port = self._ports.take(service.name)
        log_file = self.folder / f"{service.name}.log"
        process = ServiceProcess(service, {**self.env, **self.env_of(service)}, port, log_file)
        if service.name in self.processes:
            assert not self.processes[service.name].alive, f"{service.name} is running"
        self.processes[service.name] = process
        return process.start()

    def env_of(self, service: Service) -> Mapping[str, str]:
        """What a process of the pipeline gets besides ``env``: who it acts as on Kafka and on Redis."""
        on_redis = {} if self._redis_users is None else self._redis_users.env_of(service.name)
        return {**on_redis, **({} if self._env_of is None else self._env_of(self, service))}

    def free_port(self, name: str) -> int:
        """A port that nobody else gets while this pipeline is open."""
        return self._ports.take(name)

    @property
    def dispatcher_group(self) -> str:
        return f"{self.group_prefix}.dispatcher"

    def pool_group(self, pool: str | None = None) -> str:
        return f"{self.group_prefix}.pool.{pool or self.models[0].pool}"

    def lengthen_session(self, seconds: int) -> None:
        """The first pool's group keeps a silent member for so long, and not for this broker's default of 6 s."""
        entry = ConfigEntry(
            "consumer.session.timeout.ms", str(seconds * 1_000), incremental_operation=AlterConfigOpType.SET
        )
        resource = ConfigResource(ResourceType.GROUP, self.pool_group(), incremental_configs=[entry])
        for changed in self.admin.incremental_alter_configs([resource]).values():
            changed.result(_ADMIN_TIMEOUT_S)

    def assignments(self, group: str) -> dict[str, set[tuple[str, int]]]:
        """What the broker says each member of a group owns: topic and partition, by INSTANCE_ID."""
        described = self.admin.describe_consumer_groups([group], request_timeout=_ADMIN_TIMEOUT_S)[group]
        try:
            members = described.result(_ADMIN_TIMEOUT_S).members
        except KafkaException:
            return {}
        return {
            member.client_id: {
                (partition.topic, partition.partition)
                for partition in (member.assignment.topic_partitions if member.assignment else ())
            }
            for member in members
        }

    def is_stable(self, group: str) -> bool:
        """Whether every member of a group owns what it is to own. Until then a partition may still be on its way from
        one to another, and ``assignments`` may look final without being so."""
        described = self.admin.describe_consumer_groups([group], request_timeout=_ADMIN_TIMEOUT_S)[group]
        try:
            return bool(described.result(_ADMIN_TIMEOUT_S).state == ConsumerGroupState.STABLE)
        except KafkaException:
            return False

    def all_own(self) -> bool:
        """Whether every dispatcher and consumer that runs owns partitions, by the broker's word."""
        owners = {
            name
            for group in (self.dispatcher_group, *map(self.pool_group, {model.pool for model in self.models}))
            for name, partitions in self.assignments(group).items()
            if partitions
        }
        return {name for name, process in self.processes.items() if process.alive and _is_member(name)} <= owners

    def wait_all_own(self, timeout_s: float = 30.0) -> None:
        """Wait for ``all_own``."""
        eventually(self.all_own, timeout_s, f"partitions for each of {sorted(self.processes)}")

    # Requests and replies

    def tenant(self, name: str) -> str:
        """The whole name of a tenant given by its short one."""
        return f"{self.unique}-{name}"

    def model_for(self, task: str) -> str:
        return next(model.model for model in self.models if task in model.tasks)

    def request(self, task: str = Task.GENERATE, *, prompt: str | None = None, **fields: Any) -> InferenceRequest:
        """A good request with a new id; ``fields`` replace any of its own."""
        made = InferenceRequest(
            request_id=str(uuid4()),
            model=self.model_for(task),
            task=str(task),
            input=_INPUTS[task] if prompt is None else RequestInput(prompt=prompt),
            parameters=Parameters(max_tokens=4) if task == Task.GENERATE else Parameters(),
        )
        return replace(made, **fields)

    def publish(self, tenant: str, *requests: InferenceRequest) -> list[SourceCoordinate]:
        """Publish requests on the tenant's topic and wait until the broker has them all. Returns where they stand."""
        topic = names.requests_topic(self.tenant(tenant))
        return self.write(topic, [(request.request_id.encode(), self.codec.encode(request)) for request in requests])

    def write(
        self,
        topic: str,
        records: Iterable[tuple[bytes | None, bytes | None]],
        record_headers: Sequence[tuple[str, bytes]] = (),
    ) -> list[SourceCoordinate]:
        """Write any keys and values, and wait until the broker has them all. Returns where they stand, in order."""
        written: dict[int, SourceCoordinate] = {}
        failures: list[str] = []

        def delivered(number: int, error: Any, message: Message) -> None:
            if error is not None:
                failures.append(error.str())
            else:
                coordinate = str(message.topic()), message.partition() or 0, message.offset() or 0
                written[number] = SourceCoordinate(*coordinate)

        producer = self.producer
        for number, (key, value) in enumerate(records):
            on_delivery = partial(delivered, number)
            while True:
                try:
                    producer.produce(topic, value, key, headers=list(record_headers), on_delivery=on_delivery)
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
        unsent = producer.flush(_FLUSH_TIMEOUT_S)
        assert not unsent, f"{unsent} records were not acknowledged"
        assert not failures, failures[0]
        return [written[number] for number in sorted(written)]

    @property
    def producer(self) -> Producer:
        """An idempotent producer."""
        if self._producer is None:
            self._producer = Producer(idempotent_producer(self.settings))
        return self._producer

    def replies(self, *tenants: str, service: str | None = None, from_beginning: bool = True) -> Replies:
        """The replies to these tenants, by default to all, on their own topics or those of one of their services."""
        topics = [names.replies_topic(self.tenant(tenant), service) for tenant in tenants] or [
            names.replies_topic(tenant) for tenant in self.tenants
        ]
        return Replies(self.reader(*topics, from_beginning=from_beginning), self.codec)

    def reader(self, *topics: str, from_beginning: bool = True) -> LogReader:
        """A reader of any topics, closed with the pipeline."""
        reader = LogReader(self.settings, topics, from_beginning=from_beginning)
        self._cleanup.callback(reader.close)
        return reader

    def decoded(self, reader: LogReader, record_type: type[RecordT]) -> list[RecordT]:
        """What a reader of records with a tenant found about this pipeline's tenants."""
        found = (self.codec.decode_as(record_type, record.value()) for record in reader.records)
        return [event for event in found if event.tenant in self.tenants]

    def dead_letters(self, reader: LogReader) -> list[Message]:
        """What a reader of a dead-letter topic found that came from this pipeline's topics."""
        return [record for record in reader.records if self.unique in header(record, headers.DLT_ORIGINAL_TOPIC)]

    def _spec(self, tenant: str | TenantSpec) -> TenantSpec:
        spec = TenantSpec(tenant=tenant) if isinstance(tenant, str) else tenant
        return replace(spec, tenant=self.tenant(spec.tenant))


def unique_name() -> str:
    """What the fixture ``unique`` gives, for those who have no fixtures."""
    return f"t{uuid4().hex[:12]}"


def header(record: Message, name: str) -> str:
    """A header's text, empty when it is missing."""
    value = dict(record.headers() or ()).get(name, b"")
    return value.decode() if isinstance(value, bytes) else str(value)


def _is_member(name: str) -> bool:
    return name.startswith(("dispatcher-", "consumer-"))
